"""How do tensors on devices get into slabs? Copied straight there, in the lanes of their devices, while they compute.

Guarantees:

- No copy is waited for before the next one is enqueued, as far as there are slabs; none of the calls holds the GIL long.
- Small tensors that are neighbours in the file travel together: gathered on the device, then moved as one. A move costs
  some microseconds to start however small it is, which is what 64 KiB take on their way.
- What is not row-major is made so on the device, in the lane's order, with memory that is let go with its last window.
- A slab that is being filled is neither handed on nor given back before the device is done with it, whatever fails
  (`Flights`). If the device never answers, that slab is never used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

import msgspec
import torch

from aiockpt.errors import StorageTimeoutError
from aiockpt.planning.save import Copy, SavePlan, Window
from aiockpt.runtime.accelerator import Accelerator, Lane, Mark
from aiockpt.runtime.slabs import Slab, SlabPool

SMALL_BYTES = 64 << 10
"""What takes no longer on its way than to start it. Not measured here; on PCIe 4 and 5 that is at 40 to 100 KiB."""

Deliver = Callable[[Window, Slab], object]


class _Run(msgspec.Struct, frozen=True):
    """Pieces of one device that lie side by side in a window: moved as one."""

    offset: int
    size: int
    pieces: tuple[Copy, ...]


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
    """The part of a copy program that devices carry out. One save at a time.

    Args:
        plan: what goes where.
        tensors: by their number in the plan.
        devices: where each is; None in host memory, which is not our concern.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        plan: SavePlan,
        tensors: Sequence[torch.Tensor],
        devices: Sequence[torch.device | None],
    ) -> None:
        self._tensors = tensors
        self._lanes = {device: accelerator.lane(device) for device in dict.fromkeys(devices) if device is not None}
        self._flat = {
            number: _bytes(tensor)
            for number, (tensor, device) in enumerate(zip(tensors, devices, strict=True))
            if device is not None and is_row_major(tensor)
        }
        self._windows = _parts([window for file in plan.files for window in file.windows], devices, self._flat)
        self._gathered_bytes = dict.fromkeys(self._lanes, 0)
        for part in (part for parts in self._windows for part in parts):
            together = [run.size for run in part.runs if len(run.pieces) > 1]
            self._gathered_bytes[part.device] = max(self._gathered_bytes[part.device], *together, 0)
        self._gathered: dict[torch.device, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes that are used."""
        return list(self._lanes.values())

    def begin(self, after: Iterable[tuple[torch.device, Mark]]) -> None:
        """Put what is enqueued from now on behind the marks of the devices' compute streams."""
        self._made.clear()
        for device, mark in after:
            if device in self._lanes:
                self._lanes[device].follow(mark)

    def enqueue(self, number: int, slab: Slab) -> Iterator[tuple[torch.device, Mark]]:
        """Let every device that has some of window *number* copy it into *slab*; yield the mark behind each."""
        for part in self._windows[number]:
            yield part.device, self._enqueue(part, slab)

    def _enqueue(self, part: _Part, slab: Slab) -> Mark:
        lane = self._lanes[part.device]
        for number in part.begins:
            self._made[number] = lane.empty(self._tensors[number].nbytes)
        host = torch.frombuffer(slab.memory, dtype=torch.uint8)
        moves = [(host[run.offset : run.offset + run.size], list(map(self._source, run.pieces))) for run in part.runs]
        gathered = self._gather_into(part, lane)
        made = [(self._tensors[number], self._made[number]) for number in part.begins]

        def work() -> None:
            for tensor, into in made:
                into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for target, sources in moves:
                source = sources[0]
                if len(sources) > 1:
                    source = gathered[: target.numel()]
                    torch.cat(sources, out=source)
                target.copy_(source, non_blocking=True)

        mark = lane.enqueue(work)
        for number in part.ends:
            del self._made[number]
        return mark

    def _source(self, piece: Copy) -> torch.Tensor:
        flat = self._flat.get(piece.source)
        if flat is None:
            flat = self._made[piece.source]
        return flat[piece.source_offset : piece.source_offset + piece.size]

    def _gather_into(self, part: _Part, lane: Lane) -> torch.Tensor:
        """Return the memory on the device in which small tensors meet. The lane's order lets every window use the same."""
        if part.device not in self._gathered:
            self._gathered[part.device] = lane.empty(self._gathered_bytes[part.device])
        return self._gathered[part.device]


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether the memory of *tensor*, in order, is what is written."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _parts(
    windows: Sequence[Window], devices: Sequence[torch.device | None], row_major: Iterable[int]
) -> list[list[_Part]]:
    """Return what each device moves into each window."""
    ready = set(row_major)
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
                    tuple(_runs(copies)),
                    tuple(c.source for c in copies if c.source not in ready and first[c.source] == number),
                    tuple(c.source for c in copies if c.source not in ready and last[c.source] == number),
                )
                for device, copies in of_device.items()
            ]
        )
    return parts


def _runs(copies: Sequence[Copy]) -> Iterator[_Run]:
    """Yield what moves at once: small neighbours together, all else alone."""
    some: list[Copy] = []
    for copy in copies:
        if some and not _joins(some[-1], copy):
            yield _run(some)
            some = []
        some.append(copy)
    if some:
        yield _run(some)


def _joins(one: Copy, other: Copy) -> bool:
    adjacent = one.window_offset + one.size == other.window_offset
    return adjacent and max(one.size, other.size) < SMALL_BYTES


def _run(pieces: Sequence[Copy]) -> _Run:
    return _Run(pieces[0].window_offset, sum(piece.size for piece in pieces), tuple(pieces))


class Flight:
    """A slab that is being filled; *marks* are those of its copies."""

    __slots__ = ("marks", "slab", "window")

    def __init__(self, window: Window, slab: Slab) -> None:
        self.window = window
        self.slab = slab
        self.marks: list[Mark] = []

    def done(self) -> bool:
        """Say whether it is full."""
        return all(mark.done() for mark in self.marks)


class Flights:
    """The slabs of one snapshot that are being filled; each is delivered when it is full, in order.

    Use it as ``with``: leaving waits until nothing is under way. After an error what is under way is not delivered.

    Args:
        timeout_s: how long to wait for a free slab, or for the device.
    """

    def __init__(self, pool: SlabPool, deliver: Deliver, timeout_s: float) -> None:
        self._pool = pool
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._under_way: deque[Flight] = deque()

    def begin(self, window: Window) -> Flight:
        """Return a free slab to fill for *window*. While there is none, wait for those under way, and hand them on."""
        while self._under_way:
            try:
                slab = self._pool.take(0)
                break
            except StorageTimeoutError:
                self._land_first()
        else:
            slab = self._pool.take(self._timeout_s)
        flight = Flight(window, slab)
        self._under_way.append(flight)
        return flight

    def hand_on(self) -> None:
        """Deliver what is full by now, as far as nothing before it is not."""
        while self._under_way and self._under_way[0].done():
            self._deliver_first()

    def _land_first(self) -> None:
        for mark in self._under_way[0].marks:
            if not self._wait(mark):
                raise StorageTimeoutError(
                    "a device did not copy a window to the host in time; the snapshot is given up"
                )
        self._deliver_first()

    def _deliver_first(self) -> None:
        flight = self._under_way.popleft()
        self._deliver(flight.window, flight.slab)

    def __enter__(self) -> Flights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while error is None and self._under_way:
                self._land_first()
        finally:
            while self._under_way:
                self._drop(self._under_way.popleft())

    def _wait(self, mark: Mark) -> bool:
        """Wait for *mark*, but for no other one after a device that did not answer."""
        reached = mark.wait(self._timeout_s)
        if not reached:
            self._timeout_s = 0.0
        return reached

    def _drop(self, flight: Flight) -> None:
        try:
            landed = all(map(self._wait, flight.marks))
        except RuntimeError:  # the device is broken, and what it still writes is unknown
            landed = False
        if landed:
            self._pool.give(flight.slab)
        else:
            self._pool.lose(flight.slab)
