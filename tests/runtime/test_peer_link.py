"""The link between hosts: who is answered, what is believed, and what becomes of a connection that breaks."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from aiockpt.runtime import peer_link
from aiockpt.runtime.peer_link import TOKEN_BYTES, RangeReply, TcpNetwork, find_address

LOCAL = "127.0.0.1"


def test_a_host_whose_name_is_that_of_the_loopback_is_reached_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes /etc/hosts."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: resolve({"node-0": "127.0.1.1"}.get(host, host), *more, **named),
    )
    elsewhere = find_address(None, SimpleNamespace(host="192.0.2.1"))
    assert find_address(None, SimpleNamespace(host="node-0")) == elsewhere
    assert find_address(None, SimpleNamespace(host="localhost")) == LOCAL


class Echo:
    """Answers with the question; one that begins with "/" with the range of that file, and "memory" with eight bytes."""

    def __init__(self) -> None:
        self.questions: list[bytes] = []
        self.sent = threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[Callable[[bytes], RangeReply]]:
        yield self._answer

    def _answer(self, question: bytes) -> RangeReply:
        self.questions.append(question)
        if question.startswith(b"/"):
            return RangeReply(b"here", os.open(question.decode(), os.O_RDONLY), 2, 6)
        if question == b"memory":
            return RangeReply(b"there", memory=memoryview(b"01234567"), on_sent=self.sent.set)
        return RangeReply(question)


def connect(address: str) -> socket.socket:
    host, port, _ = address.split("|")
    return socket.create_connection((host, int(port)), 20)


def token_of(address: str) -> bytes:
    token = bytes.fromhex(address.rpartition("|")[2])
    assert len(token) == TOKEN_BYTES
    return token


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_a_question_is_answered_with_a_range_in_the_askers_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    server, client = TcpNetwork(LOCAL), TcpNetwork(LOCAL)
    address = server.announce(Echo())
    first, second = bytearray(4), bytearray(2)
    question = str(tmp_path / "file").encode()
    assert await client.ask(address, question, [memoryview(first), memoryview(second)]) == b"here"
    assert (bytes(first), bytes(second)) == (b"2345", b"67")
    assert await client.ask(address, b"again") == b"again"
    await client.close()
    await server.close()


async def test_memory_is_sent_and_who_gave_it_learns_when() -> None:
    server, client, echo = TcpNetwork(LOCAL), TcpNetwork(LOCAL), Echo()
    address, into = server.announce(echo), bytearray(8)
    assert await client.ask(address, b"memory", [memoryview(into)]) == b"there"
    assert into == b"01234567"
    assert await anyio.to_thread.run_sync(echo.sent.wait, 20)
    await client.close()
    await server.close()


async def test_a_file_that_ends_before_its_range_ends_the_connection(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123")
    server, client = TcpNetwork(LOCAL), TcpNetwork(LOCAL)
    with pytest.raises(ConnectionError), anyio.fail_after(20):
        await client.ask(server.announce(Echo()), str(tmp_path / "file").encode(), [memoryview(bytearray(6))])
    await client.close()
    await server.close()


async def test_a_file_is_closed_where_its_asker_has_gone(tmp_path: Path) -> None:
    path, server, asked = tmp_path / "file", TcpNetwork(LOCAL), threading.Event()
    path.write_bytes(b"0123456789")
    opened, ended = [], threading.Event()

    def answer(question: bytes) -> RangeReply:
        opened.append(os.open(path, os.O_RDONLY))
        assert asked.wait(20)
        return RangeReply(b"here" * (1 << 20), opened[0], 2, 6)

    @contextmanager
    def answering() -> Iterator[Callable[[bytes], RangeReply]]:
        try:
            yield answer
        finally:
            ended.set()

    address = server.announce(answering)
    with connect(address) as connection:
        connection.sendall(token_of(address) + struct.pack("!Q", 3) + b"you")
    asked.set()
    assert await anyio.to_thread.run_sync(ended.wait, 20)
    with pytest.raises(OSError):
        os.fstat(opened[0])
    await server.close()


@pytest.mark.parametrize("how", ["answered", "closed", "unreachable"])
async def test_a_watch_ends_with_the_answer_or_the_peer(how: str) -> None:
    server, answers = TcpNetwork(LOCAL), threading.Event()

    def answer(question: bytes) -> RangeReply:
        assert answers.wait(20)
        return RangeReply(question)

    address = server.announce(lambda: nullcontext(answer))
    if how == "unreachable":
        await server.close()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(TcpNetwork(LOCAL).watch, address, b"the end")
            await anyio.sleep(0.1)
            if how == "answered":
                answers.set()
            elif how == "closed":
                await server.close()
    answers.set()
    await server.close()


async def test_who_has_another_token_is_not_answered() -> None:
    server, echo = TcpNetwork(LOCAL), Echo()
    address = server.announce(echo)
    other = token_of(address)[:-1] + b"x"
    with connect(address) as connection:
        connection.sendall(other + struct.pack("!Q", 4) + b"read")
        assert is_closed(connection)
    with pytest.raises(OSError):
        await TcpNetwork(LOCAL).ask(address.rpartition("|")[0] + "|" + other.hex(), b"read")
    assert not echo.questions
    await server.close()


async def test_a_length_beyond_the_bound_ends_the_connection() -> None:
    server, echo = TcpNetwork(LOCAL), Echo()
    address = server.announce(echo)
    with connect(address) as connection:
        connection.sendall(token_of(address) + struct.pack("!Q", peer_link.MOST_BYTES + 1))
        assert is_closed(connection)
    assert not echo.questions
    await server.close()


async def test_a_peer_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "SILENCE_S", 0.2)
    with socket.create_server((LOCAL, 0)) as silent:
        network = TcpNetwork(LOCAL)
        with pytest.raises(TimeoutError):
            await network.ask(f"{LOCAL}|{silent.getsockname()[1]}|00", b"hello")
        await network.close()


async def test_a_connection_that_ended_while_idle_is_replaced() -> None:
    echo, client = Echo(), TcpNetwork(LOCAL)
    server = TcpNetwork(LOCAL)
    address = server.announce(echo)
    assert await client.ask(address, b"one") == b"one"
    for connection in list(server._server.connections):  # type: ignore[union-attr]
        connection.shutdown(socket.SHUT_RDWR)
    assert await client.ask(address, b"two") == b"two"
    await client.close()
    await server.close()


async def test_a_connection_whose_answer_comes_after_the_end_is_closed() -> None:
    server, client = TcpNetwork(LOCAL), TcpNetwork(LOCAL)
    asked, answers, ended = threading.Event(), threading.Event(), threading.Event()

    def answer(question: bytes) -> RangeReply:
        asked.set()
        assert answers.wait(20)
        return RangeReply(question)

    @contextmanager
    def answering() -> Iterator[Callable[[bytes], RangeReply]]:
        try:
            yield answer
        finally:
            ended.set()

    address = server.announce(answering)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, address, b"late")
        assert await anyio.to_thread.run_sync(asked.wait, 20)
        await client.close()
        answers.set()
    assert await anyio.to_thread.run_sync(ended.wait, 20)
    await server.close()


async def test_an_answer_that_breaks_off_is_an_error_and_its_connection_is_gone() -> None:
    with socket.create_server((LOCAL, 0)) as listener:

        def answer_half() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(struct.pack("!Q", 100) + b"half")

        thread = threading.Thread(target=answer_half)
        thread.start()
        network = TcpNetwork(LOCAL)
        with pytest.raises(ConnectionError):
            await network.ask(f"{LOCAL}|{listener.getsockname()[1]}|00", b"hello")
        thread.join()
        await network.close()


async def test_after_the_end_nobody_is_answered() -> None:
    server, client = TcpNetwork(LOCAL), TcpNetwork(LOCAL)
    address = server.announce(Echo())
    assert await client.ask(address, b"one") == b"one"
    await server.close()
    with pytest.raises(OSError):
        await client.ask(address, b"two")
    await client.close()
