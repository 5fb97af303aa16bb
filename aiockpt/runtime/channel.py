"""How do two processes talk? In frames over a socket pair: length, then bytes. What they mean is not known here.

Guarantees:

- A frame arrives whole or not at all, in the order in which frames were sent; after a failed send none follows.
- When `Sender.send` returns the kernel has the frames: they arrive although this process is killed in the next instant.
- A forked child has no end that counts: its copies are closed, so that the death of the parent is seen on the other side.
  A program that this one starts has none either, unless it was given one.
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


class Line:
    """One end of a connection. One thread at a time sends, in turn; the loop thread receives.

    Args:
        end: a connected stream socket, which belongs to the line from now on.
        timeout_s: how long one `send` may wait for the other side to take what was sent before.
    """

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        end.settimeout(timeout_s)
        self._end = end
        self._sending = Lock()
        self._broken = False
        self._ends = [end]
        _register(self)

    def send(self, compose: Callable[[], Iterable[bytes]]) -> None:
        """Send the frames that *compose* returns, together; it is called when nothing else is being sent. Any thread.

        Raises:
            OSError: the other side is gone, or takes nothing; nothing can be sent any more.
        """
        with self._sending:
            if self._broken:
                raise BrokenPipeError("the line is broken")
            try:
                self._end.sendall(b"".join(_framed(frame) for frame in compose()))
            except OSError:
                self.hang_up()
                raise

    async def open(self) -> Incoming:
        """Return what arrives. Call it once, on the loop that receives."""
        end = self._end.dup()
        self._ends.append(end)
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return Incoming(reader, writer)

    def hang_up(self) -> None:
        """Send nothing more: both sides see the end, and whoever is sending raises. Idempotent, any thread, never waits."""
        self._broken = True
        with suppress(OSError):  # the other side was faster
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and let the socket go. Idempotent."""
        self.hang_up()
        with self._sending:  # whoever is sending has to leave before the descriptor means something else
            self._end.close()

    def _forget(self) -> None:
        """In a forked child: close its copies, and leave the connection as it is."""
        for end in self._ends:
            end.close()


class Incoming:
    """What arrives at one end, and a way to answer from the loop thread. Use one way of sending on one end only."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> bytes | None:
        """Return the next frame; None when there will be none any more."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def post(self, frame: bytes) -> None:
        """Send a frame soon, in order; never blocks. What nobody is there to receive is dropped."""
        if not self._writer.is_closing():
            self._writer.write(_framed(frame))

    async def close(self) -> None:
        """Send what was posted, and close."""
        with suppress(OSError):
            self._writer.close()
            await self._writer.wait_closed()


def _framed(frame: bytes) -> bytes:
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes")
    return _LENGTH.pack(len(frame)) + frame


_lines: weakref.WeakSet[Line] = weakref.WeakSet()
_registered = False


def _register(line: Line) -> None:
    global _registered
    _lines.add(line)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for line in list(_lines):
        line._forget()
    _lines.clear()
