"""The beginning of a data file: a plain safetensors header, padded so that the payload is page-aligned.

Guarantees:

- What `encode_header` returns, followed by the payload, opens in every safetensors reader (docs/format.md#data-files).
- `decode_header` accepts what the safetensors library accepts and no more: entries tile the payload, sizes agree, no
  key comes twice. For anything else it raises `CorruptionError`, before a byte of payload is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter

import msgspec
from msgspec import Raw

from aiockpt.errors import CorruptionError, ManifestError, UsageError
from aiockpt.format.document import check_unique_keys, parse, without
from aiockpt.format.dtypes import ITEMSIZES, is_native
from aiockpt.format.manifest import Count, Dims
from aiockpt.format.names import MAX_NAME_BYTES

MAX_HEADER_BYTES = 64 << 20
"""The most bytes of the whole prefix: length field, JSON and padding."""
PAYLOAD_ALIGNMENT = 4096
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a file; *start* and *end* are offsets into the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(msgspec.Struct, frozen=True):
    """A file's entries in payload order, its metadata, and the file offset at which the payload starts."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    data_start: int


class _Ours(msgspec.Struct, frozen=True):
    below: str = ""


class _Wire(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: Dims
    data_offsets: tuple[Count, Count]


class _Beside(msgspec.Struct, frozen=True):
    """The part of a header beside its entries."""

    metadata: Raw = msgspec.field(default=Raw(), name=_METADATA)


def encode_header(
    entries: Sequence[Entry], metadata: dict[str, str], alignment_bytes: int = PAYLOAD_ALIGNMENT
) -> bytes:
    """Return the prefix of a data file: 8-byte length and JSON, padded with spaces to a multiple of *alignment_bytes*.

    Args:
        entries: in payload order; they tile the payload from 0, and their dtypes are native to safetensors.

    Raises:
        UsageError: they do not, or a name is empty, too long, taken twice or ``__metadata__``.
    """
    fields: dict[str, object] = {_METADATA: metadata}
    cursor = 0
    for entry in entries:
        if entry.name in fields or not 0 < len(entry.name.encode()) <= MAX_NAME_BYTES:
            raise UsageError(
                f"{entry.name[:80]!r} cannot name a tensor: it is taken, empty or too long; rename the leaf"
            )
        if not is_native(entry.dtype):
            raise UsageError(f"{entry.name}: safetensors has no {entry.dtype}; describe its bytes as U8")
        if entry.start != cursor or entry.end - entry.start != prod(entry.shape) * ITEMSIZES[entry.dtype]:
            raise UsageError(
                f"{entry.name}: bytes {entry.start}–{entry.end} do not follow {cursor} or do not fit its shape"
            )
        fields[entry.name] = _Wire(entry.dtype, entry.shape, (entry.start, entry.end))
        cursor = entry.end
    text = msgspec.json.encode(fields)
    padded_bytes = -(-(_LENGTH_BYTES + len(text)) // alignment_bytes) * alignment_bytes - _LENGTH_BYTES
    if padded_bytes + _LENGTH_BYTES > MAX_HEADER_BYTES:
        raise UsageError(f"{len(entries)} tensors are too many for one data file: use smaller files")
    return padded_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded_bytes)


def read_below(metadata: Mapping[str, str]) -> str:
    """Return the name prefix of all entries of a file, by its metadata; "" where they have their full names.

    Raises:
        CorruptionError: our own part of the metadata is not our JSON.
    """
    try:
        return parse(metadata.get("aiockpt", "{}").encode(), _Ours, "aiockpt's part of the safetensors metadata").below
    except ManifestError as error:
        raise CorruptionError(str(error)) from error


def header_size(prefix: bytes | bytearray) -> int:
    """Return where the header ends, as the first bytes of a file say."""
    return _LENGTH_BYTES + int.from_bytes(prefix[:_LENGTH_BYTES], "little")


def decode_header(prefix: bytes, file_size: int) -> Header:
    """Return the header at the beginning of a data file.

    Args:
        prefix: the file's first bytes, at least the whole header.
        file_size: bytes of the whole file.

    Raises:
        CorruptionError: no safetensors file of *file_size* bytes begins like this.
    """
    data_start = header_size(prefix)
    if data_start > min(file_size, MAX_HEADER_BYTES):
        raise CorruptionError(f"the safetensors header says it ends at {data_start}, which it cannot have")
    if len(prefix) < data_start:
        raise CorruptionError(f"the safetensors header ends at {data_start}, only {len(prefix)} bytes were read")
    body = bytes(prefix[_LENGTH_BYTES:data_start]).rstrip(b" ")  # ours are padded to a block: 1 MiB to scan
    try:
        if not body.startswith(b"{"):
            raise ManifestError("safetensors header does not start with an object")
        raw_metadata = bytes(parse(body, _Beside, "safetensors header").metadata)
        metadata = parse(raw_metadata or b"{}", dict[str, str], "safetensors metadata")
        if msgspec.json.encode(metadata) != raw_metadata:  # so ours are; DCP's part of it is a long string
            check_unique_keys(raw_metadata, "safetensors metadata")
        wires = _decode_entries(body, raw_metadata)
        entries = [Entry(name, wire.dtype, wire.shape, *wire.data_offsets) for name, wire in wires.items()]
        # Ten quotes for each decoded entry (a name, three keys, a dtype): if there are no more, no entry was dropped.
        if body.count(b'"') != 10 * len(entries) + (2 + raw_metadata.count(b'"') if raw_metadata else 0):
            check_unique_keys(body, "safetensors header")
    except ManifestError as error:
        raise CorruptionError(str(error)) from error
    # By the end, too: an empty entry comes before the one that begins at its place.
    entries.sort(key=attrgetter("start", "end"))
    _check_tiling(entries, file_size - data_start)
    return Header(tuple(entries), metadata, data_start)


def _decode_entries(body: bytes, raw_metadata: bytes) -> Mapping[str, _Wire]:
    """Decode all entries at once, and one by one where that fails, to name the bad one."""
    bare = without(body, _METADATA, raw_metadata, b"null") if raw_metadata else body
    try:
        wires = parse(bare, dict[str, _Wire | None], "safetensors header")
    except ManifestError:
        return _decode_each(body)
    wires.pop(_METADATA, None)
    found = {name: wire for name, wire in wires.items() if wire is not None}
    return found if len(found) == len(wires) else _decode_each(body)


def _decode_each(body: bytes) -> Mapping[str, _Wire]:
    fields = parse(body, dict[str, Raw], "safetensors header")
    fields.pop(_METADATA, None)
    return {name: parse(raw, _Wire, f"safetensors entry {name[:80]!r}") for name, raw in fields.items()}


def _check_tiling(entries: Sequence[Entry], payload_bytes: int) -> None:
    cursor = 0
    for entry in entries:
        name = entry.name[:80]
        width = ITEMSIZES.get(entry.dtype)
        if width is None:
            raise CorruptionError(f"safetensors entry {name!r} has the unknown dtype {entry.dtype[:40]!r}")
        if entry.start != cursor:
            raise CorruptionError(
                f"safetensors entry {name!r} has bytes {entry.start}–{entry.end}, the one before ends at {cursor}"
            )
        if entry.end - entry.start != prod(entry.shape) * width:
            raise CorruptionError(
                f"safetensors entry {name!r} has {entry.end - entry.start} bytes, its shape needs others"
            )
        cursor = entry.end
    if cursor != payload_bytes:
        raise CorruptionError(f"safetensors entries end at {cursor}, the payload has {payload_bytes} bytes")
