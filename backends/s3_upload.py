"""The upload of a data file to S3: blocks in any order become parts; whole parts are sent at once, uncopied.

Guarantees, besides those of the contract:

- A part goes out of the caller's memory; only what covers a part in pieces is copied, until the part is whole. With
  writes at multiples of the part size nothing is copied.
- The key is absent until `finish`, and never one that another writer created meanwhile.
- Failed calls may be repeated: a part that the store has is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from aiockpt.backends.s3_multipart import Multipart
from aiockpt.errors import UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Seen

PART_LIMIT = 10_000
_INLINE_BYTES = 1 << 20  # a hop to a thread costs about as much as hashing this


def choose_part_bytes(size: int, wanted: int) -> int:
    """Return the bytes of a part for a file of *size*: *wanted*, doubled until 10,000 parts are enough."""
    while size > wanted * PART_LIMIT:
        wanted *= 2
    return wanted


class PartPiece(msgspec.Struct, frozen=True):
    """What one write brings for one part: from *start* within it, *views* one after the other."""

    part: int
    start: int
    views: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(len(view) for view in self.views)


def cut(offset: int, runs: Sequence[memoryview], part_bytes: int) -> Iterator[PartPiece]:
    """Yield the pieces of parts that *runs*, one after the other from *offset*, are made of."""
    views: list[memoryview] = []
    start = offset
    for run in runs:
        rest = run.cast("B")
        while len(rest):
            room = part_bytes - offset % part_bytes
            views.append(rest[:room])
            offset += len(views[-1])
            rest = rest[room:]
            if offset % part_bytes == 0:
                yield PartPiece(start // part_bytes, start % part_bytes, tuple(views))
                views, start = [], offset
    if views:
        yield PartPiece(start // part_bytes, start % part_bytes, tuple(views))


class Gathered:
    """A part that arrives in pieces, in memory of its own until it is whole."""

    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytearray(size))
        self._spans: dict[int, int] = {}

    @property
    def filled_bytes(self) -> int:
        """Bytes that are there; what was written twice counts once."""
        return sum(self._spans.values())

    @property
    def whole(self) -> memoryview | None:
        """The part's bytes, or None while some are missing."""
        return self._memory if self.filled_bytes == len(self._memory) else None

    def copy(self, piece: PartPiece) -> None:
        """Copy a piece in. Any thread."""
        cursor = piece.start
        for view in piece.views:
            self._memory[cursor : cursor + len(view)] = view
            cursor += len(view)

    def count(self, piece: PartPiece) -> None:
        """Count a piece that was copied in."""
        self._spans[piece.start] = piece.size


class S3Upload:
    """One data file of *size* bytes under *key*; see `aiockpt.storage.backend.Upload`.

    Args:
        multipart: begun.
        hashing: limits threads that hash.
        left: called once, when this upload is over.
    """

    def __init__(
        self,
        multipart: Multipart,
        key: str,
        size: int,
        part_bytes: int,
        hashing: Limiter,
        left: Callable[[str], object],
    ) -> None:
        self._multipart = multipart
        self._key = key
        self._size = size
        self._part_bytes = choose_part_bytes(size, part_bytes)
        self._part_count = max(1, -(-size // self._part_bytes))
        self._hashing = hashing
        self._left = left
        self._gathered: dict[int, Gathered] = {}
        self._over = False

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._check_open()
        size = sum(run.nbytes for run in runs)
        if offset < 0 or offset + size > self._size:
            raise UsageError(f"{self._key!r}: bytes {offset}..{offset + size} are not within its {self._size}")
        pieces = [piece for piece in cut(offset, runs, self._part_bytes) if piece.part not in self._multipart.sent]
        whole = [piece for piece in pieces if piece.size == self._size_of(piece.part)]
        partial = [(piece, self._gather(piece.part)) for piece in pieces if piece.size != self._size_of(piece.part)]
        sums = await self._hash(size, runs, seen, whole, partial)
        async with open_tasks() as tasks:
            for piece, gathered in partial:
                gathered.count(piece)
                if (memory := gathered.whole) is not None:
                    tasks.start_soon(self._send_gathered, piece.part, memory)
            for piece, checksum in zip(whole, sums, strict=True):
                tasks.start_soon(self._multipart.send, piece.part, piece.views, checksum)

    async def finish(self) -> None:
        self._check_open()
        if not self._size and not self._multipart.sent:
            await self._multipart.send(0, (), self._multipart.sum(()))
        if len(self._multipart.sent) != self._part_count:
            written = sum(part.size for part in self._multipart.sent.values())
            written += sum(part.filled_bytes for part in self._gathered.values())
            raise UsageError(f"{self._key!r}: {written} of {self._size} bytes were written before finish()")
        await self._multipart.complete()
        self._leave()

    async def abort(self) -> None:
        if not self._over:
            self._leave()
            await self._multipart.abort()

    def _leave(self) -> None:
        self._over = True
        self._gathered.clear()
        self._left(self._key)

    def _check_open(self) -> None:
        if self._over:
            raise UsageError(f"{self._key!r} was finished or aborted; create it again")

    def _size_of(self, part: int) -> int:
        return min(self._part_bytes, self._size - part * self._part_bytes)

    def _gather(self, part: int) -> Gathered:
        return self._gathered.setdefault(part, Gathered(self._size_of(part)))

    async def _hash(
        self,
        size: int,
        runs: Sequence[memoryview],
        seen: Seen | None,
        whole: Sequence[PartPiece],
        partial: Sequence[tuple[PartPiece, Gathered]],
    ) -> list[int]:
        """Pass on the runs, copy pieces of parts, and return the sums of the whole ones: all in one hop to a thread."""

        def work() -> list[int]:
            if seen is not None:
                for run in runs:
                    seen(run)
            for piece, gathered in partial:
                gathered.copy(piece)
            return [self._multipart.sum(piece.views) for piece in whole]

        return work() if size < _INLINE_BYTES else await run_blocking(self._hashing, work)

    async def _send_gathered(self, part: int, memory: memoryview) -> None:
        """Send a part that was gathered, and release its memory."""
        checksum = await run_blocking(self._hashing, self._multipart.sum, [memory])
        await self._multipart.send(part, [memory], checksum)
        self._gathered.pop(part, None)
