"""The neutral language between adapters and engine: all that the engine knows of a state.

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
    """What this rank holds of one tensor.

    Attributes:
        name: of the leaf, as `aiockpt.format.names.join_name` writes it.
        dtype: its code (`aiockpt.format.dtypes`).
        shape: of the global tensor, in elements.
        boxes: the parts of it that *data* holds, in the order in which they lie in *data*.
        data: the local tensor, opaque here. To save: what to copy (any strides, any device). To load: what to fill.
        may_differ: whether ranks that hold the same part of it may hold other values: all that is neither a parameter nor
            an optimizer's state of one, a buffer that forward updates for instance.
        axes: of the global tensor, as they lie in memory, slowest first; None where that is their own order, or where it
            cannot be told (`aiockpt.state.layout`). The same for all shards of one name.
        outer: what *data* is the local part of, where changes are counted there and not at *data* (a DTensor); else None.
        is_buffer: whether a module holds it as a buffer, of which the lowest rank's counts where ranks differ.
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
    """What was derived of one structure, so that the next save of it need not: the one holder of all of that.

    The walk that finds a structure makes it, each later walk of that structure returns it with the state, and `release`
    ends it with the walk's own plan. A fact is found only for what it holds for: an equal digest of a structure, or the
    very same shards in the same order, whose tensors are where they were. Any thread.
    """

    def __init__(self) -> None:
        self._facts: dict[type, tuple[object, Any]] = {}

    def find(self, kind: type[T], holds_for: object) -> T | None:
        """Return the fact of class *kind* that was kept for an equal digest, or for the very same tuple of shards."""
        kept = self._facts.get(kind)  # read once: several saves may be planned on several threads
        if kept is None or (kept[0] is not holds_for and kept[0] != holds_for):
            return None
        fact: T = kept[1]
        return fact

    def keep(self, fact: T, holds_for: object) -> T:
        """Keep *fact* in place of the last one of its class, and return it."""
        self._facts[type(fact)] = holds_for, fact
        return fact

    def drop(self, kind: type) -> None:
        """Release the fact of class *kind*."""
        self._facts.pop(kind, None)

    def release(self) -> None:
        """Release all of it, and with it the tensors."""
        self._facts.clear()


class ShardedState(msgspec.Struct, frozen=True, eq=False):
    """What this rank has to checkpoint.

    Attributes:
        tensors: each distinct memory once, in the order of the walk.
        alias: other names of the same memory → the name in *tensors*.
        values: the global tree of everything else, ready for JSON; ranks must agree on it.
        per_rank: the same for what belongs to this rank alone, by leaf name.
        left_out: what the caller chose not to save: names of tensors, with dtype code and global shape, and of other
            things, with None.
        structure: equal if and only if a plan made for one state serves the other; values do not change it.
        replicas: of all tensors that this rank has, those that other ranks have, too; empty until ranks have planned.
        known: what earlier saves have derived of it, or of parts of it.
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
        """Return what is needed of it once its tensors are copied; it keeps none of them alive."""
        return msgspec.structs.replace(self, tensors=(), replicas=(), known=KnownState())


def are_same(some: Sequence[TensorShard], others: Sequence[TensorShard]) -> bool:
    """Say whether two walks found the very same shards, in the same order: such tensors are where they were."""
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
