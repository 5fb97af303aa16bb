"""What does a checkpoint consist of? The manifest (the commit), the receipts (the votes), and their JSON.

Guarantees:

- Decoding checks in this order: digest, JSON, version and ``requires``, limits, types. Anything else than a document
  of ours raises `ManifestError`, quickly and without large allocations. What the fields mean to each other is for
  `validate` to check.
- Encoding ends with decoding, so that nothing is committed that a reader would refuse.
- Unknown members are ignored; what a reader must know is announced in ``requires`` (FORMAT §9).
- Non-finite metrics are null in JSON and None here.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from aiockpt.errors import ManifestError, UsageError
from aiockpt.format.checksum import SUM_BYTES, digest128
from aiockpt.format.document import MAX_TREE_NODES, check_tree, check_unique_keys, parse, seal, unseal

VERSION = 1
KNOWN_REQUIRES = frozenset({"parts"})
"""What a reader must know of to read a document, and this version does: *parts*, `aiockpt.format.parts`."""
MAX_RANK = 32
MAX_TREES_NODES = 4 * MAX_TREE_NODES

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dim = Annotated[int, Meta(ge=0, lt=2**48)]
Dims = Annotated[tuple[Dim, ...], Meta(max_length=MAX_RANK)]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes [start, end) of file number *file* hold the box *offsets*, *sizes* of a tensor, row-major."""

    file: Count
    start: Count
    end: Count
    offsets: Dims
    sizes: Dims


if TYPE_CHECKING:
    Pieces: TypeAlias = Sequence[Piece]
else:  # what is decoded; in memory they may be the rows of a table, too (`aiockpt.format.parts`)
    Pieces = tuple[Piece, ...]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: dtype code, global shape, and the pieces that tile it."""

    dtype: str
    shape: Dims
    pieces: Pieces


class FileEntry(msgspec.Struct, frozen=True, gc=False):
    """One data file.

    Attributes:
        p: path relative to the step's folder.
        size: bytes, header included.
        rank: who wrote it.
        algo, block: what the sums are, and the bytes under each.
        sums: base64 of the blocks' sums, 8 bytes each.
        digest: xxh3_128 of the sums.
    """

    p: str
    size: Count
    rank: Count
    algo: str
    block: Count
    sums: str
    digest: str

    @classmethod
    def of(cls, path: str, *, size: int, rank: int, algo: str, block: int, sums: bytes) -> FileEntry:
        """Return the entry of a file from the raw *sums* of its blocks."""
        return cls(path, size, rank, algo, block, b64encode(sums).decode(), digest128(sums))

    def sums_bytes(self) -> bytes:
        """Return the sums of all blocks, 8 bytes each.

        Raises:
            ManifestError: they are not base64.
        """
        try:
            return b64decode(self.sums, validate=True)
        except ValueError as error:
            raise ManifestError(f"the sums of {self.p!r} are not base64: {error}") from error

    def sum_of(self, block_index: int) -> bytes:
        """Return the sum of one block (8 bytes), decoding only the base64 groups around it."""
        start = block_index * SUM_BYTES
        group = start // 3
        around = b64decode(self.sums[group * 4 : -(-(start + SUM_BYTES) // 3) * 4])
        return around[start - group * 3 :][:SUM_BYTES]


class PartEntry(msgspec.Struct, frozen=True):
    """One column of a table of pieces, in blobs beside the manifest (`aiockpt.format.parts`).

    Attributes:
        width: bytes of a number, 4 or 8; *count*: of numbers.
        digests: xxh3_128 of each blob.
    """

    column: str
    width: Count
    count: Count
    digests: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint. The order of the fields is the order in the file: a `peek` finds the first ones in 4 KiB.

    Attributes:
        generation: which save of this id it is, from 1 (FORMAT §2).
        sequence: logical clock: one more than the highest sequence visible when the attempt began.
        run: which checkpointer wrote it (12 hex digits); parent: id of the step that one had loaded, or None. Together
            they are the lineage (DECISIONS 6): steps of one run follow each other, and its first one follows *parent*.
        write_id: random, of the writer who created this object; says whose create succeeded.
        created_ns: the writer's clock; a label for people.
        alias: names that share the storage of a tensor, to its name.
        state: ``{"global": tree, "per_rank": {"0": tree, …}}``, encoded by `state.tree`.
        metrics: what retention may choose by; None where the value was not finite.
    """

    format: Literal["aiockpt"] = "aiockpt"
    version: int = VERSION
    min_reader: int = VERSION
    writer: str
    requires: tuple[str, ...] = ()
    id: str
    step: Count
    generation: Count
    sequence: Count
    run: str
    parent: str | None
    attempt: str
    write_id: str
    created_ns: Count
    world_size: Count
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    parts: tuple[PartEntry, ...] | msgspec.UnsetType = msgspec.UNSET
    alias: dict[str, str] = {}
    state: dict[str, Any] = {}
    metrics: Mapping[str, float | None] = {}
    user: Any = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's vote: its data are durable, and this is what they are (DECISIONS 4).

    Attributes:
        plan_digest, scalars_digest: what the rank planned, and its global values; all ranks must agree on the latter.
        files, tensors: as in the manifest; pieces number this rank's own files.
        state: the global tree as this rank sees it.
        per_rank: the tree that belongs to this rank alone, or None.
    """

    format: Literal["aiockpt-receipt"] = "aiockpt-receipt"
    version: int = VERSION
    min_reader: int = VERSION
    requires: tuple[str, ...] = ()
    id: str
    step: Count
    generation: Count
    sequence: Count
    run: str
    parent: str | None
    attempt: str
    rank: Count
    world_size: Count
    created_ns: Count
    plan_digest: str
    scalars_digest: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    alias: dict[str, str] = {}
    state: Any = None
    per_rank: Any = None
    metrics: Mapping[str, float | None] = {}
    user: Any = None


Verdict = Literal["commit", "collect"]


class Decision(msgspec.Struct, frozen=True):
    """What was decided about an attempt, once and for all (DECISIONS 2)."""

    decision: Verdict
    attempt: str
    write_id: str


class _Envelope(msgspec.Struct):
    """What is looked at before the rest is decoded: who may read it, and the parts whose size must be bounded first."""

    format: str
    version: int
    min_reader: int = VERSION
    requires: tuple[str, ...] = ()
    tensors: Raw = Raw(b"{}")
    state: Raw = Raw(b"{}")
    per_rank: Raw = Raw(b"null")
    user: Raw = Raw(b"null")


class _ManifestState(msgspec.Struct, rename={"everyone": "global"}):
    everyone: Raw = Raw(b"null")
    per_rank: dict[str, Raw] = {}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the sealed document of *manifest*.

    Raises:
        UsageError: a value in it cannot be written as JSON.
        ManifestError: a reader would refuse it.
    """
    return _encode(manifest, f"the manifest of {manifest.id}")


def decode_manifest(data: bytes, what: str = "manifest") -> Manifest:
    """Return the manifest in *data*; call `validate.check_manifest` before acting on it.

    Args:
        what: what to call it in messages, such as its key.

    Raises:
        ManifestError: no reader may believe it.
    """
    body = unseal(data, what)
    _check_body(body, "aiockpt", what)
    return parse(body, Manifest, what)


def encode_receipt(receipt: Receipt) -> bytes:
    """Return the sealed document of *receipt*; raises as `encode_manifest`."""
    return _encode(receipt, f"the receipt of rank {receipt.rank} for {receipt.id}")


def decode_receipt(data: bytes, what: str = "receipt") -> Receipt:
    """Return the receipt in *data*; as `decode_manifest`, and `validate.check_receipt` is its check."""
    body = unseal(data, what)
    _check_body(body, "aiockpt-receipt", what)
    return parse(body, Receipt, what)


def _encode(document: Manifest | Receipt, what: str) -> bytes:
    try:
        body = msgspec.json.encode(document)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {error}") from error
    _check_trees(parse(body, _Envelope, what), what)  # not its keys: those of a dict are distinct strings
    parse(body, type(document), what)
    return seal(body)


def _check_body(body: bytes, expected_format: str, what: str) -> None:
    """Check all that must hold before a body is decoded into structs."""
    envelope = parse(body, _Envelope, what)
    if envelope.format != expected_format:
        raise ManifestError(f"{what} is a document of format {envelope.format[:40]!r}, not {expected_format!r}")
    _check_reader(envelope, what)
    _check_keys(body, bytes(envelope.tensors), what)
    _check_trees(envelope, what)


def _check_trees(envelope: _Envelope, what: str) -> None:
    trees = [bytes(envelope.user), bytes(envelope.per_rank)]
    if envelope.format == "aiockpt":
        state = parse(envelope.state, _ManifestState, f"the state of {what}")
        trees += [bytes(state.everyone), *map(bytes, state.per_rank.values())]
    else:
        trees.append(bytes(envelope.state))
    if sum(check_tree(tree, what) for tree in trees) > MAX_TREES_NODES:
        raise ManifestError(f"{what} has more than {MAX_TREES_NODES} plain values over all ranks: use tensors")


def _check_reader(envelope: _Envelope, what: str) -> None:
    if envelope.version != VERSION or envelope.min_reader > VERSION:
        wanted = max(envelope.version, envelope.min_reader)
        raise ManifestError(
            f"{what} has format version {envelope.version} and needs a reader of version {wanted}; this aiockpt reads "
            f"version {VERSION}: install the one that wrote it"
        )
    unknown = [name for name in envelope.requires if name not in KNOWN_REQUIRES]
    if unknown:
        named = ", ".join(repr(name[:40]) for name in unknown[:5])
        raise ManifestError(f"{what} requires {named}, which this aiockpt cannot read: install a newer one")


def _check_keys(body: bytes, tensors: bytes, what: str) -> None:
    """Refuse duplicate keys, without tokenising the tensors where counting their quotes proves that there are none.

    A decoded tensor accounts for 10 quotes (its name, three keys, the dtype). When there are no more, nothing was
    dropped; a quote cannot hide, and an escaped one or an unknown member only leads to the slow way.
    """
    names = parse(tensors, dict[str, Raw], what)
    if tensors.count(b'"') == 10 * len(names):
        body = body.replace(tensors, b"{}", 1)
    check_unique_keys(body, what)


class Peek(msgspec.Struct, frozen=True):
    """What the first bytes of a manifest claim. Orders candidates; never trusted."""

    id: str
    step: int
    generation: int
    sequence: int
    run: str
    parent: str | None
    attempt: str


_PEEK = re.compile(
    rb'"id":"(?P<id>[A-Za-z0-9._-]{1,128})","step":(?P<step>[0-9]{1,19}),"generation":(?P<generation>[0-9]{1,19}),'
    rb'"sequence":(?P<sequence>[0-9]{1,19}),"run":"(?P<run>[0-9a-f]{12})",'
    rb'"parent":(?:null|"(?P<parent>[A-Za-z0-9._-]{1,128})"),"attempt":"(?P<attempt>[0-9a-f]{12})"'
)


def peek(data: bytes) -> Peek | None:
    """Return what the first bytes of a manifest claim, or None when they are not as we write them. Never raises."""
    found = _PEEK.search(data, 0, 4096) if data.startswith(b'{"format":"aiockpt",') else None
    if found is None:
        return None
    parent = found["parent"]
    return Peek(
        id=found["id"].decode(),
        step=int(found["step"]),
        generation=int(found["generation"]),
        sequence=int(found["sequence"]),
        run=found["run"].decode(),
        parent=None if parent is None else parent.decode(),
        attempt=found["attempt"].decode(),
    )
