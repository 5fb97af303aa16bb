"""The part of a state that this rank will write, before the ranks have planned it: what the planner would assign, if known.

A tensor that this rank holds whole is assumed to be whole on all ranks (`DistributedDataParallel`, the scalars of an
optimizer), and is divided as by `aiockpt.planning.spread`; a tensor that it holds in part is assumed to be its own (FSDP).
Both assumptions are wrong for a mesh that has both, as in hybrid sharding: the estimate reports them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from aiockpt.adapters.take_parts import take_parts
from aiockpt.engine.coordinator import Coordinator
from aiockpt.format.dtypes import itemsize
from aiockpt.planning.shard_map import local_boxes_of
from aiockpt.planning.spread import spread
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure

SUPPOSED = (
    "the ranks have not planned a save yet: what this rank holds whole is taken to be held by all of them, and what it "
    "holds in part to be its own"
)
ONLY_SEEN = (
    "tensors that other ranks have and this one has not (pipeline stages, FullyShardedDataParallel) are not counted"
)


def find_share(
    coordinator: Coordinator, walked: ShardedState, coming: Sequence[TensorShard]
) -> tuple[ShardedState, tuple[str, ...]]:
    """Return what this rank writes of *walked* and of *coming*, and the assumptions made, in words.

    The plan of an earlier save, or of `warm_up`, is used if there is one; nothing is communicated.
    """
    if coordinator.world_size == 1:
        return _join(walked, walked.tensors, coming), ()
    known = coordinator.known_share(walked)
    if known is None:
        return _likely(coordinator, _join(walked, walked.tensors, coming)), (SUPPOSED, ONLY_SEEN)
    if not coming:
        return known, (ONLY_SEEN,)
    likely = _likely(coordinator, _join(walked, (), coming))
    return _join(walked, known.tensors, likely.tensors), (SUPPOSED, ONLY_SEEN)


def _join(state: ShardedState, some: Sequence[TensorShard], others: Sequence[TensorShard]) -> ShardedState:
    """Return *state* with these tensors instead of its own; *state* itself if they are the same."""
    tensors = (*some, *others)
    if tensors == state.tensors:
        return state
    return msgspec.structs.replace(state, tensors=tensors, structure=digest_structure(tensors, state.alias))


def _likely(coordinator: Coordinator, state: ShardedState) -> ShardedState:
    whole = [shard for shard in state.tensors if _is_whole(shard)]
    held = local_boxes_of(msgspec.structs.replace(state, tensors=tuple(whole)))
    parts = spread([held] * coordinator.world_size)[coordinator.rank]
    order = {shard.name: number for number, shard in enumerate(state.tensors)}
    dealt = [*take_parts(whole, parts), *(shard for shard in state.tensors if not _is_whole(shard))]
    return _join(state, sorted(dealt, key=lambda shard: order[shard.name]), ())


def _is_whole(shard: TensorShard) -> bool:
    return sum(box.volume for box in shard.boxes) == math.prod(shard.shape)


def whole_bytes(shards: Iterable[TensorShard]) -> int:
    """Return the bytes of the tensors that *shards* are parts of, on all ranks together, each once."""
    by_name = {shard.name: math.prod(shard.shape) * itemsize(shard.dtype) for shard in shards}
    return sum(by_name.values())
