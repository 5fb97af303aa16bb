"""States on the devices of a twin, the plans of them, and what a snapshot made of both."""

from collections.abc import Mapping, Sequence

import torch

from aiockpt.adapters.native import StateWalker
from aiockpt.planning.write_plan import SavePlan, Window, plan_save
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.state.shards import ShardedState

SLAB_BYTES = 4096


class Writer:
    """Writes slabs to memory as they are delivered, overwrites them, and gives them back."""

    def __init__(self, plan: SavePlan, pool: SlabPool) -> None:
        self.files = [bytearray(file.size) for file in plan.files]
        self.offsets: list[tuple[int, int]] = []
        self._pool = pool

    def __call__(self, window: Window, slab: Slab) -> None:
        self.offsets.append((window.file, window.offset))
        self.files[window.file][window.offset : window.offset + window.size] = slab.memory[: window.size]
        slab.memory[:] = b"\xee" * len(slab.memory)
        self._pool.release(slab)


def planned(state: Mapping[str, torch.Tensor]) -> tuple[ShardedState, SavePlan]:
    """Return *state* as the engine has it, and the plan for it in small windows."""
    walked = StateWalker().walk(state)
    return walked, plan_save(walked, slab_bytes=SLAB_BYTES, file_bytes=16 * SLAB_BYTES)


def read_back(walked: ShardedState, plan: SavePlan, files: Sequence[bytearray]) -> dict[str, torch.Tensor]:
    """Return what *files* hold."""
    read = {}
    for shard in walked.tensors:
        (piece,) = plan.tensors[shard.name].pieces
        data = files[piece.file][piece.start : piece.end]
        flat = torch.frombuffer(data, dtype=shard.data.dtype) if data else torch.empty(0, dtype=shard.data.dtype)
        read[shard.name] = flat.reshape(shard.data.shape)
    return read
