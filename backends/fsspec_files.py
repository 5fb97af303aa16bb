"""Upload and reading of data files through the open files of fsspec, on worker threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import anyio

from aiockpt.backends.buffers import Buffers, check_range, ends_early
from aiockpt.backends.fsspec_place import Create, FsspecFile, FsspecPlace, fsspec_errors
from aiockpt.errors import StorageError, StorageTransferError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen

logger = logging.getLogger("aiockpt")

_PIECE_BYTES = 16 << 20


class FsspecStream:
    """The bytes of one data file on their way into a file; see `aiockpt.backends.in_order.ByteSink`."""

    def __init__(self, place: FsspecPlace, key: str, limiter: Limiter) -> None:
        self._place = place
        self._key = key
        self._limiter = limiter
        self._claimed = False
        self._file: FsspecFile | None = None

    def begin(self, create: Create) -> None:
        """Claim the key by creating it empty, and open it for writing. Blocking; call `abort` when it raises."""
        with fsspec_errors("creating", self._key):
            self._place.put_new(self._key, b"", create)
            self._claimed = True
            self._file = self._place.fs.open(self._place.path(self._key), "wb")

    async def send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        await run_blocking(self._limiter, self._send, runs, seen)

    async def finish(self) -> None:
        await run_blocking(self._limiter, self._finish)

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await run_blocking(self._limiter, self._abort)
            except StorageError as error:
                logger.info("what was written of %s is left there: %s", self._key, error)

    def _send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        assert self._file is not None
        for run in runs:
            if seen is not None:
                seen(run)
            with _lost("writing", self._key):
                self._file.write(run)

    def _finish(self) -> None:
        assert self._file is not None
        with _lost("finishing", self._key):
            self._file.close()

    def _abort(self) -> None:
        if self._file is not None:
            with suppress(Exception):  # it is given up
                _discard(self._file)
        if self._claimed:
            self._place.delete([self._key])


class FsspecReader:
    """An object opened for ranged reads; see `aiockpt.storage.backend.Reader`. Each read has a file of its own."""

    def __init__(self, place: FsspecPlace, key: str, size: int, limiter: Limiter) -> None:
        self._place = place
        self._key = key
        self._size = size
        self._limiter = limiter
        self._idle: list[FsspecFile] = []
        self._closed = False

    @property
    def size(self) -> int:
        return self._size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        if self._closed:
            raise UsageError(f"{self._key!r} was closed; open it again")
        buffers = Buffers(into)
        check_range(self._key, offset, buffers.left_bytes, self._size)
        if buffers.left_bytes:
            await run_blocking(self._limiter, self._fill, offset, buffers, seen)

    async def close(self) -> None:
        self._closed = True
        await run_blocking(self._limiter, self._close)

    def _fill(self, offset: int, buffers: Buffers, seen: Seen | None) -> None:
        with fsspec_errors("opening", self._key):
            file = self._idle.pop() if self._idle else self._place.open(self._key)
        try:
            with fsspec_errors("reading", self._key):
                file.seek(offset)
            while buffers.left_bytes:
                wanted = min(buffers.left_bytes, _PIECE_BYTES)
                with fsspec_errors("reading", self._key):
                    piece = file.read(wanted)
                if not piece:
                    raise ends_early(self._key, offset)
                if len(piece) > wanted:
                    raise StorageTransferError(f"{self._key!r}: {len(piece)} bytes came for {wanted}", key=self._key)
                buffers.fill(memoryview(piece), seen)
                offset += len(piece)
        finally:
            self._idle.append(file)
            if self._closed:
                self._close()

    def _close(self) -> None:
        with fsspec_errors("closing", self._key):
            while self._idle:
                self._idle.pop().close()


def _discard(file: FsspecFile) -> None:
    """Close *file* without publishing what it holds, where it knows how to."""
    if (discard := getattr(file, "discard", None)) is None:
        file.close()
    else:
        discard()
        file.closed = True  # type: ignore[attr-defined]  # or collecting it would flush it


@contextmanager
def _lost(doing: str, key: str) -> Iterator[None]:
    """Turn an error of a file system into one of ours that is not retryable: the stream is lost with it."""
    try:
        with fsspec_errors(doing, key):
            yield
    except StorageError as error:
        error.retryable = False
        raise
