"""The plan of a rank's save: which bytes go where in which data file, and in what order they are copied.

Guarantees:

- Pure and deterministic: equal descriptions give equal plans on every rank and in every process.
- Every byte of every shard lies in exactly one file, once; files have no holes (docs/format.md#data-files).
- Tensors of modules and all others lie in separate files; the weights come first. The weights of one module lie in files
  of their own, too, and have the module's own names there, so that other tools can read such a file as its weights.
- The copy order is the file order, so that windows fill one after the other and one slab is enough to drain any state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter

import msgspec

from aiockpt.format.document import digest128
from aiockpt.format.dtypes import is_native, itemsize
from aiockpt.format.finite import may_be_not_finite
from aiockpt.format.manifest import Piece, TensorEntry
from aiockpt.format.names import prefixes
from aiockpt.format.safetensors import Entry, encode_header
from aiockpt.planning.modules import Modules
from aiockpt.state.shards import ShardedState, TensorShard

PAGE_BYTES = 4096
LARGE = 64
"""A file of so many times the requested alignment gets it: the padding is 1.6 % of the file at most."""
WEIGHTS, REST = "weights", "rest"
"""Kinds of data files: what modules hold, and all else. To keep the weights of a step alone is a choice of files."""
MAX_APART = 8
"""So many modules have files of their own; a state of more small ones would become as many small files."""
HEADER = -1
"""In a `Copy`, the source that is not a shard but the file's own header."""


class Copy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """*size* bytes from *source_offset* of shard number *source* to *window_offset* of a window."""

    window_offset: int
    source: int
    source_offset: int
    size: int


class Window(msgspec.Struct, frozen=True):
    """A part of a data file that one slab holds: its copies, and its place in the file."""

    file: int
    offset: int
    size: int
    copies: tuple[Copy, ...]


class FilePlan(msgspec.Struct, frozen=True):
    """One data file: its header, its size with the header, its windows in order, and the kind of what is in it."""

    header: bytes
    size: int
    windows: tuple[Window, ...]
    kind: str = REST


class FloatSpan(msgspec.Struct, frozen=True, gc=False):
    """Bytes [start, end) of a data file are numbers of the tensor *name*, of a dtype that has values that are not finite."""

    start: int
    end: int
    dtype: str
    name: str


class SavePlan(msgspec.Struct, frozen=True, dict=True):
    """The files that one rank writes.

    Attributes:
        files: the data files in order; pieces name them by this index.
        tensors: the manifest's entries for the tensors of this rank.
        tensor_bytes: bytes of tensors; *file_bytes* adds the headers.
        digest: equal plans have equal digests; it goes into the receipt.
    """

    files: tuple[FilePlan, ...]
    tensors: dict[str, TensorEntry]
    tensor_bytes: int
    file_bytes: int
    digest: str

    @cached_property
    def window_count(self) -> int:
        """How many slabs hold all of it."""
        return sum(len(file.windows) for file in self.files)

    @cached_property
    def float_spans(self) -> list[list[FloatSpan]]:
        """The spans to screen in each file, in the order of the bytes."""
        spans: dict[int, list[FloatSpan]] = defaultdict(list)
        for name, entry in self.tensors.items():
            if may_be_not_finite(entry.dtype):
                for piece in entry.pieces:
                    if piece.end > piece.start:
                        spans[piece.file].append(FloatSpan(piece.start, piece.end, entry.dtype, name))
        return [sorted(spans[file], key=attrgetter("start")) for file in range(len(self.files))]


def plan_save(
    state: ShardedState, *, slab_bytes: int, file_bytes: int, payload_alignment: int = PAGE_BYTES
) -> SavePlan:
    """Return the plan that saves *state*: files of about *file_bytes*, cut into windows of *slab_bytes*.

    In a large file the payload begins at a multiple of *payload_alignment* bytes: with that of a checksum block, row
    ranges of a power of two lie in blocks of their own, so that ranks that read every other one read no more than that.

    Several shards may be parts of one tensor. Those without elements are left out, unless the whole tensor has none:
    its name must not be lost.
    """
    held = [index for index, shard in enumerate(state.tensors) if shard.nbytes or 0 in shard.shape]
    held.sort(key=lambda index: _file_order(state.tensors[index], index))
    names = frozenset(shard.name for shard in state.tensors)
    files: list[FilePlan] = []
    pieces: dict[str, list[Piece]] = {}
    for (kind, below), order in _sort_by_kind(state, held).items():
        for members in _split_files(state.tensors, order, file_bytes):
            shards = [state.tensors[index] for index in members]
            files.append(
                _plan_file(kind, below, shards, members, names, len(files), slab_bytes, payload_alignment, pieces)
            )
    return SavePlan(
        files=tuple(files),
        tensors=_tensor_entries(state.tensors, pieces),
        tensor_bytes=sum(shard.nbytes for shard in state.tensors),
        file_bytes=sum(file.size for file in files),
        digest=digest128(msgspec.json.encode([state.structure, slab_bytes, file_bytes, payload_alignment])),
    )


def _sort_by_kind(state: ShardedState, held: Sequence[int]) -> dict[tuple[str, str], list[int]]:
    """Return the shards *held* grouped by kind and module; the weights first, in the order of the state."""
    modules = modules_of_weights(state)
    apart = len(set(modules.values())) <= MAX_APART
    sorted_by: dict[tuple[str, str], list[int]] = {
        (WEIGHTS, module if apart else ""): [] for module in dict.fromkeys(modules.values())
    }
    for index in held:
        module = modules.get(state.tensors[index].name)
        place = (REST, "") if module is None else (WEIGHTS, module if apart else "")
        sorted_by.setdefault(place, []).append(index)
    return sorted_by


def modules_of_weights(state: ShardedState) -> dict[str, str]:
    """Return the name of each tensor that a module holds, and the name of the module.

    The latter is "" for a tensor that is stored under a name outside of modules, because another object holds it, too.
    """
    roots = Modules(state.values).roots
    if not roots:
        return {}

    def module_of(name: str) -> str | None:
        module = next((prefix for prefix in prefixes(name) if prefix in roots), None)
        return "" if module is not None and not name.startswith(f"{module}.") else module

    modules = {shard.name: module for shard in state.tensors if (module := module_of(shard.name)) is not None}
    elsewhere = {
        kept: "" for other, kept in state.alias.items() if kept not in modules and module_of(other) is not None
    }
    return modules | elsewhere


def _file_order(shard: TensorShard, index: int) -> tuple[bool, int, int]:
    """Page multiples first, the rest by falling item size: almost all is page-aligned (docs/format.md#data-files)."""
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
    kind: str,
    below: str,
    shards: Sequence[TensorShard],
    sources: Sequence[int],
    names: frozenset[str],
    number: int,
    slab_bytes: int,
    payload_alignment: int,
    pieces: dict[str, list[Piece]],
) -> FilePlan:
    """Plan one file of *shards*, whose numbers in the state are *sources*, and add its pieces to *pieces*.

    Args:
        below: the module that holds all of them, whose own names they get in the file; "" for none.
        names: of all tensors of the state.
    """
    entries: list[Entry] = []
    cursor = 0
    for shard, name in zip(shards, _entry_names(shards, names), strict=True):
        own_name = name.removeprefix(f"{below}.") if below else name
        entries.append(_header_entry(shard, own_name, cursor, cursor + shard.nbytes))
        cursor += shard.nbytes
    alignment = payload_alignment if cursor >= LARGE * payload_alignment else PAGE_BYTES
    header = encode_header(entries, _metadata(shards, entries, below), alignment)
    spans = [(0, len(header), HEADER)]
    for shard, source, entry in zip(shards, sources, entries, strict=True):
        start, end = len(header) + entry.start, len(header) + entry.end
        pieces.setdefault(shard.name, []).extend(_pieces(shard, number, start))
        if end > start:
            spans.append((start, end, source))
    size = len(header) + cursor
    return FilePlan(header, size, tuple(_windows(number, size, spans, slab_bytes)), kind)


def _entry_names(shards: Sequence[TensorShard], names: frozenset[str]) -> Iterator[str]:
    """Yield the name of each shard's entry: the tensor's own, then ``name#1``, ``name#2``, … that no tensor has."""
    counts: dict[str, int] = {}
    for shard in shards:
        count = counts.get(shard.name, 0)
        name = f"{shard.name}#{count}" if count else shard.name
        while count and name in names:
            count += 1
            name = f"{shard.name}#{count}"
        counts[shard.name] = count + 1
        yield name


def _header_entry(shard: TensorShard, name: str, start: int, end: int) -> Entry:
    """The safetensors entry: the shard's own shape where it is one box, a flat one where it is several."""
    if not is_native(shard.dtype):
        return Entry(name=name, dtype="U8", shape=(end - start,), start=start, end=end)
    shape = shard.boxes[0].sizes if len(shard.boxes) == 1 else ((end - start) // itemsize(shard.dtype),)
    return Entry(name=name, dtype=shard.dtype, shape=shape, start=start, end=end)


def _metadata(shards: Sequence[TensorShard], entries: Sequence[Entry], below: str) -> dict[str, str]:
    """Return torch's own keys, for its Hugging Face reader to place sharded tensors, and ours: JSON in a string."""
    offsets = {
        entry.name: {"saved_offsets": shard.boxes[0].offsets}
        for shard, entry in zip(shards, entries, strict=True)
        if len(shard.boxes) == 1
    }
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": msgspec.json.encode(offsets).decode(),
        "aiockpt": msgspec.json.encode({"v": 1, "below": below} if below else {"v": 1}).decode(),
    }


def _pieces(shard: TensorShard, file: int, start: int) -> Iterator[Piece]:
    for box in shard.boxes:
        end = start + box.volume * itemsize(shard.dtype)
        if end > start or 0 in shard.shape:
            yield Piece(file, start, end, box.offsets, box.sizes)
        start = end


def _tensor_entries(shards: Sequence[TensorShard], pieces: Mapping[str, Sequence[Piece]]) -> dict[str, TensorEntry]:
    """Return the manifest's entries in the order of the state; a tensor without pieces here has none."""
    return {
        shard.name: TensorEntry(shard.dtype, shard.shape, tuple(pieces[shard.name]), shard.axes or msgspec.UNSET)
        for shard in shards
        if shard.name in pieces
    }


def _windows(file: int, size: int, spans: Sequence[tuple[int, int, int]], slab_bytes: int) -> Iterator[Window]:
    """Cut a file into windows of one slab, with the copies into each; *spans* are (start, end, source), in order."""
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
