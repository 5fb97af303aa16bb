"""Frames between two processes, over a socket: length, then bytes. Their content is opaque here.

There is one socket pair for each direction: an answer without a receiver breaks only its own direction, and loses nothing
that the other side sent before its end. Guarantees:

- A frame arrives whole or not at all, in the order in which frames were sent; after a failed send none follows.
- When `Sender.send` returns the kernel has the frames: they arrive even if this process is killed in the next instant.
- A forked child keeps no end: its copies are closed, so that the other side detects the death of the parent. A program that
  this one starts has no end either, unless one is passed to it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Lock

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class Sender:
    """Sends frames; any thread, one at a time.

    Args:
        end: a connected stream socket, which belongs to the sender from now on.
        timeout_s: how long one `send` may wait for the other side to read what was sent before.
    """

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        end.settimeout(timeout_s)
        close_in_forks(end)
        self._end = end
        self._sending = Lock()
        self._broken = False

    def send(self, compose: Callable[[], Iterable[bytes]]) -> None:
        """Send the frames that *compose* returns, together; it is called when nothing else is being sent.

        Raises:
            OSError: the other side is gone, or reads nothing; nothing can be sent any more.
        """
        with self._sending:
            if self._broken:
                raise BrokenPipeError("the other side is gone")
            data = b"".join(_framed(frame) for frame in compose())
            try:
                self._end.sendall(data)
            except BaseException:  # half a frame may be there
                self.hang_up()
                raise

    def hang_up(self) -> None:
        """Send nothing more: the other side sees the end, and a `send` under way raises. Idempotent, never waits."""
        # Without the lock, which a `send` under way holds: the shutdown is what ends that.
        self._broken = True
        with suppress(OSError):  # the other side was faster
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and close the socket. Idempotent."""
        self.hang_up()
        with self._sending:  # a send under way has to end before the descriptor is reused
            self._end.close()


class Receiver:
    """Receives frames, on one event loop.

    Args:
        end: a connected stream socket, which belongs to the receiver from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        close_in_forks(end)
        self._end = end
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def receive(self) -> bytes | None:
        """Return the next frame; None when there will be none any more."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._end)
        reader, _ = self._streams
        try:
            (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def hang_up(self) -> None:
        """Have `receive` end, whatever the other side does. Idempotent, any thread, never waits."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, on the loop. Idempotent."""
        if self._streams is None:
            self._end.close()
        else:
            self._streams[1].close()


class Poster:
    """Sends frames without ever waiting, on one event loop; frames without a receiver are dropped."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        _, self._writer = await asyncio.open_unix_connection(sock=self._end)

    def post(self, frame: bytes) -> None:
        """Send a frame soon, in order."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(_framed(frame))

    async def close(self) -> None:
        """Send what was posted, and close."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
                await self._writer.wait_closed()


def _framed(frame: bytes) -> bytes:
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes")
    return _LENGTH.pack(len(frame)) + frame


_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_registered = False


def close_in_forks(end: socket.socket) -> None:
    """Make every child that is forked from now on close its copy of *end*, for as long as *end* exists."""
    global _registered
    _ends.add(end)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for end in list(_ends):
        end.close()
    _ends.clear()
