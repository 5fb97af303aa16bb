"""The neutral description of a state, between adapters and engine: all that the engine knows of it.

An adapter turns a framework's state into a `ShardedState`; planning and pipeline know nothing else. No framework has a
class here: sharding is boxes of a global shape, ties are aliases, everything that is not a tensor is a tree of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, TypeVar

import msgspec
import xxhash

from aiockpt.format.dtypes import itemsize
from aiockpt.state.geometry import Box

T = TypeVar("T")


class TensorShard(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of one tensor that this rank holds.

    Attributes:
        name: of the leaf, as `aiockpt.format.names.join_name` writes it.
        dtype: its code (`aiockpt.format.dtypes`).
        shape: of the global tensor, in elements.
        boxes: the parts of it that *data* holds, in the order in which they lie in *data*.
        data: the local tensor, opaque here. A save copies it (any strides, any device); a load fills it.
        may_differ: whether ranks that hold the same part may have different values: True for all but parameters and the
            optimizer's state of parameters, for instance a buffer that forward updates.
        axes: of the global tensor, as they lie in memory, slowest first; None where that is their own order, or where it
            is unknown (`aiockpt.state.layout`). The same for all shards of one name.
        outer: the tensor (a DTensor) that *data* is the local part of, where changes are counted there; else None.
        is_buffer: whether a module holds it as a buffer; where ranks differ, the lowest rank's value counts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    data: Any
    outer: Any = None
    may_differ: bool = False
    axes: tuple[int, ...] | None = None
    is_buffer: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that this rank holds."""
        return sum(box.volume for box in self.boxes) * itemsize(self.dtype)


class KnownState:
    """A cache of all facts that were derived from one structure, for the next saves of it.

    The walk that finds a structure creates the cache, each later walk of that structure returns it with the state, and
    `release` ends it with the walk's own plan. A fact is found only for the key that it was stored for: an equal digest of
    a structure, or the very same shards in the same order, whose tensors have not moved. Any thread.
    """

    def __init__(self) -> None:
        self._facts: dict[type, tuple[object, Any]] = {}

    def find(self, kind: type[T], holds_for: object) -> T | None:
        """Return the fact of class *kind* that was stored for an equal digest, or for the very same tuple of shards."""
        kept = self._facts.get(kind)  # read once: several saves may be planned on several threads
        if kept is None or (kept[0] is not holds_for and kept[0] != holds_for):
            return None
        fact: T = kept[1]
        return fact

    def keep(self, fact: T, holds_for: object) -> T:
        """Store *fact* in place of the last one of its class, and return it."""
        self._facts[type(fact)] = holds_for, fact
        return fact

    def drop(self, kind: type) -> None:
        """Release the fact of class *kind*."""
        self._facts.pop(kind, None)

    def release(self) -> None:
        """Release all facts, and with them the tensors."""
        self._facts.clear()


class ShardedState(msgspec.Struct, frozen=True, eq=False):
    """The state that this rank checkpoints.

    Attributes:
        tensors: each distinct memory once, in the order of the walk.
        alias: other names of the same memory → the name in *tensors*.
        values: the global tree of everything else, ready for JSON; ranks must agree on it.
        per_rank: the same for values that belong to this rank alone, by leaf name.
        left_out: names that the caller excluded from the save: of tensors, with dtype code and global shape, and of other
            things, with None.
        structure: equal if and only if a plan made for one state is valid for the other; values do not change it.
        replicas: those tensors of this rank that other ranks have, too; empty until ranks have planned.
        known: facts that earlier saves have derived from it, or from parts of it.
    """

    tensors: tuple[TensorShard, ...]
    alias: Mapping[str, str]
    values: Any
    per_rank: Any
    structure: str
    left_out: Mapping[str, tuple[str, tuple[int, ...]] | None] = {}
    replicas: tuple[TensorShard, ...] = ()
    known: KnownState = msgspec.field(default_factory=KnownState)

    def without_tensors(self) -> ShardedState:
        """Return the state that is needed once the tensors are copied; it keeps none of them alive."""
        return msgspec.structs.replace(self, tensors=(), replicas=(), known=KnownState())


def are_same(some: Sequence[TensorShard], others: Sequence[TensorShard]) -> bool:
    """Return whether two walks found the very same shards, in the same order: then no tensor has moved."""
    return some is others or (len(some) == len(others) and all(map(is_, some, others)))


def digest_structure(tensors: Sequence[TensorShard], alias: Mapping[str, str]) -> str:
    """Return the digest of names, dtypes, shapes, boxes, layouts and ties, in order: `ShardedState.structure`."""
    hasher = xxhash.xxh3_128()
    for shard in tensors:
        hasher.update(msgspec.json.encode((shard.name, shard.dtype, shard.shape, shard.boxes)))
        if shard.axes is not None:
            hasher.update(msgspec.json.encode(shard.axes))
    hasher.update(msgspec.json.encode(sorted(alias.items())))
    return hasher.hexdigest()
