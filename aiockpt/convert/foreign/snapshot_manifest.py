"""The manifest of a torchsnapshot: the entries of each rank, and those that all ranks share.

``.snapshot_metadata`` is JSON, or YAML where an early version wrote it. An entry is called by its rank and the keys that
lead to it, ``0/model/weight``; ``%`` and ``/`` in a key are ``%25`` and ``%2F``. It describes a tensor, the chunks of one,
an object in a file, a plain value, or a container of further entries.
"""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import msgspec

from aiockpt.errors import CorruptionError, UsageError

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
    """The same of a DTensor; ranks may have the same shards. Where they lay in the mesh is of no use here."""


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
        return msgspec.json.decode(data, type=_Metadata)
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise UsageError(f"{METADATA}: {_INSTALL_YAML}") from error
    try:
        return msgspec.convert(yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), type=_Metadata)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _share(ranks: dict[int, dict[str, Entry]]) -> dict[int, dict[str, Entry]]:
    """Add to each rank what is noted once: with the first rank what is replicated, with each rank its shards of a tensor."""
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
