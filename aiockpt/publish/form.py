"""The form of a version: the names of folders and files, and the index, whose creation makes the version visible.

Guarantees:

- Pure. A delta has the index that slime and ModelExpress read; ours lies beside it, in ``metadata.aiockpt``.
- `decode_index` accepts plain file names only, and digests for every tensor, by which a receiver checks what it has made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import xxhash

from aiockpt.convert.folder_layout import INDEX_NAME, Layout, decode_index
from aiockpt.errors import CorruptionError, ManifestError
from aiockpt.format.document import described, parse

CHAIN, FOLD = "weight_v", "full_v"
_FOLDER = re.compile(r"(weight_v|full_v)([0-9]{6,})")
DECISION = "aiockpt.decision.json"
"""The object of a version in a store whose creation decides who has written it."""
CHECKSUM = "adler32"
"""The one checksum that both slime and ModelExpress 0.7.0 know."""

COMPANION_BYTES = 64 << 20
"""The largest file beside the weights (a tokenizer) that goes into full versions."""
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".md")

Kind = Literal["full", "delta"]


class FileNote(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file, and its digest; "" for a file of a full version, whose tensors have digests."""

    bytes: int
    digest: str = ""


class VersionNotes(msgspec.Struct, frozen=True, kw_only=True):
    """Our own part of an index.

    Attributes:
        v: of this form.
        step, run, attempt, sequence: the save that the weights are of, as its manifest has them.
        parent: the attempt of the version before, None for a full version.
        of: of a fold, the number of the version whose weights it has, too.
        layout: digest of the names, dtypes and shapes.
        weight_bytes: of all tensors of the model.
        tensors: name → digests of its bytes in the version before ("" in a full version) and in this one.
    """

    v: int = 1
    kind: Kind
    step: int
    run: str
    attempt: str
    sequence: int
    parent: str | None = None
    created_ns: int
    of: int | None = None
    digest: Literal["xxh3_128"] = "xxh3_128"
    layout: str
    weight_bytes: int
    files: dict[str, FileNote]
    tensors: dict[str, tuple[str, str]]


class VersionIndex(msgspec.Struct, frozen=True):
    """The index of a version: its folder and number, and the file of each tensor that the folder has."""

    folder: str
    number: int
    notes: VersionNotes
    weight_map: dict[str, str]

    @property
    def is_full(self) -> bool:
        """Whether it needs no version before it."""
        return self.notes.kind == "full"

    @property
    def file_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.notes.files.values())

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each tensor in this version."""
        return {name: new for name, (_, new) in self.notes.tensors.items()}


class _Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    total_size: int | None = None
    version: str = ""
    base_version: str = ""
    delta_encoding: str = ""
    compression_format: str = ""
    checksum_format: str = ""
    aiockpt: VersionNotes | None = None


class _Document(msgspec.Struct, frozen=True):
    metadata: _Metadata
    weight_map: dict[str, str]


def version_text(number: int) -> str:
    """Return the number of a version as an index has it: ``000007``."""
    return f"{number:06d}"


def version_folder(number: int, prefix: str = CHAIN) -> str:
    """Return the folder of a version, or with *prefix* of a fold."""
    return prefix + version_text(number)


def parse_folder(name: str) -> tuple[str, int] | None:
    """Return prefix and number of the folder of a version; None for another name."""
    found = _FOLDER.fullmatch(name)
    return None if found is None or name != found[1] + version_text(int(found[2])) else (found[1], int(found[2]))


def is_companion(name: str) -> bool:
    """Return whether a file belongs beside the weights: configuration, tokenizer, template, code of the model."""
    return name.endswith(_COMPANIONS) and not name.startswith(".") and name not in (INDEX_NAME, DECISION)


def index_key(folder: str) -> str:
    """Return the key of a version's index."""
    return f"{folder}/{INDEX_NAME}"


def encode_version(number: int, notes: VersionNotes, weight_map: Mapping[str, str]) -> bytes:
    """Return the index of a version; a delta is against the version before it in number."""
    if notes.kind == "full":
        metadata = _Metadata(notes.weight_bytes, version_text(number), aiockpt=notes)
    else:
        base = version_text(number - 1)
        metadata = _Metadata(None, version_text(number), base, "xor", "zstd", CHECKSUM, notes)
    return msgspec.json.encode(_Document(metadata, dict(sorted(weight_map.items()))))


def decode_version(data: bytes, folder: str, url: str) -> VersionIndex:
    """Return the index of the version in *folder* of the place *url*.

    Raises:
        CorruptionError: it is no index of ours, or leads out of its folder.
    """
    what = f"{url}/{index_key(folder)}"
    weight_map = decode_index(data, what)
    try:
        notes = parse(data, described(_Document), what).metadata.aiockpt
    except ManifestError as error:
        raise CorruptionError(str(error), key=what) from error
    placed = parse_folder(folder)
    if notes is None or placed is None:
        raise CorruptionError(
            f"{what} has no digests of aiockpt, so what is received cannot be verified: receive what aiockpt has published"
        )
    _check(notes, weight_map, what)
    return VersionIndex(folder, placed[1], notes, weight_map)


def _check(notes: VersionNotes, weight_map: Mapping[str, str], what: str) -> None:
    if notes.v != 1:
        raise CorruptionError(f"{what} has the form {notes.v} of aiockpt, this release reads 1: use a newer aiockpt")
    changed = {name for name, (old, new) in notes.tensors.items() if old != new}
    if changed != weight_map.keys() or set(weight_map.values()) != notes.files.keys():
        some = min(changed ^ weight_map.keys(), default="its files")
        raise CorruptionError(f"{what} contradicts itself over {some[:80]!r}: publish a full version", key=what)


def digest_layout(layout: Layout) -> str:
    """Return the digest of the names, dtypes and shapes of a folder's tensors."""
    entries = [
        (span.weight.name, span.weight.becomes, span.weight.shape) for file in layout.files for span in file.spans
    ]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(entries)))


def newest_full(indexes: Iterable[VersionIndex], most: int | None = None) -> VersionIndex | None:
    """Return the full version, or the fold, with the highest number, *most* at the most."""
    full = [index for index in indexes if index.is_full and (most is None or index.number <= most)]
    return max(full, key=lambda index: (index.number, index.notes.of is None), default=None)
