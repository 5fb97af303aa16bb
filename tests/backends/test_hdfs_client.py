"""What hdfs-native raises becomes our errors, and files are flushed block by block: no server is needed for these."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")

from aiockpt.backends.hdfs import HdfsBackend
from aiockpt.backends.hdfs_client import PIECE_BYTES, FlushedWriter, hdfs_errors
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

_STACK = r"\n\tat org.apache.hadoop.Foo.bar(Foo.java:1)"


def rpc(name: str, said: str = "said", kind: str = "RPCError") -> RuntimeError:
    """Return what the library raises for a Java exception of the NameNode (the text is Rust's, with its quotes)."""
    return RuntimeError(f'{kind}("{name}", "{said}{_STACK}")')


@pytest.mark.parametrize(
    ("raised", "ours", "retryable"),
    [
        (FileNotFoundError("File does not exist: /x\n\tat org…"), ObjectNotFoundError, False),
        (IsADirectoryError("/x"), ObjectNotFoundError, False),
        (FileExistsError("/x already exists"), ObjectExistsError, False),
        (rpc("java.io.FileNotFoundException"), ObjectNotFoundError, False),
        (rpc("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException"), StorageFullError, False),
        (rpc("org.apache.hadoop.hdfs.protocol.NSQuotaExceededException"), StorageFullError, False),
        (rpc("org.apache.hadoop.security.AccessControlException"), StorageAccessError, False),
        (rpc("org.apache.hadoop.security.token.SecretManager$InvalidToken"), StorageAccessError, False),
        (rpc("org.apache.hadoop.AuthorizationException", kind="FatalRPCError"), StorageAccessError, False),
        (RuntimeError('SASLError("no")'), StorageAccessError, False),
        (RuntimeError("NoSASLMechanism"), StorageAccessError, False),
        (rpc("org.apache.hadoop.ipc.RetriableException"), StorageThrottledError, True),
        (rpc("org.apache.hadoop.ipc.StandbyException"), StorageError, True),
        (rpc("org.apache.hadoop.hdfs.server.namenode.SafeModeException"), StorageError, True),
        (rpc("java.io.IOException", "/x could only be replicated to 0 nodes instead of 1."), StorageError, True),
        (rpc("java.io.IOException", "/x could only be written to 0 of the 1 minReplication nodes."), StorageError, True),
        (rpc("java.io.IOException", "something else"), StorageError, False),
        (rpc("org.apache.hadoop.hdfs.server.namenode.LeaseExpiredException"), StorageError, False),
        (rpc("org.apache.hadoop.fs.InvalidPathException"), UsageError, None),
        (rpc("org.apache.hadoop.hdfs.protocol.FSLimitException$PathComponentTooLongException"), UsageError, None),
        (RuntimeError('DataTransferError("All nodes failed for write")'), StorageError, True),
        (RuntimeError('BlocksNotFound("/x")'), StorageError, True),
        (RuntimeError("ChecksumError"), StorageTransferError, True),
        (RuntimeError("what nobody has seen yet"), StorageError, False),
        (OSError("Connection refused (os error 111)"), StorageError, True),
        (OSError("connection timed out"), StorageTimeoutError, True),
        (NotImplementedError("hsync"), StorageError, False),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Exception) else "",
)  # fmt: skip
def test_what_the_library_raises_becomes_ours(
    raised: Exception, ours: type[CheckpointError], retryable: bool | None
) -> None:
    with pytest.raises(CheckpointError) as caught, hdfs_errors("reading", "a/key"):
        raise raised
    assert type(caught.value) is ours
    assert caught.value.__cause__ is raised
    assert "reading 'a/key'" in str(caught.value)
    assert "org.apache.hadoop.Foo" not in str(caught.value)
    if isinstance(caught.value, StorageError):
        assert caught.value.retryable is retryable
        assert caught.value.key == "a/key"


def test_a_panic_of_the_library_does_not_end_the_loop() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(StorageError, match="panicked: no reactor") as caught, hdfs_errors("reading", "key"):
        raise panic("no reactor")
    assert not caught.value.retryable


@pytest.mark.parametrize("passing", [KeyboardInterrupt(), ArithmeticError("of a checksum"), UsageError("ours")])
def test_what_is_not_the_library_s_passes(passing: BaseException) -> None:
    with pytest.raises(type(passing)) as caught, hdfs_errors("reading", "key"):
        raise passing
    assert caught.value is passing


class RecordingWriter:
    """Keeps what is written, with an ``hsync`` and a ``close`` where they came."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        assert type(data) is bytes, "the library copies anything else byte by byte"
        self.calls.append(data)

    def hsync(self) -> None:
        self.calls.append("hsync")

    def close(self) -> None:
        self.calls.append("close")


def written(block_bytes: int, *runs: bytes) -> list[Any]:
    recorded = RecordingWriter()
    writer = FlushedWriter(recorded, SimpleNamespace(blocksize=block_bytes))  # type: ignore[arg-type]
    for run in runs:
        writer.write(memoryview(run))
    writer.close()
    assert writer.size == sum(len(run) for run in runs)
    return recorded.calls


def test_every_block_is_flushed_before_the_next_one_begins() -> None:
    assert written(4, b"ab", b"cdefghij", b"kl") == [
        b"ab", b"cd", "hsync", b"efgh", "hsync", b"ij", b"kl", "hsync", "close",
    ]  # fmt: skip


def test_an_empty_file_needs_no_flush() -> None:
    assert written(4) == ["close"]
    assert written(4, b"") == ["close"]


def test_long_runs_are_handed_over_in_pieces() -> None:
    calls = written(1 << 30, bytes(2 * PIECE_BYTES + 1))
    assert [len(call) for call in calls[:3]] == [PIECE_BYTES, PIECE_BYTES, 1]
    assert calls[3:] == ["hsync", "close"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hdfs:///path", "HADOOP_CONF_DIR"),
        ("hdfs://nameservice/path", "HADOOP_CONF_DIR"),
        ("hdfs://localhost:1/path?webdav=off", "unknown option 'webdav'"),
        ("hdfs://localhost:1/path?webhdfs=localhost", "no address of WebHDFS"),
    ],
)
def test_a_url_that_leads_nowhere_says_what_to_write(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(UsageError, match=message):
        HdfsBackend(url)


def test_a_nameservice_is_looked_up_in_the_settings_and_webhdfs_is_not_guessed() -> None:
    settings = {"dfs.ha.namenodes.ns": "a", "dfs.namenode.rpc-address.ns.a": "localhost:1"}
    backend = HdfsBackend("hdfs://ns/path", config=settings)
    assert backend.url == "hdfs://ns/path"
    assert repr(backend) == "<HdfsBackend 'hdfs://ns/path' joining=no>"
    assert backend._webhdfs is None
