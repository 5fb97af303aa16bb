"""The backend for HDFS, ``hdfs://namenode:port/path``, on hdfs-native.

Guarantees, besides those of the contract:

- A key is absent or whole: small objects are written to a temporary file and renamed, without overwriting for ``put_new``,
  so one racer wins. Temporary files are in ``.tmp`` below the root, are never listed, and go after a day.
- **Durable** means: the NameNode has the name in its edit log, and every byte was flushed (``hsync``) on every DataNode of
  its pipeline before the file was closed. Data survive a power cut of all replicas at once only where the DataNodes also
  flush their folders: set ``dfs.datanode.synconclose=true`` for that.
- No call to a server runs on the event loop (see `hdfs_client`).

The client polls again after 0.5 s when a DataNode has not yet reported the last block of a file that is closed, so a small
object often costs that long. ``dfs.namenode.file.close.num-committed-allowed=1`` (Hadoop 2.9) avoids it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from hdfs_native import FileReader, FileStatus

from aiockpt.backends.hdfs_client import FlushedWriter, connect, create_file, hdfs_errors
from aiockpt.backends.hdfs_upload import HdfsUpload, WebHdfs, parse_webhdfs
from aiockpt.backends.ranges import Buffers, RangeReader
from aiockpt.errors import StorageError, UsageError
from aiockpt.events import LimiterStatistics
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import World
from aiockpt.storage.address import hide_secrets
from aiockpt.storage.backend import Listing, Seen, Space, Stat, Traits, check_key, check_keys, check_prefix, check_size

_BLOCK_WRITES = 4
_BLOCK_READS = 4
_SMALL_VERBS = 8
# The most bytes that a read shows at once: they are still in the CPU's cache.
SHOWN_BYTES = 1 << 20
_ATTEMPTS = 16  # the writer gives up after so many removals of its folder
_NS_PER_MS = 1_000_000
_TEMPORARY = ".tmp"
_LEFTOVER_AFTER_MS = 24 * 3600 * 1000
_WEBHDFS_PORT = 9870
_NO_WEBHDFS = "off"


class HdfsStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """An HDFS backend at one instant.

    Attributes:
        webhdfs: the server that joins parts; None as long as data files are written as one stream.
        limiters: threads that run and wait, by kind of work.
    """

    webhdfs: str | None
    limiters: tuple[LimiterStatistics, ...]


class HdfsBackend:
    """Objects as files below a folder of HDFS, which is made when the first one is written.

    Args:
        url: ``hdfs://namenode:port/path``; ``hdfs://nameservice/path`` and ``hdfs:///path`` read ``HADOOP_CONF_DIR``.
            ``?webhdfs=…`` at its end is another way to pass *webhdfs_url*.
        world: the seam to the random source.
        webhdfs_url: ``http://host:port`` of the NameNode's WebHDFS, or of a gateway, which joins files that are written
            in parallel parts; "off" for one stream a file. None tries port 9870 of the NameNode. A server that does not
            see the same files, or requires Kerberos, is not used.
        config: Hadoop settings for the client, above those of the configuration files.
    """

    def __init__(
        self,
        url: str,
        *,
        world: World | None = None,
        webhdfs_url: str | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        place = urlsplit(url)
        self.url = hide_secrets(url)
        self._root = "/" + unquote(place.path).strip("/")
        self._world = world or World()
        self._client = connect(url, config)
        self._webhdfs = _choose_webhdfs(url, webhdfs_url)
        self._webhdfs_is_guessed = webhdfs_url is None and not place.query
        self._joining = False
        self._swept = False
        self._small = Limiter("hdfs small verbs", _SMALL_VERBS)
        self._writes = Limiter("hdfs block writes", _BLOCK_WRITES)
        self._reads = Limiter("hdfs block reads", _BLOCK_READS)

    @property
    def traits(self) -> Traits:
        return Traits(scope="shared", durable=True, block_writes=_BLOCK_WRITES, block_reads=_BLOCK_READS)

    async def put(self, key: str, data: bytes) -> None:
        with hdfs_errors("writing", check_key(key)):
            await run_blocking(self._small, self._publish, key, data, True)

    async def put_new(self, key: str, data: bytes) -> None:
        with hdfs_errors("creating", check_key(key)):
            await run_blocking(self._small, self._publish, key, data, False)

    async def get(self, key: str, max_bytes: int) -> bytes:
        with hdfs_errors("reading", check_key(key)):
            return await run_blocking(self._small, self._read_whole, key, max_bytes)

    async def open(self, key: str) -> RangeReader:
        with hdfs_errors("opening", check_key(key)):
            file = await run_blocking(self._small, self._client.read, self._path(key))
        return open_reader(file, key, self._reads)

    async def create(self, key: str, size: int) -> HdfsUpload:
        path = self._path(check_size(key, size))
        upload = HdfsUpload(self._client, self._writes, self._find_webhdfs, path, key, size)
        try:
            with hdfs_errors("creating", key):
                await run_blocking(self._small, upload.begin)
        except BaseException:
            await upload.abort()
            raise
        return upload

    async def stat(self, key: str) -> Stat:
        with hdfs_errors("looking for", check_key(key)):
            return await run_blocking(self._small, self._stat, key)

    async def list(self, prefix: str) -> Listing:
        with hdfs_errors("listing", check_prefix(prefix)):
            return await run_blocking(self._small, self._list, prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await run_blocking(self._small, self._delete, check_keys(keys))

    async def space(self) -> Space:
        """Return unknown space: the client has no call for it; a full cluster or quota shows in `StorageFullError`."""
        return Space(None, None)

    async def close(self) -> None:
        """Does nothing: connections are the library's, which closes them with the last user of the client."""

    def statistics(self) -> HdfsStatistics:
        """Return the counts of this instant."""
        return HdfsStatistics(
            webhdfs=self._webhdfs.url if self._joining and self._webhdfs else None,
            limiters=tuple(limiter.statistics() for limiter in (self._small, self._writes, self._reads)),
        )

    def __repr__(self) -> str:
        return f"<HdfsBackend {self.url!r} joining={self.statistics().webhdfs or 'no'}>"

    def _path(self, key: str) -> str:
        return posixpath.join(self._root, key) if key else self._root

    # What follows runs on worker threads.

    def _find_webhdfs(self, path: str, modified_ms: int, owner: str) -> WebHdfs | None:
        """Return a server that sees the new file at *path*, to join its parts. (A comma would split its name.)"""
        webhdfs = self._webhdfs
        if webhdfs is None or "," in path:
            self._joining = False
            return None
        self._joining = webhdfs.sees(path, modified_ms, owner)
        if not self._joining and self._webhdfs_is_guessed:
            self._webhdfs = None  # a port without an answer may take long to fail: ask once
        return webhdfs if self._joining else None

    def _publish(self, key: str, data: bytes, overwrite: bool) -> None:
        """Rename a temporary file with *data* to *key*; once more when its folder is removed meanwhile."""
        path = self._path(key)
        temporary = ""
        try:
            for _ in range(_ATTEMPTS):
                temporary = temporary or self._write_temporary(data)
                self._client.mkdirs(posixpath.dirname(path), create_parent=True)
                try:
                    self._client.rename(temporary, path, overwrite)
                except FileNotFoundError:
                    # The folder is missing. Or the temporary file is: renamed by a call whose answer was lost, which the
                    # client sent again. Then a new one finds our own object at the key, and `put_once` recognises it.
                    temporary = temporary if self._exists(temporary) else ""
                else:
                    temporary = ""
                    return
        finally:
            if temporary:
                self._remove_temporary(temporary)
        raise StorageError(
            f"{key!r}: its folder was removed {_ATTEMPTS} times while it was written; "
            "stop the program that cleans up there",
            key=key,
            retryable=True,
        )

    def _write_temporary(self, data: bytes) -> str:
        path = self._path(f"{_TEMPORARY}/{self._world.token(8).hex()}")
        writer = create_file(self._client, path)
        try:
            status = self._client.get_file_info(path)
            flushed = FlushedWriter(writer, status)
            flushed.write(memoryview(data))
            flushed.close()
            # The date of the new file is the NameNode's clock, which dates leftovers too; this machine's may differ.
            self._sweep_leftovers(status.modification_time)
        except BaseException:
            self._remove_temporary(path)
            raise
        return path

    def _remove_temporary(self, path: str) -> None:
        with suppress(OSError, RuntimeError):  # it stays as a leftover, which is removed later
            self._client.delete(path)

    def _sweep_leftovers(self, now_ms: int) -> None:
        """Remove, once, what killed writers left behind a day ago or earlier."""
        if self._swept:
            return
        self._swept = True
        for found in self._client.list_status(self._path(_TEMPORARY)):
            if found.modification_time < now_ms - _LEFTOVER_AFTER_MS:
                self._client.delete(found.path)

    def _exists(self, path: str) -> bool:
        try:
            self._client.get_file_info(path)
        except FileNotFoundError:
            return False
        return True

    def _read_whole(self, key: str, max_bytes: int) -> bytes:
        reader = self._client.read(self._path(key))
        return reader.read_range(0, min(len(reader), max_bytes))

    def _stat(self, key: str) -> Stat:
        found = self._client.get_file_info(self._path(key))
        if found.isdir:
            raise FileNotFoundError(f"{key!r} is a folder")
        return _to_stat(key, found)

    def _list(self, prefix: str) -> Listing:
        folder = self._path(prefix)
        objects: list[Stat] = []
        folders: list[str] = []
        with suppress(FileNotFoundError):
            for found in self._client.list_status(folder):
                if (key := self._listed_key(prefix, folder, found.path)) is None:
                    continue
                if found.isdir:
                    folders.append(key)
                else:
                    objects.append(_to_stat(key, found))
        return Listing(tuple(sorted(objects, key=lambda stat: stat.key)), tuple(sorted(folders)))

    def _listed_key(self, prefix: str, folder: str, path: str) -> str | None:
        """Return the key of *path*; None when it is no object: temporary files, impossible names, the folder itself."""
        name = posixpath.basename(path)
        if path == folder or (not prefix and name == _TEMPORARY):
            return None
        try:
            return check_key(f"{prefix}/{name}" if prefix else name)
        except UsageError:
            return None

    def _delete(self, keys: tuple[str, ...]) -> None:
        emptied: dict[str, None] = {}
        for key in keys:
            with hdfs_errors("deleting", key):
                self._remove(self._path(key))
            emptied[posixpath.dirname(key)] = None
        for folder in emptied:
            with hdfs_errors("removing the folder", folder):
                self._prune(folder)

    def _prune(self, folder: str) -> None:
        """Remove *folder* and those above it while they are empty. The root stays."""
        while folder and self._remove(self._path(folder)):
            folder = posixpath.dirname(folder)

    def _remove(self, path: str) -> bool:
        """Remove a file or an empty folder; return False where a folder holds something."""
        try:
            self._client.delete(path)
        except RuntimeError as error:
            if "PathIsNotEmptyDirectoryException" in str(error):
                return False
            raise
        return True


def _choose_webhdfs(url: str, given: str | None) -> WebHdfs | None:
    """Return the server to try for joining: the given one, that of *url*, or the usual port of its NameNode."""
    place = urlsplit(url)
    query = dict(parse_qsl(place.query))
    if unknown := query.keys() - {"webhdfs"}:
        raise UsageError(f"{url!r}: unknown option {sorted(unknown)[0]!r}; there is ?webhdfs=http://host:port or =off")
    wanted = given if given is not None else query.get("webhdfs")
    if wanted == _NO_WEBHDFS:
        return None
    if wanted is not None:
        return parse_webhdfs(wanted)
    # Without a port the host is the name of a nameservice, which no HTTP client can resolve.
    return parse_webhdfs(f"http://{place.hostname}:{_WEBHDFS_PORT}") if place.port else None


def _to_stat(key: str, found: FileStatus) -> Stat:
    return Stat(key, found.length, found.modification_time * _NS_PER_MS)


def open_reader(file: FileReader, key: str, limiter: Limiter) -> RangeReader:
    """Return a reader of the object *key*: one stream for each read, packet by packet, on a thread.

    hdfs-native checks the CRC of every packet, so damage on a DataNode's disk or on the way is an error or another replica.
    """

    async def fill(offset: int, buffers: Buffers, seen: Seen | None) -> None:
        await run_blocking(limiter, _fill, _packets(file, key, offset, buffers.left_bytes), buffers, seen)

    return RangeReader(key, len(file), fill)


def _fill(packets: Iterator[memoryview], buffers: Buffers, seen: Seen | None) -> None:
    """Fill *buffers*; pass each to *seen* as soon as it is full, or `SHOWN_BYTES` of it are new."""
    packet = memoryview(b"")
    while (room := buffers.room) is not None:
        (run,) = buffers.take(min(room.nbytes, SHOWN_BYTES))
        filled = 0
        while filled < run.nbytes:
            packet = packet or next(packets)
            count = min(packet.nbytes, run.nbytes - filled)
            run[filled : filled + count] = packet[:count]
            packet = packet[count:]
            filled += count
        if seen is not None:
            seen(run)


def _packets(file: FileReader, key: str, offset: int, wanted: int) -> Iterator[memoryview]:
    """Yield the packets of the DataNodes; convert their errors to ours."""
    with hdfs_errors("reading", key):
        stream = file.read_range_stream(offset, wanted)
    while True:
        with hdfs_errors("reading", key):
            packet = next(stream, None)
        if packet is None:
            raise StorageError(
                f"{key!r}: the DataNodes sent fewer bytes than it has; read it again", key=key, retryable=True
            )
        yield memoryview(packet)
