"""The link between processes of a job on different hosts: a question and its answer, with bytes of a file or of memory.

It is plain TCP. The verbs of `Network` are all of it, so that another transport can take its place. Guarantees:

- Nothing is answered before the token of the asked process has come, which is compared in constant time; the socket listens
  on the announced address alone; no length is believed beyond `MOST_BYTES`.
- A range goes from its file or memory into the socket, and from the socket into the asker's memory. What is sent is a copy:
  a file may change as soon as it is closed (`sendfile` leaves pages of the file in the sockets, and takes as long).
- A peer that sends nothing for `SILENCE_S` is lost: TimeoutError. A connection that broke is never used again.
- A question is answered on its connection's own thread and needs no other of the process: two processes whose threads all
  wait for each other would wait for ever.

Measured on loopback: 0.22 s of processor for each GiB taken and 0.14 given. Gloo's 0.16 and 0.17 break the whole group with
one dead rank; HTTP, ZeroMQ and gRPC cost two to five times as much.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import socketserver
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from aiockpt.errors import UsageError
from aiockpt.runtime.limits import Limiter, run_blocking

T = TypeVar("T")
SILENCE_S = 20.0
"""Without a byte from a peer, before it is lost."""
IDLE_S = 60.0
"""Until an idle connection is closed, with its thread."""
CONNECT_S = 5.0
POLL_S = 0.2
"""How often the thread that accepts looks whether it is to end."""
GIVEN_BYTES = 1 << 19
"""Read from a file and sent, while the processor's cache has it."""
ASKED_AT_ONCE = 8
"""Threads that wait for the answers of one peer."""
TOKEN_BYTES = 32
MOST_BYTES = 257 << 20
"""The longest question or answer, without its range: a record, and what is said beside it."""
_LENGTH = struct.Struct("!Q")


class RangeReply(NamedTuple):
    """An answer, and what follows it: *memory*, or the range of a file.

    Attributes:
        fd, offset, size: descriptor, which is closed then, first byte, bytes.
        on_sent: called when all of it is sent.
    """

    data: bytes
    fd: int = -1
    offset: int = 0
    size: int = 0
    memory: memoryview | None = None
    on_sent: Callable[[], object] | None = None


Answering = AbstractContextManager[Callable[[bytes], RangeReply]]
"""Made for each connection, on its thread; the function answers one question."""


class Network(Protocol):
    """How the processes of a job reach each other."""

    def announce(self, answering: Callable[[], Answering]) -> str:
        """Answer from now on; return the address, with the token, for the processes that may ask."""
        ...

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        """Return the answer to *question*.

        Args:
            parts: filled one after the other with the range that follows; the next is taken when one is full.

        Raises:
            TimeoutError: the peer is silent.
            OSError: it cannot be reached, or is lost.
        """
        ...

    async def watch(self, address: str, question: bytes) -> None:
        """Return when *question* is answered, however late, or its peer is lost; takes no thread meanwhile."""

    async def close(self) -> None:
        """Answer no more, and close all connections. Idempotent."""


MakeNetwork = Callable[[str, Callable[[int], bytes]], Network]
"""Called with the address of this host, and what draws random bytes."""


class TcpNetwork:
    """Plain TCP.

    Args:
        host: the address of this host that is announced, and listened on.
        token: random bytes that are drawn for this process.
    """

    def __init__(self, host: str, token: Callable[[int], bytes] = os.urandom) -> None:
        self._host, self._token = host, token(TOKEN_BYTES)
        self._server: _Server | None = None
        self._peers: dict[str, _Peer] = {}

    def announce(self, answering: Callable[[], Answering]) -> str:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._server = server = _Server(family, self._host, self._token, answering)
        threading.Thread(target=server.serve_forever, args=(POLL_S,), name="aiockpt peers", daemon=True).start()
        return f"{self._host}|{server.server_address[1]}|{self._token.hex()}"

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        if address not in self._peers:
            self._peers[address] = _Peer(address)
        peer = self._peers[address]
        return await run_blocking(peer.limiter, peer.ask, question, iter(parts))

    async def watch(self, address: str, question: bytes) -> None:
        host, port, token = address.split("|")
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(b"".join((bytes.fromhex(token), _LENGTH.pack(len(question)), question)))
                await reader.read(1)
            finally:
                writer.close()

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await run_blocking(Limiter("peers, closing", 1), server.stop)
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """The connections to one process. Blocking; any thread."""

    def __init__(self, address: str) -> None:
        host, port, token = address.split("|")
        self._address, self._token = (host, int(port)), bytes.fromhex(token)
        self._idle: deque[socket.socket] = deque()
        self._is_closed = False
        self.limiter = Limiter(f"peer {host}", ASKED_AT_ONCE)

    def ask(self, question: bytes, parts: Iterator[memoryview]) -> bytes:
        """Return the answer; ask once more over a new connection where an idle one turns out to be closed."""
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = socket.create_connection(self._address, CONNECT_S), True
            try:
                if is_new:
                    connection.settimeout(SILENCE_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.sendall(self._token)
                _send(connection, question)
                size = connection.recv(_LENGTH.size)
            except ConnectionError:
                size = b""
            except BaseException:
                connection.close()
                raise
            if size:
                return self._finish(connection, size, parts)
            connection.close()
            if is_new:
                raise ConnectionResetError("it ended before it had answered")

    def _finish(self, connection: socket.socket, size: bytes, parts: Iterator[memoryview]) -> bytes:
        """Receive an answer that begins with *size*, and maybe not all of that."""
        try:
            answer = _receive(connection, _checked(size + _receive(connection, _LENGTH.size - len(size))))
            if _receive(connection, 1) == _RANGE:
                for part in parts:
                    _fill(connection, part)
        except BaseException:
            connection.close()  # in the middle of an answer
            raise
        self._idle.append(connection)
        if self._is_closed:  # meanwhile, by another thread
            self.close()
        return answer

    def close(self) -> None:
        """Close the idle connections, and each other one when its answer has come."""
        self._is_closed = True
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


class _Server(socketserver.ThreadingTCPServer):
    """A thread that accepts, and one for each connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, family: int, host: str, token: bytes, answering: Callable[[], Answering]) -> None:
        self.address_family = family
        self.token, self.answering = token, answering
        self.connections: set[socket.socket] = set()
        self.is_stopped = False
        super().__init__((host, 0), _Connection)

    def stop(self) -> None:
        """Accept no more, and end all connections. Blocking."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, at once
        self.shutdown()
        self.server_close()
        self.is_stopped = True  # for a connection that is not in the list yet
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a connection that broke says so at its other end."""


class _Connection(socketserver.BaseRequestHandler):
    """The questions of one other process, one after the other."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  of this kind alone
    request: socket.socket

    def handle(self) -> None:
        connection, server = self.request, self.server
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), server.token):
            return
        server.connections.add(connection)
        try:
            with server.answering() as answer:
                while not server.is_stopped:
                    connection.settimeout(IDLE_S)
                    size = _receive(connection, _LENGTH.size)
                    connection.settimeout(SILENCE_S)
                    self._reply(answer(_receive(connection, _checked(size))))
        finally:
            server.connections.discard(connection)

    def _reply(self, reply: RangeReply) -> None:
        opened = nullcontext() if reply.fd < 0 else os.fdopen(reply.fd, "rb", buffering=0)
        with opened as file:
            _send(self.request, reply.data, _NO_RANGE if file is None and reply.memory is None else _RANGE)
            if reply.memory is not None:
                self.request.sendall(reply.memory)
            elif file is not None:
                file.seek(reply.offset)
                piece, left = memoryview(bytearray(min(GIVEN_BYTES, reply.size))), reply.size
                while left:
                    if not (count := file.readinto(piece[:left])):
                        raise OSError("the file ends before its range")  # and so does the connection
                    self.request.sendall(piece[:count])
                    left -= count
        if reply.on_sent is not None:
            reply.on_sent()


_NO_RANGE, _RANGE = b"\0", b"\1"
"""The byte after an answer."""


def _send(connection: socket.socket, message: bytes, end: bytes = b"") -> None:
    connection.sendall(b"".join((_LENGTH.pack(len(message)), message, end)))


def _checked(length: bytes) -> int:
    (size,) = _LENGTH.unpack(length)
    if size > MOST_BYTES:
        raise ConnectionAbortedError(f"a message of {size} bytes is none of ours")
    return int(size)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < view.nbytes:
        received = connection.recv_into(view[filled:])
        if not received:
            raise ConnectionResetError("the connection ended")
        filled += received


class _AtOnce(ThreadPoolExecutor):
    """Does its work on the thread that asks for it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  the future has it
            done.set_exception(error)
        return done


@contextmanager
def on_this_thread() -> Iterator[Callable[[Awaitable[T]], T]]:
    """Yield a function that runs a coroutine on this thread, with all the blocking work that it hands to others."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_AtOnce(1))

        async def wait_for(work: Awaitable[T]) -> T:
            return await work

        yield lambda work: runner.run(wait_for(work))


def find_address(network: str | None, store: Any) -> str:
    """Return the address of this host that others reach it by.

    Args:
        network: an address, or a network interface; None for the local end of a connection to the store.

    Raises:
        UsageError: there is no such interface here.
    """
    if network is None:
        while (inner := getattr(store, "underlying_store", None)) is not None:
            store = inner
        host = str(getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname())
        address = _towards(host)
        if address.startswith(_LOOPBACK) and not host.startswith((*_LOOPBACK, "localhost")):
            # Debian's /etc/hosts gives the own name to the loopback, where other hosts reach nobody.
            return _towards(_ELSEWHERE)
        return address
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in network else socket.AF_INET, network)
    except OSError:
        return _of_interface(network)
    return network


def _towards(host: str) -> str:
    """Return the local address of packets to *host*; nothing is sent."""
    with suppress(OSError):
        family, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


_LOOPBACK = "127.", "::1"
_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): packets to it take the default route."""


def _of_interface(name: str) -> str:
    import fcntl  # POSIX alone

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
        except OSError as error:
            known = ", ".join(other for _, other in socket.if_nameindex())
            raise UsageError(
                f"network={name!r} is neither an address nor an interface of this host with one; it has {known}"
            ) from error
    return socket.inet_ntoa(asked[20:24])


_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface, in bytes 20 to 24 of what is returned."""
