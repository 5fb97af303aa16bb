"""Names in the checkpoint of the parameters and tensors of a state, however their modules were wrapped.

An optimizer finds the state of a parameter by them. A module that loads itself may load a parameter from another key than
its own; its optimizer follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.module import (
    OwnLoad,
    SavedModule,
    bare_key,
    is_saved_module,
    loads_directly,
    open_source,
    walk_parts,
)
from aiockpt.state.tree import Path


class SavedNames:
    """What parameters and tensors of a state are called in the checkpoint, however their modules were wrapped."""

    def __init__(self, holders: Mapping[Path, tuple[Path, nn.Module | Mapping[Any, Any]]], matcher: Matcher) -> None:
        self._holders = holders
        self._matcher = matcher
        self._sources: dict[Path, SavedModule | None] = {}
        self._renames: dict[Path, dict[Path, str]] = {}

    def name_of(self, owner: Path) -> str:
        """Return the name of the tensor at *owner* of the state."""
        path, holder = self._holders.get(owner, ((), {}))
        if path not in self._sources:
            self._sources[path] = self._source(path, holder) if path else None
        source = self._sources[path]
        if source is None:
            return self._matcher.stored_name(owner)
        if isinstance(holder, nn.Module):
            name = source.stored_name(owner, self._matcher)
            if self._matcher.stored.facts(name) is None:
                return self._renames_of(path, holder, source).get(owner, name)
            return name
        return source.name_of(bare_key(str(owner[-1]), holder))

    def _source(self, path: Path, holder: nn.Module | Mapping[Any, Any]) -> SavedModule | None:
        if isinstance(holder, nn.Module) or is_saved_module(holder, path, self._matcher):
            return open_source(path, self._matcher)
        return None

    def _renames_of(self, path: Path, holder: nn.Module, source: SavedModule) -> dict[Path, str]:
        """Return the names of parameters that modules, which load themselves, load from other keys than their own."""
        if path not in self._renames:
            parts = walk_parts(holder, path, loads_directly)
            own = [OwnLoad(member, place, source, self._matcher) for place, member, direct in parts if not direct]
            self._renames[path] = {owner: name for one in own for owner, name in one.find_renames().items()}
        return self._renames[path]
