"""Decoders of bytes that another program may have written: each one, with valid documents to start from.

A target's `decode` says whether the bytes were accepted; what it raises besides our errors is a finding.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import msgspec

from aiockpt.errors import CorruptionError, ManifestError, UsageError
from aiockpt.format.document import ALGORITHM, seal, unseal
from aiockpt.format.manifest import (
    FileEntry,
    Piece,
    Receipt,
    TensorEntry,
    decode_head,
    decode_manifest,
    decode_receipt,
    encode_manifest,
    encode_receipt,
)
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import MAX_NAME_BYTES, data_path, join_name, prefixes, split_name
from aiockpt.format.safetensors import Entry, decode_header, encode_header
from aiockpt.format.validate import check_manifest, check_receipt
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.tree import Decoder, Encoder
from tests.campaigns.mutations import is_object
from tests.paper import ATTEMPT, paper_receipt

STEP = "step-00000007"
HEADER_BYTES, FILE_BYTES = 4096, 4096 + 96


class Target(msgspec.Struct, frozen=True):
    """A decoder: *decode* says whether it accepted the bytes; *corpus* are some that it does."""

    name: str
    corpus: tuple[bytes, ...]
    decode: Callable[[bytes], bool]


class _NoLeaves:
    """Writes and reads values without a framework."""

    def encode(self, value: Any, path: Any, encoder: Encoder) -> None:
        return None

    def encode_bytes(self, data: bytes, path: Any) -> None:
        return None

    def encode_numbers(self, values: Any, path: Any, *, in_order: bool) -> None:
        return None

    def decode(self, kind: str, node: Any, path: Any, decoder: Decoder) -> Any:
        raise KeyError(kind)


def _receipt(rank: int) -> Receipt:
    file = FileEntry.of(
        data_path(ATTEMPT, rank, 0), size=FILE_BYTES, rank=rank, algo=ALGORITHM, block=HEADER_BYTES, sums=bytes(16)
    )
    return paper_receipt(
        rank,
        id=STEP,
        step=7,
        files=(file,),
        tensors={"w": TensorEntry("F32", (4, 8), (Piece(0, 4096, 4160, (2 * rank, 0), (2, 8)),), (1, 0))},
        alias={"head": "w"},
        state={"step": 7, "lr": [0.1, {"$": "tuple", "items": [1, 2]}]},
    )


def _read_manifest(body: bytes) -> bool:
    decode_head(body)
    if not is_object(body):
        return False
    try:
        check_manifest(decode_manifest(seal(body)), STEP, 1)
    except ManifestError:
        return False
    return True


def _read_receipt(body: bytes) -> bool:
    if not is_object(body):
        return False
    try:
        check_receipt(decode_receipt(seal(body)), STEP, ATTEMPT, 0)
    except ManifestError:
        return False
    return True


def _read_header(text: bytes) -> bool:
    """Read *text* as the JSON of a header, of a file that has the length it asks for."""
    try:
        decode_header(len(text).to_bytes(8, "little") + text, 8 + len(text) + FILE_BYTES - HEADER_BYTES)
    except CorruptionError:
        return False
    return True


def _read_prefix(prefix: bytes) -> bool:
    """Read the first bytes of a file, its length field too."""
    try:
        decode_header(prefix, FILE_BYTES)
    except CorruptionError:
        return False
    return True


def _read_tree(text: bytes) -> bool:
    """Read a tree of plain values, as it would stand in a manifest that was accepted."""
    try:
        node = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # no manifest with this tree is accepted: the other targets look at that
    try:
        Decoder(CodecRegistry(), _NoLeaves()).decode(node, ("state",))
        Decoder(None, _NoLeaves()).decode(node, ("state",))
    except (ManifestError, UsageError):
        return False
    return True


def _read_name(data: bytes) -> bool:
    if len(data) > MAX_NAME_BYTES:
        return False  # as a manifest that held it would be
    name = data.decode(errors="replace")
    prefixes(name)
    try:
        parts = split_name(name)
    except UsageError:
        return False
    assert join_name(parts) == name
    return True


_RECEIPTS = [_receipt(0), _receipt(1)]
_MANIFEST = merge_receipts(_RECEIPTS, writer="aiockpt", write_id="w", created_ns=9)
_HEADER = encode_header((Entry("w", "F32", (2, 8), 0, 64), Entry("b", "U8", (32,), 64, 96)), {"format": "pt"})
_VALUES = (
    {"a": (1, {2, 3}), (1, "b"): [None, True], "big": 10**30, "odd": [math.nan, -math.inf, 1 + 2j, b"\0\1"]},
    [OrderedDict(a=1), defaultdict(list, a=[1]), deque([1], maxlen=3), frozenset("ab"), Counter("aab"), range(3)],
    [
        Decimal("1.5"),
        datetime(2026, 1, 1, tzinfo=UTC),
        timedelta(1),
        UUID(int=7),
        PurePosixPath("a/b"),
        bytearray(b"x"),
    ],
)
_TREES = tuple(
    msgspec.json.encode(Encoder(CodecRegistry(), _NoLeaves()).encode(value, ("state",))) for value in _VALUES
)
TARGETS = {
    target.name: target
    for target in (
        Target("manifest", (unseal(encode_manifest(_MANIFEST), "it"),), _read_manifest),
        Target("receipt", (unseal(encode_receipt(_RECEIPTS[0]), "it"),), _read_receipt),
        Target("header", (_HEADER[8:].rstrip(),), _read_header),
        Target("prefix", (_HEADER,), _read_prefix),
        Target("tree", _TREES, _read_tree),
        Target("name", (b"optimizer.groups[0].lr", rb"a\.b.\e[-3].\[", "é.ü".encode()), _read_name),
    )
}
