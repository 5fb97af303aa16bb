"""Checksums, and the documents that are sealed with them (manifest, receipt): small, and parsed safely for any content.

A sealed document is one line of JSON whose last member is the digest of every byte before it
(docs/format.md#sealed-documents). The digest is compared *before* anything is parsed. It finds damage, not malice, so
parsing trusts nothing either.

Guarantees:

- `unseal` returns the very bytes that `seal` was given, or raises `ManifestError`.
- `parse` raises `ManifestError` and nothing else, for any bytes.
- A document in which an object has the same key twice is refused, because readers would differ about it.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec
import numpy as np
import xxhash

from aiockpt.errors import ManifestError

# Checksums that prove bytes to be those that were saved: xxh3_64 over file blocks, xxh3_128 over documents.
#
# Guarantees:
#
# - One block, one sum of 8 bytes (big-endian, xxHash's canonical form); the last block of a file may be shorter.
# - Hashing releases the GIL and copies nothing; buffers must be C-contiguous.
#
# xxh3 finds damage, not malice: a digest that fits proves no author (docs/format.md#checksums). One CPU hashes 39 GB/s.


ALGORITHM = "xxh3_64"
BLOCK_BYTES = 8 << 20
SUM_BYTES = 8


class BlockHasher:
    """The sum of one block whose bytes arrive in several runs.

    Attributes:
        update: adds the block's next bytes.
        digest: returns the sum of what was added so far (8 bytes).
    """

    def __init__(self) -> None:
        state = xxhash.xxh3_64()
        self.update: Callable[[memoryview], None] = state.update
        self.digest: Callable[[], bytes] = state.digest


def hash_block(data: bytes | bytearray | memoryview) -> bytes:
    """Return the sum of one whole block (8 bytes)."""
    return xxhash.xxh3_64_digest(data)


def digest128(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of a document or a list of sums: ``xxh3_128:`` and 32 hex digits."""
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def block_count(size: int, block_bytes: int) -> int:
    """Return how many blocks a file of *size* bytes has."""
    return -(-size // block_bytes)


def block_range(index: int, size: int, block_bytes: int) -> tuple[int, int]:
    """Return the half-open byte range of block *index* in a file of *size* bytes."""
    start = index * block_bytes
    return start, min(start + block_bytes, size)


# Sealed documents, proven by their own digest.

MAX_DOCUMENT_BYTES = 256 << 20
MAX_TREE_BYTES = 16 << 20
MAX_TREE_NODES = 10**6
MAX_TREE_DEPTH = 256
"""JSON levels. A state has at most 64 (docs/format.md#limits); its tags need up to three levels each."""

_SEAL = b',"digest":"'
_SEAL_BYTES = len(_SEAL) + len("xxh3_128:") + 32 + len(b'"}\n')
# Possessive quantifiers: without backtracking the time is linear for any bytes, a hostile document among them.
_TOKEN = re.compile(rb'[{}]|"(?:[^"\\]++|\\.)*+"[ \t\r\n]*+:?', re.DOTALL)
_NOT_STRUCTURE = bytes(sorted(set(range(256)) - set(b"[]{},")))
_LEVELS = np.zeros(256, np.int8)
_LEVELS[list(b"[{")] = 1
_LEVELS[list(b"]}")] = -1

RARELY = 10_000_019
"""New objects between two passes of a collector that is paused: more than any document has. The number is unusual, which
distinguishes our threshold from one that the program has set."""
_pauses: list[None] = []
"""The pauses under way, of all threads."""
_usual: tuple[int, ...] = ()
"""The thresholds before the first of them."""

T = TypeVar("T")


def seal(body_json: bytes) -> bytes:
    """Return the document of *body_json*, a JSON object with at least one member, with its digest as the last member.

    Raises:
        ManifestError: it would be larger than a reader accepts.
    """
    if not (body_json.startswith(b"{") and body_json.endswith(b"}") and len(body_json) > 2):
        raise ValueError("only a JSON object with at least one member can be sealed")
    head = body_json[:-1]
    if len(head) + _SEAL_BYTES > MAX_DOCUMENT_BYTES:
        raise ManifestError(
            f"the document has {len(body_json)} bytes, more than {MAX_DOCUMENT_BYTES}: store fewer, larger tensors"
        )
    return b"".join([head, _SEAL, digest128(head).encode(), b'"}\n'])


_ADVICE = "Load another step, or another copy of this one."


def unseal(data: bytes, what: str) -> bytes:
    """Return the body of a sealed document, as plain JSON without the digest.

    Args:
        what: the document's name for messages.

    Raises:
        ManifestError: it is too large, torn, or its bytes are not those that were sealed.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ManifestError(f"{what} has {len(data)} bytes, more than the {MAX_DOCUMENT_BYTES} any document has")
    head, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if not (tail.startswith(_SEAL) and tail.endswith(b'"}\n')):
        raise ManifestError(f"{what} does not end with its digest: it is torn or no document of aiockpt. {_ADVICE}")
    written = tail[len(_SEAL) : -len(b'"}\n')]
    found = digest128(head).encode()
    if written != found:
        raise ManifestError(
            f"{what} is damaged: its digest says {written.decode('ascii', 'replace')}, its bytes {found.decode()}. {_ADVICE}"
        )
    return head + b"}"


_described: set[object] = set()
_describing = threading.Lock()
_DESCRIBING_S = 0.25
"""Long for one description. A process forked while another thread held the lock waits no longer for it."""


def described(kind: T) -> T:
    """Return *kind*, which may be decoded on any thread from now on.

    msgspec describes a Struct when it is first decoded, and a second thread that finds the description half-made ends the
    process with a segmentation fault (0.22.0). So each type is described once, by one thread.
    """
    if kind not in _described:
        _describe(kind)
    return kind


def _describe(kind: object) -> None:
    held = _describing.acquire(timeout=_DESCRIBING_S)
    try:
        msgspec.json.Decoder(kind)
        _described.add(kind)
    finally:
        if held:
            _describing.release()


def parse(body: bytes | msgspec.Raw, kind: type[T], what: str) -> T:
    """Decode JSON from outside as *kind*, with the garbage collector paused.

    Raises:
        ManifestError: it is not JSON, too deep, or does not have the form of *kind*.
    """
    try:
        with collector_paused():
            return msgspec.json.decode(body, type=described(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the last two through
        raise ManifestError(f"{what} cannot be read: {error}") from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from walking the growing result again and again (2–10 × slower).

    The program decides whether the collector is on: many trainers call ``gc.disable()`` and collect at chosen steps, and
    may do so on another thread during a pause. So the collector is not switched off: its threshold is raised, and is
    restored when the last pause ends, unless another one was set meanwhile.
    """
    global _usual
    _pauses.append(None)  # one call of C code, like `pop`: two threads cannot lose a count
    first, *others = gc.get_threshold()
    # 0 means that the program has switched automatic collection off. RARELY was set by another pause, and `_usual`
    # has the thresholds before that.
    if 0 < first < RARELY:
        _usual = (first, *others)
        gc.set_threshold(RARELY, *others)
    try:
        yield
    finally:
        _pauses.pop()
        now, *others = gc.get_threshold()
        if not _pauses and now == RARELY and others == list(_usual[1:]):
            gc.set_threshold(*_usual)


def check_unique_keys(body: bytes, what: str) -> None:
    """Refuse valid JSON in which an object has a key twice: msgspec would keep the last one, other readers the first.

    Raises:
        ManifestError: names the key.
    """
    open_objects: list[set[bytes]] = []
    for token in _TOKEN.findall(body):
        if token == b"{":
            open_objects.append(set())
        elif token == b"}":
            open_objects.pop()
        elif token.endswith(b":"):
            quoted = token[:-1].rstrip()
            # A key with escapes may be another spelling of one without.
            key = parse(quoted, str, what).encode() if b"\\" in quoted else quoted[1:-1]
            if key in open_objects[-1]:
                raise ManifestError(f"{what} has the key {key.decode('utf-8', 'replace')!r} twice in one object")
            open_objects[-1].add(key)


def without(body: bytes, member: str, part: bytes, instead: bytes = b"{}") -> bytes:
    """Return valid JSON *body* with *instead* for *part* where a member of that name has it, at any depth; else *body*.

    A quoted name and a colon are a key: in a string the quotes would be escaped.
    """
    found = body.find(f'"{member}":'.encode())
    start = found + len(member) + 3
    if found < 0 or not body.startswith(part, start):
        return body
    return b"".join((body[:start], instead, memoryview(body)[start + len(part) :]))


# A memo of the last questions: a job saves one structure repeatedly; results that follow from it alone are computed once.
#
# A question is compared by its value, never by its name or place, so an answer is right for any caller. Comparing equal
# structures is one pass in C; it saves some sixty calls of Python a tensor, on the thread that all saves share.

Q = TypeVar("Q")
A = TypeVar("A")


class Memo(Generic[Q, A]):
    """The last questions and their answers. None may be changed once it is `remember`\\ ed. Any thread.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._last: tuple[tuple[Q, A], ...] = ()

    def recall(self, question: Q) -> A | None:
        """Return the answer to *question*; None when that was not one of the last."""
        return next((answer for asked, answer in self._last if asked == question), None)

    def remember(self, question: Q, answer: A) -> A:
        """Store *answer*, and return it."""
        # Replaced as a whole: another thread may be reading it.
        self._last = ((question, answer), *self._last[: self._most - 1])
        return answer


MEMO_BYTES = 1 << 20
"""The most bytes of JSON that are kept in memory to be compared with the next document."""
MEMO_PIECES = 100_000
"""The most pieces of a layout that is kept likewise."""
_trees: Memo[bytes, int] = Memo()


def check_tree(raw: bytes, what: str) -> int:
    """Check valid JSON of any form against the limits of an inline tree, before it is decoded; return its node count.

    The count is an upper bound; an empty list costs 80 bytes of memory for 3 bytes of JSON, so it is bounded first.

    Raises:
        ManifestError: it is too large, has too many nodes or is too deep.
    """
    if len(raw) > MAX_TREE_BYTES:
        raise ManifestError(f"{what} has {len(raw)} bytes of plain values, more than {MAX_TREE_BYTES}: use tensors")
    nodes = _count_nodes(raw)
    if nodes <= MAX_TREE_DEPTH:  # also bounds the depth
        return nodes
    known = _trees.recall(raw)  # the tree of a receipt is in the manifest, too
    return _check_structure(raw, what) if known is None else known


def _check_structure(raw: bytes, what: str) -> int:
    # Escapes are removed first, backslashes in pairs from the left: then each quote begins or ends a string.
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    bare = b"".join(unescaped.split(b'"')[::2])
    structure = bare.translate(None, delete=_NOT_STRUCTURE)
    nodes = _count_nodes(structure)
    if nodes > MAX_TREE_NODES:
        raise ManifestError(f"{what} has more than {MAX_TREE_NODES} values: use tensors")
    depth = np.cumsum(_LEVELS[np.frombuffer(structure, np.uint8)], dtype=np.int64).max(initial=0)
    if depth > MAX_TREE_DEPTH:
        raise ManifestError(f"{what} is nested deeper than {MAX_TREE_DEPTH} levels")
    return _trees.remember(raw, nodes) if len(raw) <= MEMO_BYTES else nodes


def _count_nodes(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + 1
