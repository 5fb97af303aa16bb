"""What is each tensor of a state called, and which are slices of a flat parameter? Looked up by identity.

Optimizers know parameters, not names: here are the names that the modules of the same state give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from aiockpt.adapters.fsdp1 import find_slices
from aiockpt.adapters.fsdp2 import show_shards
from aiockpt.adapters.held import FlatRange
from aiockpt.adapters.kinds import kind_of
from aiockpt.adapters.module import walk_modules
from aiockpt.errors import kind_in_words
from aiockpt.state.tree import MAX_DEPTH, Path, refuse


class Index:
    """The tensors of a state by identity; valid while they live.

    Args:
        state: as for saving. Its sharded modules are made to show their shards.

    Attributes:
        paths: of each parameter, buffer and bare tensor; the first path of a shared one, modules before bare leaves.
        slices: what a parameter that is a slice of a flat one has of the original.

    Raises:
        UnsupportedStateError: *state* is not made of dicts with text as keys.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.paths: dict[int, Path] = {}
        self.slices: dict[int, FlatRange] = {}
        if not isinstance(state, Mapping):
            refuse((), f"{kind_in_words(state)}; give a dict of what to save, by name")
        bare: dict[int, Path] = {}
        self._enter(state, (), bare)
        for identity, place in bare.items():
            self.paths.setdefault(identity, place)

    def slice_of(self, tensor: torch.Tensor) -> FlatRange | None:
        """Return what *tensor* has of the original parameter; None when it is no slice."""
        return self.slices.get(id(tensor))

    def _enter(self, mapping: Mapping[str, Any], path: Path, bare: dict[int, Path]) -> None:
        if len(path) > MAX_DEPTH:
            refuse(path[:8], f"nested deeper than {MAX_DEPTH} levels (does it contain itself?); flatten it")
        for key, value in mapping.items():
            if type(key) is not str:
                refuse(path, f"the key {key!r} is not text; keys at this level name what is saved")
            kind = kind_of(value)
            if kind == "module":
                self._enter_module(value, (*path, key))
            elif kind == "tensor":
                bare.setdefault(id(value), (*path, key))
            elif kind == "container":
                self._enter(value, (*path, key), bare)

    def _enter_module(self, module: nn.Module, path: Path) -> None:
        show_shards(module)
        self.slices |= {id(parameter): flat for parameter, flat in find_slices(module, path)}
        for member_path, member in walk_modules(module, path):
            for mapping in (member._parameters, member._buffers):
                for name, tensor in mapping.items():
                    if tensor is not None:
                        self.paths.setdefault(id(tensor), (*member_path, name))
