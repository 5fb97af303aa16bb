"""The documents of a checkpoint: the manifest (the commit), the receipts (the votes), and their JSON.

Guarantees:

- Decoding checks in this order: digest, JSON, version and ``requires``, limits, types. Anything else than a document
  of ours raises `ManifestError`, quickly and without large allocations. Whether the fields agree with each other is
  checked by `validate`.
- Encoding ends with decoding, so that no document is committed that a reader would refuse.
- The first 4 KiB of a manifest hold its head, which orders steps, and the head's digest: many manifests can be ordered by
  their first bytes alone, and a damaged head orders nothing.
- Unknown members are ignored; features that a reader must know are announced in ``requires`` (docs/format.md#versioning).
- Non-finite metrics are null in JSON and None here.
"""

from __future__ import annotations

from abc import abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw
from msgspec.structs import replace

from aiockpt.errors import ManifestError, NewerFormatError, UsageError
from aiockpt.format.document import (
    MAX_TREE_NODES,
    MEMO_BYTES,
    SUM_BYTES,
    Memo,
    check_tree,
    check_unique_keys,
    digest128,
    parse,
    seal,
    unseal,
    without,
)
from aiockpt.format.dtypes import CODES

VERSION = 1
KNOWN_REQUIRES = frozenset({"parts", "dtypes"})
"""The features that a document may require and this version reads: `aiockpt.format.parts`, `aiockpt.format.dtypes`."""
HEAD_BYTES = 4096
"""The head of a manifest, and the digest after it, lie within so many bytes from its start."""
_HEAD_SEAL = b',"head":"'
_AFTER_HEAD = b',"write_id":"'
_AXES = b'"axes":'
MAX_RANK = 32
MAX_DIM = 2**48
MAX_TREES_NODES = 4 * MAX_TREE_NODES

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dim = Annotated[int, Meta(ge=0, lt=MAX_DIM)]
Dims = Annotated[tuple[Dim, ...], Meta(max_length=MAX_RANK)]
Axis = Annotated[int, Meta(ge=0, lt=MAX_RANK)]
Axes = Annotated[tuple[Axis, ...], Meta(max_length=MAX_RANK)]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes [start, end) of file number *file* hold the box *offsets*, *sizes* of a tensor, row-major."""

    file: Count
    start: Count
    end: Count
    offsets: Dims
    sizes: Dims


class PieceView(Sequence[Piece]):
    """The pieces of one tensor in a table of all (`aiockpt.format.pieces`)."""

    @abstractmethod
    def listed(self) -> list[Piece]:
        """Return the pieces as they are written in JSON."""

    @abstractmethod
    def is_writable(self) -> bool:
        """Return whether a reader accepts the numbers in the table."""


if TYPE_CHECKING:
    Pieces: TypeAlias = Sequence[Piece]
else:  # what is decoded; in memory they may be a `PieceView`, too
    Pieces = tuple[Piece, ...]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: dtype code, global shape, and the pieces that tile it.

    Attributes:
        axes: its axes as they lay in memory, slowest first, where that is not their own order (`aiockpt.state.layout`);
            unset where it is, or where it is unknown. Bytes in files are row-major in any case.
    """

    dtype: str
    shape: Dims
    pieces: Pieces
    axes: Axes | msgspec.UnsetType = msgspec.UNSET


def has_table(tensors: Mapping[str, TensorEntry]) -> bool:
    """Return whether the pieces of *tensors* are in one table, not in a tuple for each tensor."""
    return isinstance(next((entry.pieces for entry in tensors.values()), ()), PieceView)


LeftOut = dict[str, tuple[str, Dims] | None]
"""Names that the caller excluded from the save: of tensors, with dtype code and global shape, and of others, with null."""


def required_for(tensors: Mapping[str, TensorEntry], left_out: LeftOut | msgspec.UnsetType) -> tuple[str, ...]:
    """Return the features that a document announces in ``requires`` because of its dtypes."""
    codes = {entry.dtype for entry in tensors.values()} | {facts[0] for facts in (left_out or {}).values() if facts}
    return () if codes <= CODES else ("dtypes",)


class FileEntry(msgspec.Struct, frozen=True, gc=False):
    """One data file.

    Attributes:
        p: path relative to the step's folder.
        size: bytes, header included.
        rank: the one that wrote it.
        algo, block: the kind of the sums, and the bytes under each.
        sums: base64 of the blocks' sums, 8 bytes each.
        digest: xxh3_128 of the sums.
        kind: "weights" where modules hold all of its tensors, "rest" where they hold none; unset where that is unknown.
        not_finite: its tensors with numbers that are NaN or infinite, and how many; unset where they were not checked.
    """

    p: str
    size: Count
    rank: Count
    algo: str
    block: Count
    sums: str
    digest: str
    kind: str | msgspec.UnsetType = msgspec.UNSET
    not_finite: dict[str, Count] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(
        cls,
        path: str,
        *,
        size: int,
        rank: int,
        algo: str,
        block: int,
        sums: bytes,
        kind: str | msgspec.UnsetType = msgspec.UNSET,
        not_finite: dict[str, int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> FileEntry:
        """Return the entry of a file from the raw *sums* of its blocks."""
        return cls(path, size, rank, algo, block, b64encode(sums).decode(), digest128(sums), kind, not_finite)

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


def are_finite(files: Sequence[FileEntry]) -> bool | msgspec.UnsetType:
    """Return `Manifest.finite` for *files*: whether all numbers are finite; unset unless all were checked."""
    if any(file.not_finite is msgspec.UNSET for file in files) or not files:
        return msgspec.UNSET
    return not any(file.not_finite for file in files)


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


MAX_ANCESTORS = 16
Ancestors = Annotated[tuple[tuple[str, Count], ...], Meta(max_length=MAX_ANCESTORS)]
"""Saves, by run and sequence."""
ForkedFrom = tuple[str, str, str]
"""Place, step id and run of a step of another place."""
MAX_OLDER = 64
Older = Annotated[tuple[tuple[str, Count], ...], Meta(max_length=MAX_OLDER)]
"""Steps by id and highest generation."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint. The order of the fields is the order in the file: those up to ``world_size`` are its head.

    Attributes:
        generation: number of the save of this id, from 1 (docs/format.md#generations-and-attempts).
        sequence: logical clock: one more than the highest sequence visible when the attempt began.
        run: which checkpointer wrote it (12 hex digits); parent: id of the step that one had loaded, or None. Together
            they are the lineage (docs/decisions.md#lineage): steps of one run follow each other, the first follows *parent*.
        ancestors: run and sequence of the save that was loaded, then of the one that its run had loaded, and so on, at most
            `MAX_ANCESTORS`: they stay true when a step is deleted or saved anew.
        forked_from: place, step id and run of the step of another place that the line of saves began from.
        finite: whether no file holds a number that is NaN or infinite; unset where not all of them were checked.
        write_id: random, of the writer that created this object; identifies the create that succeeded.
        created_ns: the writer's clock; a label for people.
        alias: names that share the storage of a tensor, to its name.
        left_out: names that the caller excluded from the save; a load leaves them unchanged in the state.
        state: ``{"global": tree, "per_rank": {"0": tree, …}}``, encoded by `state.tree`.
        metrics: values that retention may choose by; None where a value was not finite.
        config: the configuration of the program, where it passed one.
        older: steps that existed when its run began to save, or that the run has committed since, before this save began;
            the newest first, at most `MAX_OLDER`: this save is newer.
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
    ancestors: Ancestors | msgspec.UnsetType = msgspec.UNSET
    forked_from: ForkedFrom | msgspec.UnsetType = msgspec.UNSET
    attempt: str
    finite: bool | msgspec.UnsetType = msgspec.UNSET
    world_size: Count
    write_id: str
    created_ns: Count
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    parts: tuple[PartEntry, ...] | msgspec.UnsetType = msgspec.UNSET
    alias: dict[str, str] = {}
    left_out: LeftOut | msgspec.UnsetType = msgspec.UNSET
    state: dict[str, Any] = {}
    metrics: Mapping[str, float | None] = {}
    user: Any = None
    config: Any = msgspec.UNSET
    older: Older | msgspec.UnsetType = msgspec.UNSET


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's vote: its data are durable, and described here (docs/format.md#receipts).

    Attributes:
        plan_digest, scalars_digest: of the rank's plan, and of its global values; all ranks must agree on the latter.
        files, tensors: as in the manifest; pieces number this rank's own files.
        state: the global tree as this rank sees it.
        per_rank: the tree that belongs to this rank alone, or None.
        replicas, buffers: digests of tensors that other ranks have, too (`aiockpt.format.merge`).
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
    ancestors: Ancestors | msgspec.UnsetType = msgspec.UNSET
    forked_from: ForkedFrom | msgspec.UnsetType = msgspec.UNSET
    attempt: str
    rank: Count
    world_size: Count
    created_ns: Count
    plan_digest: str
    scalars_digest: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    alias: dict[str, str] = {}
    left_out: LeftOut | msgspec.UnsetType = msgspec.UNSET
    state: Any = None
    per_rank: Any = None
    metrics: Mapping[str, float | None] = {}
    user: Any = None
    config: Any = msgspec.UNSET
    replicas: bytes | msgspec.UnsetType = msgspec.UNSET
    buffers: bytes | msgspec.UnsetType = msgspec.UNSET
    older: Older | msgspec.UnsetType = msgspec.UNSET


RECEIPT_START = b'{"format":"aiockpt-receipt"'
"""The first bytes of every receipt."""

Verdict = Literal["commit", "collect"]


class Decision(msgspec.Struct, frozen=True):
    """The final decision about an attempt (docs/format.md#the-decision-record)."""

    decision: Verdict
    attempt: str
    write_id: str


class _Envelope(msgspec.Struct):
    """The members that are read first: the announced features, and the parts whose size must be bounded."""

    format: str
    version: int
    min_reader: int = VERSION
    requires: tuple[str, ...] = ()
    tensors: Raw = Raw(b"{}")
    state: Raw = Raw(b"{}")
    per_rank: Raw = Raw(b"null")
    user: Raw = Raw(b"null")
    config: Raw = Raw(b"null")


class _ManifestState(msgspec.Struct, rename={"everyone": "global"}):
    everyone: Raw = Raw(b"null")
    per_rank: dict[str, Raw] = {}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the sealed document of *manifest*.

    Raises:
        UsageError: a value in it cannot be written as JSON.
        ManifestError: a reader would refuse it.
    """
    return _encode(manifest, f"the manifest of {manifest.id}", _with_head_digest)


def _with_head_digest(body: bytes) -> bytes:
    """Return *body* with the digest of its head after it. (In a string its quotes would be escaped.)"""
    at = body.index(_AFTER_HEAD)
    head = body[:at]
    return b"".join([head, _HEAD_SEAL, digest128(head).encode(), b'"', memoryview(body)[at:]])


def decode_manifest(data: bytes, what: str = "manifest") -> Manifest:
    """Return the manifest in *data*; call `validate.check_manifest` before acting on it.

    Args:
        what: its name in messages, such as its key.

    Raises:
        ManifestError: it is damaged or not valid.
    """
    return _decode(data, "aiockpt", Manifest, what)


def encode_receipt(receipt: Receipt) -> bytes:
    """Return the sealed document of *receipt*; raises as `encode_manifest`."""
    return _encode(receipt, f"the receipt of rank {receipt.rank} for {receipt.id}", lambda body: body)


def decode_receipt(data: bytes, what: str = "receipt") -> Receipt:
    """Return the receipt in *data*; as `decode_manifest`, and `validate.check_receipt` is its check."""
    return _decode(data, "aiockpt-receipt", Receipt, what)


D = TypeVar("D", Manifest, Receipt)
_decoded: Memo[bytes, dict[str, TensorEntry]] = Memo()


def _decode(data: bytes, expected_format: str, kind: type[D], what: str) -> D:
    """Return the document in *data*; tensors that are equal to those of the last document are not decoded again."""
    body = unseal(data, what)
    envelope = _check_body(body, expected_format, what)
    tensors = bytes(envelope.tensors)
    known = _decoded.recall(tensors)
    document = parse(body if known is None else without(body, "tensors", tensors), kind, what)
    if known is not None and not document.tensors:
        document = replace(document, tensors=dict(known))
    elif known is not None:  # an earlier member of that name, in another object, has the same value
        document = parse(body, kind, what)
    elif len(tensors) <= MEMO_BYTES:
        _decoded.remember(tensors, dict(document.tensors))
    _check_keys(body, tensors, bytes(envelope.state), document, what)
    return document


_encoded: Memo[tuple[tuple[str, ...], dict[str, TensorEntry]], bytes] = Memo()


def _encode(document: Manifest | Receipt, what: str, finish: Callable[[bytes], bytes]) -> bytes:
    """Return the sealed *document*, decoded once as a check; tensors equal to those of the last document are skipped."""
    # Dicts are equal in any order of their keys, and their JSON is not: so the order is a part of the question.
    question = (tuple(document.tensors), document.tensors)
    known = _encoded.recall(question)
    try:
        tensors = msgspec.json.encode(document.tensors, enc_hook=_list_pieces) if known is None else known
        proof = _without_table(document) if known is None else replace(document, tensors={})
        body = finish(msgspec.json.encode(replace(document, tensors=Raw(tensors))))
        read = body if proof is document else msgspec.json.encode(proof)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {error}") from error
    _check_trees(parse(read, _Envelope, what), what)  # not its keys: those of a dict are distinct strings
    parse(read, type(document), what)
    if known is None and len(tensors) <= MEMO_BYTES:
        _encoded.remember((question[0], dict(document.tensors)), tensors)
    return seal(body)


def _list_pieces(value: object) -> object:
    return value.listed() if isinstance(value, PieceView) else msgspec.to_builtins(value)  # which refuses it


def _without_table(document: Manifest | Receipt) -> Manifest | Receipt:
    """Return *document* without its pieces where a table holds them and a reader accepts its numbers; else unchanged."""
    some = next((entry.pieces for entry in document.tensors.values()), ())
    if not isinstance(some, PieceView) or not some.is_writable():
        return document
    return replace(document, tensors={name: replace(entry, pieces=()) for name, entry in document.tensors.items()})


def _check_body(body: bytes, expected_format: str, what: str) -> _Envelope:
    """Make the checks that must precede the decoding of a body into structs; return its envelope."""
    envelope = parse(body, _Envelope, what)
    if envelope.format != expected_format:
        raise ManifestError(f"{what} is a document of format {envelope.format[:40]!r}, not {expected_format!r}")
    _check_reader(envelope, what)
    _check_trees(envelope, what)
    return envelope


def _check_trees(envelope: _Envelope, what: str) -> None:
    trees = [bytes(envelope.user), bytes(envelope.config), bytes(envelope.per_rank)]
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
        raise NewerFormatError(
            f"{what} has format version {envelope.version} and needs a reader of version {wanted}; this aiockpt reads "
            f"version {VERSION}: install the one that wrote it"
        )
    unknown = [name for name in envelope.requires if name not in KNOWN_REQUIRES]
    if unknown:
        named = ", ".join(repr(name[:40]) for name in unknown[:5])
        raise NewerFormatError(f"{what} requires {named}, which this aiockpt cannot read: install a newer one")


def _check_keys(body: bytes, tensors: bytes, state: bytes, document: Manifest | Receipt, what: str) -> None:
    """Refuse duplicate keys, without tokenising the two large parts where a quicker check proves that they have none.

    A decoded tensor accounts for 10 quotes (its name, three keys, the dtype), and for 12 where it has axes. When there are
    no more, no key was dropped; an escaped quote or an unknown member only leads to the slow check. A state that encodes
    to the bytes that were read has lost no key, either.
    """
    entries = document.tensors
    if msgspec.json.encode(document.state) == state:
        body = without(body, "state", state)
    with_axes = sum(entry.axes is not msgspec.UNSET for entry in entries.values()) if _AXES in tensors else 0
    if tensors.count(b'"') == 10 * len(entries) + 2 * with_axes:
        body = without(body, "tensors", tensors)
    check_unique_keys(body, what)


class Head(msgspec.Struct, frozen=True):
    """The fields of a manifest that identify its save and order it in time. They order steps, and decide nothing else."""

    id: str
    step: Count
    generation: Count
    sequence: Count
    run: str
    parent: str | None
    attempt: str
    ancestors: Ancestors | msgspec.UnsetType = msgspec.UNSET
    finite: bool | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, manifest: Manifest) -> Head:
        return cls(*(getattr(manifest, name) for name in cls.__struct_fields__))


def decode_head(data: bytes) -> Head | None:
    """Return the head in the first bytes of a manifest, if the digest after it matches. Never raises.

    None proves nothing: the manifest may be damaged, or have been written by a version without that digest. Read it whole.
    """
    at = data.find(_HEAD_SEAL, 0, HEAD_BYTES)
    head, rest = data[:at], data[at + len(_HEAD_SEAL) : HEAD_BYTES]
    written = digest128(head).encode() + b'"'
    if at < 0 or not head.startswith(b'{"format":"aiockpt",') or not rest.startswith(written):
        return None
    try:
        return parse(head + b"}", Head, "a head")
    except ManifestError:
        return None
