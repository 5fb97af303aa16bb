"""How is an ``nn.Module`` read and filled? Directly, parameter by parameter, unless the module wants a say.

- *Directly*: parameters and persistent buffers by their fully qualified names, in the memory they are in; the values of
  ``get_extra_state()`` as plain values.
- *The general way*, for a module anywhere in which ``state_dict()`` is overridden or hooked: what ``state_dict()``
  returns is saved, and ``load_state_dict()`` is given new tensors.

Names are those of the bare module: what `DistributedDataParallel` (``module.``) and `torch.compile` (``_orig_mod.``) put
around it, at any depth, is left out, so that a checkpoint of one loads into the other. So it is with FSDP1's wrapper and
that of activation checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from aiockpt.adapters.fsdp1 import is_fsdp1
from aiockpt.adapters.fsdp2 import is_own_hook
from aiockpt.adapters.held import FlatRange
from aiockpt.adapters.intake import Intake
from aiockpt.adapters.run import Run
from aiockpt.adapters.tensors import empty_like
from aiockpt.adapters.watch import Watch
from aiockpt.state.tree import TAG, Node, Path

EXTRA = "_extra_state"
_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
Keep = Callable[[Path, torch.Tensor, FlatRange | None], None]
Slices = Callable[[torch.Tensor], FlatRange | None]
"""Which part of an original parameter a tensor is; None when it is whole."""


def wrapped_name(module: nn.Module) -> str | None:
    """Return the name under which a transparent wrapper holds the module it wraps; None when it is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    if is_fsdp1(module):
        return "_fsdp_wrapped_module"
    if _CHECKPOINT_WRAPPED in module._modules:
        return _CHECKPOINT_WRAPPED
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod"
    return None


def walk_modules(module: nn.Module, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    """Yield each module below *module* and itself, with its path, wrappers left out; a shared one at each path."""
    inner = wrapped_name(module)
    if inner is not None:
        yield from walk_modules(getattr(module, inner), path)
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk_modules(child, (*path, name))


def walk_tensors(module: nn.Module, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the parameters and persistent buffers of one module, not of its children."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield (*path, name), parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield (*path, name), buffer


def is_direct(module: nn.Module) -> bool:
    """Return whether one module leaves saving and loading to its parameters and buffers."""
    cls = type(module)
    load = cls._load_from_state_dict
    hooks = chain(
        module._state_dict_hooks.values(),
        module._state_dict_pre_hooks.values(),
        module._load_state_dict_pre_hooks.values(),
        module._load_state_dict_post_hooks.values(),
    )
    return (
        cls.state_dict is nn.Module.state_dict
        and cls.load_state_dict is nn.Module.load_state_dict
        and cls._save_to_state_dict is nn.Module._save_to_state_dict
        # torch's own overrides (normalisation layers) only amend checkpoints of its old versions.
        and load.__module__.startswith("torch.nn.modules.")
        and all(map(is_own_hook, hooks))
        and "state_dict" not in vars(module)
        and "load_state_dict" not in vars(module)
    )


class ModulePart:
    """One module of a walked state; see `aiockpt.adapters.native`."""

    def __init__(self, module: nn.Module, path: Path, slices: Slices, watch: Watch, keep: Keep) -> None:
        self._module = module
        self._path = path
        self._extras: list[tuple[Path, nn.Module]] = []
        _watch_wrappers(module, watch)
        members = list(walk_modules(module, path))
        self._direct = all(is_direct(member) for _, member in members)
        for member_path, member in members:
            if not self._direct:
                watch.names(member)
                continue
            watch.module(member)
            for tensor_path, tensor in walk_tensors(member, member_path):
                keep(tensor_path, tensor, slices(tensor))
            if has_extra(member):
                self._extras.append((member_path, member))

    def refresh(self, value: object, run: Run) -> Node:
        """Return the node of the module's values; the tensors of a direct one were kept by the walk."""
        run.same(value, self._module)
        if self._direct:
            values = {
                extra_key(self._path, path): run.encode(member.get_extra_state(), (*path, EXTRA))
                for path, member in self._extras
            }
        else:
            values = self._refresh_general(run)
        return {TAG: "module", "values": values} if values else {TAG: "module"}

    def _refresh_general(self, run: Run) -> dict[str, Node]:
        values = {}
        for key, value in general_state(self._module).items():
            path = (*self._path, *key.split("."))
            if isinstance(value, torch.Tensor):
                run.put(path, value)
            else:
                values[key] = run.encode(value, path)
        return values


def _watch_wrappers(module: nn.Module, watch: Watch) -> None:
    for member in module.modules():
        if wrapped_name(member) is not None:
            watch.mapping(member._modules)


def has_extra(module: nn.Module) -> bool:
    """Return whether a module has values of its own (``get_extra_state``)."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_key(root: Path, path: Path) -> str:
    """Return the key that ``state_dict()`` gives to the extra state of the module at *path* below *root*."""
    return ".".join([*map(str, path[len(root) :]), EXTRA])


def general_state(module: nn.Module) -> dict[str, Any]:
    """Return what ``state_dict()`` of the bare module says, by names without wrappers."""
    bare = _unwrap(module)
    return {plain: value for plain, (_, value) in _plain_keys(bare, bare.state_dict()).items()}


def _unwrap(module: nn.Module) -> nn.Module:
    while (inner := wrapped_name(module)) is not None:
        module = getattr(module, inner)
    return module


def _plain_keys(bare: nn.Module, state: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return key without wrappers → (key, value)."""
    drop = {
        f"{name}.{inner}".lstrip(".")
        for name, member in bare.named_modules(remove_duplicate=False)
        if (inner := wrapped_name(member)) is not None
    }
    plain = {}
    for key, value in state.items():
        parts = key.split(".")
        kept = [part for place, part in enumerate(parts) if ".".join(parts[: place + 1]) not in drop]
        plain[".".join(kept)] = (key, value)
    return plain


def load_module(module: nn.Module, path: Path, slices: Slices, intake: Intake) -> None:
    """Ask *intake* for all that a module holds."""
    intake.claim(path)
    values = (intake.find_tagged(path, "module") or {}).get("values", {})
    members = list(walk_modules(module, path))
    if not all(is_direct(member) for _, member in members):
        _load_general(module, path, values, intake)
        return
    for member_path, member in members:
        for tensor_path, tensor in walk_tensors(member, member_path):
            intake.want(tensor_path, tensor, slices(tensor))
        if has_extra(member):
            _load_extra(member, member_path, extra_key(path, member_path), values, intake)


def _load_extra(member: nn.Module, path: Path, key: str, values: dict[str, Node], intake: Intake) -> None:
    name = (*path, EXTRA)
    if not intake.selects(name):
        return
    if key not in values:
        intake.miss(name)
        return
    value = intake.value(name, values[key])
    intake.later(lambda: member.set_extra_state(value()))


def _load_general(module: nn.Module, path: Path, values: dict[str, Node], intake: Intake) -> None:
    if not intake.selects_whole(path, "it has its own load_state_dict()"):
        return
    bare = _unwrap(module)
    current = bare.state_dict()
    filled: OrderedDict[str, Any] = OrderedDict()
    decoded: dict[str, Callable[[], Any]] = {}
    for plain, (key, value) in _plain_keys(bare, current).items():
        leaf = (*path, *plain.split("."))
        if isinstance(value, torch.Tensor):
            fresh = empty_like(value, value.dtype)
            if intake.want(leaf, fresh):
                filled[key] = fresh
        elif plain in values:
            decoded[key] = intake.value(leaf, values[plain])
        else:
            intake.miss(leaf)

    def apply() -> None:
        state = OrderedDict({**filled, **{key: value() for key, value in decoded.items()}})
        if hasattr(current, "_metadata"):
            state._metadata = current._metadata  # type: ignore[attr-defined]
        bare.load_state_dict(state, strict=intake.strict)

    intake.later(apply)
