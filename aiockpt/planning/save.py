"""Which bytes of this rank go where in which data file, and in what order are they copied?

Guarantees:

- Pure and deterministic: equal descriptions give equal plans on every rank and in every process.
- Every byte of every shard lies in exactly one file, once; files have no holes (FORMAT §1).
- The copy order is the file order, so that windows fill one after the other and one slab is enough to drain any state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from aiockpt.format.checksum import digest128
from aiockpt.format.dtypes import is_native, itemsize
from aiockpt.format.manifest import Piece, TensorEntry
from aiockpt.format.safetensors import Entry, encode_header
from aiockpt.state.shards import ShardedState, TensorShard

PAGE_BYTES = 4096
HEADER = -1
"""In a `Copy`, the source that is not a shard but the file's own header."""


class Copy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """*size* bytes from *source_offset* of shard number *source* to *window_offset* of a window."""

    window_offset: int
    source: int
    source_offset: int
    size: int


class Window(msgspec.Struct, frozen=True):
    """A part of a data file that one slab holds: what to copy into it, and where it goes."""

    file: int
    offset: int
    size: int
    copies: tuple[Copy, ...]


class FilePlan(msgspec.Struct, frozen=True):
    """One data file: its header, its size with the header, and its windows in order."""

    header: bytes
    size: int
    windows: tuple[Window, ...]


class SavePlan(msgspec.Struct, frozen=True):
    """What one rank writes.

    Attributes:
        files: the data files in order; pieces name them by this index.
        tensors: the manifest's entries for what this rank holds.
        tensor_bytes: bytes of tensors; *file_bytes* adds the headers.
        digest: equal plans have equal digests; it goes into the receipt.
    """

    files: tuple[FilePlan, ...]
    tensors: dict[str, TensorEntry]
    tensor_bytes: int
    file_bytes: int
    digest: str

    @property
    def window_count(self) -> int:
        """How many slabs hold all of it."""
        return sum(len(file.windows) for file in self.files)


def plan_save(state: ShardedState, *, slab_bytes: int, file_bytes: int) -> SavePlan:
    """Return what to write for *state*: files of about *file_bytes*, cut into windows of *slab_bytes*."""
    order = sorted(range(len(state.tensors)), key=lambda index: _file_order(state.tensors[index], index))
    files: list[FilePlan] = []
    tensors: dict[str, TensorEntry] = {}
    for members in _split_files(state.tensors, order, file_bytes):
        file = _plan_file(state.tensors, members, len(files), slab_bytes, tensors)
        files.append(file)
    return SavePlan(
        files=tuple(files),
        tensors=tensors,
        tensor_bytes=sum(shard.nbytes for shard in state.tensors),
        file_bytes=sum(file.size for file in files),
        digest=digest128(msgspec.json.encode([state.structure, slab_bytes, file_bytes])),
    )


def _file_order(shard: TensorShard, index: int) -> tuple[bool, int, int]:
    """Page multiples first, the rest by falling item size: almost all is page-aligned without padding (FORMAT §1)."""
    return (shard.nbytes % PAGE_BYTES != 0, -itemsize(shard.dtype), index)


def _split_files(shards: Sequence[TensorShard], order: Sequence[int], file_bytes: int) -> Iterator[list[int]]:
    members: list[int] = []
    held = 0
    for index in order:
        if members and held + shards[index].nbytes > file_bytes:
            yield members
            members, held = [], 0
        members.append(index)
        held += shards[index].nbytes
    if members:
        yield members


def _plan_file(
    shards: Sequence[TensorShard], members: list[int], number: int, slab_bytes: int, tensors: dict[str, TensorEntry]
) -> FilePlan:
    entries: list[Entry] = []
    cursor = 0
    for index in members:
        end = cursor + shards[index].nbytes
        entries.append(_header_entry(shards[index], cursor, end))
        cursor = end
    header = encode_header(entries, _metadata([shards[index] for index in members]))
    for index, entry in zip(members, entries, strict=True):
        tensors[shards[index].name] = _tensor_entry(shards[index], number, len(header) + entry.start)
    size = len(header) + cursor
    spans = [(0, len(header), HEADER)]
    spans += [
        (len(header) + entry.start, len(header) + entry.end, index)
        for index, entry in zip(members, entries, strict=True)
        if entry.end > entry.start
    ]
    return FilePlan(header, size, tuple(_windows(number, size, spans, slab_bytes)))


def _header_entry(shard: TensorShard, start: int, end: int) -> Entry:
    """The safetensors entry: the shard's own shape where it is one box, a flat one where it is several."""
    if not is_native(shard.dtype):
        return Entry(name=shard.name, dtype="U8", shape=(end - start,), start=start, end=end)
    shape = shard.boxes[0].sizes if len(shard.boxes) == 1 else ((end - start) // itemsize(shard.dtype),)
    return Entry(name=shard.name, dtype=shard.dtype, shape=shape, start=start, end=end)


def _metadata(shards: Sequence[TensorShard]) -> dict[str, str]:
    """Torch's own keys, so that its Hugging Face reader places sharded tensors; ours is JSON in a string."""
    offsets = {shard.name: {"saved_offsets": shard.boxes[0].offsets} for shard in shards if len(shard.boxes) == 1}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": msgspec.json.encode(offsets).decode(),
        "aiockpt": '{"v":1}',
    }


def _tensor_entry(shard: TensorShard, file: int, start: int) -> TensorEntry:
    pieces = []
    for box in shard.boxes:
        end = start + box.volume * itemsize(shard.dtype)
        pieces.append(Piece(file, start, end, box.offsets, box.sizes))
        start = end
    return TensorEntry(dtype=shard.dtype, shape=shard.shape, pieces=tuple(pieces))


def _windows(file: int, size: int, spans: Sequence[tuple[int, int, int]], slab_bytes: int) -> Iterator[Window]:
    """Cut a file into windows of one slab and say what lands in each; *spans* are (start, end, source), in order."""
    first = 0
    for offset in range(0, size, slab_bytes):
        end = min(offset + slab_bytes, size)
        copies = []
        for position in range(first, len(spans)):
            start, stop, source = spans[position]
            if start >= end:
                break
            low, high = max(start, offset), min(stop, end)
            copies.append(Copy(low - offset, source, low - start, high - low))
            if stop <= end:
                first = position + 1
        yield Window(file, offset, end - offset, tuple(copies))
