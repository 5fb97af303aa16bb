"""The upload of a data file through obstore: a stream, part by part, with several parts in flight.

Guarantees:

- Until `finish` the key holds the small object that claimed it; then, at once, the whole file.
- `abort` removes the parts that were sent, and the claim.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import obstore

from aiockpt.backends.cloud_errors import cloud_errors
from aiockpt.backends.in_order import copy_runs
from aiockpt.errors import StorageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger("aiockpt")

PARTS = 4
_PART_BYTES = 16 << 20
_PART_STEP_BYTES = 8 << 20
_MOST_PARTS = 10_000


class CloudStream:
    """The bytes of one data file on their way into an object; see `aiockpt.backends.in_order.ByteSink`.

    Args:
        store: removes the claim when the upload is aborted.
        uploading: the same place, through a client that sends a failed part again.
        key: the claimed key.
        size: bytes that will be sent.
        limiter: for the threads that copy and hash.
    """

    def __init__(self, store: ObjectStore, uploading: ObjectStore, key: str, size: int, limiter: Limiter) -> None:
        self._store = store
        self._key = key
        self._limiter = limiter
        self._memory = PartMemory()
        self._writer = obstore.open_writer_async(uploading, key, buffer_size=part_bytes(size), max_concurrency=PARTS)

    async def send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        for run in runs:  # one at a time, so that no more is copied than can be sent
            part = await run_blocking(self._limiter, copy_runs, [run], self._memory.lend(run.nbytes), seen)
            with _lost("writing", self._key):
                await self._writer.write(part)

    async def finish(self) -> None:
        with _lost("finishing", self._key):
            await self._writer.close()

    async def abort(self) -> None:
        error = StorageError(f"{self._key!r} was aborted", key=self._key)
        await self._try("its parts", self._writer.__aexit__(type(error), error, None))
        await self._try("its claim", self._release())

    async def _try(self, what: str, removing: Awaitable[object]) -> None:
        try:
            with cloud_errors("aborting", self._key):
                await removing
        except StorageError as error:
            logger.info("%s: %s will stay for the store's own cleaning: %s", self._key, what, error)

    async def _release(self) -> None:
        with suppress(FileNotFoundError):
            await obstore.delete_async(self._store, self._key)


class PartMemory:
    """Memory for the parts in flight, reused once the client has released it.

    The client keeps a reference to what it is given and does not report when it drops it; but a view that is still
    referenced cannot be released. (A copy into new memory instead costs twice the processor time: pages are faulted in.)
    """

    def __init__(self) -> None:
        self._lent: list[tuple[memoryview, memoryview]] = []

    def lend(self, size_bytes: int) -> memoryview:
        """Return *size_bytes* without any other reference to them."""
        memory = self._take_back(size_bytes) or np.empty(size_bytes, np.uint8).data
        view = memory[:size_bytes]
        self._lent.append((memory, view))
        return view

    def _take_back(self, size_bytes: int) -> memoryview | None:
        for index, (memory, view) in enumerate(self._lent):
            if memory.nbytes < size_bytes:
                continue
            with suppress(BufferError):
                view.release()
                del self._lent[index]
                return memory
        return None


@contextmanager
def _lost(doing: str, key: str) -> Iterator[None]:
    """Turn an error of obstore into one of ours that is not retryable: the stream is lost with it."""
    try:
        with cloud_errors(doing, key):
            yield
    except StorageError as error:
        error.retryable = False
        raise


def part_bytes(size: int) -> int:
    """Return the bytes of a part of a file of *size* bytes: a multiple of 8 MiB, few enough parts for any store."""
    return max(_PART_BYTES, -(-size // _MOST_PARTS // _PART_STEP_BYTES) * _PART_STEP_BYTES)
