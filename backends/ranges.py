"""Ranged reads: the checks and buffers that all backends share.

`RangeReader` checks a read and calls the function that fetches the bytes; `Buffers` are the caller's buffers as one row
of bytes, copied to once, and shown where the bytes land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from aiockpt.errors import StorageError, UsageError
from aiockpt.storage.backend import Seen

_BUFFERS_PER_CALL = 1024  # IOV_MAX on Linux
_COPY_HOLDING_THE_GIL_BYTES = 1 << 15  # below this numpy's set-up costs more than the wait for the GIL


class Buffers:
    """The caller's buffers as one row of bytes, filled from the front."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._views = deque(view.cast("B") for view in into if view.nbytes)
        self.size_bytes = self.left_bytes = sum(view.nbytes for view in self._views)

    @property
    def filled_bytes(self) -> int:
        return self.size_bytes - self.left_bytes

    @property
    def views(self) -> Sequence[memoryview]:
        """The unfilled memory."""
        return tuple(self._views)

    @property
    def room(self) -> memoryview | None:
        """The memory for the next bytes; None when all is full."""
        return self._views[0] if self._views else None

    def peek(self, limit_bytes: int) -> list[memoryview]:
        """Return the next unfilled runs, *limit_bytes* and one system call's number of buffers at most in all."""
        runs: list[memoryview] = []
        for view in self._views:
            if limit_bytes <= 0 or len(runs) == _BUFFERS_PER_CALL:
                break
            size = view.nbytes
            runs.append(view if size <= limit_bytes else view[:limit_bytes])
            limit_bytes -= size
        return runs

    def take(self, size_bytes: int) -> Iterator[memoryview]:
        """Yield the next *size_bytes* in runs: they are filled, or about to be."""
        views = self._views
        while size_bytes:
            run = views.popleft()
            if run.nbytes > size_bytes:
                views.appendleft(run[size_bytes:])
                run = run[:size_bytes]
            size = run.nbytes
            self.left_bytes -= size
            size_bytes -= size
            yield run

    def advance(self, size_bytes: int) -> None:
        """Record that the next *size_bytes* are filled."""
        for _ in self.take(size_bytes):
            pass

    def fill(self, data: memoryview, seen: Seen | None = None) -> None:
        """Copy *data*, which fits, and pass each run to *seen* in its new place. Blocking; large runs without the GIL."""
        done = 0
        for run in self.take(data.nbytes):
            copy_bytes(run, data[done : done + run.nbytes])
            if seen is not None:
                seen(run)
            done += run.nbytes


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy; large runs without the GIL (a memoryview assignment of 64 MiB holds it for 12 ms, `copyto` does not)."""
    if target.nbytes < _COPY_HOLDING_THE_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def check_range(key: str, offset: int, wanted_bytes: int, size_bytes: int, *, damaged: bool = False) -> None:
    """Check that *wanted_bytes* from *offset* lie within the object *key* of *size_bytes*.

    Raises:
        UsageError: *offset* is negative.
        StorageError: the object ends before that.
    """
    if offset < 0:
        raise UsageError(f"{key!r}: there is no byte {offset}")
    if offset + wanted_bytes > size_bytes:
        raise ends_early(key, size_bytes, damaged=damaged)


def ends_early(key: str, size_bytes: int, *, damaged: bool = False) -> StorageError:
    """Return the error that the object *key* ends after *size_bytes*, before the buffers are full."""
    message = f"{key!r} ends at byte {size_bytes}, and more was asked for: it is truncated"
    return StorageError(message, key=key, damaged=damaged)


class RangeReader:
    """The object *key* of *size* bytes, opened for ranged reads; see `aiockpt.storage.backend.Reader`.

    Args:
        fill: reads from an offset into buffers, at least one byte, all of it within the object, and shows it.
        release: called by the first `close`.
    """

    def __init__(
        self,
        key: str,
        size: int,
        fill: Callable[[int, Buffers, Seen | None], Awaitable[None]],
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._key = key
        self.size = size
        self._fill = fill
        self._release = release
        self._closed = False

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        if self._closed:
            raise UsageError(f"{self._key!r} was closed; open it again")
        buffers = Buffers(into)
        check_range(self._key, offset, buffers.left_bytes, self.size)
        if buffers.left_bytes:
            await self._fill(offset, buffers, seen)

    async def close(self) -> None:
        self._closed = True
        if self._release is not None:
            await self._release()
