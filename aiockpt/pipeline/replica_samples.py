"""Samples of the replicas that this rank and others hold, taken when the state is copied, and their digests.

From a box of more than 256 bytes 8 samples of 32 bytes are read, evenly spaced in the order of its elements; from a
smaller one all bytes; with ``debug="digest"`` all bytes of any box. Guarantees:

- The digests are of the state as it is copied: it is read where the copy begins, under the same guard, and on a device in
  the order of the side stream, behind whose event the state may change.
- They depend on the elements alone, not on strides, the device or the plan of a rank.
- Reading costs about a microsecond a tensor (a wait for memory); hashing comes later, at the vote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from aiockpt.adapters.tensors import byte_view
from aiockpt.errors import StorageTimeoutError
from aiockpt.format.merge import ReplicaTables, row_of
from aiockpt.format.validate import ROW
from aiockpt.pipeline.device_copy import is_row_major, on_host
from aiockpt.pipeline.snapshot import AddressCheck
from aiockpt.runtime.accelerator import Accelerator, DeviceEvent, DeviceStream
from aiockpt.state.shards import TensorShard

SAMPLES, SAMPLE_BYTES = 8, 32
"""Each sample costs a cache miss, whatever its size: 16 of 16 bytes took 1.8 ms for 1,172 tensors, these 1.1."""
SMALL_BYTES = SAMPLES * SAMPLE_BYTES
# By item size; torch has no integer of 16 bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Box(msgspec.Struct, frozen=True):
    """Elements [start, start + volume) of *data*, row-major; *row* is its number in the table."""

    row: int
    data: torch.Tensor
    start: int
    volume: int

    @property
    def itemsize(self) -> int:
        return int(self.data.element_size())

    @property
    def is_small(self) -> bool:
        return self.volume * self.itemsize <= SMALL_BYTES

    @property
    def sampled_bytes(self) -> int:
        return min(self.volume * self.itemsize, SMALL_BYTES)

    @property
    def distance(self) -> int:
        """Elements from one sample to the next."""
        return (self.volume - SAMPLE_BYTES // self.itemsize) // (SAMPLES - 1)


class ReplicaSamples:
    """The samples to read from one set of tensors.

    Args:
        shards: those that other ranks have, too.
        whole: whether all bytes are read.
    """

    def __init__(self, shards: Sequence[TensorShard], accelerator: Accelerator, *, whole: bool) -> None:
        self._accelerator = accelerator
        self._addresses = AddressCheck(shards)
        self._boxes = list(_boxes_of(shards))
        held = [(shard.name, box) for shard in shards for box in shard.boxes if box.volume]
        buffers = find_buffers(shards)
        self._rows = np.array([row_of(name, box.offsets, box.sizes) for name, box in held], ROW)
        self._is_buffer = np.array([name in buffers for name, _ in held], bool)
        self._readers: list[tuple[torch.device | None, _HostReader | _TorchReader]] = []
        if not whole:
            self._readers = list(_make_readers(self._boxes, accelerator))

    def begin(self, after: Sequence[tuple[torch.device, DeviceEvent]], timeout_s: float) -> Sampling:
        """Read the samples in host memory, and enqueue the reads of each device behind the events *after*.

        Raises:
            TornSnapshotError: a tensor has moved.
            StorageTimeoutError: a device did not answer in time.
        """
        streams = {device: self._accelerator.stream(device) for device, _ in after}
        for device, event in after:
            streams[device].follow(event)
        # Before any read by address: to read memory that was returned to the system ends the process.
        self._addresses.check()
        sampling = Sampling(self._rows, self._is_buffer, timeout_s)
        for of_device, reader in self._readers:
            if of_device is None:
                sampling.add(reader, reader.read())
            else:
                assert isinstance(reader, _TorchReader)
                sampling.begin(of_device, streams[of_device], reader)
        if not self._readers:
            for box in self._boxes:
                home = self._accelerator.device_of(box.data)
                sampling.digests[box.row] = _digest_all(box, None if home is None else streams[home], timeout_s)
        return sampling


class Sampling:
    """The samples of one save.

    Attributes:
        events: of each device, the event behind its reads; until then the state must not change.
        digests: by row.
    """

    def __init__(self, rows: NDArray[np.void], is_buffer: NDArray[np.bool_], timeout_s: float) -> None:
        self.events: dict[torch.device, DeviceEvent] = {}
        self.digests: dict[int, int] = {}
        self._rows = rows
        self._is_buffer = is_buffer
        self._timeout_s = timeout_s
        self._read: list[tuple[Sequence[tuple[int, int]], bytes]] = []
        self._unread: list[tuple[DeviceStream, torch.Tensor, Sequence[tuple[int, int]]]] = []

    def add(self, reader: _HostReader | _TorchReader, raw: bytes) -> None:
        """Accept the bytes *raw* that *reader* has read."""
        self._read.append((reader.sizes, raw))

    def begin(self, device: torch.device, stream: DeviceStream, reader: _TorchReader) -> None:
        """Enqueue the reads of *device*, into memory of its own."""
        memory = stream.empty(reader.size_bytes)
        self.events[device] = stream.enqueue(lambda: reader.gather(memory))
        self._unread.append((stream, memory, reader.sizes))

    def finish(self) -> None:
        """Wait for the reads of the devices, and fetch the samples.

        Raises:
            StorageTimeoutError: a device did not answer in time.
        """
        for stream, memory, sizes in self._unread:
            self._read.append((sizes, _fetch(memory, stream, self._timeout_s).numpy().tobytes()))
        self._unread.clear()

    def tables(self) -> ReplicaTables:
        """Return the tables for the receipt, once all is read. Any thread."""
        for sizes, raw in self._read:
            bounds = accumulate((size for _, size in sizes), initial=0)
            hashes = (xxhash.xxh3_64_intdigest(raw[low:high]) for low, high in pairwise(bounds))
            self.digests.update(zip((row for row, _ in sizes), hashes, strict=True))
        self._read.clear()
        rows = self._rows.copy()
        rows["digest"] = [self.digests[row] for row in range(len(rows))]
        return ReplicaTables(rows[~self._is_buffer].tobytes(), rows[self._is_buffer].tobytes())


def find_buffers(shards: Sequence[TensorShard]) -> Collection[str]:
    """Return the names of buffers; where ranks differ, the lowest rank's value counts.

    A ``state_dict()`` does not mark its buffers. The statistics of a BatchNorm, which each rank has of its own batches,
    are recognised there by their three names in one place.
    """
    names, last = {shard.name for shard in shards}, _BATCH_STATISTICS[-1]
    places = [name.removesuffix(last) for name in names if name.endswith(last)]
    statistics = [{place + one for one in _BATCH_STATISTICS} for place in places]
    return {shard.name for shard in shards if shard.is_buffer}.union(*(some for some in statistics if some <= names))


def _boxes_of(shards: Sequence[TensorShard]) -> Iterator[_Box]:
    row = 0
    for shard in shards:
        start = 0
        for box in shard.boxes:
            if box.volume:
                yield _Box(row, shard.data, start, box.volume)
                row, start = row + 1, start + box.volume


def _make_readers(
    boxes: Sequence[_Box], accelerator: Accelerator
) -> Iterator[tuple[torch.device | None, _HostReader | _TorchReader]]:
    """Yield a reader by address for row-major tensors in host memory, and for the rest one by torch for each device."""
    some: dict[tuple[torch.device | None, torch.device, bool], list[_Box]] = {}
    for box in boxes:
        device = accelerator.device_of(box.data)
        by_address = device is None and box.data.device.type == "cpu" and is_row_major(box.data)
        some.setdefault((device, box.data.device, by_address), []).append(box)
    for (device, _, by_address), alike in some.items():
        yield device, _HostReader(alike) if by_address else _TorchReader(alike)


class _HostReader:
    """Reads row-major tensors in host memory, by their addresses, all samples by one call.

    Attributes:
        sizes: the row and the bytes of each box, in the order in which they are read.
    """

    def __init__(self, boxes: Sequence[_Box]) -> None:
        small, large = [box for box in boxes if box.is_small], [box for box in boxes if not box.is_small]
        self.sizes = [(box.row, box.sampled_bytes) for box in (*large, *small)]
        self._small = [(ctypes.c_char * box.sampled_bytes).from_address(_address(box)) for box in small]
        starts = np.array([_address(box) for box in large], np.int64)
        distances = np.array([box.distance * box.itemsize for box in large], np.int64)
        places = (starts[:, None] + distances[:, None] * np.arange(SAMPLES)).ravel()
        first = int(places.min(initial=2**62))
        self._places = places - first
        self._memory: NDArray[Any] | None = None
        if large:  # every 16 bytes of the address space from there on are an element; only those at *places* are read
            sample: Any = (ctypes.c_char * SAMPLE_BYTES).from_address(first)
            one = np.frombuffer(sample, f"V{SAMPLE_BYTES}")
            self._memory = np.lib.stride_tricks.as_strided(one, (int(self._places.max()) + 1,), (1,))

    def read(self) -> bytes:
        samples = b"" if self._memory is None else self._memory[self._places].tobytes()
        return b"".join([samples, *self._small])


class _TorchReader:
    """Reads tensors that are on one device, or not row-major, with torch: small pieces are gathered into one.

    Attributes:
        sizes: the row and the bytes of each box, in the order in which they are read.
        size_bytes: of all samples.
    """

    def __init__(self, boxes: Sequence[_Box]) -> None:
        large = [box for box in boxes if is_row_major(box.data) and not box.is_small]
        others = [box for box in boxes if not is_row_major(box.data) or box.is_small]
        self.sizes = [(box.row, box.sampled_bytes) for box in (*large, *others)]
        self.size_bytes = sum(size for _, size in self.sizes)
        self._home = boxes[0].data.device
        self._large = [_sample_rows(box) for box in large]
        self._others = [_pick(box) for box in others]

    def gather(self, into: torch.Tensor) -> None:
        """Write all samples to *into*, bytes on the same device."""
        size = SMALL_BYTES * len(self._large)
        if self._large:
            torch.cat(self._large, out=into[:size].view(-1, SAMPLE_BYTES))
        if self._others:
            torch.cat([pick() for pick in self._others], out=into[size:])

    def read(self) -> bytes:
        memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._home)
        self.gather(memory)
        return memory.cpu().numpy().tobytes()


def _address(box: _Box) -> int:
    return box.data.data_ptr() + box.start * box.itemsize


def _sample_rows(box: _Box) -> torch.Tensor:
    """Return the samples as a view of a row-major tensor, a row each."""
    flat = box.data.view(-1).view(torch.uint8)
    # `as_strided` counts from the beginning of the storage, not of the tensor.
    start = flat.storage_offset() + box.start * box.itemsize
    return flat.as_strided((SAMPLES, SAMPLE_BYTES), (box.distance * box.itemsize, 1), start)


def _pick(box: _Box) -> Callable[[], torch.Tensor]:
    """Return a function that returns the sampled bytes of a tensor of any strides."""
    bits = box.data.view(_BITS[box.itemsize])
    if box.is_small:
        elements = np.arange(box.volume)
    else:
        firsts = box.distance * np.arange(SAMPLES)
        elements = (firsts[:, None] + np.arange(SAMPLE_BYTES // box.itemsize)).ravel()
    if not bits.dim():
        return lambda: bits.view(1).view(torch.uint8)
    indices = np.unravel_index(elements + box.start, tuple(bits.shape))
    places = tuple(torch.from_numpy(np.ascontiguousarray(some)).to(bits.device) for some in indices)
    return lambda: bits[places].view(torch.uint8)


def _fetch(tensor: torch.Tensor, stream: DeviceStream, timeout_s: float) -> torch.Tensor:
    """Return a row-major copy of *tensor* in host memory, made in the order of *stream*.

    Raises:
        StorageTimeoutError: the device did not answer in time.
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    if not stream.enqueue(lambda: host.copy_(tensor)).wait(timeout_s):
        raise StorageTimeoutError("a device did not copy the samples of its replicas in time; the snapshot was aborted")
    return host


def _digest_all(box: _Box, stream: DeviceStream | None, timeout_s: float) -> int:
    dense = on_host(box.data) if stream is None else _fetch(box.data, stream, timeout_s)
    start = box.start * box.itemsize
    return xxhash.xxh3_64_intdigest(byte_view(dense)[start : start + box.volume * box.itemsize])
