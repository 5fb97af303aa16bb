"""The upload of a data file to HDFS, where a file is one append-only stream: in parts that are joined, or in order.

- **Parts**, where WebHDFS answers: every ``write`` makes a file of its own below ``<key>.parts/``, on its own pipeline of
  DataNodes, in any order and several at once. `finish` joins them on the NameNode (CONCAT) and renames the whole to its
  key: no byte moves twice.
- **In order**, elsewhere: one stream; a ``write`` that comes early waits, off the threads, until its turn has come.

Guarantees:

- The key is claimed, exclusively, by an empty file from `begin` on; in parts it stays empty until the whole is there.
- When a ``write`` of a part returns, that part was flushed to the disks of its DataNodes (`FlushedWriter`).
- `abort` removes the key and the parts. What a killed writer leaves are objects below its key, which collectors list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import anyio
from hdfs_native import Client

from aiockpt.backends.hdfs_client import FlushedWriter, create_file, hdfs_errors
from aiockpt.backends.hdfs_concat import WebHdfs
from aiockpt.errors import CheckpointError, StorageError, StorageTimeoutError, StorageTransferError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen

TURN_TIMEOUT_S = 600.0
"""A stream that has not moved for so long is missing a block that is never written."""


class _Way(Protocol):
    """A way to turn blocks into the file at *path*."""

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Write non-empty *runs* from *offset*."""

    def stop(self) -> None:
        """Fail the writes that wait for their turn."""

    def close(self) -> None:
        """Complete the file at the key. Blocking."""

    def discard(self) -> None:
        """Remove what there is besides the file at the key. Blocking."""


class HdfsUpload:
    """One data file of *size* bytes under *key*; see `aiockpt.storage.backend.Upload`.

    Args:
        client: of the file system.
        limiter: for the threads that write.
        find_webhdfs: called with the path, date (ms) and owner of the new file; returns the server that joins, if any.
        path: absolute, of the key.
        key: for errors.
        size: bytes.
        turn_timeout_s: how long a stream may stand still while a block waits for its turn.
    """

    def __init__(
        self,
        client: Client,
        limiter: Limiter,
        find_webhdfs: Callable[[str, int, str], WebHdfs | None],
        path: str,
        key: str,
        size: int,
        *,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._limiter = limiter
        self._find_webhdfs = find_webhdfs
        self._path = path
        self._key = key
        self._size = size
        self._turn_timeout_s = turn_timeout_s
        self._way: _Way | None = None
        self._created = False
        self._over = False
        self._written_bytes = 0
        self._writing = 0
        self._idle = anyio.Event()

    def begin(self) -> None:
        """Claim the key, and find out which way to write. Blocking.

        Raises:
            OSError, RuntimeError: the key exists, or HDFS refuses; call `abort` then.
        """
        writer = create_file(self._client, self._path)
        self._created = True
        status = self._client.get_file_info(self._path)
        webhdfs = self._find_webhdfs(self._path, status.modification_time, status.owner)
        if webhdfs is None or not self._size:
            stream = FlushedWriter(writer, status)
            self._way = OrderedStream(stream, self._limiter, self._key, self._turn_timeout_s)
        else:
            writer.close()
            self._way = JoinedParts(
                self._client, self._limiter, webhdfs, status.owner, self._path, self._key, self._size
            )

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        size = sum(run.nbytes for run in runs)
        if offset < 0 or offset + size > self._size:
            raise UsageError(f"{self._key!r}: bytes {offset}..{offset + size} are not within its {self._size}")
        with self._use() as way:
            if size:
                await way.write(offset, runs, seen)
            elif seen is not None:
                for run in runs:
                    seen(run)
        self._written_bytes += size

    async def finish(self) -> None:
        if self._written_bytes != self._size and not self._over:
            raise UsageError(f"{self._key!r}: {self._written_bytes} of {self._size} bytes were written before finish()")
        with self._use() as way:
            self._over = True
            try:
                with hdfs_errors("finishing", self._key):
                    await run_blocking(self._limiter, way.close)
            except BaseException:
                await self._discard()
                raise

    async def abort(self) -> None:
        if self._over:
            return
        self._over = True
        if self._way is not None:
            self._way.stop()
        with anyio.CancelScope(shield=True):
            if self._writing:
                await self._idle.wait()
        await self._discard()

    @contextmanager
    def _use(self) -> Iterator[_Way]:
        """Lend the way to write while the upload is open; `abort` waits for its users."""
        if self._over or self._way is None:
            raise UsageError(f"{self._key!r} was finished or aborted; create it again")
        self._writing += 1
        try:
            yield self._way
        finally:
            self._writing -= 1
            if not self._writing:
                self._idle.set()
                self._idle = anyio.Event()

    async def _discard(self) -> None:
        """Remove the file and its parts, also when cancelled. What cannot be removed remains for a collector."""
        if self._created:
            with anyio.CancelScope(shield=True), suppress(CheckpointError), hdfs_errors("removing", self._key):
                await run_blocking(self._limiter, self._remove)

    def _remove(self) -> None:
        self._client.delete(self._path)
        if self._way is not None:
            self._way.discard()


class JoinedParts:
    """A file for each block, joined at the end."""

    def __init__(
        self, client: Client, limiter: Limiter, webhdfs: WebHdfs, user: str, path: str, key: str, size: int
    ) -> None:
        self._client = client
        self._limiter = limiter
        self._webhdfs = webhdfs
        self._user = user
        self._path = path
        self._folder = f"{path}.parts"
        self._key = key
        self._size = size
        self._parts: dict[int, str] = {}

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        with hdfs_errors("writing", self._key):
            await run_blocking(self._limiter, self._write_part, offset, runs, seen)

    def stop(self) -> None:
        """Does nothing: no part waits for another."""

    def close(self) -> None:
        whole, *others = [self._parts[offset] for offset in sorted(self._parts)]
        if others:
            self._webhdfs.concat(whole, others, self._user)
        joined_bytes = self._client.get_file_info(whole).length
        if joined_bytes != self._size:
            raise StorageTransferError(
                f"{self._key!r}: its {len(self._parts)} parts have {joined_bytes} bytes together, not {self._size}",
                key=self._key,
                retryable=False,
            )
        self._rename(whole)
        self._client.delete(self._folder, recursive=True)

    def discard(self) -> None:
        self._client.delete(self._folder, recursive=True)

    def _write_part(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        path = f"{self._folder}/{offset:016x}"  # names sort as offsets do
        # A part that failed is written again from its start, if it is: its name is used nowhere else.
        created = create_file(self._client, path, overwrite=True)
        writer = FlushedWriter(created, self._client.get_file_info(path))
        _write_runs(writer, runs, seen)
        writer.close()
        self._parts[offset] = path

    def _rename(self, whole: str) -> None:
        try:
            self._client.rename(whole, self._path, overwrite=True)
        except FileNotFoundError:  # the client sends again when the connection broke: the first one may have arrived
            if self._client.get_file_info(self._path).length != self._size:
                raise


class OrderedStream:
    """One stream, to which blocks are added in the order of their offsets."""

    def __init__(self, writer: FlushedWriter, limiter: Limiter, key: str, turn_timeout_s: float) -> None:
        self._writer = writer
        self._limiter = limiter
        self._key = key
        self._turn_timeout_s = turn_timeout_s
        self._position = 0  # not the writer's own size, which grows before its thread is done
        self._moved = anyio.Event()
        self._broken = ""

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        await self._wait_turn(offset)
        try:
            with hdfs_errors("writing", self._key):
                await run_blocking(self._limiter, _write_runs, self._writer, runs, seen)
        except BaseException as error:
            self._break(f"an earlier block failed: {error!r}")
            if isinstance(error, StorageError):
                error.retryable = False  # some of it may be in the stream: it cannot be sent again
            raise
        self._position = offset + sum(run.nbytes for run in runs)
        self._move()

    def stop(self) -> None:
        self._break("it was aborted")

    def close(self) -> None:
        self._writer.close()

    def discard(self) -> None:
        """Does nothing: the stream is all there is."""

    async def _wait_turn(self, offset: int) -> None:
        while self._position != offset or self._broken:
            if self._broken:
                raise StorageError(f"{self._key!r} takes no more: {self._broken}; create it again", key=self._key)
            with anyio.move_on_after(self._turn_timeout_s) as waited:
                await self._moved.wait()
            if waited.cancelled_caught:
                raise StorageTimeoutError(
                    f"{self._key!r}: byte {self._position} was not written for {self._turn_timeout_s:g} s, and byte"
                    f" {offset} waits for it; write blocks that follow each other, or give WebHDFS (?webhdfs=http://…)",
                    key=self._key,
                    retryable=False,
                )

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._move()

    def _move(self) -> None:
        """Wake the waiting writes, to check again."""
        self._moved.set()
        self._moved = anyio.Event()


def _write_runs(writer: FlushedWriter, runs: Sequence[memoryview], seen: Seen | None) -> None:
    for run in runs:
        if seen is not None:
            seen(run)
        if run.nbytes:
            writer.write(run.cast("B"))
