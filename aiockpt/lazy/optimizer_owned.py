"""Detection of the tensors that change only in optimizer steps which call torch's hooks, and so not while those steps wait.

Guarantees:

- Trusted are the parameters and the state of optimizers whose every step calls torch's hooks (`is_announced`): of those
  that the state names, or, if it names no optimizer, of all in this process.
- A tensor that something else changes, too, is not trusted, whatever owns it: an optimizer without hooks, or forward
  itself (`changed_in_forward`).
- A result stays valid while no optimizer or module was made or freed, and the groups, states and steps are the same.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from aiockpt.adapters.addresses import TensorMemory
from aiockpt.adapters.kinds import find_objects
from aiockpt.adapters.optimizer import is_plain
from aiockpt.adapters.tensor_kinds import local_tensors, tensor_kind
from aiockpt.state.shards import TensorShard

# Finds the optimizers of this process, and the modules whose forward changes parameters, at every save.
#
# A tensor has no reference to what changes it, so optimizers and modules are found as referrers of their classes. That
# walks over all objects (tens of milliseconds), and is repeated only when the reference count of a class has changed: each
# object is a reference to its class, and classes are few.
#
# To refer to all objects, even for a moment, breaks other threads: a tuple that is being made from an iterator cannot grow
# when another reference to it exists.


_LEARNED_RANGE = "torch.ao.quantization._learnable_fake_quantize"


class OptimizerFinder:
    """Finds optimizers and such modules, and caches the result without keeping any of them alive.

    Attributes:
        warned: classes of optimizers already logged as stepping without hooks.
    """

    def __init__(self) -> None:
        self.warned: set[type] = set()
        self._counts: list[tuple[int, int]] = []
        self._found: list[weakref.ref[object]] = []

    def collect(self) -> list[object]:
        """Return the living optimizers, and the modules of torch that may change parameters in forward."""
        kinds = (Optimizer, nn.Embedding, nn.EmbeddingBag, *_learned_ranges())
        classes = list(_with_subclasses(kinds))
        # Before the search: for an object that another thread makes meanwhile the next save finds other counts.
        counts = [(id(cls), sys.getrefcount(cls)) for cls in classes]
        found = [known() for known in self._found]
        if counts != self._counts or None in found:
            # Not isinstance(): it reads `__class__` of whatever refers to a class, which may run code of the program.
            found = [one for one in gc.get_referrers(*classes) if issubclass(type(one), kinds)]
            self._counts, self._found = counts, list(map(weakref.ref, found))
        return found


def changed_in_forward(module: object) -> Iterator[torch.Tensor]:
    """Yield the parameters that forward of *module* changes by itself.

    From torch 2.13's source: ``max_norm`` renormalises the rows that are looked up, in place; a learned fake quantisation
    limits its scale. A third-party module with a ``max_norm`` is assumed to pass it, and parameters of its own, to
    torch.
    """
    if not isinstance(module, nn.Module) or "_parameters" not in vars(module):  # none yet in the middle of `__init__`
        return
    if isinstance(module, _learned_ranges()):
        yield from module.parameters()
    elif limit_of(module) is not None:
        yield from module.parameters(recurse=isinstance(module, nn.Embedding | nn.EmbeddingBag))  # or what makes them
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))  # a view of a flat one


def limit_of(module: object) -> object:
    """Return the norm below which forward of *module* keeps its rows; None without a ``max_norm``."""
    return getattr(module, "max_norm", None)


def _learned_ranges() -> tuple[type, ...]:
    known = sys.modules.get(_LEARNED_RANGE)
    return () if known is None else (known._LearnableFakeQuantize,)


def _with_subclasses(kinds: tuple[type, ...]) -> Iterator[type]:
    classes = list(kinds)
    for cls in classes:
        classes += cls.__subclasses__()
    return iter(dict.fromkeys(classes))


# Decides whether torch calls its hooks in every step of an optimizer: only then our hook can have it wait.
#
# Torch puts its hooks around ``step`` of a class when the first instance runs ``Optimizer.__init__``. So a class that leaves
# that out does not wait, nor does an instance whose ``step`` was replaced. A function that only looks like torch's
# (everything that ``functools.wraps`` made of it does) is recognised by where its code is from.


_HOOKING = sys.modules[Optimizer.__module__]
_DELEGATES = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("lightning.fabric.wrappers", "_FabricOptimizer"): "_optimizer",
    ("lightning_fabric.wrappers", "_FabricOptimizer"): "_optimizer",
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"): "_optimizer",
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"): "_optimizer",
}
"""Classes without hooks that only call the ``step`` of an inner optimizer, and the attribute that holds it."""


def is_announced(optimizer: Optimizer) -> bool:
    """Return whether every ``step`` of *optimizer* calls torch's hooks before it changes anything."""
    step = vars(optimizer).get("step", type(optimizer).step)
    for cls in type(optimizer).__mro__:
        where = _DELEGATES.get((cls.__module__, cls.__qualname__))
        inner = vars(optimizer).get(where) if where and step is vars(cls).get("step") else None
        if isinstance(inner, Optimizer):
            return is_announced(inner)
    return _calls_hooks(step)


def step_of(optimizer: Optimizer) -> tuple[Hashable, Hashable]:
    """Return a token that changes when ``step`` is replaced, on the class or on the instance. Keeps nothing alive."""
    return _token(type(optimizer).step), _token(vars(optimizer).get("step"))


def _token(step: Any) -> Hashable:
    try:
        return weakref.ref(getattr(step, "__func__", step))
    except TypeError:  # None, or made by C code
        return id(step)


def _calls_hooks(step: Any) -> bool:
    """Return whether *step* is torch's wrapper with the hooks, or what a scheduler or ``torch.compile`` put around that.

    Both call it, and compiled code runs the hooks again in every call.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while step is not None:
        step = getattr(step, "__func__", step)
        home = getattr(step, "__globals__", None)
        if home is vars(_HOOKING):
            return bool(getattr(step, "hooked", False))
        if home is vars(lr_scheduler):
            step = getattr(step, "__wrapped__", None)
        elif compiler is not None and home is vars(compiler):
            step = getattr(step, "_torchdynamo_orig_callable", None)
        else:
            return False
    return False


_DISPATCH = attrgetter("__torch_dispatch__")
logger = logging.getLogger("aiockpt")


class OptimizerOwned:
    """The owners found for one state; call `find` first."""

    def __init__(self, finder: OptimizerFinder) -> None:
        self._finder = finder
        self._facts: list[object] | None = None
        self._watched: frozenset[int] = frozenset()
        self._limited: list[nn.Module] = []
        self._trusted_locals: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._trusted = self._changed_elsewhere = TensorMemory(())

    def find(self, state: Mapping[str, Any], tensors: Sequence[TensorShard], *, trusting: bool) -> None:
        """Find what changes *tensors*.

        Args:
            trusting: also trust parameters that no optimizer is known to own.
        """
        modules = [module for _, module in find_objects(state, nn.Module)]
        self._limited = [part for module in modules for part in module.modules() if hasattr(part, "max_norm")]
        living = self._finder.collect()
        named = [optimizer for _, optimizer in find_objects(state, Optimizer)]
        optimizers = [one for one in living if isinstance(one, Optimizer)]
        # What the walker watches needs no second check: the same walk shows that it is as it was.
        self._watched = frozenset(id(one) for one in named if is_plain(one))
        self._facts = self._facts_of(living)  # first: what another thread changes from here on is another fact
        silent = [one for one in {id(one): one for one in (*named, *optimizers)}.values() if not is_announced(one)]
        owned = [*chain.from_iterable(map(_tensors_of, named or optimizers))]
        owned += [parameter for module in modules for parameter in module.parameters()] if trusting else []
        changed = chain(map(_tensors_of, silent), map(changed_in_forward, chain(living, self._limited)))
        self._trusted = TensorMemory(_plain(owned))
        self._changed_elsewhere = TensorMemory(_plain(chain.from_iterable(changed)), around=True)
        self._remember_addresses(named, owned, tensors)
        self._warn(silent, tensors)

    def is_current(self) -> bool:
        """Return whether the last result still holds; what the walker watches is not checked again."""
        return (
            self._facts is not None
            and self._facts_of(self._finder.collect()) == self._facts
            and list(map(torch.Tensor.data_ptr, self._trusted_locals)) == self._pointers
        )

    def kind_of(self, tensor: torch.Tensor) -> Literal["owned", "unhooked", "other"]:
        """Return "owned" if only announced steps change *tensor*, "unhooked" if something else changes it or its storage."""
        if self._changed_elsewhere.touches(tensor):
            return "unhooked"
        return "owned" if tensor in self._trusted else "other"

    def _remember_addresses(
        self, named: Iterable[Optimizer], owned: Iterable[torch.Tensor], tensors: Sequence[TensorShard]
    ) -> None:
        """Record the addresses of trusted tensors that share memory with *tensors* and that the walker does not watch."""
        watched = {id(t) for one in named if id(one) in self._watched for t in _tensors_of(one)}
        wanted = TensorMemory(shard.data for shard in tensors)
        locals_ = (local for tensor in _plain(owned) if id(tensor) not in watched for local in local_tensors(tensor))
        self._trusted_locals = [local for local in locals_ if wanted.touches(local)]
        self._pointers = list(map(torch.Tensor.data_ptr, self._trusted_locals))

    def _facts_of(self, living: Sequence[object]) -> list[object]:
        """Return values that differ after any change; `_trusted_locals` keeps objects alive whose ids could be reused."""
        facts: list[object] = [len(living), *map(id, living)]
        facts += [limit_of(one) is None for one in chain(living, self._limited) if not isinstance(one, Optimizer)]
        for one in living:
            if isinstance(one, Optimizer):
                facts.append(step_of(one))
                if id(one) not in self._watched:
                    facts += map(id, _all_of(one))
        return facts

    def _warn(self, silent: Sequence[Optimizer], tensors: Sequence[TensorShard]) -> None:
        for one in silent:
            if type(one) in self._finder.warned:
                continue
            memory = TensorMemory(_plain(_tensors_of(one)))
            if any(memory.touches(shard.data) for shard in tensors):
                self._finder.warned.add(type(one))
                logger.warning(
                    "%s steps without torch's hooks, so what it owns is copied in each lazy save. If it calls another "
                    "optimizer's step() before it changes anything, name its parameters in "
                    "Checkpointer(lazy=Lazy(immutable=[…])).",
                    type(one).__qualname__,
                )


def _all_of(optimizer: Optimizer) -> Iterator[object]:
    """Yield the parameters and all values of the state of *optimizer*, which another thread may be stepping."""
    groups = list(getattr(optimizer, "param_groups", ()))  # none yet in the middle of `__init__`
    yield from chain.from_iterable(list(group["params"]) for group in groups)
    entries = list(getattr(optimizer, "state", {}).values())
    yield from chain.from_iterable(list(entry.values()) for entry in entries if isinstance(entry, dict))


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (value for value in _all_of(optimizer) if isinstance(value, torch.Tensor))


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have an address, and bytes of their own."""
    return [value for value in tensors if tensor_kind(value).is_spread or _has_address(value)]


def _has_address(tensor: torch.Tensor) -> bool:
    return (
        not (_DISPATCH(type(tensor)) != _DISPATCH(torch.Tensor) or tensor.is_nested or tensor.is_meta)
        and tensor.layout == torch.strided
    )
