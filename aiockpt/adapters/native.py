"""What does a state hold, in the neutral language? Walk it once, then walk it again for almost nothing.

`StateWalker` turns a nested dict of modules, optimizers, objects with ``state_dict()``, tensors and plain values into a
`ShardedState`. The first (*cold*) walk makes a plan: which tensors there are, under which names, which share memory. A
later (*warm*) walk checks that nothing has moved (`aiockpt.adapters.watch`) and reads the plain values anew.

Guarantees:

- What cannot be saved is refused by its path, before anything is written.
- Memory that several names share is stored once, the others are aliases.
- Any doubt is a cold walk: a cached walk is never served over moved, retied, resized or replaced tensors.
- Tensors are not copied and not changed; the state is only read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter, eq
from typing import Any, Protocol

import msgspec
import torch

from aiockpt.adapters.held import FlatRange
from aiockpt.adapters.index import Index
from aiockpt.adapters.intake import LoadTarget
from aiockpt.adapters.kinds import Stateful, kind_of
from aiockpt.adapters.leaves import write_tensor
from aiockpt.adapters.loader import Loader
from aiockpt.adapters.module import ModulePart
from aiockpt.adapters.optimizer import OptimizerPart
from aiockpt.adapters.rng import RNG, PerRank, per_rank
from aiockpt.adapters.run import Run, Stale
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import open_target, read_tree
from aiockpt.adapters.tensors import Leaf, describe, tensor_name
from aiockpt.adapters.watch import Watch
from aiockpt.errors import ManifestError, UnsupportedStateError
from aiockpt.format.document import check_tree, collector_paused
from aiockpt.format.names import join_name
from aiockpt.state.codecs import DEFAULT_CODECS, CodecRegistry
from aiockpt.state.shards import ShardedState, TensorShard, are_same, digest_structure
from aiockpt.state.tree import TAG, Node, Path, refuse

__all__ = ["RNG", "LoadTarget", "StateWalker", "Stored", "open_target", "per_rank", "read_tree"]

_DATA = attrgetter("data")
_FACTS = attrgetter("name", "dtype", "shape", "boxes")
_VIEW = (torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("shape", "dtype", "device"))
SAME_NAME = "another leaf has the same name; rename a key"
CHECKED_SIZE = 1 << 16
"""Nodes and characters from which on the tree is measured against the limits of the format on every walk."""


class Part(Protocol):
    """One object of a walked state."""

    def refresh(self, value: Any, run: Run) -> Node:
        """Return the node of *value* as it is now.

        Raises:
            Stale: it is not what the plan was made for.
        """


class StateWalker:
    """Walks states of one job, and remembers the last one.

    Between walks it keeps the tensors of the last state alive; `forget` lets go of them.

    Args:
        codecs: the user's classes; None takes those of `aiockpt.register_codec`.
        rank: whose own values are meant.
    """

    def __init__(self, codecs: CodecRegistry | None = None, *, rank: int = 0) -> None:
        self._codecs = codecs or DEFAULT_CODECS
        self._rank = rank
        self._plan: _Plan | None = None
        self.cold_walks = 0

    def walk(self, state: Mapping[str, Any]) -> ShardedState:
        """Return what *state* holds now.

        Raises:
            UnsupportedStateError: a leaf cannot be saved; it is named.
        """
        if self._plan is not None and self._plan.watch.holds():
            try:
                with collector_paused():  # tensors that are gathered anew are objects enough to set it off
                    return self._plan.run(state, self._codecs, self._rank)
            except Stale:
                pass
        self._plan = None
        self.cold_walks += 1
        with collector_paused():
            plan = _Plan(state)
            walked = plan.run(state, self._codecs, self._rank, check=True)
        self._plan = plan
        return walked

    def forget(self) -> None:
        """Let go of the last state."""
        self._plan = None


class _Plan:
    """One cold walk: the parts of a state, its tensors, and the watch over them."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.watch = Watch()
        self._kept: dict[str, Leaf] = {}
        self._root = _ContainerPart(state, (), Index(state), self)
        self.watch.seal()
        self._memories: dict[Hashable, str] = {}
        shards, self._alias = _tie(self._kept.values(), {}, self._memories)
        self._shards = tuple(shards)
        self._structure: tuple[Hashable, str] | None = None
        self._gathered: list[TensorShard] = []
        self._tensors = self._shards

    def keep(self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None) -> None:
        """Take a tensor that stays where it is between walks; *flat* as for `describe`."""
        leaf = describe(tensor_name(path), tensor, path, flat)
        if leaf.name in self._kept:
            refuse(path, SAME_NAME)
        self._kept[leaf.name] = leaf
        self.watch.tensor(tensor)

    def run(self, state: Mapping[str, Any], codecs: CodecRegistry, rank: int, *, check: bool = False) -> ShardedState:
        """Read the values of *state* and return all of it."""
        run = Run(codecs, rank)
        values = self._root.refresh(state, run)
        if check or run.written > CHECKED_SIZE:
            _check_size(values)
            _check_size(run.per_rank)
        found = set[str]()
        for leaf in run.leaves:
            if leaf.name in self._kept or leaf.name in found:
                raise UnsupportedStateError(leaf.name, SAME_NAME)
            found.add(leaf.name)
        shards, alias = _tie(run.leaves, self._memories, {})
        every_alias = {**self._alias, **alias}
        structure = self._settle(shards, every_alias)
        return ShardedState(self._tensors, every_alias, values, run.per_rank, structure)

    def _settle(self, found: list[TensorShard], alias: Mapping[str, str]) -> str:
        """Put what was gathered anew behind what is kept; return the digest of the structure.

        Only what was gathered anew can have changed that. Where it is what it was in the last walk, the shards of then
        stand for it: one object each time, and one tuple of them, tell others that nothing has moved (see `are_same`).
        """
        facts = (tuple(map(_FACTS, found)), tuple(alias.items()))
        known = self._structure is not None and self._structure[0] == facts
        if known:
            stay = map(eq, _places(self._gathered), _places(found))
            found = [old if stays else new for old, new, stays in zip(self._gathered, found, stay, strict=True)]
        if not known or not are_same(found, self._gathered):
            self._tensors = (*self._shards, *found)
            self._gathered = found
        if self._structure is None or not known:
            self._structure = (facts, digest_structure(self._tensors, alias))
        return self._structure[1]


class _ContainerPart:
    """A dict with string keys that holds more than plain values; it may be another dict in each walk."""

    def __init__(self, mapping: Mapping[str, Any], path: Path, index: Index, plan: _Plan) -> None:
        self._keys = list(mapping)
        self._parts = [_part(value, (*path, key), index, plan) for key, value in mapping.items()]

    def refresh(self, value: Any, run: Run) -> Node:
        """Return the nodes of what is in the dict."""
        if not isinstance(value, Mapping) or list(value) != self._keys:
            raise Stale
        nodes = {key: part.refresh(value[key], run) for key, part in zip(self._keys, self._parts, strict=True)}
        return {TAG: "dict", "items": list(map(list, nodes.items()))} if TAG in nodes else nodes


def _part(value: Any, path: Path, index: Index, plan: _Plan) -> Part:
    match kind_of(value):
        case "module":
            return ModulePart(value, path, index.slice_of, plan.watch, plan.keep)
        case "optimizer":
            return OptimizerPart(value, path, index, plan.watch, plan.keep)
        case "tensor":
            return _TensorPart(value, path, plan)
        case "container":
            return _ContainerPart(value, path, index, plan)
        case "loader":
            return _LoaderPart(value, path)
        case "per_rank":
            return _OwnPart(value, path)
        case "stateful":
            return _StatefulPart(value, path)
        case "value":
            return _ValuePart(path)


class _TensorPart:
    """A bare tensor."""

    def __init__(self, tensor: torch.Tensor, path: Path, plan: _Plan) -> None:
        plan.keep(path, tensor)
        self._tensor = tensor
        self._node = write_tensor(tensor, tensor_name(path))

    def refresh(self, value: Any, run: Run) -> Node:
        run.same(value, self._tensor)
        return self._node


class _StatefulPart:
    """An object with ``state_dict()``, whatever that returns."""

    def __init__(self, value: Stateful, path: Path) -> None:
        self._value = value
        self._path = path

    def refresh(self, value: Any, run: Run) -> Node:
        run.same(value, self._value)
        return {TAG: "stateful", "value": run.encode(value.state_dict(), self._path)}


class _LoaderPart:
    """A data loader: what its readers share, and what this data-parallel rank's have, in the global tree under its number.

    So peers that read the same data say the same, and the union of all ranks' trees has every data-parallel rank once.
    """

    def __init__(self, value: Loader[Any], path: Path) -> None:
        self._value = value
        self._path = path

    def refresh(self, value: Any, run: Run) -> Node:
        run.same(value, self._value)
        held = self._value.held()
        rank = str(self._value.rank)
        own = {rank: run.encode(held.own, (*self._path, "readers", rank))} if self._value.saves else {}
        shared = run.encode(held.shared, (*self._path, "shared"))
        return {TAG: "loader", "form": held.form, "size": self._value.size, "shared": shared, "readers": own}


class _OwnPart:
    """What belongs to this rank: an object, or the value that `per_rank` wraps."""

    def __init__(self, value: Any, path: Path) -> None:
        self._value = value
        self._path = path

    def refresh(self, value: Any, run: Run) -> Node:
        run.same(value, self._value)
        held = value.value if isinstance(value, PerRank) else value
        is_object = kind_of(held) in ("stateful", "per_rank")
        run.per_rank[join_name(self._path)] = run.encode_own(held.state_dict() if is_object else held, self._path)
        return {TAG: "per_rank"}


class _ValuePart:
    """A plain value, read anew each time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refresh(self, value: Any, run: Run) -> Node:
        if kind_of(value) != "value":
            raise Stale
        return run.encode(value, self._path)


def _tie(
    leaves: Iterable[Leaf], known: Mapping[Hashable, str], seen: dict[Hashable, str]
) -> tuple[list[TensorShard], dict[str, str]]:
    """Return each distinct memory once, and the other names of it; *known* are memories stored already."""
    distinct: list[TensorShard] = []
    alias: dict[str, str] = {}
    for leaf in leaves:
        key = (leaf.memory, leaf.shards[0].dtype)
        name = leaf.name if leaf.memory is None else known.get(key) or seen.setdefault(key, leaf.name)
        if name == leaf.name:
            distinct += leaf.shards
        else:
            alias[leaf.name] = name
    return distinct, alias


def _places(shards: Sequence[TensorShard]) -> Iterable[Hashable]:
    """Return where each tensor is, and how it is seen there; comparable while the tensors live."""
    tensors = list(map(_DATA, shards))
    return zip(*(map(get, tensors) for get in _VIEW), strict=True)


def _check_size(values: Node) -> None:
    """Refuse a tree that no reader would accept."""
    try:
        check_tree(msgspec.json.encode(values), "the state")
    except ManifestError as error:
        raise UnsupportedStateError("the state", str(error)) from error
