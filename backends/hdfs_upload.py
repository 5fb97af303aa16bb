"""The upload of a data file to HDFS, where a file is one append-only stream: in parts that are joined, or in order.

- **Parts**, where WebHDFS answers: every ``write`` makes a file of its own below ``<key>.parts/``, on its own pipeline of
  DataNodes, in any order and several at once. `finish` joins them on the NameNode (CONCAT) and renames the whole to its
  key: no byte moves twice.
- **In order**, elsewhere: one stream; an early ``write`` waits, without a thread, for its turn.

Guarantees:

- From `begin` on the key is claimed, exclusively, by an empty file; with parts it stays empty until all are joined.
- When a ``write`` of a part returns, that part was flushed to the disks of its DataNodes (`FlushedWriter`).
- `abort` removes the key and the parts. A killed writer leaves objects below its key, which collectors list.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol
from urllib.parse import quote, urlencode, urlsplit

import anyio
import msgspec
from hdfs_native import Client

from aiockpt.backends.hdfs_client import FlushedWriter, create_file, hdfs_errors
from aiockpt.errors import CheckpointError, StorageError, StorageTimeoutError, StorageTransferError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Progress, Seen

# A stream without progress for so long lacks a block that is never written.
TURN_TIMEOUT_S = 600.0
_TIMEOUT_S = 30.0
# The first request to a new NameNode takes some seconds.
_PROBE_TIMEOUT_S = 10.0
# Servers and gateways take request lines of 8 KiB; longer lists are sent in batches.
_SOURCES_BYTES = 6000


class _Way(Protocol):
    """A way to turn blocks into the file at *path*."""

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Write non-empty *runs* from *offset*."""

    def stop(self) -> None:
        """Make the writes that wait for their turn fail."""

    def close(self) -> None:
        """Complete the file at the key. Blocking."""

    def discard(self) -> None:
        """Remove all files besides the one at the key. Blocking."""


class HdfsUpload:
    """One data file of *size* bytes under *key*; see `aiockpt.storage.backend.Upload`.

    Args:
        client: of the file system.
        limiter: for the threads that write.
        find_webhdfs: called with the path, date (ms) and owner of the new file; returns the server that joins, if any.
        path: absolute, of the key.
        key: for errors.
        size: bytes.
        turn_timeout_s: how long a stream may make no progress while a block waits for its turn.
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
        self._progress = Progress(key, size)
        self._turn_timeout_s = turn_timeout_s
        self._way: _Way | None = None
        self._created = False
        self._writing = 0
        self._idle = anyio.Event()

    def begin(self) -> None:
        """Claim the key, and choose the way to write. Blocking.

        Raises:
            OSError, RuntimeError: the key exists, or HDFS refuses; call `abort` then.
        """
        writer = create_file(self._client, self._path)
        self._created = True
        status = self._client.get_file_info(self._path)
        webhdfs = self._find_webhdfs(self._path, status.modification_time, status.owner)
        if webhdfs is None or not self._progress.size:
            stream = FlushedWriter(writer, status)
            self._way = OrderedStream(stream, self._limiter, self._key, self._turn_timeout_s)
        else:
            writer.close()
            self._way = JoinedParts(
                self._client, self._limiter, webhdfs, status.owner, self._path, self._key, self._progress.size
            )

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        size = self._progress.check_block(offset, runs)
        with self._use() as way:
            if size:
                await way.write(offset, runs, seen)
            elif seen is not None:
                for run in runs:
                    seen(run)
        self._progress.written_bytes += size

    async def finish(self) -> None:
        self._progress.check_open()
        self._progress.check_whole()
        with self._use() as way:
            self._progress.over = True
            try:
                with hdfs_errors("finishing", self._key):
                    await run_blocking(self._limiter, way.close)
            except BaseException:
                await self._discard()
                raise

    async def abort(self) -> None:
        if self._progress.over:
            return
        self._progress.over = True
        # First: a write that waits for its turn would keep the upload busy.
        if self._way is not None:
            self._way.stop()
        with anyio.CancelScope(shield=True):
            if self._writing:
                await self._idle.wait()
        await self._discard()

    @contextmanager
    def _use(self) -> Iterator[_Way]:
        """Yield the way to write while the upload is open; `abort` waits for its users."""
        self._progress.check_open()
        assert self._way is not None, "it was begun"
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
        # Joined to the first part, not to the empty file at the key: CONCAT needs a target with bytes, in its folder.
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
        # A retry writes a failed part again from its start: its name is used nowhere else.
        created = create_file(self._client, path, overwrite=True)
        writer = FlushedWriter(created, self._client.get_file_info(path))
        _write_runs(writer, runs, seen)
        writer.close()
        self._parts[offset] = path

    def _rename(self, whole: str) -> None:
        try:
            self._client.rename(whole, self._path, overwrite=True)
        except FileNotFoundError:  # the client retries after a broken connection: the first call may have succeeded
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
                error.retryable = False  # a part of it may be in the stream: it cannot be sent again
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
                raise StorageError(f"{self._key!r} accepts no more: {self._broken}; create it again", key=self._key)
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


class WebHdfs(msgspec.Struct, frozen=True):
    """The REST interface of a NameNode, or of an HttpFS or Knox gateway to it: for CONCAT, which the HDFS client lacks.

    The NameNode moves the blocks of some files to another one of the same folder: metadata alone (the split upload of
    ByteCheckpoint, NSDI'25, §5.1). Hadoop 2.7 and later; earlier ones refuse short blocks in the middle. Blocking.

    Attributes:
        url: ``http://host:port`` or ``https://host:port``.
    """

    url: str

    def sees(self, path: str, modified_ms: int, user: str) -> bool:
        """Return whether *user* sees the file at *path*, last written at *modified_ms*, through this server too.

        False also when it does not answer, or requires a log-in that we do not have (SPNEGO).
        """
        try:
            status, answer = self._call("GET", path, {"op": "GETFILESTATUS", "user.name": user}, _PROBE_TIMEOUT_S)
            return status == http.client.OK and json.loads(answer)["FileStatus"]["modificationTime"] == modified_ms
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return False

    def concat(self, target: str, sources: Sequence[str], user: str) -> None:
        """Append the files *sources* to *target*, in order, and remove them. Paths are absolute, without a comma.

        Args:
            target: a file that is not empty, in the folder of *sources*.
            sources: files of at least one byte.
            user: the user name to send, where the cluster accepts a name.

        Raises:
            StorageError: it was refused, or not answered. How many files were joined is then unknown.
        """
        for some in _in_turns(sources):
            query = {"op": "CONCAT", "user.name": user, "sources": ",".join(some)}
            try:
                status, answer = self._call("POST", target, query, _TIMEOUT_S)
            except (OSError, http.client.HTTPException) as error:
                raise StorageError(f"joining {len(some)} files to {target!r} at {self.url}: {error!r}") from error
            if status != http.client.OK:
                raise StorageError(
                    f"joining {len(some)} files to {target!r} at {self.url} was refused with {status}: {_said(answer)};"
                    " to write without joining, open the place with ?webhdfs=off"
                )

    def _call(self, method: str, path: str, query: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.netloc, timeout=timeout_s)
        try:
            connection.request(method, f"{place.path}/webhdfs/v1{quote(path)}?{urlencode(query)}")
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def parse_webhdfs(url: str) -> WebHdfs:
    """Return the server at *url*.

    Raises:
        UsageError: it is no ``http://host:port``.
    """
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.netloc:
        raise UsageError(f"{url!r} is no address of WebHDFS; write http://namenode:9870, or 'off' to do without")
    return WebHdfs(url.rstrip("/"))


def _in_turns(sources: Sequence[str]) -> Iterator[list[str]]:
    """Yield *sources* in lists that fit into a request line each."""
    some: list[str] = []
    length = 0
    for source in sources:
        quoted = len(quote(source, safe="")) + 3
        if some and length + quoted > _SOURCES_BYTES:
            yield some
            some, length = [], 0
        some.append(source)
        length += quoted
    if some:
        yield some


def _said(answer: bytes) -> str:
    """Return the message of a RemoteException, else the first bytes of the answer."""
    try:
        return str(json.loads(answer)["RemoteException"]["message"]).partition("\n")[0]
    except (ValueError, KeyError, TypeError):
        return repr(answer[:200])
