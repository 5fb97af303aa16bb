"""Reading of an S3 object: ranged GETs, read into the caller's memory as they arrive.

Guarantees, besides those of the contract:

- All reads of one reader are of one object: each requires the ETag that ``open`` saw.
- An answer that is cut short, or is not the requested range, is a `StorageTransferError`; ``seen`` has been called by
  then with nothing of it, so that the read can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiockpt.backends.buffers import check_range
from aiockpt.backends.s3_client import Bucket
from aiockpt.backends.s3_wire import Sink, receive
from aiockpt.errors import ObjectExistsError, StorageError, StorageTransferError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen

_INLINE_BYTES = 1 << 20  # a hop to a thread costs about as much as hashing this


class S3Reader:
    """An object as it was when it was opened; see `aiockpt.storage.backend.Reader`."""

    def __init__(self, bucket: Bucket, key: str, size: int, etag: str, hashing: Limiter) -> None:
        self._bucket = bucket
        self._key = key
        self._size = size
        self._etag = etag
        self._hashing = hashing
        self._closed = False

    @property
    def size(self) -> int:
        return self._size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        if self._closed:
            raise UsageError(f"{self._key!r} was closed; open it again")
        views = [view.cast("B") for view in into if view.nbytes]
        wanted = sum(len(view) for view in views)
        check_range(self._key, offset, wanted, self._size)
        if not wanted:
            return
        await self._get(offset, wanted, views)
        if seen is not None:
            await self._show(views, wanted, seen)

    async def close(self) -> None:
        self._closed = True

    async def _get(self, offset: int, wanted: int, views: Sequence[memoryview]) -> None:
        client = await self._bucket.client()
        sink = Sink(views)
        try:
            with self._bucket.sending("reading", self._key) as moved:
                answer = await client.get_object(
                    Bucket=self._bucket.name,
                    Key=self._bucket.path(self._key),
                    Range=f"bytes={offset}-{offset + wanted - 1}",
                    IfMatch=self._etag,
                )
                async with answer["Body"] as body:
                    self._check_range(answer.get("ContentRange", ""), offset, wanted)
                    await receive(body.raw_stream, sink, moved)
        except ObjectExistsError as error:  # a condition failed: the one that we sent
            raise StorageError(f"{self._key!r} was replaced while it was read; open it again", key=self._key) from error
        if sink.came_bytes != wanted:
            came = sink.came_bytes
            raise StorageTransferError(f"{self._key!r}: {came} bytes came and {wanted} were asked for", key=self._key)

    def _check_range(self, said: str, offset: int, wanted: int) -> None:
        """Refuse another range than the requested one; a store that ignores the header sends the whole object."""
        if said.removeprefix("bytes ").partition("/")[0] == f"{offset}-{offset + wanted - 1}":
            return
        if not (said or offset or wanted != self._size):
            return
        raise StorageTransferError(
            f"{self._key!r}: asked for bytes {offset}..{offset + wanted - 1}, the answer says {said or 'everything'!r}",
            key=self._key,
        )

    async def _show(self, views: Sequence[memoryview], size: int, seen: Seen) -> None:
        """Pass all bytes to *seen*: after they came, and in one hop, as each hop costs training a wait for the GIL."""
        if size < _INLINE_BYTES:
            _show_all(views, seen)
        else:
            await run_blocking(self._hashing, _show_all, views, seen)


def _show_all(views: Sequence[memoryview], seen: Seen) -> None:
    for view in views:
        seen(view)
