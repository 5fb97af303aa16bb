"""The upload of a data file to S3: blocks in any order become the parts of a multipart upload.

Guarantees, besides those of the contract:

- A whole part is sent at once, from the caller's memory, after its checksum, and cancelled when it stalls; only writes
  that cover a part in pieces are copied, until it is whole. With writes at multiples of the part size nothing is copied.
- The key is absent until `finish`, which never replaces an object of another writer: completion states that condition,
  and a checksum over all of it where those of the parts can be combined. An answer lost after its effect is a success.
- Failed calls may be repeated: a part that the store has is not sent again.
- ``abort``, and a ``begin`` that failed, leave no upload behind, unless the store cannot be reached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import msgspec

from aiockpt.backends.s3_body import Body, Checks
from aiockpt.backends.s3_client import Bucket
from aiockpt.backends.s3_create import WRITE_ID, Creator
from aiockpt.errors import StorageError
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.storage.backend import Progress, Seen

PART_LIMIT = 10_000
_INLINE_BYTES = 1 << 20  # a hop to a thread costs about as much as hashing this
# Among the parameters of a checksum: each part states its own; no parameter of S3.
_IN_PARTS = "in parts"


def choose_part_bytes(size: int, wanted: int) -> int:
    """Return the bytes of a part for a file of *size*: *wanted*, doubled until 10,000 parts are enough."""
    while size > wanted * PART_LIMIT:
        wanted *= 2
    return wanted


class PartPiece(msgspec.Struct, frozen=True):
    """The piece of one part in one write: from *start* within the part, *views* one after the other."""

    part: int
    start: int
    views: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        return sum(len(view) for view in self.views)


def cut(offset: int, runs: Sequence[memoryview], part_bytes: int) -> Iterator[PartPiece]:
    """Cut *runs*, one after the other from *offset*, into pieces of parts."""
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
        """Bytes that were written; those written twice count once."""
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
        multipart: the multipart upload, begun.
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
        self._progress = Progress(key, size)
        self._part_bytes = choose_part_bytes(size, part_bytes)
        self._part_count = max(1, -(-size // self._part_bytes))
        self._hashing = hashing
        self._left = left
        self._gathered: dict[int, Gathered] = {}

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._progress.check_open()
        size = self._progress.check_block(offset, runs)
        pieces = [piece for piece in cut(offset, runs, self._part_bytes) if piece.part not in self._multipart.sent]
        whole = [piece for piece in pieces if piece.size == self._size_of(piece.part)]
        partial = [(piece, self._gather(piece.part)) for piece in pieces if piece.size != self._size_of(piece.part)]
        sums = await self._hash(size, runs, seen, whole, partial)
        async with open_tasks() as tasks:
            for piece, gathered in partial:
                # Counted here, on the loop, after the copy: of several writes only the last one finds the part whole.
                gathered.count(piece)
                if (memory := gathered.whole) is not None:
                    tasks.start_soon(self._send_gathered, piece.part, memory)
            for piece, checksum in zip(whole, sums, strict=True):
                tasks.start_soon(self._multipart.send, piece.part, piece.views, checksum)

    async def finish(self) -> None:
        self._progress.check_open()
        # A multipart upload needs a part, also for no bytes.
        if not self._progress.size and not self._multipart.sent:
            await self._multipart.send(0, (), self._multipart.sum(()))
        if len(self._multipart.sent) != self._part_count:
            written = sum(part.size for part in self._multipart.sent.values())
            written += sum(part.filled_bytes for part in self._gathered.values())
            raise self._progress.incomplete(written)
        await self._multipart.complete()
        self._leave()

    async def abort(self) -> None:
        if not self._progress.over:
            self._leave()
            await self._multipart.abort()

    def _leave(self) -> None:
        self._progress.over = True
        self._gathered.clear()
        self._left(self._progress.key)

    def _size_of(self, part: int) -> int:
        return min(self._part_bytes, self._progress.size - part * self._part_bytes)

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
        """Pass the runs to *seen*, copy pieces of parts, and return the sums of the whole ones, in one hop to a thread."""

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


class SentPart(msgspec.Struct, frozen=True):
    """A part that the store has: its name there, its checksum (0 without one), and its bytes."""

    etag: str
    sum: int
    size: int


class Multipart:
    """One multipart upload to *key*; parts are counted from 0.

    Args:
        sending: limits parts under way.

    Attributes:
        sent: the parts that the store has, by number.
    """

    def __init__(self, bucket: Bucket, creator: Creator, key: str, checks: Checks, sending: Limiter) -> None:
        self._bucket = bucket
        self._creator = creator
        self._key = key
        self._checks = checks
        self._sending = sending
        self._write_id = creator.new_write_id()
        self._upload_id = ""
        self.sent: dict[int, SentPart] = {}

    def sum(self, views: Sequence[memoryview]) -> int:
        """Return the checksum of a part, for `send`. Any thread."""
        return 0 if (summing := self._checks.summing) is None else summing.of(views)

    async def begin(self) -> None:
        """Start the upload."""
        summing = self._checks.summing
        checked = {} if summing is None else {"ChecksumAlgorithm": summing.name, "ChecksumType": "FULL_OBJECT"}
        client = await self._bucket.client()
        where, metadata = self._bucket.address(self._key), {WRITE_ID: self._write_id}
        try:
            with self._bucket.errors("creating", self._key):
                answer = await self._checks.send(
                    checked, lambda check: client.create_multipart_upload(**where, Metadata=metadata, **check)
                )
        except BaseException as error:
            if not isinstance(error, StorageError) or error.retryable:  # it may have been started
                with anyio.CancelScope(shield=True), suppress(StorageError):
                    # Its id is not known, so every upload of this key goes: no other writer has the nonce in its name.
                    await abort_uploads(self._bucket, self._key)
            raise
        self._upload_id = answer["UploadId"]

    async def send(self, part: int, views: Sequence[memoryview], checksum: int) -> None:
        """Send one part; *views* must not change until this returns."""
        client = await self._bucket.client()
        async with self._sending:
            with self._bucket.sending(f"writing part {part + 1} of", self._key) as moved:
                address = {**self._bucket.address(self._key), "UploadId": self._upload_id, "PartNumber": part + 1}
                answer = await self._checks.send(
                    self._check(checksum),
                    lambda check: client.upload_part(**address, **check, Body=Body(views, moved) if views else b""),
                )
                self.sent[part] = SentPart(answer["ETag"], checksum, sum(len(view) for view in views))

    async def complete(self) -> None:
        """Create the key from the parts sent, in their order."""
        try:
            await self._complete()
        except StorageError as error:
            if not await self._creator.was_ours(self._key, self._write_id, error):
                raise

    async def abort(self) -> None:
        """Remove the upload. Never raises a StorageError."""
        if self._upload_id:
            with anyio.CancelScope(shield=True), suppress(StorageError):
                await abort_uploads(self._bucket, self._key, self._upload_id)

    async def _complete(self) -> None:
        numbers = sorted(self.sent)
        client = await self._bucket.client()
        condition = self._creator.condition

        def complete(check: Mapping[str, Any]) -> Awaitable[Any]:
            parts = [
                {
                    "PartNumber": number + 1,
                    "ETag": self.sent[number].etag,
                    **(self._check(self.sent[number].sum) if check else {}),
                }
                for number in numbers
            ]
            whole = {name: value for name, value in check.items() if name != _IN_PARTS}
            return client.complete_multipart_upload(  # type: ignore[no-any-return,unused-ignore]
                **self._bucket.address(self._key),
                **whole,
                **condition,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )

        with self._bucket.errors("finishing", self._key):
            await self._checks.send(self._check_all([self.sent[number] for number in numbers]), complete)

    def _check(self, value: int) -> dict[str, str]:
        return {} if (summing := self._checks.summing) is None else summing.field(value)

    def _check_all(self, parts: Sequence[SentPart]) -> dict[str, str]:
        """Return the parameters that state that the parts have checksums, and that of all of them where it is known."""
        if (summing := self._checks.summing) is None:
            return {}
        value = summing.of_all([(part.sum, part.size) for part in parts])
        return (
            {_IN_PARTS: ""} if value is None else {_IN_PARTS: "", "ChecksumType": "FULL_OBJECT", **self._check(value)}
        )


async def abort_uploads(bucket: Bucket, key: str, upload_id: str = "") -> None:
    """Remove the multipart upload *upload_id* of *key*; all uploads of exactly that key when it is ""."""
    client = await bucket.client()
    with bucket.errors("aborting the upload of", key):
        ids = [upload_id] if upload_id else []
        if not ids:
            answer = await client.list_multipart_uploads(Bucket=bucket.name, Prefix=bucket.path(key))
            ids = [found["UploadId"] for found in answer.get("Uploads", ()) if found["Key"] == bucket.path(key)]
        for one in ids:
            await client.abort_multipart_upload(**bucket.address(key), UploadId=one)
