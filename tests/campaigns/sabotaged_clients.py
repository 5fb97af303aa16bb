"""Readers of every backend on clients that answer as a `Saboteur` says: the seam is the library below each of them."""

import asyncio
import errno
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import aiohttp
import anyio
import obstore
from obstore.exceptions import GenericError

from aiockpt.backends import cloud, fsspec, hdfs, local_reader, s3
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.ranges import Buffers, RangeReader
from aiockpt.backends.s3_client import Bucket, Settings
from aiockpt.errors import StorageError, StorageTransferError
from aiockpt.runtime.limits import Limiter
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Reader, Seen
from aiockpt.storage.transfer import cut_views
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import SimulatedClock

HONEST = ("short", "broken", "refused", "slow", "long")
LYING = (*HONEST, "wrong", "repeated")
WAITS_S = (0.01, 1.0, 30.0, 90.0, 400.0)


class Answer(NamedTuple):
    """What comes for a range: pieces, *wait_s* seconds before the first and the last, and an error at the end or none."""

    pieces: list[bytes]
    fails: bool = False
    wait_s: float = 0.0


class Saboteur:
    """Draws an answer for each range that is asked for.

    Args:
        fraction: of the answers are no whole and right one.
        kinds: what those may be.
        asked: called before each answer.
    """

    def __init__(
        self,
        dice: random.Random,
        clock: SimulatedClock,
        fraction: float,
        kinds: Sequence[str],
        asked: Callable[[], object],
    ) -> None:
        self.dice, self.clock, self._fraction, self._kinds, self._asked = dice, clock, fraction, kinds, asked
        self.kinds: Counter[str] = Counter()

    def answer(self, data: bytes, offset: int, size: int) -> Answer:
        """Return what comes for *size* bytes of *data* from *offset*."""
        self._asked()
        kind = self.dice.choice(self._kinds) if self.dice.random() < self._fraction else "whole"
        self.kinds[kind] += 1
        body = data[offset : offset + size]
        if kind == "refused":
            return Answer([], fails=True)
        if kind in ("short", "broken"):
            body = body[: self.dice.randrange(max(1, size))]
        if kind == "long":
            body += self.dice.randbytes(self.dice.randint(1, 5000))
        if kind == "wrong" and body:
            at = self.dice.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        if kind == "repeated":
            at = self.dice.randint(0, size)
            body = (body[:at] + body)[:size]
        wait_s = self.dice.choice(WAITS_S) if kind == "slow" else 0.0
        return Answer(list(self._cut(body)), kind == "broken", wait_s)

    def _cut(self, body: bytes) -> Iterator[bytes]:
        while body:
            size = self.dice.choice((1, 100, 1000, 4096, 1 << 20))
            yield body[:size]
            body = body[size:]

    def block(self, wait_s: float) -> None:
        """Let the time pass that a thread waits."""
        self.clock.now_ns += round(wait_s * 1e9)


def foreign(key: str, data: bytes, saboteur: Saboteur) -> Reader:
    """Return a backend from elsewhere: it shows what comes as it comes, and does not mind what is missing."""

    async def fill(_: int, buffers: Buffers, __: Seen | None) -> None:
        raise AssertionError(f"{key}: {buffers.left_bytes} bytes are read by its own read()")

    class Foreign(RangeReader):
        async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
            size = sum(view.nbytes for view in into)
            answer = saboteur.answer(data, offset, size)
            await anyio.sleep(answer.wait_s)
            at = 0
            for piece in answer.pieces:
                for view in cut_views(into, at, at + len(piece)):
                    view.cast("B")[:] = piece[: view.nbytes]
                    piece = piece[view.nbytes :]
                    at += view.nbytes
                    if seen is not None:
                        seen(view)
            if answer.fails:
                kind = saboteur.dice.choice((StorageError, StorageTransferError))
                raise kind("the line broke", key=key, retryable=True)

    return Foreign(key, len(data), fill)


def on_cloud(key: str, data: bytes, saboteur: Saboteur) -> Reader:
    """Return a reader of the cloud backend: the answers are obstore's."""

    class Store:
        async def get_range(self, start: int, length: int) -> bytes:
            answer = saboteur.answer(data, start, length)
            await anyio.sleep(answer.wait_s)
            if answer.fails:
                raise GenericError(f"HttpError {{ kind: {saboteur.dice.choice(('Decode', 'Timeout', 'Request'))} }}")
            return b"".join(answer.pieces)

    return cloud.open_reader(cast("Any", Store()), key, len(data), Limiter("cloud", 4))


def on_fsspec(key: str, data: bytes, saboteur: Saboteur) -> Reader:
    """Return a reader of the fsspec backend: the answers are what its files read."""

    class File:
        def seek(self, offset: int, /) -> None:
            self.at = offset

        def read(self, size: int, /) -> bytes:
            answer = saboteur.answer(data, self.at, size)
            saboteur.block(answer.wait_s)
            body = b"".join(answer.pieces)
            self.at += len(body)
            if answer.fails:
                raise saboteur.dice.choice((ConnectionResetError(), TimeoutError(), OSError(errno.EIO, "EIO")))
            return body

        def close(self) -> None: ...

    class Folder:
        def open(self, _: str) -> File:
            return File()

    return fsspec.open_reader(cast("Any", Folder()), key, len(data), Limiter("fsspec", 4))


def on_hdfs(key: str, data: bytes, saboteur: Saboteur) -> Reader:
    """Return a reader of the HDFS backend: the answers are packets of its library."""

    class File:
        def __len__(self) -> int:
            return len(data)

        def read_range_stream(self, offset: int, size: int) -> Iterator[bytes]:
            answer = saboteur.answer(data, offset, size)
            saboteur.block(answer.wait_s)
            yield from answer.pieces
            if answer.fails:
                name = saboteur.dice.choice(("DataTransferError", "ChecksumError", "BlocksNotFound"))
                raise RuntimeError(f'{name}("broke")')

    return hdfs.open_reader(cast("Any", File()), key, Limiter("hdfs", 4))


class _Content:
    """aiohttp's stream of an answer's body."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def set_read_chunk_size(self, _: int) -> None: ...
    def feed_eof(self) -> None: ...

    def read_nowait(self) -> bytes:
        return b""

    def is_eof(self) -> bool:
        return False

    async def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        await anyio.sleep(self._answer.wait_s)
        for piece in self._answer.pieces:
            yield piece, True
        if self._answer.fails:
            raise aiohttp.ClientPayloadError("the connection broke")


class _Transport:
    """A connection, without TLS, on which an answer's body comes; what sends it is a timer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._ours, self._peer = socket.socketpair()
        self._sending = asyncio.get_running_loop().call_later(answer.wait_s, self._send)

    def _send(self) -> None:
        for piece in self._answer.pieces:
            self._peer.sendall(piece)
        self._peer.close()

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._ours if name == "socket" else None

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None:
        self._sending.cancel()
        self._peer.close()
        self._ours.close()


def on_s3(key: str, data: bytes, saboteur: Saboteur) -> Reader:
    """Return a reader of the S3 backend: the answers are aiohttp's, or come on a socket of their own."""

    class Client:
        async def get_object(self, *, Range: str, **address: str) -> dict[str, Any]:  # noqa: N803
            start, _, end = Range.removeprefix("bytes=").partition("-")
            size = int(end) + 1 - int(start)
            answer = saboteur.answer(data, int(start), size)
            if answer.fails and not answer.pieces:
                raise saboteur.dice.choice((aiohttp.ServerDisconnectedError(), TimeoutError(), ConnectionResetError()))
            return {"ContentRange": f"bytes {start}-{end}/{len(data)}", "Body": body(answer, size)}

    @asynccontextmanager
    async def body(answer: Answer, size: int) -> AsyncIterator[Any]:
        transport = _Transport(answer) if saboteur.dice.random() < 0.5 else None
        response = SimpleNamespace(content=_Content(answer), content_length=size, connection=None)
        if transport is not None:
            response.connection = SimpleNamespace(transport=transport)
        try:
            yield SimpleNamespace(raw_stream=response)
        finally:
            if transport is not None:
                transport.close()

    class SabotagedBucket(Bucket):
        async def client(self) -> Any:
            return Client()

    return s3.open_reader(SabotagedBucket("b", "", Settings()), key, len(data), "tag", Limiter("s3", 4))


async def on_disk(key: str, data: bytes, saboteur: Saboteur) -> Reader:
    """Return a reader of the local backend: the answers are the system's, cached, uncached, or past the page cache."""
    dice = saboteur.dice

    class Disk(ForwardingFiles):
        def forward(self, call: FilesCall) -> Any:
            if call.verb != "preadv":
                return call()
            _, buffers, offset, flags = call.arguments
            size = sum(view.nbytes for view in buffers)
            answer = saboteur.answer(data, offset, min(size, len(data) - offset))
            saboteur.block(answer.wait_s)
            done = 0
            for view in cut_views(buffers, 0, sum(map(len, answer.pieces))):
                view.cast("B")[:] = b"".join(answer.pieces)[done : done + view.nbytes]
                done += view.nbytes
            if answer.fails:
                if flags and dice.random() < 0.5:
                    raise OSError(dice.choice((errno.EAGAIN, errno.EOPNOTSUPP)), "no page of it")
                raise OSError(dice.choice((errno.EIO, errno.ESTALE, errno.EINVAL)), "the disk failed")
            return done

    files = SimulatedFiles(
        direct_alignment=dice.choice((4096, None)), page_cache=dice.choice(("warm", "cold", "unsupported"))
    )
    folder, _, name = key.rpartition("/")
    for depth in range(len(folder.split("/"))):
        files.mkdir("/" + "/".join(folder.split("/")[: depth + 1]))
    fd = files.open(f"/{folder}/{name}", os.O_WRONLY | os.O_CREAT)
    files.pwrite(fd, memoryview(data), 0)
    files.close(fd)
    return await LocalBackend("/", world=World(files=Disk(files))).open(key)


READERS: dict[str, Callable[[str, bytes, Saboteur], Any]] = {
    "foreign": foreign,
    "cloud": on_cloud,
    "fsspec": on_fsspec,
    "hdfs": on_hdfs,
    "s3": on_s3,
    "local": on_disk,
}


@contextmanager
def small_pieces(size: int) -> Iterator[None]:
    """Have all backends ask for, and show, *size* bytes at once, and obstore ask the stores of `on_cloud`."""

    async def get_range(store: Any, _: str, *, start: int, length: int) -> bytes:
        found: bytes = await store.get_range(start, length)
        return found

    with (
        patch.object(obstore, "get_range_async", get_range),
        patch.object(cloud, "_PIECE_BYTES", size),
        patch.object(fsspec, "PIECE_BYTES", size),
        patch.object(hdfs, "SHOWN_BYTES", size),
        patch.object(local_reader, "PIECE_BYTES", size),
    ):
        yield
