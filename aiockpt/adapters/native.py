"""Walks of a state into neutral terms: a full one first, then cached ones at almost no cost.

`StateWalker` turns a nested dict of modules, optimizers, objects with ``state_dict()``, tensors and plain values into a
`ShardedState`. The first (*cold*) walk makes a plan: the tensors, their names, and which of them share memory. A later
(*warm*) walk checks that nothing has moved (`aiockpt.adapters.watch`) and reads the plain values again.

Guarantees:

- A value that cannot be saved is refused by its path, before anything is written.
- Memory that several names share is stored once, under the first name; the other names are aliases.
- Any doubt causes a cold walk: a cached walk is never served over moved, retied, resized or replaced tensors.
- Tensors are not copied and not changed; the state is only read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, eq, is_
from typing import Any

import msgspec
import torch

from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import kind_of, members
from aiockpt.adapters.leaves import SAME_NAME, KeptTensors, Run, Stale, write_tensor
from aiockpt.adapters.module import ModulePart
from aiockpt.adapters.objects import write_loader, write_own, write_stateful
from aiockpt.adapters.optimizer import OptimizerPart
from aiockpt.adapters.selection import ALL, LeafChoice, Selection
from aiockpt.adapters.stored import members_of
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import Leaf, tensor_name
from aiockpt.adapters.watch import Watch
from aiockpt.errors import ManifestError, UnsupportedStateError
from aiockpt.format.document import MAX_TREE_BYTES, MAX_TREE_NODES, check_tree, collector_paused
from aiockpt.format.names import join_name
from aiockpt.state.codecs import DEFAULT_CODECS, CodecRegistry
from aiockpt.state.shards import KnownState, ShardedState, TensorShard, are_same, digest_structure
from aiockpt.state.tree import TAG, Node, Path, write_metadata

# Limits on the tree of plain values, for every reader (docs/format.md#limits), and the leaves that make it large.
#
# For a tree that grows while the program trains (a log, a history), a warning is logged at a half, three quarters and seven
# eighths of the limits, so that a run does not begin to fail without one.


MIB = 1 << 20
WARN_AT = (0.5, 0.75, 0.875)
SHOWN = 3
_ADVICE = "Keep large ones as tensors or arrays (a long list of numbers is stored as one), or write logs to a file."
logger = logging.getLogger("aiockpt")


class TreeSize:
    """Measures the trees of the walks of one program."""

    def __init__(self) -> None:
        self._warned = 0

    def check(self, values: Node) -> None:
        """Refuse a tree that readers would reject; log a warning for one that approaches their limits.

        Raises:
            UnsupportedStateError: it exceeds a limit; the message names the largest leaves.
        """
        raw = msgspec.json.encode(values)
        try:
            count = check_tree(raw, "the state")
        except ManifestError as error:
            raise UnsupportedStateError("the state", f"{error}. {_biggest(values)}. {_ADVICE}") from error
        filled = max(count / MAX_TREE_NODES, len(raw) / MAX_TREE_BYTES)
        due = sum(filled >= mark for mark in WARN_AT)
        if due > self._warned:
            self._warned = due
            logger.warning(
                "the plain values of the state are %d values, %.1f MiB, and at most %d and %d MiB can be saved. %s. %s",
                count,
                len(raw) / MIB,
                MAX_TREE_NODES,
                MAX_TREE_BYTES // MIB,
                _biggest(values),
                _ADVICE,
            )


def _biggest(values: Node) -> str:
    """Return as text which leaves are the largest."""
    found = sorted(_leaves(values, (), _size(values) // (4 * SHOWN)), key=lambda leaf: -leaf[1])[:SHOWN]
    return "The biggest: " + ", ".join(f"{join_name(path) or 'all'} ({size / MIB:.1f} MiB)" for path, size in found)


def _leaves(node: Node, path: Path, least: int) -> Iterator[tuple[Path, int]]:
    """Yield the parts of at least *least* bytes that have no such parts themselves, with their sizes."""
    inside = node["value"] if type(node) is dict and node.get(TAG) in ("stateful", "codec") else node
    parts = [(key, part) for key, part in members_of(inside).items() if type(part) in (dict, list, str)]
    large = [(key, part) for key, part in parts if _size(part) >= least]
    if not large:
        yield path, _size(node)
    for key, part in large:
        yield from _leaves(part, (*path, key), least)


def _size(node: Node) -> int:
    return len(msgspec.json.encode(node))


_CONTAINERS = (dict, OrderedDict, list, tuple)
_SEQUENCES = (list, tuple)
_DATA = attrgetter("data")
_FACTS = attrgetter("name", "dtype", "shape", "boxes", "axes")
_VIEW = (torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("shape", "dtype", "device"))
PLANS = 2
"""Number of selections whose plan is kept: a run may save a part of its state often and all of it now and then."""
CHECKED_SIZE = 1 << 16
"""Size, in nodes and characters, above which every walk checks the tree against the limits of the format."""


Refresh = Callable[[Any, Run], Node]
"""Returns the current node of one part of the state; raises `Stale` where that is not what the plan was made for."""


class StateWalker:
    """Walks the states of one job, and keeps the plan of the last state for each of the last `PLANS` selections.

    Between walks it keeps the tensors of these states alive; `release` drops them.

    Args:
        codecs: the user's classes; None uses those of `aiockpt.register_codec`.
        rank: the rank whose own values are saved.
        alone: whether this rank alone has the state.
    """

    def __init__(self, codecs: CodecRegistry | None = None, *, rank: int = 0, alone: bool = True) -> None:
        self._codecs = codecs or DEFAULT_CODECS
        self._rank = rank
        self._alone = alone
        self._plans: dict[Selection, _StatePlan] = {}
        self._size = TreeSize()
        self.cold_walks = 0

    def walk(self, state: Mapping[str, Any], selection: Selection = ALL) -> ShardedState:
        """Return the part of *state* that *selection* chooses, as it is now.

        Raises:
            UnsupportedStateError: a leaf cannot be saved; it is named.
            UsageError: *selection* names something that the state lacks, or a part of an object that is saved as a whole.
        """
        # Taken out, and put back at the end when the walk has succeeded: the first plan is the least recently used.
        plan = self._plans.pop(selection, None)
        known = KnownState() if plan is None else plan.known
        if plan is not None and plan.watch.holds():
            try:
                with collector_paused():  # gathered tensors are numerous enough to trigger it
                    walked = plan.run(state, self._codecs, self._rank, self._size)
            except Stale:
                pass
            else:
                self._plans[selection] = plan
                return walked
        self.cold_walks += 1
        with collector_paused():
            plan = _StatePlan(state, selection, known, alone=self._alone)
            walked = plan.run(state, self._codecs, self._rank, self._size, check=True)
        while len(self._plans) >= PLANS:
            self._plans.pop(next(iter(self._plans))).known.release()
        self._plans[selection] = plan
        return walked

    def release(self) -> None:
        """Release the last states and their plans."""
        while self._plans:
            self._plans.popitem()[1].known.release()


class _StatePlan:
    """The plan of one cold walk: the parts of a state, its tensors, their watch, and the facts *known* of them."""

    def __init__(self, state: Mapping[str, Any], selection: Selection, known: KnownState, *, alone: bool) -> None:
        self.known = known
        self._kept = KeptTensors(LeafChoice(selection, state, alone=alone))
        self._root = _container(state, (), Index(state), self._kept)
        self._kept.choice.check()
        self.watch = self._kept.watch
        self.watch.seal()
        self._memories: dict[Hashable, str] = {}
        shards, self._alias = _tie(self._kept.leaves.values(), {}, self._memories)
        self._shards = tuple(shards)
        self._structure: tuple[Hashable, str] | None = None
        self._gathered: list[TensorShard] = []
        self._tensors = self._shards

    def run(
        self, state: Mapping[str, Any], codecs: CodecRegistry, rank: int, size: TreeSize, *, check: bool = False
    ) -> ShardedState:
        """Read the values of *state*; return them with the tensors of the plan."""
        run = Run(codecs, rank)
        values = self._root(state, run)
        if check or run.written > CHECKED_SIZE:
            size.check(values)
            size.check(run.per_rank)
        found = set[str]()
        for leaf in run.leaves:
            if leaf.name in self._kept.leaves or leaf.name in found:
                raise UnsupportedStateError(leaf.name, SAME_NAME)
            found.add(leaf.name)
        shards, alias = _tie(run.leaves, self._memories, {})
        every_alias = {**self._alias, **alias}
        structure = self._store_structure(shards, every_alias)
        left_out = {**self._kept.left_out, **run.left_out}
        return ShardedState(self._tensors, every_alias, values, run.per_rank, structure, left_out, known=self.known)

    def _store_structure(self, found: list[TensorShard], alias: Mapping[str, str]) -> str:
        """Append the gathered tensors to the kept ones; return the digest of the structure.

        Only gathered tensors can have changed the structure. Where they are those of the last walk, its shards are used
        again: the same objects in the same tuple show that nothing has moved (see `are_same`).
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


class _Kept(msgspec.Struct, frozen=True, eq=False):
    """A tensor in a container that the plan keeps: *node* is valid as long as the tensor stays the same."""

    tensor: torch.Tensor
    node: Node


class _FixedDict:
    """A dict in which all is kept: tensors, and dicts like it. Its node is valid while all of these are the same objects.

    One check in C compares the dict with all dicts in it; where it fails, *refresh* reads them one by one. (That took 0.3 of
    the 0.6 ms of a lazy call for 1,000 tensors in 251 dicts.)
    """

    def __init__(self, container: dict[str, Any], node: Node, refresh: Refresh, *, has_dicts: bool) -> None:
        self.node = node
        self._container, self._refresh = container, refresh
        self._watch = Watch() if has_dicts else None  # else *refresh* is as fast
        if self._watch is not None:
            for mapping in _dicts_in(container):
                self._watch.mapping(mapping)
            self._watch.seal()

    def __call__(self, value: Any, run: Run) -> Node:
        if self._watch is not None and value is self._container and self._watch.holds():
            return self.node
        return self._refresh(value, run)


def _dicts_in(container: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield container
    for value in container.values():
        if type(value) is dict:
            yield from _dicts_in(value)


def _container(container: Any, path: Path, index: Index, plan: KeptTensors) -> Refresh:
    """Plan a dict, list or tuple that holds more than plain values; it may be another object in each walk."""
    cls, keys = type(container), [key for key, _ in members(container)]
    parts = [_part(value, (*path, key), index, plan) for key, value in members(container)]
    # The format has a dict at the root, also where the caller gives an OrderedDict.
    written_as = cls if path else dict
    nodes = [(key, part.node if isinstance(part, _Kept) else None) for key, part in zip(keys, parts, strict=True)]
    # One pass of C code checks all tensors: a call for each took half of a lazy save of bare tensors.
    kept = [part.tensor for part in parts if isinstance(part, _Kept)]
    is_kept = [isinstance(part, _Kept) for part in parts]
    others = [(place, part) for place, part in enumerate(parts) if not isinstance(part, _Kept)]
    # In a list the null stays, so that the items behind it keep their positions, which are their names.
    left_out = [place for place, part in others if part is _left_out and cls not in _SEQUENCES]
    is_plain_dict = written_as not in (OrderedDict, *_SEQUENCES) and _has_plain_keys(keys)

    def refresh(value: Any, run: Run) -> Node:
        if type(value) is not cls or [key for key, _ in members(value)] != keys:
            raise Stale
        found = list(value) if cls in _SEQUENCES else list(value.values())
        if not all(map(is_, compress(found, is_kept), kept)):
            raise Stale
        fresh = list(nodes)
        for place, part in others:
            fresh[place] = (keys[place], part(found[place], run))
        for place in reversed(left_out):
            del fresh[place]
        node = dict(fresh) if is_plain_dict else write_container(written_as, fresh)
        return write_metadata(node, value, path, run) if path else node

    fixed = [part for _, part in others if isinstance(part, _FixedDict)]
    if cls is dict and is_plain_dict and len(fixed) == len(others):
        kept_nodes = (part.node for part in parts if isinstance(part, _Kept | _FixedDict))  # all of them
        node = dict(zip(keys, kept_nodes, strict=True))
        return _FixedDict(container, node, refresh, has_dicts=bool(fixed))
    return refresh


def _has_plain_keys(keys: Iterable[Any]) -> bool:
    return all(type(key) is str and key != TAG for key in keys)


def write_container(cls: type, nodes: list[tuple[Any, Node]]) -> Node:
    """Return the node of a container of class *cls*; a mapping of another class than `OrderedDict` is a dict."""
    if cls is list:
        return [node for _, node in nodes]
    if cls is tuple:
        return {TAG: "tuple", "items": [node for _, node in nodes]}
    if cls is OrderedDict:
        return {TAG: "OrderedDict", "items": list(map(list, nodes))}
    return dict(nodes) if _has_plain_keys(key for key, _ in nodes) else {TAG: "dict", "items": list(map(list, nodes))}


def _part(value: Any, path: Path, index: Index, plan: KeptTensors) -> Refresh | _Kept:
    """Plan one part of the state."""
    kind = kind_of(value)
    if kind not in ("module", "container") and not plan.choice.keeps_whole(path, value):
        plan.leave_out(path, value)
        return _left_out
    match kind:
        case "module":
            return ModulePart(value, path, index.slice_of, plan).refresh
        case "optimizer":
            return OptimizerPart(value, path, index, plan).refresh
        case "container":
            return _container(value, path, index, plan)
        case "value":
            return partial(_refresh_value, path)
        case "tensor" if tensor_kind(value).in_parts:  # encoded in each walk: its parts may be other objects by then
            return _same_object(value, lambda run: run.encode(value, path))
        case "tensor":
            plan.keep(path, value)
            return _Kept(value, write_tensor(value, tensor_name(path)))
        case "loader":
            return _same_object(value, partial(write_loader, value, path))
        case "per_rank":
            return _same_object(value, partial(write_own, value, path, index))
        case "stateful":
            return _same_object(value, partial(write_stateful, value, path))


def _same_object(expected: object, write: Callable[[Run], Node]) -> Refresh:
    """Return the function that writes one object, which must be the same in each walk."""

    def refresh(value: object, run: Run) -> Node:
        run.same(value, expected)
        return write(run)

    return refresh


def _left_out(value: Any, run: Run) -> Node:
    return None


def _refresh_value(path: Path, value: Any, run: Run) -> Node:
    """Write a plain value, which each walk reads again."""
    if type(value) not in _CONTAINERS and kind_of(value) != "value":
        raise Stale
    try:
        return run.encode(value, path)
    except UnsupportedStateError:
        # An object was added since. Checking for one first would cost each walk of a long list a second pass.
        if kind_of(value) == "value":
            raise
        raise Stale from None


def _tie(
    leaves: Iterable[Leaf], known: Mapping[Hashable, str], seen: dict[Hashable, str]
) -> tuple[list[TensorShard], dict[str, str]]:
    """Return each distinct memory once, and its other names as aliases; *known* memories are stored already."""
    distinct: list[TensorShard] = []
    alias: dict[str, str] = {}
    for leaf in leaves:
        # *memory* has the dtype of the view that `bytes_of` makes, which different dtypes may share.
        key = (leaf.memory, leaf.shards[0].dtype)
        name = leaf.name if leaf.memory is None else known.get(key) or seen.setdefault(key, leaf.name)
        if name == leaf.name:
            distinct += leaf.shards
        else:
            alias[leaf.name] = name
    return distinct, alias


def _places(shards: Sequence[TensorShard]) -> Iterable[Hashable]:
    """Return the memory of each tensor and its view of it; comparable while the tensors live."""
    tensors = list(map(_DATA, shards))
    return zip(*(map(get, tensors) for get in _VIEW), strict=True)
