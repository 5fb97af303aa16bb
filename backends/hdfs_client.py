"""The client of HDFS (hdfs-native): the connection, the conversion of its errors to ours, and flushed writing.

Guarantees:

- Every exception of the library, a Rust panic too, becomes one of `aiockpt.errors`, with the Java stack left off.
- The library's own retries are off where a URL names one NameNode; for a nameservice it tries each NameNode once.
- `FlushedWriter.close` returns when every byte was flushed to the disks of all replicas: ``hsync`` at the end of each
  block, because it reaches the block that is being written and no earlier one.

The blocking client runs on worker threads. `hdfs_native.AsyncClient` is not used: its coroutines compute on the event
loop's own thread (and block it up to 0.7 s for a read of 16 MiB), cost twice the CPU, and panic when a NameNode does not
answer, because their back-off needs a runtime which that thread does not have (0.14.7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hdfs_native import Client, FileStatus, WriteOptions

from aiockpt.errors import (
    CheckpointError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    UsageError,
)
from aiockpt.redaction import redact_error

if TYPE_CHECKING:
    from hdfs_native._internal import RawFileWriter

# Bytes of one call to the library: more cost more CPU (new memory), fewer cost more waits for the GIL [measured].
PIECE_BYTES = 1 << 20

_ONE_NAMENODE = {"dfs.client.failover.max.attempts": "0"}
_NAMESERVICE = {"dfs.client.failover.max.attempts": "3"}
_JAVA = re.compile(r'(?:Fatal)?RPCError\("(?:[\w$]+\.)*(?:\w+\$)?(\w+)", "(.*)', re.DOTALL)
_NATIVE = re.compile(r"(\w+)(?:\((.*))?", re.DOTALL)
_BY_NAME: dict[str, type[StorageError]] = {
    "FileNotFoundException": ObjectNotFoundError,
    "FileAlreadyExistsException": ObjectExistsError,
    "AlreadyBeingCreatedException": ObjectExistsError,
    "DSQuotaExceededException": StorageFullError,
    "NSQuotaExceededException": StorageFullError,
    "QuotaByStorageTypeExceededException": StorageFullError,
    "AccessControlException": StorageAccessError,
    "AuthorizationException": StorageAccessError,
    "InvalidToken": StorageAccessError,
    "SASLError": StorageAccessError,
    "GSSAPIError": StorageAccessError,
    "NoSASLMechanism": StorageAccessError,
    "RetriableException": StorageThrottledError,
    "RpcServerTooBusyException": StorageThrottledError,
    "ChecksumError": StorageTransferError,
}
_UNUSABLE = {"InvalidPathException", "PathComponentTooLongException", "MaxDirectoryItemsExceededException"}
_PASSING = {"SafeModeException", "StandbyException", "DataTransferError", "BlocksNotFound", "NotReplicatedYetException"}
_NO_PLACE = "could only be"  # "... replicated to 0 nodes" (2.x), "... written to 0 of the 1 minReplication nodes" (3.x)
_ADVICE: dict[type[StorageError], str] = {
    StorageFullError: ". Free space or lower retention, then save again",
    StorageAccessError: ". Log in (kinit), set HADOOP_USER_NAME, or ask for the right",
}


def connect(url: str, config: Mapping[str, str] | None = None) -> Client:
    """Return a client of the NameNode or nameservice that *url* names; nothing is sent yet.

    Args:
        url: ``hdfs://host:port/…``, ``hdfs://nameservice/…``, or ``hdfs:///…`` for ``fs.defaultFS``; the last two need
            ``HADOOP_CONF_DIR``.
        config: Hadoop settings in addition to, and above, those of the files.

    Raises:
        UsageError: *url* names none.
    """
    place = urlsplit(url)
    retries = _ONE_NAMENODE if place.port else _NAMESERVICE
    try:
        return Client(f"hdfs://{place.netloc}" if place.netloc else None, {**retries, **(config or {})})
    except RuntimeError as error:
        raise UsageError(
            f"{url!r} leads to no NameNode: {error}; write hdfs://host:port/path, or set HADOOP_CONF_DIR to the folder of"
            " the cluster's core-site.xml and hdfs-site.xml"
        ) from error


def create_file(client: Client, path: str, *, overwrite: bool = False) -> RawFileWriter:
    """Make a file and return its writer, which does nothing when it is dropped. Blocking.

    (`Client.create` wraps it in an `io.RawIOBase`, whose finalizer closes the file: on whatever thread the collector runs,
    for 15 s when a DataNode is dead, and a torn file becomes a whole one.)
    """
    return client.inner.create(path, WriteOptions(overwrite=overwrite))


@contextmanager
def hdfs_errors(doing: str, key: str) -> Iterator[None]:
    """Convert an error of the library, raised while *doing* something to *key*, to ours."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise from_hdfs_error(error, doing, key) from redact_error(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic is a BaseException, and would end the loop
            raise
        raise StorageError(f"{doing} {key!r}: the HDFS client panicked: {error}", key=key) from error


def from_hdfs_error(error: Exception, doing: str, key: str) -> CheckpointError:
    """Return ours for an exception of hdfs-native (`OSError` and `RuntimeError` are all it raises on purpose)."""
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return ObjectNotFoundError(f"{doing} {key!r}: {_first_line(str(error))}", key=key)
    if isinstance(error, FileExistsError):
        return ObjectExistsError(f"{doing} {key!r}: {_first_line(str(error))}", key=key)
    if isinstance(error, OSError):
        return _connection_error(error, doing, key)
    if isinstance(error, NotImplementedError):
        return StorageError(
            f"{doing} {key!r}: {error}. Files that are erasure-coded cannot be flushed; choose a folder that is replicated"
            " (hdfs ec -setPolicy -replicate)",
            key=key,
        )
    return _named_error(str(error), doing, key)


def _connection_error(error: OSError, doing: str, key: str) -> StorageError:
    text = str(error)
    message = f"{doing} {key!r}: {text}. Check that the NameNode and the DataNodes run"
    if isinstance(error, TimeoutError) or "timed out" in text or "deadline has elapsed" in text:
        return StorageTimeoutError(message, key=key)
    return StorageError(message, key=key, retryable=True)


def _named_error(text: str, doing: str, key: str) -> CheckpointError:
    """Return ours for a text like ``RPCError("java.some.Exception", "message\\n\\tat …")`` or ``DataTransferError("…")``."""
    found = _JAVA.match(text) or _NATIVE.match(text)
    name, said = (found[1], _first_line(found[2] or "")) if found else ("", text)
    message = f"{doing} {key!r}: {name}: {said}"
    if name in _UNUSABLE:
        return UsageError(f"{message}. Choose another key: HDFS does not accept this name")
    if (ours := _BY_NAME.get(name)) is not None:
        return ours(message + _ADVICE.get(ours, ""), key=key)
    if _NO_PLACE in said:
        message += ". The DataNodes are full, dead, or busy: check `hdfs dfsadmin -report`"
        return StorageError(message, key=key, retryable=True)
    return StorageError(message, key=key, retryable=name in _PASSING)


def _first_line(text: str) -> str:
    """Return *text* without the Java stack, which follows a line break or, in quoted text, an escaped one."""
    return text.partition("\n")[0].partition("\\n\\tat")[0].rstrip('")')


class FlushedWriter:
    """A new file that is written from its start to its end, and flushed block by block. Blocking.

    Args:
        writer: of `create_file`.
        status: of that file, for its block size.
    """

    def __init__(self, writer: RawFileWriter, status: FileStatus) -> None:
        assert status.blocksize, "only folders have no block size"
        self._writer = writer
        self._block_bytes = status.blocksize
        self._unflushed_bytes = 0
        self.size = 0

    def write(self, data: memoryview) -> None:
        """Append *data* in pieces of ``bytes``: the library reads those whole, and a memoryview byte by byte."""
        start = 0
        while start < data.nbytes:
            room = self._block_bytes - self.size % self._block_bytes
            piece = data[start : start + min(PIECE_BYTES, room)]
            self._writer.write(bytes(piece))
            start += piece.nbytes
            self.size += piece.nbytes
            self._unflushed_bytes += piece.nbytes
            if piece.nbytes == room:
                self._flush()

    def close(self) -> None:
        """Flush the rest, and complete the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._unflushed_bytes:
            self._writer.hsync()
            self._unflushed_bytes = 0
