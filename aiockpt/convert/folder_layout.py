"""The layout of a Hugging Face folder: file names, headers, the index, and the check of an index from outside.

Guarantees:

- Pure. Every weight lies in exactly one file, as `huggingface_hub` would divide them: weights in the order of the model, a
  limit of bytes for each file, and a single file named ``model.safetensors``.
- Elements are aligned to their size, so that readers can map a file instead of copying it.
- Memory that several names share is written once; the other names are in the file's metadata, as
  ``safetensors.torch.save_model`` writes them.
- `decode_index` accepts plain file names only: no index leads out of its folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

import msgspec

from aiockpt.errors import CorruptionError, ManifestError, UsageError
from aiockpt.format.document import check_unique_keys, parse
from aiockpt.format.dtypes import itemsize
from aiockpt.format.safetensors import PAYLOAD_ALIGNMENT, Entry, encode_header

Item = TypeVar("Item")
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Limit of one file; the default of ``save_pretrained`` for years."""
_METADATA = {"format": "pt"}
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_OURS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")


class Weight(msgspec.Struct, frozen=True):
    """One tensor on its way into a folder.

    Attributes:
        name: in the folder; *stored*: its name in the step.
        dtype: its code in the step; *becomes*: its code in the folder.
    """

    name: str
    stored: str
    dtype: str
    becomes: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in the folder."""
        return prod(self.shape) * itemsize(self.becomes)


class WeightSpan(msgspec.Struct, frozen=True):
    """Bytes [start, end) of a file hold *weight*, row-major."""

    start: int
    end: int
    weight: Weight


class FolderFile(msgspec.Struct, frozen=True):
    """One file of a folder: its name, its header, its size with the header, and the spans of its weights."""

    name: str
    header: bytes
    size: int
    spans: tuple[WeightSpan, ...]


class Layout(msgspec.Struct, frozen=True):
    """A whole folder; *index* is the document that is written last, None for a single file."""

    files: tuple[FolderFile, ...]
    index: bytes | None

    @property
    def file_bytes(self) -> int:
        return sum(file.size for file in self.files)


def plan_folder(weights: Sequence[Weight], ties: Mapping[str, str], max_shard_bytes: int = SHARD_BYTES) -> Layout:
    """Return the files for *weights*, in the order of the model.

    Args:
        ties: other names of a weight's memory → its name.
        max_shard_bytes: of tensors in one file; a larger tensor has a file of its own.

    Raises:
        UsageError: a name cannot stand in a safetensors header.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes={max_shard_bytes}: give at least 1")
    if taken := ties.keys() & _METADATA.keys():
        raise UsageError(f"{min(taken)!r} shares memory and cannot be noted: safetensors keeps that key; rename it")
    shards = list(split_by_bytes(weights, lambda weight: weight.nbytes, max_shard_bytes)) or [[]]
    files = tuple(_plan_file(name, shard, ties) for name, shard in zip(file_names(len(shards)), shards, strict=True))
    if len(files) == 1:
        return Layout(files, None)
    places = {span.weight.name: file.name for file in files for span in file.spans}
    return Layout(files, encode_index(places, sum(weight.nbytes for weight in weights)))


def file_names(count: int) -> list[str]:
    """Return the names of the *count* files of a folder."""
    return [SINGLE_NAME] if count == 1 else [_shard_name(number, count) for number in range(count)]


def split_by_bytes(items: Iterable[Item], bytes_of: Callable[[Item], int], most_bytes: int) -> Iterator[list[Item]]:
    """Yield *items* in groups of at most *most_bytes*; a larger one has a group of its own."""
    members: list[Item] = []
    held = 0
    for item in items:
        if members and held + bytes_of(item) > most_bytes:
            yield members
            members, held = [], 0
        members.append(item)
        held += bytes_of(item)
    if members:
        yield members


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _plan_file(name: str, weights: Sequence[Weight], ties: Mapping[str, str]) -> FolderFile:
    entries: list[Entry] = []
    cursor = 0
    ordered = sorted(weights, key=_payload_order)
    for weight in ordered:
        entries.append(Entry(weight.name, weight.becomes, weight.shape, cursor, cursor + weight.nbytes))
        cursor += weight.nbytes
    held = {weight.name for weight in weights}
    tied = {other: kept for other, kept in ties.items() if kept in held}
    header = encode_header(entries, {**_METADATA, **tied})
    spans = tuple(
        WeightSpan(len(header) + entry.start, len(header) + entry.end, weight)
        for entry, weight in zip(entries, ordered, strict=True)
    )
    return FolderFile(name, header, len(header) + cursor, spans)


def _payload_order(weight: Weight) -> tuple[bool, int]:
    """Whole pages first, the rest by falling item size: the order of steps, so that both are read sequentially."""
    return weight.nbytes % PAYLOAD_ALIGNMENT != 0, -itemsize(weight.becomes)


def encode_index(places: Mapping[str, str], total_bytes: int) -> bytes:
    """Return the index of a folder of several files.

    Args:
        places: weight → its file.
        total_bytes: of all weights.
    """
    document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def decode_index(data: bytes, what: str) -> dict[str, str]:
    """Return tensor → file, by an index from outside.

    Raises:
        CorruptionError: it is no index, or names something other than a file of its folder.
    """
    try:
        found = parse(data, _Index, what).weight_map
        check_unique_keys(data, what)
    except ManifestError as error:
        raise CorruptionError(str(error), key=what) from error
    for tensor, file in found.items():
        if not _FILE_NAME.fullmatch(file):
            raise CorruptionError(
                f"{what} says that {tensor[:80]!r} is in {file[:80]!r}, which is no safetensors file of this folder",
                key=what,
            )
    return found


def is_weights(name: str) -> bool:
    """Return whether *name* is a file name of conversions, the index included."""
    return _OURS.fullmatch(name) is not None
