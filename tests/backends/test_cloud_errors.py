"""Each thing that a cloud store or the network can say becomes the right error of ours; said by a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("obstore", reason="the extra aiockpt[cloud] is not installed")

from obstore.store import AzureStore, GCSStore, S3Store

from aiockpt.backends.cloud import CloudBackend
from aiockpt.errors import (
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
from aiockpt.storage.backend import Backend
from tests.fails import fails

HANG = b"hang"


@asynccontextmanager
async def serve_raw(response: bytes) -> AsyncIterator[str]:
    """Answer every request with *response*, hang, or hang up; give the endpoint."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if response == HANG:
            await over.wait()
        else:
            writer.write(response)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        over.set()
        await asyncio.sleep(0)


def azure(endpoint: str) -> CloudBackend:
    store = AzureStore(
        "container",
        account_name="account",
        account_key="a2V5",
        endpoint=endpoint,
        retry_config={"max_retries": 0},
        client_options={"allow_http": True, "timeout": "500ms"},
    )
    return CloudBackend("az://container", store=store)


def s3(endpoint: str) -> CloudBackend:
    store = S3Store(
        "bucket",
        endpoint=endpoint,
        access_key_id="id",
        secret_access_key="key",
        region="here",
        retry_config={"max_retries": 0},
        client_options={"allow_http": True, "timeout": "500ms"},
    )
    return CloudBackend("s3://bucket", store=store)


def said(status: int, body: bytes = b"<Error/>") -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


CUT_SHORT = (
    b"HTTP/1.1 200 x\r\nLast-Modified: Sat, 21 Nov 2026 11:33:22 GMT\r\nETag: e\r\nContent-Length: 99\r\n\r\nshort"
)


@pytest.mark.parametrize("open_at", [azure, s3])
@pytest.mark.parametrize(
    ("response", "error", "retryable"),
    [
        (said(404), ObjectNotFoundError, False),
        (said(401), StorageAccessError, False),
        (said(403), StorageAccessError, False),
        (said(429), StorageThrottledError, True),
        (said(503), StorageThrottledError, True),
        (said(529), StorageThrottledError, True),
        (said(500), StorageError, True),
        (said(502), StorageError, True),
        (said(504), StorageTimeoutError, True),
        (said(507), StorageFullError, False),
        (said(400), StorageError, False),
        (HANG, StorageTimeoutError, True),
        (b"", StorageError, True),
        (CUT_SHORT, StorageTransferError, True),
    ],
    ids=["404", "401", "403", "429", "503", "529", "500", "502", "504", "507", "400", "hangs", "hangs up", "cut short"],
)
async def test_an_answer_becomes_our_error(
    open_at: Callable[[str], Backend], response: bytes, error: type[StorageError], retryable: bool
) -> None:
    async with serve_raw(response) as endpoint:
        with pytest.raises(StorageError) as caught:
            await open_at(endpoint).get("a/b", 1 << 20)
    assert type(caught.value) is error
    assert caught.value.retryable is retryable
    assert caught.value.key == "a/b"
    assert "Debug source" not in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("status", [409, 412])
async def test_a_refused_create_is_a_conflict(status: int) -> None:
    async with serve_raw(said(status)) as endpoint:
        await fails(azure(endpoint).put_new("a/b", b"1"), ObjectExistsError)


async def test_a_server_that_is_not_there_may_be_back_a_moment_later() -> None:
    async with serve_raw(b"") as endpoint:
        pass
    await fails(azure(endpoint).stat("a"), retryable=True)


def test_a_url_that_obstore_cannot_read_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be opened"):
        CloudBackend("nosuch://bucket")


def test_google_opens_without_a_request() -> None:
    backend = CloudBackend("gs://bucket/run/")
    assert isinstance(backend._store, GCSStore)
    assert backend._store.prefix == "run"
    assert backend.url == "gs://bucket/run"
