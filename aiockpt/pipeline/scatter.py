"""Live tensors from fetched bytes: mostly they are fetched straight into them; the rest is copied at the end.

A target that is dense host memory is filled in place. One on a device, or strided, is fetched into a staging tensor and
copied when all blocks are verified. Pieces that overlap a target in short runs come through scratch memory, which may be
limited: then the passes of a load use it one after the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from aiockpt.format.document import collector_paused
from aiockpt.format.manifest import Manifest
from aiockpt.planning.read_plan import LoadPlan, Scattered, Wanted, plan_load
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard


class Places:
    """The memories that a load fills.

    Args:
        shards: what is wanted; ``data`` is the live tensor, filled in place.
        scratch_limit_bytes: of scratch memory, unless one piece is larger. Each pass must be settled before the next
            one is read then; without a limit all may be at once.
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[TensorShard], scratch_limit_bytes: int | None = None
    ) -> None:
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._wanted: list[Wanted] = []
        self._parts: list[torch.Tensor] = []  # a dense tensor for each wanted box
        for shard in shards:
            dense: torch.Tensor = shard.data
            if not is_fillable(dense):
                dense = torch.empty(dense.shape, dtype=dense.dtype, device="cpu")
                self._staged.append((shard.data, dense))
            if len(shard.boxes) == 1:
                self._wanted.append(Wanted(shard.name, shard.boxes[0]))
                self._parts.append(dense)
            else:
                self._add_boxes(shard, dense)
        with collector_paused():
            self.plan: LoadPlan = plan_load(manifest, self._wanted, scratch_limit_bytes)
        memory = torch.empty(self.plan.scratch_bytes, dtype=torch.uint8)
        self._scratch = [memory[offset : offset + size] for offset, size in self.plan.scratch]
        self._unplaced: dict[int, list[Scattered]] = {}
        for piece in self.plan.scattered:
            self._unplaced.setdefault(piece.pass_number, []).append(piece)
        self.memories = [byte_view(tensor) for tensor in (*self._parts, *self._scratch)]

    def _add_boxes(self, shard: TensorShard, dense: torch.Tensor) -> None:
        flat = dense.view(-1)
        start = 0
        for box in shard.boxes:
            self._wanted.append(Wanted(shard.name, box))
            self._parts.append(flat[start : start + box.volume])
            start += box.volume

    def settle(self, pass_number: int | None = None) -> None:
        """Copy what is not where it is wanted yet. Runs on a worker thread, after all blocks were verified.

        Args:
            pass_number: the pass that was read, whose part of the scratch memory becomes free; None: all of them were.
        """
        all_read = pass_number is None or pass_number == len(self.plan.passes) - 1
        for number, pieces in self._unplaced.items():
            if all_read or number == pass_number:
                while pieces:
                    self._place(pieces.pop())
        if all_read:
            for live, dense in self._staged:
                live.copy_(dense)

    def _place(self, piece: Scattered) -> None:
        target = self._parts[piece.target]
        scratch = self._scratch[piece.scratch - len(self._parts)]
        box = self._wanted[piece.target].box
        source = scratch.view(target.dtype).view(piece.stored.sizes)[_slices(piece.overlap, piece.stored)]
        target.view(box.sizes)[_slices(piece.overlap, box)].copy_(source)


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - base, low - base + size)
        for low, base, size in zip(part.offsets, whole.offsets, part.sizes, strict=True)
    )


def is_fillable(tensor: torch.Tensor) -> bool:
    """Say whether bytes can be read straight into *tensor*."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a dense host tensor's memory as bytes; valid while the tensor lives."""
    size = tensor.nbytes
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
