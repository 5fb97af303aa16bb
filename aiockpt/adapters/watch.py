"""Change detection between walks: cheap, exact checks, so that a cached walk is never served over new tensors.

The failure is known: a cached plan over replaced parameters saved bit-identical stale steps (NeMo-RL). So the objects of a
walk are watched by identity, and each tensor by memory, shape, strides and dtype; a tensor that is spread over ranks also
by its placement and its local tensors. A false alarm costs one cold walk.

The checks are flattened into a few C-level passes: about 0.6 µs a tensor that is no longer in a cache, most of it waiting
for memory, against about 10 µs for a walk.

A watch keeps the watched objects alive; drop it to release memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, contains, is_, itemgetter, methodcaller
from typing import Any

import torch

from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import is_lazy

_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_HIDDEN = itemgetter("_non_persistent_buffers_set")
_PARTS = itemgetter(*_HELD, *_HOOKS)
_DTYPE = attrgetter("dtype")
_VALUES = methodcaller("values")
_CALL: Any = call  # typed, it would refuse a getter of one argument


class Watch:
    """The objects of one walk. Record them, then call `seal`; `holds` returns whether a new walk would find the same."""

    def __init__(self) -> None:
        self._mappings: list[Mapping[Any, Any]] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._key_only: list[Mapping[Any, Any]] = []
        self._entries: list[tuple[Mapping[Any, Any], Any]] = []
        self._lists: list[list[Any]] = []
        self._getters: list[Callable[[Any], Any]] = []
        self._owners: list[Any] = []
        self._modules: list[torch.nn.Module] = []
        self._own: list[dict[str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._identities: list[list[Any]] = []
        self._hidden: list[frozenset[str]] = []
        self._pointers: list[int] = []
        self._views_hold: Callable[[], bool] = _never

    def mapping(self, mapping: Mapping[Any, Any]) -> None:
        """Watch the keys, their order, and the values by identity."""
        (self._mappings if mapping else self._empty).append(mapping)

    def keys(self, mapping: Mapping[Any, Any], unchanging: Iterable[Any] = ()) -> None:
        """Watch the keys and their order, and by identity the values of the *unchanging* keys."""
        self._key_only.append(mapping)
        self._entries += ((mapping, key) for key in unchanging)

    def items(self, items: list[Any]) -> None:
        """Watch the items of a list by identity."""
        self._lists.append(items)

    def attribute(self, get: Callable[[Any], Any], owner: Any) -> None:
        """Watch what *get* of *owner* returns, by identity."""
        self._getters.append(get)
        self._owners.append(owner)

    def module(self, module: torch.nn.Module) -> None:
        """Watch one module (not its children): its class, parameters, buffers, submodules, and that no hook appears."""
        own = vars(module)
        self._modules.append(module)
        self._own.append(own)
        for name in (*_HELD, *_HOOKS):
            self.mapping(own[name])

    def names(self, module: torch.nn.Module) -> None:
        """Watch only the names of the parameters, buffers and submodules of one module."""
        for get in map(attrgetter, _HELD):
            self.attribute(get, module)
            self.mapping(get(module))

    def tensor(self, tensor: torch.Tensor) -> None:
        """Watch memory, shape, strides and dtype of a tensor; its owner is watched elsewhere.

        A lazily conjugated tensor never passes the check, and need not: a walk copies it.
        """
        kind = tensor_kind(tensor)
        kind.watch(tensor, self)
        self._tensors += kind.local_tensors(tensor)

    def seal(self) -> None:
        """End the recording: the present state of all watched objects is the one to compare with."""
        self._sizes = list(map(len, self._sized()))
        self._identities = list(map(list, self._found()))
        self._hidden = [frozenset(_HIDDEN(own)) for own in self._own]
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        if not any(map(is_lazy, self._tensors)):
            self._views_hold = _guards(self._tensors) or _twins(self._tensors)

    def holds(self) -> bool:
        """Return whether all watched objects are unchanged since `seal`."""
        return (
            not any(self._empty)
            and list(map(len, self._sized())) == self._sizes
            and all(map(_same, self._found(), self._identities))
            and list(map(_HIDDEN, self._own)) == self._hidden
            and not any(map(contains, self._own, repeat("state_dict")))
            and not any(map(contains, self._own, repeat("load_state_dict")))
            and self._tensors_hold()
        )

    def _sized(self) -> Iterable[Collection[Any]]:
        return chain(self._mappings, self._key_only, self._lists)

    def _found(self) -> Iterator[Iterable[Any]]:
        """Yield the objects that must be identical: keys before their values. The caller has compared the sizes."""
        yield chain.from_iterable(self._mappings)
        yield chain.from_iterable(map(_VALUES, self._mappings))
        yield chain.from_iterable(self._key_only)
        yield chain.from_iterable(self._lists)
        yield (mapping[key] for mapping, key in self._entries)
        yield map(_CALL, self._getters, self._owners)
        yield map(type, self._modules)
        yield map(vars, self._modules)
        yield chain.from_iterable(map(_PARTS, self._own))

    def _tensors_hold(self) -> bool:
        try:
            return list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers and self._views_hold()
        except RuntimeError:  # moved to another device or layout, where the two cannot be compared
            return False


def _never() -> bool:
    return False


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Return a check that *tensors* still have their dtypes, shapes and strides; None where torch does not provide it.

    The guards of ``torch.compile``: one loop in C++, half the time of `_twins`. Some other changes fail them, too
    (``requires_grad``, a call inside ``inference_mode``), and cost a cold walk. They are no public API, hence the checks.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return partial(check, *tensors) if check(*tensors) is True else None
    except (ImportError, TypeError, ValueError, RuntimeError):
        return None


def _twins(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Return the same check from public functions: each tensor is compared with a view of its former self."""
    twins = [tensor.detach() for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    return lambda: _same(map(_DTYPE, tensors), dtypes) and all(map(torch.Tensor.is_set_to, tensors, twins))


def _same(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Compare by identity, item by item; the counts are known to be equal."""
    return all(map(is_, found, expected))
