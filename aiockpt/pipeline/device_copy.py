"""The copy of tensors on devices straight into slabs, in streams of its own, while the devices compute.

Guarantees:

- No copy waits for the one before it, as long as slabs are free; no call holds the GIL long.
- Small tensors that are neighbours in the file are gathered on the device, then moved as one. Starting a move costs some
  microseconds however small it is, as much as the transfer of 64 KiB.
- A tensor that is not row-major is made so on the device, in the stream's order, in memory that is freed with its last
  window. A run shares no memory on the device with another one. Events report a full slab: `aiockpt.pipeline.snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from aiockpt.planning.write_plan import Copy, SavePlan, Window
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.runtime.slabs import Slab

SMALL_BYTES = 64 << 10
"""The size whose transfer takes as long as its start. Not measured here; on PCIe 4 and 5 that is 40 to 100 KiB."""


class _Run(msgspec.Struct, frozen=True):
    """Pieces of one device that lie side by side in a window: moved as one. *sources* are their bytes on the device."""

    offset: int
    size: int
    pieces: tuple[Copy, ...]
    sources: tuple[torch.Tensor, ...] | None


class _Part(msgspec.Struct, frozen=True):
    """What one device moves into one window.

    Attributes:
        begins, ends: the tensors that must be made row-major, whose first or last bytes are here.
    """

    device: torch.device
    runs: tuple[_Run, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]


class DeviceCopies:
    """The part of a copy program that devices carry out.

    Args:
        plan: what goes where.
        tensors: by their number in the plan.
        devices: of each tensor; None in host memory, which is not copied here.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        plan: SavePlan,
        tensors: Sequence[torch.Tensor],
        devices: Sequence[torch.device | None],
    ) -> None:
        self.tensors = tensors
        self.streams = {device: accelerator.stream(device) for device in dict.fromkeys(devices) if device is not None}
        flat = {
            number: _bytes(tensor)
            for number, (tensor, device) in enumerate(zip(tensors, devices, strict=True))
            if device is not None and is_row_major(tensor)
        }
        self.windows = _parts([window for file in plan.files for window in file.windows], devices, flat)
        self.gathered_bytes = dict.fromkeys(self.streams, 0)
        for part in (part for parts in self.windows for part in parts):
            together = [run.size for run in part.runs if len(run.pieces) > 1]
            self.gathered_bytes[part.device] = max(self.gathered_bytes[part.device], *together, 0)

    def begin(self, after: Iterable[tuple[torch.device, DeviceEvent]]) -> DeviceRun:
        """Return one run of the copies, ordered behind the events of the devices' compute streams."""
        for device, event in after:
            if device in self.streams:
                self.streams[device].follow(event)
        return DeviceRun(self)


class DeviceRun:
    """The copies of one save. Its memory on devices is its own: a run that failed may still be under way."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._made: dict[int, torch.Tensor] = {}
        self._gathered = {
            device: stream.empty(copies.gathered_bytes[device])
            for device, stream in copies.streams.items()
            if copies.gathered_bytes[device]
        }

    def enqueue(self, number: int, slab: Slab) -> Iterator[tuple[torch.device, DeviceEvent]]:
        """Enqueue the copy of window *number* into *slab* on every device with a part of it; yield the event behind each."""
        for part in self._copies.windows[number]:
            yield part.device, self._enqueue(part, slab)

    def _enqueue(self, part: _Part, slab: Slab) -> DeviceEvent:
        stream, tensors = self._copies.streams[part.device], self._copies.tensors
        self._made |= {number: stream.empty(tensors[number].nbytes) for number in part.begins}
        made = [(tensors[number], self._made[number]) for number in part.begins]
        host = torch.frombuffer(slab.memory, dtype=torch.uint8)
        moves = [(host[run.offset : run.offset + run.size], self._sources(run)) for run in part.runs]

        def work() -> None:
            for tensor, into in made:
                into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for target, sources in moves:
                source = sources[0]
                if len(sources) > 1:  # the stream's order lets all of a run share the same memory
                    source = self._gathered[part.device][: target.numel()]
                    torch.cat(sources, out=source)
                target.copy_(source, non_blocking=True)

        event = stream.enqueue(work)
        for number in part.ends:
            # The enqueued work still reads it: the allocator gives such memory only to this stream, behind that work.
            del self._made[number]
        return event

    def _sources(self, run: _Run) -> tuple[torch.Tensor, ...]:
        return tuple(_source(piece, self._made) for piece in run.pieces) if run.sources is None else run.sources


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether the memory of *tensor*, in order, is what is written."""
    # Torch conjugates and negates lazily: the memory of such a tensor does not hold its values.
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* in host memory, row-major: itself where it is so already, else a copy."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _source(piece: Copy, flat: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return flat[piece.source][piece.source_offset : piece.source_offset + piece.size]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _parts(
    windows: Sequence[Window], devices: Sequence[torch.device | None], flat: Mapping[int, torch.Tensor]
) -> list[list[_Part]]:
    """Return what each device moves into each window; *flat* are the bytes of the tensors that are row-major."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, window in enumerate(windows):
        for copy in window.copies:
            first.setdefault(copy.source, number)
            last[copy.source] = number
    parts: list[list[_Part]] = []
    for number, window in enumerate(windows):
        of_device: dict[torch.device, list[Copy]] = {}
        for copy in window.copies:
            device = devices[copy.source] if copy.source >= 0 else None
            if device is not None:
                of_device.setdefault(device, []).append(copy)
        parts.append(
            [
                _Part(
                    device,
                    tuple(_run(pieces, flat) for pieces in _neighbours(copies, flat)),
                    tuple(c.source for c in copies if c.source not in flat and first[c.source] == number),
                    tuple(c.source for c in copies if c.source not in flat and last[c.source] == number),
                )
                for device, copies in of_device.items()
            ]
        )
    return parts


def _neighbours(copies: Sequence[Copy], flat: Mapping[int, torch.Tensor]) -> Iterator[list[Copy]]:
    """Yield what moves at once: small neighbours of one kind (row-major, or made so) together, all else alone."""
    some: list[Copy] = []
    for copy in copies:
        if some and not (_joins(some[-1], copy) and (some[-1].source in flat) == (copy.source in flat)):
            yield some
            some = []
        some.append(copy)
    if some:
        yield some


def _joins(one: Copy, other: Copy) -> bool:
    adjacent = one.window_offset + one.size == other.window_offset
    return adjacent and max(one.size, other.size) < SMALL_BYTES


def _run(pieces: Sequence[Copy], flat: Mapping[int, torch.Tensor]) -> _Run:
    sources = tuple(_source(piece, flat) for piece in pieces) if pieces[0].source in flat else None
    return _Run(pieces[0].window_offset, sum(piece.size for piece in pieces), tuple(pieces), sources)
