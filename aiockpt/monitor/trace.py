"""The trace of a process: every event as one line of JSON in a file.

Guarantees:

- The engine never waits for the file: an event is encoded and queued (about a microsecond), and a separate task writes the
  queue, through aiofiles, on a worker thread, at most every `GATHER_S`. A process that is killed loses no more than the
  events of that time.
- When the checkpointer is closed, also at interpreter exit, the file ends with its last event, in whole lines. A process
  that is killed may leave half a line; the next one that appends begins a new line.
- Where several processes append to one file (two jobs in one folder), a process that appends after another one repeats
  the line that identifies it.
- In the absence of events the first rank writes signs of life (`alive_after_s`): the time of a kill, and so the amount of
  lost work, is known to a tenth of the time since the last event, or to a minute.
- A file that cannot be written harms no save: the error is logged, and further events are dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import aiofiles
import anyio
import anyio.to_thread
import msgspec
from aiofiles.threadpool.binary import AsyncFileIO

from aiockpt.errors import UsageError
from aiockpt.events import Alive, Event, Opened
from aiockpt.options import refuse_value
from aiockpt.storage.backend import local_path

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FOLDER = "monitor"
"""Beside the steps of a run."""
GATHER_S = 0.05
"""Seconds between two writes of the file: a save has some fourteen events in a moment, and the two calls on a worker of a
write cost more than all lines."""


def alive_after_s(quiet_s: float) -> float:
    """Return the wait until the next sign of life, after *quiet_s* without an event."""
    return min(max(1.0, quiet_s / 10), 60.0)


class TraceFile:
    """Appends every event to a file; add it to one checkpointer: ``Checkpointer(…, observers=[TraceFile()])``.

    Each process has a file of its own; ``aiockpt report RUN`` reads those of all ranks as one.

    Args:
        path: the file, whose folder must exist; ``{rank}`` in it is the rank. None: ``monitor/rank-00000.jsonl`` below
            the nearest place that is a folder of this machine; its folder is made.
        mesh: the position of this rank in the parallel job, by which the report can group: a ``DeviceMesh`` with named
            dimensions, or coordinates by name, such as ``{"dp": 3, "tp": 0, "pp": 1}``.

    Raises:
        UsageError: the dimensions of the mesh have no names.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, mesh: DeviceMesh | Mapping[str, int] | None = None
    ) -> None:
        given: object = path
        if not isinstance(given, str | os.PathLike | None):
            refuse_value("TraceFile", "path", given, "a path, or None for the folder of the checkpoints")
        self._path = None if path is None else os.fspath(path)
        self._mesh = _coordinates(mesh)
        self._lines: list[bytes] = []
        self._opened: Opened | None = None
        self._news, self._end = anyio.Event(), anyio.Event()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Opened):
            event = self._opened = msgspec.structs.replace(event, mesh=self._mesh)
        self._lines.append(msgspec.json.encode(event) + b"\n")
        self._news.set()

    async def run(self) -> None:
        """Write the queue whenever it is not empty, until `aclose`.

        Raises:
            UsageError: no file was named, and no place is a folder.
            OSError: the file cannot be written; later events are dropped.
        """
        self._end = anyio.Event()
        await self._wait_for_news()
        if not self._lines:
            return
        try:
            path = await anyio.to_thread.run_sync(self._place)
            # The first event of a checkpointer is Opened, and no line was taken yet.
            opened, last_s = self._lines[0], anyio.current_time()
            first = self._opened is not None and self._opened.rank == 0
            # a: every write goes to the end, wherever another process has put it; +: `_begin` reads the last byte.
            async with aiofiles.open(path, "a+b", buffering=0) as file:
                end = await _begin(file)
                while not self._end.is_set() or self._lines:
                    lines, self._lines = self._lines, []
                    if lines:
                        last_s = anyio.current_time()
                    elif await self._wait_for_news(alive_after_s(anyio.current_time() - last_s) if first else None):
                        continue
                    else:
                        lines = [msgspec.json.encode(Alive(at_ns=time.monotonic_ns())) + b"\n"]
                    if (size := await file.seek(0, os.SEEK_END)) != end:  # another process writes there, too
                        lines.insert(0, opened)
                    end = size + await _write(file, b"".join(lines))
                    # Waits for the end and not for news: lines gather meanwhile, and a close is not delayed.
                    with anyio.move_on_after(GATHER_S):
                        await self._end.wait()
        finally:
            self._lines.clear()

    async def aclose(self) -> None:
        """Stop `run` when all is written."""
        self._end.set()
        self._news.set()

    def _place(self) -> str:
        """Return the path of the file; make its folder where the path is the default."""
        opened = self._opened
        if self._path is not None:
            return self._path if opened is None else self._path.replace("{rank}", str(opened.rank))
        assert opened is not None, "the first event says where the run is"
        for url in opened.urls:
            if (path := local_path(url)) is not None:
                folder = path / FOLDER
                folder.mkdir(parents=True, exist_ok=True)
                return str(folder / f"rank-{opened.rank:05}.jsonl")
        raise UsageError("TraceFile(): no place is a folder of this machine: name the file, TraceFile('trace.jsonl')")

    async def _wait_for_news(self, most_s: float | None = None) -> bool:
        """Wait for a line or for `aclose`; return False where neither comes within *most_s* seconds."""
        if not self._lines and not self._end.is_set():
            self._news = anyio.Event()
            with anyio.move_on_after(most_s):
                await self._news.wait()
        return bool(self._lines) or self._end.is_set()

    def __repr__(self) -> str:
        return f"<TraceFile {self._path!r}, {len(self._lines)} events queued>"


def _coordinates(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, int]:
    """Return the coordinates by the name of their dimension; no entry for a rank outside the mesh."""
    if mesh is None or isinstance(mesh, Mapping):
        return dict(mesh or {})
    if not mesh.mesh_dim_names:
        raise UsageError("TraceFile(mesh=…): its dimensions have no names: init_device_mesh(…, mesh_dim_names=(…))")
    return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate() or (), strict=False))


async def _write(file: AsyncFileIO, data: bytes) -> int:
    """Append all of *data*, which an unbuffered file may accept in parts; return its size."""
    left = memoryview(data)
    while left:
        left = left[await file.write(left) :]
    return len(data)


async def _begin(file: AsyncFileIO) -> int:
    """End the half line of a writer that was killed in it, if any; return where the file ends."""
    size: int = await file.seek(0, os.SEEK_END)
    if size:
        await file.seek(size - 1)
        if await file.read(1) != b"\n":
            return size + await _write(file, b"\n")
    return size
