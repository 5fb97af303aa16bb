"""``nn.Module``: what it is made of, what its parts are called, and how it is saved.

A module is saved *directly*, parameter by parameter: parameters and persistent buffers by their fully qualified names, in
the memory they are in, and the values of ``get_extra_state()`` as plain values. Below it a module that saves itself (it
overrides or hooks ``state_dict()``, or is TorchScript) is asked for its ``state_dict()``; only this part of the tree is.
`aiockpt.adapters.module_target` is the way back.

Names are those of the bare module: what `DistributedDataParallel` (``module.``) and `torch.compile` (``_orig_mod.``) put
around it, at any depth, is left out, so that a checkpoint of one loads into the other. So it is with FSDP1's wrapper and
that of activation checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from aiockpt.adapters.composites import is_composite
from aiockpt.adapters.fsdp import is_fsdp1, is_own_hook
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.run import Run
from aiockpt.adapters.selection import LeafChoice
from aiockpt.adapters.tensors import facts_of
from aiockpt.adapters.watch import Watch
from aiockpt.errors import kind_in_words
from aiockpt.format.names import join_name
from aiockpt.state.tree import METADATA, TAG, Node, Path, refuse

EXTRA = "_extra_state"
PLAIN_VERSION = {"version": 1}
MAX_MODULES_DEPTH = 256
_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
_FSDP1_WRAPPED = "_fsdp_wrapped_module"
Slices = Callable[[torch.Tensor], FlatRange | None]
"""Which part of an original parameter a tensor is; None when it is whole."""


def wrapped_name(module: nn.Module) -> str | None:
    """Return the name under which a transparent wrapper holds the module it wraps; None when it is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    if _FSDP1_WRAPPED in module._modules and is_fsdp1(module):
        return _FSDP1_WRAPPED
    if _CHECKPOINT_WRAPPED in module._modules:
        return _CHECKPOINT_WRAPPED
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod"
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all transparent wrappers."""
    while (inner := wrapped_name(module)) is not None:
        module = getattr(module, inner)
    return module


def walk_modules(module: nn.Module, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    """Yield each module below *module* and itself, with its path, wrappers left out; a shared one at each path."""
    return ((place, member) for place, member, _ in walk_parts(module, path, lambda member: True))


def walk_parts(
    module: nn.Module, path: Path, is_direct: Callable[[nn.Module], bool]
) -> Iterator[tuple[Path, nn.Module, bool]]:
    """Yield each module below *module* and itself, with its path and whether it is direct; nothing below one that is not."""
    module = unwrap(module)
    if len(path) > MAX_MODULES_DEPTH:
        refuse(path[:8], f"modules nested deeper than {MAX_MODULES_DEPTH} levels (does one contain itself?)")
    direct = is_direct(module)
    yield path, module, direct
    if direct:
        for name, child in module._modules.items():
            if child is not None:
                yield from walk_parts(child, (*path, name), is_direct)


def walk_tensors(module: nn.Module, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the parameters and persistent buffers of one module, not of its children."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield (*path, name), parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield (*path, name), buffer


def saves_directly(module: nn.Module) -> bool:
    """Return whether one module leaves saving to its parameters and buffers."""
    cls = type(module)
    hooks = chain(module._state_dict_hooks.values(), module._state_dict_pre_hooks.values())
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and cls.state_dict is nn.Module.state_dict
        and cls._save_to_state_dict is nn.Module._save_to_state_dict
        and all(map(is_own_hook, hooks))
        and "state_dict" not in vars(module)
    )


def loads_directly(module: nn.Module) -> bool:
    """Return whether one module leaves saving and loading to its parameters and buffers."""
    cls = type(module)
    hooks = chain(module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values())
    return (
        saves_directly(module)
        and cls.load_state_dict is nn.Module.load_state_dict
        # torch's own overrides (normalisation layers) only amend checkpoints of its old versions.
        and cls._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and all(map(is_own_hook, hooks))
        and "load_state_dict" not in vars(module)
    )


class ModuleWalk(Protocol):
    """The walk that a module is a part of."""

    choice: LeafChoice
    watch: Watch

    def keep_chosen(self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None) -> bool:
        """Take a tensor that stays where it is between walks, unless it is left out.

        Return whether it is made of others, and is to be saved by the caller, as a value.
        """
        ...

    def leave_out(self, path: Path, value: object = None, flat: FlatRange | None = None) -> None:
        """Note what is not saved."""


class ModulePart:
    """One module of a walked state; see `aiockpt.adapters.native`."""

    def __init__(self, module: nn.Module, path: Path, slices: Slices, plan: ModuleWalk) -> None:
        watch = plan.watch
        self._choice = plan.choice
        self._module = module
        self._path = path
        self._extras: list[tuple[Path, nn.Module]] = []
        self._own: list[tuple[Path, nn.Module]] = []
        self._composites: list[tuple[Path, torch.Tensor]] = []
        self._metadata: dict[str, Any] = {}
        _watch_wrappers(module, watch)
        for member_path, member, direct in walk_parts(module, path, saves_directly):
            if not direct:
                self._own.append((member_path, member))
                _watch_names(member, watch)
                _refuse_slices(member, member_path, slices)
                continue
            watch.module(member)
            for tensor_path, tensor in walk_tensors(member, member_path):
                if plan.keep_chosen(tensor_path, tensor, slices(tensor)):
                    self._composites.append((tensor_path, tensor))
            if has_extra(member) and plan.choice.keeps((*member_path, EXTRA)):
                self._extras.append((member_path, member))
            elif has_extra(member):
                plan.leave_out((*member_path, EXTRA))
            if not loads_directly(member):
                self._metadata |= _versions(member, member_path[len(path) :])

    def refresh(self, value: object, run: Run) -> Node:
        """Return the node of the module's values; the tensors of what is direct were kept by the walk."""
        run.same(value, self._module)
        values = {
            below(self._path, (*path, EXTRA)): run.encode(member.get_extra_state(), (*path, EXTRA))
            for path, member in self._extras
        }
        values |= {below(self._path, path): run.encode(tensor, path) for path, tensor in self._composites}
        metadata = dict(self._metadata)
        for path, member in self._own:
            self._refresh_own(member, path, run, values, metadata)
        node: dict[str, Node] = {TAG: "module"}
        if values:
            node["values"] = values
        if metadata:
            node[METADATA] = metadata
        return node

    def _refresh_own(
        self, member: nn.Module, path: Path, run: Run, values: dict[str, Node], metadata: dict[str, Any]
    ) -> None:
        state, versions = own_state(member, path)
        live = _live_parameters(member) if self._choice.by_rule else {}
        buffers = plain_keys(unwrap(member), dict(member.named_buffers(remove_duplicate=False)))
        for key, value in state.items():
            place = (*path, *key.split("."))
            if not self._choice.keeps(place, live.get(key)):
                run.left_out[join_name(place)] = facts_of(value) if isinstance(value, torch.Tensor) else None
            elif isinstance(value, torch.Tensor) and not is_composite(value):
                run.put(place, value, is_buffer=key in buffers)
            else:
                values[below(self._path, place)] = run.encode(value, place)
        metadata |= {below(self._path, (*path, *split_key(key))): versions[key] for key in versions}


def _live_parameters(member: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by the keys of ``state_dict()``, which has others for them."""
    live = dict(member.named_parameters(remove_duplicate=False))
    return {plain: live[key] for plain, key in plain_keys(unwrap(member), live).items()}


def _versions(member: nn.Module, relative: Path) -> dict[str, Any]:
    """Return what the modules below one that loads itself are to be told of the version that was saved."""
    return {
        ".".join(map(str, place)): {"version": module._version}
        for place, module in walk_modules(member, relative)
        if getattr(module, "_version", 1) != 1
    }


def _watch_wrappers(module: nn.Module, watch: Watch) -> None:
    for member in module.modules():
        if wrapped_name(member) is not None:
            watch.mapping(member._modules)


def _watch_names(member: nn.Module, watch: Watch) -> None:
    """Watch which parameters there are: optimizers know them by these names. TorchScript never changes its own."""
    for below_it in member.modules():
        if not isinstance(below_it, torch.jit.ScriptModule):
            watch.names(below_it)


def _refuse_slices(member: nn.Module, path: Path, slices: Slices) -> None:
    if any(slices(parameter) is not None for parameter in member.parameters()):
        refuse(
            path,
            f"{type(member).__qualname__} has its own state_dict(), and FSDP1 has cut its parameters into slices; use FSDP2",
        )


def has_extra(module: nn.Module) -> bool:
    """Return whether a module has values of its own (``get_extra_state``)."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def below(root: Path, path: Path) -> str:
    """Return the key that ``state_dict()`` of the module at *root* gives to what is at *path*."""
    return ".".join(map(str, path[len(root) :]))


def split_key(key: str) -> Path:
    """Return the path that a key of ``state_dict()`` means; that of the module itself is empty."""
    return tuple(key.split(".")) if key else ()


def own_state(module: nn.Module, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``state_dict()`` of a bare module says, by names without wrappers, and what is not usual of its versions.

    Raises:
        UnsupportedStateError: it is no dict by text.
    """
    bare = unwrap(module)
    state: Any = bare.state_dict()
    if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
        refuse(path, f"its state_dict() is {kind_in_words(state)}, not a dict with text as keys")
    plain = plain_keys(bare, state)
    known: Mapping[str, Any] = getattr(state, "_metadata", {})
    versions = {
        name: plain_version(known[key_here])
        for name, key_here in plain_keys(bare, known).items()
        if known[key_here] != PLAIN_VERSION
    }
    return {name: state[key] for name, key in plain.items()}, versions


def plain_version(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module is told of a version, as far as JSON has it."""
    return {key: value for key, value in told.items() if isinstance(value, bool | int | str | None)}


def plain_keys(bare: nn.Module, keys: Mapping[str, Any]) -> dict[str, str]:
    """Return each of *keys* of a bare module's ``state_dict()``, by the same without wrappers."""
    drop = {
        f"{name}.{inner}".lstrip(".")
        for name, member in bare.named_modules(remove_duplicate=False)
        if (inner := wrapped_name(member)) is not None
    }
    plain = {}
    for key in keys:
        parts = key.split(".")
        kept = [part for place, part in enumerate(parts) if ".".join(parts[: place + 1]) not in drop]
        # A wrapper and what it wraps are one: of the two it is the inner one that was saved.
        plain[".".join(kept)] = key
    return plain
