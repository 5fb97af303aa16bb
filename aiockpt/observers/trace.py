"""What happened, to be read later? Every event as one line of JSON in a file.

Guarantees:

- The engine never waits for the file: an event is encoded and queued (about a microsecond), and a task of its own writes
  what has come together, through aiofiles, on a worker thread.
- When the checkpointer is closed, also at interpreter exit, the file ends with its last event, in whole lines. A process
  that is killed may leave half a line; the next one that appends begins a new line.
- A file that cannot be written harms no save: that is logged, and no more events are kept.
"""

from __future__ import annotations

import os

import aiofiles
import anyio
import msgspec
from aiofiles.threadpool.binary import AsyncBufferedReader

from aiockpt.events import Event
from aiockpt.runtime.world import Clock, OsClock


class TraceStarted(Event, frozen=True, tag=True):
    """A process begins to write: its wall clock at *at_ns*, so that the traces of several can be laid side by side."""

    time_ns: int
    pid: int


class TraceFile:
    """Appends every event to a file; give it to one checkpointer: ``Checkpointer(…, observers=[TraceFile(path)])``.

    Args:
        path: the file; it is created when it is not there, its folder is not.
        clock: what the first line says of the time; tests pass a simulated one.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self._path = os.fspath(path)
        self._clock = clock or OsClock()
        self._lines: list[bytes] = []
        self._news: anyio.Event | None = None
        self._ending = self._given_up = False

    def on_event(self, event: Event) -> None:
        """Queue *event*."""
        if not self._given_up:
            self._lines.append(msgspec.json.encode(event) + b"\n")
            self._wake()

    async def run(self) -> None:
        """Write what is queued, whenever there is something, until `aclose`.

        Raises:
            OSError: the file cannot be written; what comes after that is dropped.
        """
        now_ns, time_ns = self._clock.monotonic_ns(), self._clock.time_ns()
        self._ending = False
        self.on_event(TraceStarted(at_ns=now_ns, time_ns=time_ns, pid=os.getpid()))
        try:
            async with aiofiles.open(self._path, "a+b") as file:
                if await _ends_in_half_a_line(file):
                    await file.write(b"\n")
                while not self._ending or self._lines:
                    lines, self._lines = self._lines, []
                    if lines:
                        await file.write(b"".join(lines))
                        await file.flush()
                    else:
                        self._news = anyio.Event()
                        await self._news.wait()
        finally:
            self._given_up = not self._ending
            self._lines.clear()

    async def aclose(self) -> None:
        """Let `run` end when all is written."""
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def __repr__(self) -> str:
        return f"<TraceFile {self._path!r}, {len(self._lines)} events queued>"


async def _ends_in_half_a_line(file: AsyncBufferedReader) -> bool:
    """Say whether whoever wrote last was killed in the middle of it."""
    size = await file.seek(0, os.SEEK_END)
    if not size:
        return False
    await file.seek(size - 1)
    return await file.read(1) != b"\n"
