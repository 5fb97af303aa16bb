"""The reader of snapshots of torchsnapshot: the whole state of the first rank, and the differences of other ranks.

Replicated, chunked and sharded tensors are joined into one. Values that are equal on all ranks are kept once; where a rank
differs, its value is at the same path under ``other_ranks`` and the rank's number.
"""

from __future__ import annotations

import base64
import io
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import torch

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.convert.foreign.mapped_folder import MappedFolder, join_chunks, reported_as_damage
from aiockpt.convert.foreign.torch_files import read_tensor, unpickle
from aiockpt.errors import CorruptionError, UsageError
from aiockpt.format.document import described
from aiockpt.state.geometry import Box

# The manifest of a torchsnapshot: the entries of each rank, and those that all ranks share.
#
# ``.snapshot_metadata`` is JSON, or YAML where an early version wrote it. The name of an entry is its rank and the keys to
# it, ``0/model/weight``; ``%`` and ``/`` in a key are ``%25`` and ``%2F``. An entry describes a tensor, the chunks of one,
# an object in a file, a plain value, or a container of further entries.


METADATA = ".snapshot_metadata"
_INSTALL_YAML = (
    "it is YAML, as early versions of torchsnapshot wrote it, and reading that needs pyyaml: pip install pyyaml"
)


class _TaggedEntry(msgspec.Struct, frozen=True, tag_field="type"):
    """One entry; its ``type`` is the tag of its class."""


class StoredTensor(_TaggedEntry, frozen=True, tag="Tensor"):
    """A tensor in a file, or the chunk of one.

    Attributes:
        location: of the file, in the folder.
        serializer: how it was written: ``"buffer_protocol"`` for its bytes, ``"torch_save"`` for an archive.
        dtype: ``"torch.float32"``.
        byte_range: the part of the file; None for all of it.
    """

    location: str
    serializer: str
    dtype: str
    shape: tuple[int, ...]
    byte_range: tuple[int, int] | None = None
    replicated: bool = False


class StoredChunk(msgspec.Struct, frozen=True):
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: StoredTensor


class ChunkedTensor(_TaggedEntry, frozen=True, tag="ChunkedTensor"):
    """A tensor that was too big for one file."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    replicated: bool = False


class ShardedEntry(_TaggedEntry, frozen=True, tag="ShardedTensor"):
    """The shards that a rank had of a tensor; the size of the whole follows from the shards of all ranks."""

    shards: tuple[StoredChunk, ...]
    replicated: bool = False


class MeshedEntry(ShardedEntry, frozen=True, tag="DTensor"):
    """The same of a DTensor; ranks may have the same shards. Their places in the mesh are not needed here."""


class PickledObject(_TaggedEntry, frozen=True, tag="object"):
    """Something that was pickled into a file."""

    location: str
    serializer: str
    replicated: bool = False


class StoredList(_TaggedEntry, frozen=True, tag="list"):
    """A list; its length follows from its entries."""


class StoredDict(_TaggedEntry, frozen=True, tag="dict"):
    """A dict with these keys, in their order."""

    keys: tuple[str | int | bool, ...]


class StoredOrderedDict(StoredDict, frozen=True, tag="OrderedDict"):
    """The same of an ``OrderedDict``, which `Foreign` states have as a dict."""


class _Plain(_TaggedEntry, frozen=True):
    """A plain value as text."""

    serialized_value: str
    replicated: bool = False

    def value(self) -> Any:
        """Return the value."""
        raise NotImplementedError


class PlainInt(_Plain, frozen=True, tag="int"):
    """An integer in decimal."""

    def value(self) -> int:
        return int(self.serialized_value)


class PlainText(_Plain, frozen=True, tag="str"):
    """A string as it is."""

    def value(self) -> str:
        return self.serialized_value


class PlainBool(_Plain, frozen=True, tag="bool"):
    """``True`` or ``False``."""

    def value(self) -> bool:
        return {"True": True, "False": False}[self.serialized_value]


class PlainBytes(_Plain, frozen=True, tag="bytes"):
    """Bytes in base64."""

    def value(self) -> bytes:
        return base64.b64decode(self.serialized_value, validate=True)


class PlainFloat(_Plain, frozen=True, tag="float"):
    """The eight bytes of a double in base64, so that no digit is lost."""

    def value(self) -> float:
        (found,) = struct.unpack("<d", base64.b64decode(self.serialized_value, validate=True))
        return float(found)


Leaf = (
    StoredTensor
    | ChunkedTensor
    | ShardedEntry
    | MeshedEntry
    | PickledObject
    | PlainInt
    | PlainText
    | PlainBool
    | PlainBytes
    | PlainFloat
)
Container = StoredList | StoredDict | StoredOrderedDict
Entry = Leaf | Container


class _Metadata(msgspec.Struct, frozen=True):
    manifest: dict[str, Entry]


def read_manifest(folder: Path) -> dict[int, dict[str, Entry]]:
    """Return the entries of each rank by their paths, ``"model/weight"``, with those that the ranks share.

    Raises:
        UsageError: an entry is of a type that no released version writes; or pyyaml is needed.
        CorruptionError: the file is damaged.
    """
    path = folder / METADATA
    try:
        manifest = _decode(path.read_bytes()).manifest
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and ".type" in str(error):
            raise UsageError(f"{path} has an entry of an unknown type: {error}; load it with torchsnapshot") from error
        raise CorruptionError(f"{path} is damaged: {error}") from error
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise CorruptionError(f"{path} is damaged: {error}") from error
    ranks: dict[int, dict[str, Entry]] = {}
    for name, entry in manifest.items():
        rank, _, logical = name.partition("/")
        if not rank.isdecimal() or not logical:
            raise CorruptionError(f"{path} is damaged: {name!r} is no rank with a path")
        ranks.setdefault(int(rank), {})[logical] = entry
    return _share(dict(sorted(ranks.items())))


def _decode(data: bytes) -> _Metadata:
    if data.lstrip()[:1] == b"{":
        return msgspec.json.decode(data, type=described(_Metadata))
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise UsageError(f"{METADATA}: {_INSTALL_YAML}") from error
    try:
        return msgspec.convert(
            yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), type=described(_Metadata)
        )
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _share(ranks: dict[int, dict[str, Entry]]) -> dict[int, dict[str, Entry]]:
    """Add to each rank the entries that are recorded once: those replicated (by the first rank), and all shards."""
    shards: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], StoredChunk]] = {}
    for entries in ranks.values():
        for path, entry in entries.items():
            if isinstance(entry, ShardedEntry):
                boxes = shards.setdefault(path, {})
                for shard in entry.shards:
                    boxes.setdefault((shard.offsets, shard.sizes), shard)
    whole = {path: ShardedEntry(tuple(boxes.values())) for path, boxes in shards.items()}
    first = next(iter(ranks.values()), {})
    replicated = {path: entry for path, entry in first.items() if getattr(entry, "replicated", False)}
    return {
        rank: {**replicated, **entries, **{path: whole[path] for path in entries if path in whole}}
        for rank, entries in ranks.items()
    }


# The merge of states that ranks saved separately: their common part, and the differences of each rank.


def merge_rank(state: dict[Any, Any], held: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add to *state* the entries that only this rank *held*, and return those that differ, in dicts with the same paths.

    Tensors are compared by their bytes. A list of which an element differs differs as a whole.
    """
    differences = {}
    for key, value in held.items():
        if key not in state:
            state[key] = value
        elif type(value) is dict and type(state[key]) is dict:
            if inside := merge_rank(state[key], value):
                differences[key] = inside
        elif not _same(state[key], value):
            differences[key] = value
    return differences


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:  # noqa: BLE001  of objects whose comparison is neither
        return False


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    mine, theirs = _pieces(one), _pieces(other)
    return mine.keys() == theirs.keys() and all(torch.equal(_bytes(mine[box]), _bytes(theirs[box])) for box in mine)


def _pieces(tensor: torch.Tensor) -> dict[tuple[Box, ...], torch.Tensor]:
    if isinstance(tensor, Shards):
        return {piece.boxes: piece.local for piece in tensor.held.pieces}
    return {(): tensor}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


OTHER_RANKS = "other_ranks"

_Position = tuple[int, ...]


def is_one(path: Path) -> bool:
    """Return whether *path* is a snapshot; an unfinished one has no metadata, and does not count."""
    return (path / METADATA).is_file()


def read(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    """Return the state in a snapshot, by the names of its ``app_state``.

    Raises:
        UsageError: an item is an object, and *trust_pickle* does not allow it; a tensor is quantised; pyyaml is needed.
        CorruptionError: a file is missing or cut short, or the metadata contradict the files or themselves.
    """
    with reported_as_damage(path / METADATA):
        return _read_state(path, trust_pickle)


def _read_state(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    files = _Files(path, trust_pickle)
    state: dict[str, Any] = {}
    others: dict[int, dict[str, Any]] = {}
    for rank, entries in read_manifest(path).items():
        if differences := merge_rank(state, _Tree(entries, files).app_state()):
            others[rank] = differences
    if others and OTHER_RANKS in state:
        raise UsageError(f"{path}: its state has a part named {OTHER_RANKS}, a name reserved for other ranks")
    return {**state, OTHER_RANKS: others} if others else state


class _Tree:
    """The entries of one rank, rebuilt as nested containers."""

    def __init__(self, entries: Mapping[str, Entry], files: _Files) -> None:
        self._entries = entries
        self._files = files
        self._lengths = Counter(path.rpartition("/")[0] for path in entries)

    def app_state(self) -> dict[str, Any]:
        """Return the contents of each part of the state."""
        return {unquote(path): self._at(path) for path in self._entries if "/" not in path}

    def _at(self, path: str) -> Any:
        entry = self._entries.get(path)
        if entry is None:
            raise CorruptionError(f"{METADATA} is damaged: it does not describe {path}")
        if isinstance(entry, StoredList):
            return [self._at(f"{path}/{place}") for place in range(self._lengths[path])]
        if isinstance(entry, StoredDict):
            if self._lengths[path] != len(entry.keys):
                raise CorruptionError(f"{METADATA} is damaged: {path} has other entries than keys")
            return {key: self._at(f"{path}/{_quote(str(key))}") for key in entry.keys}
        return self._files.leaf(path, entry)


def _quote(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


class _Files:
    """The contents of a snapshot's files, each entry once: ranks that share one get the same object."""

    def __init__(self, path: Path, trust_pickle: bool) -> None:
        self._path = path
        self._files = MappedFolder(path, METADATA)
        self._trusts = trust_pickle
        self._found: dict[Leaf, Any] = {}

    def leaf(self, path: str, entry: Leaf) -> Any:
        """Return the tensor or the value that an entry describes."""
        if entry not in self._found:
            self._found[entry] = self._read(f"{self._path}: {unquote(path)}", entry)
        return self._found[entry]

    def _read(self, what: str, entry: Leaf) -> Any:
        if isinstance(entry, StoredTensor):
            return self._tensor(what, entry)
        if isinstance(entry, ChunkedTensor):
            return self._join(what, entry.shape, entry.chunks)
        if isinstance(entry, ShardedEntry):
            ends = ([sum(side) for side in zip(box.offsets, box.sizes, strict=True)] for box in entry.shards)
            return self._join(what, tuple(map(max, zip(*ends, strict=True))), entry.shards)
        if isinstance(entry, PickledObject):
            return unpickle(io.BytesIO(self._files.part(entry.location, what)), what, self._trusts)
        try:
            return entry.value()
        except (ValueError, KeyError, struct.error) as error:
            raise CorruptionError(f"{what} is damaged: {error!r}") from error

    def _join(self, what: str, shape: _Position, chunks: Sequence[StoredChunk]) -> torch.Tensor:
        if not chunks or any(chunk.tensor.shape != chunk.sizes for chunk in chunks):
            raise CorruptionError(f"{what}: its chunks have other sizes than their tensors")
        found = [(chunk.offsets, self._tensor(what, chunk.tensor)) for chunk in chunks]
        return join_chunks(shape, found[0][1].dtype, found, what)

    def _tensor(self, what: str, entry: StoredTensor) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or min(entry.shape, default=0) < 0:
            raise CorruptionError(f"{what} is a {entry.dtype} of {entry.shape}")
        if entry.serializer not in ("buffer_protocol", "torch_save"):
            raise UsageError(f"{what} is quantised ({entry.serializer}): load it with torchsnapshot, and save it whole")
        size_bytes = torch.Size(entry.shape).numel() * dtype.itemsize
        if entry.serializer == "buffer_protocol" and not size_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        start, end = entry.byte_range or (0, None)
        data = self._files.part(entry.location, what, start, end)
        if entry.serializer == "torch_save":
            return read_tensor(data, what, dtype, entry.shape)
        if len(data) != size_bytes:
            raise CorruptionError(f"{what} has {len(data):,} bytes in its file, and {size_bytes:,} are its shape")
        return torch.frombuffer(data, dtype=dtype).view(entry.shape)
