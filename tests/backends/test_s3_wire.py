"""How large bodies pass between memory and a connection: by the socket itself, and through aiohttp where that cannot be."""

import asyncio
import itertools
import shutil
import ssl
import subprocess
from asyncio.selector_events import _SelectorTransport  # type: ignore[attr-defined]
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientPayloadError, web

from aiockpt.backends import s3_wire
from aiockpt.backends.ranges import Buffers
from aiockpt.backends.s3_body import Body
from aiockpt.backends.s3_wire import receive
from aiockpt.testing.backend_suite import patterned
from tests.fails import fails

SIZE = 3 << 20
BODY = bytes(patterned(SIZE))


class Served:
    """A server of one body.

    Attributes:
        connections: the client's addresses, in the order of the requests.
        chunked: send it without its length.
        sent: bytes after which the connection breaks.
        received: the bodies that came; *taken*: bytes of them after which the connection is cut.
    """

    def __init__(self) -> None:
        self.connections: list[object] = []
        self.chunked = False
        self.sent = SIZE
        self.body = BODY
        self.received: list[bytes] = []
        self.taken: int | None = None

    async def take(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.connections.append(request.transport.get_extra_info("peername"))
        body = bytearray()
        async for piece in request.content.iter_any():
            body += piece
            if self.taken is not None and len(body) >= self.taken:
                request.transport.abort()
        self.received.append(bytes(body))
        return web.Response(status=201)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.connections.append(request.transport.get_extra_info("peername"))
        response = web.StreamResponse()
        if self.chunked:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(self.body)
        await response.prepare(request)
        for start in range(0, self.sent, 200_000):
            await response.write(self.body[start : min(start + 200_000, self.sent)])
        if self.sent < SIZE:
            request.transport.abort()
        return response


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
async def url(request: pytest.FixtureRequest, served: Served, tmp_path: Path) -> AsyncIterator[str]:
    """Where the body is served: plain, unless the test is marked `ENCRYPTED` or `BOTH`."""
    scheme: str = getattr(request, "param", "http")
    application = web.Application()
    application.router.add_get("/", served.handle)
    application.router.add_put("/", served.take)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        context = certified(tmp_path) if scheme == "https" else None
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


ENCRYPTED = pytest.mark.parametrize("url", ["https"], indirect=True)
BOTH = pytest.mark.parametrize("url", ["http", "https"], indirect=True)


def certified(folder: Path) -> ssl.SSLContext:
    """Return a server's side of TLS, with a certificate of its own making."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    key, certificate = folder / "key", folder / "certificate"
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt to take the socket itself found one."""
    tried: list[bool] = []

    def open_plain(transport: Any) -> Any:
        tried.append((plain := original(transport)) is not None)
        return plain

    original = s3_wire.open_plain
    monkeypatch.setattr(s3_wire, "open_plain", open_plain)
    return tried


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each body that was decrypted into the caller's memory."""
    fillers: list[object] = []
    original = s3_wire._Filler.fill

    async def fill(self: s3_wire._Filler) -> None:
        fillers.append(self)
        await original(self)

    monkeypatch.setattr(s3_wire._Filler, "fill", fill)
    return fillers


async def get(session: aiohttp.ClientSession, url: str, into: Sequence[memoryview]) -> int:
    async with session.get(url, ssl=False) as response:
        return await receive(response, Buffers(into), lambda: None)


async def get_whole(session: aiohttp.ClientSession, url: str, cuts: Sequence[int] = ()) -> None:
    """Get the body into buffers that are *cuts* of one memory, and compare it."""
    memory = memoryview(bytearray(SIZE))
    came_bytes = await get(session, url, [memory[a:b] for a, b in itertools.pairwise([0, *cuts, SIZE])])
    assert memory == BODY
    assert came_bytes == SIZE


def check_direct(url: str, opened: list[bool], filled: list[object], count: int) -> None:
    """Check that *count* bodies went straight into memory: from a plain socket, or decrypted there."""
    plain = url.startswith("http:")
    assert opened == [plain] * count
    assert len(filled) == (0 if plain else count)


@BOTH
@pytest.mark.parametrize("cuts", [(), (1,), (100_000, 100_001, 2 << 20)])
async def test_a_body_lands_in_the_buffers_and_the_connection_is_used_again(
    served: Served, url: str, opened: list[bool], filled: list[object], cuts: Sequence[int]
) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            await get_whole(session, url, cuts)
    assert len(set(served.connections)) == 1
    check_direct(url, opened, filled, 3)


@BOTH
async def test_a_body_that_does_not_say_its_length_goes_through_aiohttp(
    served: Served, url: str, opened: list[bool], filled: list[object]
) -> None:
    served.chunked = True
    async with aiohttp.ClientSession() as session:
        await get_whole(session, url)
    assert not opened
    assert not filled


async def test_more_than_there_is_room_for_is_counted_and_harms_no_later_answer(
    served: Served, url: str, opened: list[bool]
) -> None:
    async with aiohttp.ClientSession() as session:
        memory = memoryview(bytearray(SIZE - 5))
        assert await get(session, url, [memory]) == SIZE
        assert memory == BODY[:-5]
        await get_whole(session, url)
    assert opened == [True]


async def test_a_small_body_that_came_with_its_headers_needs_no_socket(served: Served, url: str) -> None:
    served.body = b"small"
    async with aiohttp.ClientSession() as session:
        memory = memoryview(bytearray(5))
        await get(session, url, [memory])
        assert bytes(memory) == b"small"


@BOTH
async def test_a_connection_that_ends_early_is_an_error_and_not_used_again(
    served: Served, url: str, opened: list[bool], filled: list[object]
) -> None:
    served.sent = 2_000_000
    async with aiohttp.ClientSession() as session:
        await fails(get(session, url, [memoryview(bytearray(SIZE))]), ClientPayloadError)
        served.sent = SIZE
        await get_whole(session, url)
    assert len(set(served.connections)) == 2
    check_direct(url, opened, filled, 2)


@ENCRYPTED
async def test_a_read_that_is_cancelled_leaves_the_memory_to_its_owner(
    served: Served, url: str, filled: list[object]
) -> None:
    async with aiohttp.ClientSession() as session:
        memory = memoryview(bytearray(SIZE))
        reading = asyncio.ensure_future(get(session, url, [memory]))
        while not filled:  # noqa: ASYNC110  there is nobody to set an event
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        memory[:] = bytes(SIZE)
        await get_whole(session, url)
        assert memory == bytes(SIZE)


@ENCRYPTED
async def test_an_encrypted_body_is_told_to_move_while_it_comes_by_the_task_that_waits(url: str) -> None:
    tasks = []
    async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as response:
        buffers = Buffers([memoryview(bytearray(SIZE))])
        await receive(response, buffers, lambda: tasks.append(asyncio.current_task()))
    assert tasks
    assert set(tasks) == {asyncio.current_task()}


# ------------------------------------------------------------------ sending


async def put(session: aiohttp.ClientSession, url: str, views: Sequence[memoryview]) -> int:
    async with session.put(url, data=Body(views, lambda: None), ssl=False) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("cuts", [(), (1,), (100_000, 100_001, 2 << 20)])
async def test_a_body_is_sent_from_memory_and_the_connection_is_used_again(
    served: Served, url: str, opened: list[bool], cuts: Sequence[int]
) -> None:
    edges = [0, *cuts, SIZE]
    views = [memoryview(BODY)[a:b] for a, b in itertools.pairwise(edges)]
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            assert await put(session, url, views) == 201
    assert served.received == [BODY] * 3
    assert len(set(served.connections)) == 1
    assert opened == [True] * 3


async def test_a_small_body_goes_with_its_headers(served: Served, url: str, opened: list[bool]) -> None:
    async with aiohttp.ClientSession() as session:
        assert await put(session, url, [memoryview(b"small")]) == 201
    assert served.received == [b"small"]
    assert not opened


async def test_while_the_connection_has_something_to_send_nothing_overtakes_it(
    served: Served, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def overtake(*_: object) -> None:
        raise AssertionError("sent past what the transport holds")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_sendall", overtake)
    monkeypatch.setattr(_SelectorTransport, "get_write_buffer_size", lambda _: 1)
    async with aiohttp.ClientSession() as session:
        assert await put(session, url, [memoryview(BODY)]) == 201
    assert served.received == [BODY]


async def test_a_connection_that_is_cut_while_a_body_is_sent_is_an_error_and_not_used_again(
    served: Served, url: str, opened: list[bool]
) -> None:
    served.taken = 1_000_000
    large = memoryview(bytes(64 << 20))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await put(session, url, [large])
        served.taken = None
        assert await put(session, url, [memoryview(BODY)]) == 201
    assert served.received[-1] == BODY
    assert len(set(served.connections)) == len(served.connections)  # aiohttp may have tried twice
    assert all(opened)


@ENCRYPTED
async def test_what_is_to_be_encrypted_goes_through_aiohttp(served: Served, url: str, opened: list[bool]) -> None:
    async with aiohttp.ClientSession() as session:
        assert await put(session, url, [memoryview(BODY)]) == 201
    assert served.received == [BODY]
    assert not any(opened)
