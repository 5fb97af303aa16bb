"""The upload of blocks in any order to a place that accepts one stream of bytes.

Guarantees, besides those of `aiockpt.storage.backend.Upload`:

- Every byte is sent to the stream once, from the first to the last.
- A block that is next in order is sent from the caller's memory. An early one waits as a copy, so that no order of
  calls can deadlock; the engine's windows come in file order, or nearly.
- A stream cannot be rewound: after the first block that failed or was cancelled the upload refuses everything but
  `abort`, and none of its errors is retryable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import anyio
import numpy as np

from aiockpt.backends.ranges import copy_bytes
from aiockpt.errors import StorageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Progress, Seen


class ByteSink(Protocol):
    """The target of the bytes, in order. Its errors are ours."""

    async def send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Pass each of *runs* to *seen*, then accept it; none of them is used after this returned."""

    async def finish(self) -> None:
        """Make what was sent an object, durably."""

    async def abort(self) -> None:
        """Discard what was sent. Never raises a StorageError."""


class InOrderUpload:
    """One data file of *size* bytes under *key*, sent through *stream*; see `aiockpt.storage.backend.Upload`.

    Args:
        limiter: for the threads that copy and hash early blocks.
    """

    def __init__(self, key: str, size: int, stream: ByteSink, limiter: Limiter) -> None:
        self._progress = Progress(key, size)
        self._stream = stream
        self._limiter = limiter
        self._turn = anyio.Lock(fast_acquire=True)  # first come, first served: the order of the claims
        self._claimed = 0
        self._early: dict[int, memoryview] = {}
        self._failed: BaseException | None = None

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._check_open()
        if not (size := self._progress.check_block(offset, runs)):
            return
        flat = [run.cast("B") for run in runs]
        try:
            if offset == self._claimed:
                await self._send(size, flat, seen)
            else:
                await self._keep(offset, size, flat, seen)
        except BaseException as error:
            self._failed = self._failed or error
            raise
        self._progress.written_bytes += size

    async def finish(self) -> None:
        self._check_open()
        self._progress.check_whole()
        self._progress.over = True
        try:
            await self._stream.finish()
        except BaseException:
            await self._discard()
            raise

    async def abort(self) -> None:
        if not self._progress.over:
            self._progress.over = True
            await self._discard()

    async def _send(self, size: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Send *runs*, whose turn it is, and the blocks that were waiting for them."""
        # Before any await: the next block in order then waits for its turn behind this one, and is not copied.
        self._claimed += size
        following = []
        while (held := self._early.pop(self._claimed, None)) is not None:
            following.append(held)
            self._claimed += held.nbytes
        async with self._turn:
            self._check_open()  # an earlier write in the queue may have failed
            await self._stream.send(runs, seen)
            if following:
                await self._stream.send(following, None)

    async def _keep(self, offset: int, size: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Copy *runs*, to be sent in their turn; send them at once when that has come during the copy."""
        held = await run_blocking(self._limiter, copy_runs, runs, np.empty(size, np.uint8).data, seen)
        if offset == self._claimed:
            await self._send(size, [held], None)
        else:
            self._early[offset] = held

    async def _discard(self) -> None:
        self._early.clear()
        with anyio.CancelScope(shield=True):
            async with self._turn:
                await self._stream.abort()

    def _check_open(self) -> None:
        self._progress.check_open()
        if self._failed is not None:
            key = self._progress.key
            raise StorageError(
                f"{key!r}: an earlier block was not written ({self._failed!r}); abort it and create it again", key=key
            ) from self._failed


def copy_runs(runs: Sequence[memoryview], into: memoryview, seen: Seen | None) -> memoryview:
    """Copy *runs*, each passed to *seen* first, to *into*, and return it. Blocking; without the GIL."""
    start = 0
    for run in runs:
        if seen is not None:
            seen(run)
        if run.nbytes:
            copy_bytes(into[start : start + run.nbytes], run.cast("B"))
        start += run.nbytes
    return into


@contextmanager
def lost_stream() -> Iterator[None]:
    """Mark every error of ours in the block as not retryable: the stream is lost with it."""
    try:
        yield
    except StorageError as error:
        error.retryable = False
        raise
