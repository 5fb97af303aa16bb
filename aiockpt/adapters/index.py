"""Index of the tensors of a state by identity: their names, and which are slices of a flat parameter.

Optimizers hold parameters without names; the modules of the same state define the names.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from aiockpt.adapters.dtensors import FSDP, find_slices, show_shards
from aiockpt.adapters.kinds import driven_by, innermost, kind_of, members
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.module import loads_directly, walk_modules, walk_parts
from aiockpt.adapters.tensor_kinds import local_tensors
from aiockpt.adapters.tensors import memory_key
from aiockpt.errors import kind_in_words
from aiockpt.state.tree import MAX_DEPTH, Path, refuse


class Index:
    """The tensors of a state by identity; valid while they live.

    Args:
        state: as for saving. The index makes its sharded modules show their shards.

    Attributes:
        paths: of each parameter, buffer and bare tensor; the first path of a shared one, modules before bare leaves.
        slices: the range of the original parameter, for each parameter that is a slice of a flat one.
        holders: the modules of the state, and its dicts with tensors, by their paths.

    Raises:
        UnsupportedStateError: *state* is not made of dicts with text as keys.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.paths: dict[int, Path] = {}
        self.slices: dict[int, FlatRange] = {}
        self.holders: dict[Path, nn.Module | Mapping[Any, Any]] = {}
        self._schedulers: dict[int, list[Any]] = {}
        if not isinstance(state, Mapping):
            refuse((), f"{kind_in_words(state)}; give a dict of what to save, by name")
        self._bare: list[tuple[torch.Tensor, Path]] = []
        self._by_memory: dict[Hashable, Path] | None = None
        self._enter(state, ())
        for tensor, path in self._bare:
            self.paths.setdefault(id(tensor), path)

    def path_of(self, tensor: torch.Tensor) -> Path | None:
        """Return the path of *tensor*, or of a bare tensor in the same memory (as in a ``state_dict()``); or None."""
        found = self.paths.get(id(tensor))
        if found is not None or not self._bare:
            return found
        if self._by_memory is None:
            self._by_memory = {}
            for bare, path in self._bare:
                self._by_memory.setdefault(_memory_of(bare), path)
        return self._by_memory.get(_memory_of(tensor))

    def slice_of(self, tensor: torch.Tensor) -> FlatRange | None:
        """Return the range of the original parameter that *tensor* holds; None if it is not a slice."""
        return self.slices.get(id(tensor))

    def holder_of(self, path: Path) -> tuple[Path, nn.Module | Mapping[Any, Any] | None]:
        """Return the path of the module or dict that contains the tensor at *path*, and the module or dict, or None."""
        for length in range(len(path) - 1, -1, -1):
            holder = self.holders.get(path[:length])
            if isinstance(holder, nn.Module) or (holder is not None and length == len(path) - 1):
                return path[:length], holder
        return (), None

    def schedulers_of(self, optimizer: Optimizer) -> list[Any]:
        """Return the objects of the state that set the rates of *optimizer*."""
        return self._schedulers.get(id(innermost(optimizer)), [])

    def loads_itself(self, parameter: torch.Tensor) -> bool:
        """Return whether *parameter* is of a module that loads itself, which may change the shape."""
        modules = (holder for holder in self.holders.values() if isinstance(holder, nn.Module))
        parts = (part for module in modules for part in walk_parts(module, (), loads_directly))
        return any(parameter is one for _, member, direct in parts if not direct for one in member.parameters())

    def _enter(self, container: Any, path: Path) -> None:
        if len(path) > MAX_DEPTH:
            refuse(path[:8], f"nested deeper than {MAX_DEPTH} levels (does it contain itself?); flatten it")
        is_mapping = isinstance(container, Mapping)
        for key, value in members(container):
            if type(key) is not str:
                check_key(key, path)
            kind = kind_of(value)
            if kind == "tensor":
                self._bare.append((value, (*path, key)))
                if is_mapping:
                    self.holders[path] = container
            elif kind == "module":
                self._enter_module(value, (*path, key))
            elif kind == "container":
                self._enter(value, (*path, key))
            elif kind == "stateful" and (optimizer := driven_by(value)) is not None:
                self._schedulers.setdefault(id(optimizer), []).append(value)

    def _enter_module(self, module: nn.Module, path: Path) -> None:
        if FSDP in sys.modules:
            show_shards(module)
            self.slices |= {id(parameter): flat for parameter, flat in find_slices(module, path)}
        self.holders[path] = module
        for member_path, member in walk_modules(module, path):
            for mapping in (member._parameters, member._buffers):
                for name, tensor in mapping.items():
                    if tensor is not None:
                        self.paths.setdefault(id(tensor), (*member_path, name))


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that tensors of the same elements in the same memory share, even without elements on this rank."""
    # Without elements the storage tells them apart: a ``state_dict()`` detaches its tensors, which share it.
    return tensor.shape, *(memory_key(own) or own.untyped_storage()._cdata for own in local_tensors(tensor))


def check_key(key: object, path: Path) -> None:
    """Refuse a key that cannot be part of the name of an object, or of a tensor beside one.

    Raises:
        UnsupportedStateError: it is not text, nor, below the top, an integer.
    """
    if path and type(key) is int and abs(key) < 2**63:
        return
    if isinstance(key, torch.Tensor):
        shown = f"a tensor of shape {tuple(key.shape)} is a key here, and has no name that another process would know"
        refuse(path, f"{shown}; give list(….values()), or a dict with names of yours as keys")
    if path:
        refuse(path, f"the key {key!r} cannot name the object beside it or under it; use text or integers as keys here")
    refuse(path, f"the key {key!r} is not text; keys at this level name what is saved")
