"""How do live tensors get into slabs, and how long may training be held for it?

Guarantees:

- When `copy_windows` returns, every byte was copied: the state may change.
- It copies in file order and hands each window on as soon as it is full, so that writing starts while the copy still
  runs, and one slab is enough to drain any state.
- Its cost beside the copy itself is about half a microsecond a tensor: addresses and offsets, no tensor operations.
- The memory of a tensor is held until its last byte is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiockpt.planning.save import HEADER, FilePlan, SavePlan, Window
from aiockpt.runtime.slabs import Slab, SlabPool
from aiockpt.state.shards import TensorShard

if TYPE_CHECKING:
    import torch

Deliver = Callable[[Window, Slab], object]


def copy_windows(
    plan: SavePlan,
    shards: Sequence[TensorShard],
    pool: SlabPool,
    deliver: Deliver,
    *,
    wanted: Callable[[], bool],
    timeout_s: float,
) -> None:
    """Copy *shards* into slabs of *pool*, window after window, and *deliver* each full one.

    Runs on the thread that calls it and holds it for the length of the copy. Stops early, without an error, when
    *wanted* says False: the save has failed or was cancelled, and nobody needs the rest.

    Raises:
        StorageTimeoutError: no slab came free within *timeout_s* seconds.
    """
    tensors = [_dense(shard.data) for shard in shards]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for file in plan.files:
        header = ctypes.create_string_buffer(file.header, len(file.header))
        addresses.append(ctypes.addressof(header))  # position HEADER = -1 of the list
        _copy_file(file, addresses, pool, deliver, wanted, timeout_s)
        addresses.pop()


def _copy_file(
    file: FilePlan,
    addresses: list[int],
    pool: SlabPool,
    deliver: Deliver,
    wanted: Callable[[], bool],
    timeout_s: float,
) -> None:
    assert HEADER == -1
    move = ctypes.memmove  # releases the GIL
    for window in file.windows:
        if not wanted():
            return
        slab = pool.take(timeout_s)
        base = slab.address
        for target, source, offset, size in _as_tuples(window):
            move(base + target, addresses[source] + offset, size)
        deliver(window, slab)


def _as_tuples(window: Window) -> Sequence[tuple[int, int, int, int]]:
    return [(copy.window_offset, copy.source, copy.source_offset, copy.size) for copy in window.copies]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself where its memory is what is written, else a host copy in row-major order."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
