"""The reader of a run's events: the files of `aiockpt.monitor.trace`, of all ranks and starts, as one.

Guarantee: damage in a file does not keep the rest from being read. Lines that are no event are counted, and so are lines
whose process is unknown because the line that names it is damaged; files that cannot be read are named.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import anyio
import msgspec

from aiockpt import events
from aiockpt.errors import CheckpointError, UsageError
from aiockpt.events import Committed, Event, Opened, StageEnded
from aiockpt.format.document import described
from aiockpt.monitor.run_log import ProcessLog, RunLog, UnreadFile, start_numbers
from aiockpt.monitor.trace import FOLDER
from aiockpt.redaction import redact
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend
from aiockpt.units import count

# Alignment of the hosts' clocks, as far as saves prove an offset. A save is a round trip through the store: the first rank
# writes the manifest after it has read another rank's receipt, and that rank then reads the manifest. So the other rank's
# events up to its receipt precede the first rank's commit, and its events from reading the commit on follow it. Over many
# saves the two bounds converge, as with the messages of NTP. Wall clocks that satisfy both bounds are left unchanged.


class _Seen(msgspec.Struct):
    """Times of one rank's receipt for a commit, of the commit, or of reading it, by step, in ns of its own wall clock."""

    voted: dict[int, int]
    begun: dict[int, int]
    ended: dict[int, int]
    received: dict[int, int]


def align_clocks(run: RunLog) -> RunLog:
    """Return *run* with the ranks' clocks of each start aligned with its first rank's, where saves contradict them."""
    by_start: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, number in enumerate(start_numbers(run) if run.processes else []):
        by_start[number][run.processes[place].opened.rank].append(place)
    processes = list(run.processes)
    for ranks in by_start.values():
        seen = {rank: _seen(run.processes[place] for place in places) for rank, places in ranks.items()}
        for rank, places in ranks.items():
            shift_ns = _shift(seen[min(seen)], seen[rank])
            for place in places:
                processes[place] = msgspec.structs.replace(run.processes[place], shift_ns=shift_ns)
    return msgspec.structs.replace(run, processes=processes)


def _seen(logs: Iterable[ProcessLog]) -> _Seen:
    """Return the times of one rank, from all its checkpointers of one start."""
    seen = _Seen({}, {}, {}, {})
    for at_ns, event in ((log.wall_ns(event.at_ns), event) for log in logs for event in log.events):
        match event:
            case StageEnded(operation="save", stage="vote", failed=False):
                seen.voted[event.step] = at_ns
            case StageEnded(operation="save", stage="commit", failed=False):
                seen.begun[event.step] = at_ns - round(event.seconds * 1e9)
                seen.ended[event.step] = at_ns
            case Committed():
                seen.received[event.step] = at_ns
    return seen


def _shift(first: _Seen, other: _Seen) -> int:
    """Return the nanoseconds to add to the clock of *other*; 0 where saves agree with it, or their bounds contradict."""
    steps = [step for step in first.begun if step in other.voted and step in other.received and step not in other.begun]
    if not steps:
        return 0
    most = min(first.begun[step] - other.voted[step] for step in steps)
    least = max(first.ended[step] - other.received[step] for step in steps)
    return 0 if least <= 0 <= most or least > most else (least + most) // 2


_kinds = [kind for kind in Event.__subclasses__() if kind.__module__ == events.__name__]
_times = {kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.type is float) for kind in _kinds}
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(described(reduce(or_, _kinds)))

ENDING = ".jsonl"
READS = 16
"""Concurrent reads of objects."""
LATEST_NS, LATEST_S, MOST_RANKS = 2**62, 2**32, 1_000_000
"""Larger values are damage, and so are values below 0."""

Trace = tuple[str, bytes | Exception]
"""The name of a file, and its contents, or why it could not be read."""


def read_run(where: str | os.PathLike[str]) -> RunLog:
    """Return the events in *where*: a file of a `TraceFile`, a folder with some, or the folder of a run; path or URL.

    Raises:
        UsageError: there is no trace, or nothing can be read from it; or no such file or folder.
        StorageError: the storage of a URL does not answer.
    """
    given = os.fspath(where)
    address = parse_address(where)
    traces = _files(Path(address.text)) if address.scheme == "file" else anyio.run(_fetch, given)
    processes: list[ProcessLog] = []
    unread = number = 0
    missing: list[UnreadFile] = []
    for number, (name, data) in enumerate(traces, 1):  # noqa: B007  how many there are
        if isinstance(data, Exception):
            missing.append(UnreadFile(name, str(data)))
            continue
        events, missed = _decode(data.split(b"\n"))
        processes += events
        unread += missed
    if not number:
        raise UsageError(
            f"{redact(given)}: no trace of a run here. Have the next start write one: "
            "Checkpointer(…, observers=[aiockpt.monitor.TraceFile()]), which writes to folders, not into buckets"
        )
    if not processes:
        why = "; ".join(f"{file.name}: {file.why}" for file in missing[:3])
        raise UsageError(
            f"{redact(given)}: nothing can be read from {count(number, 'trace')} here: "
            + (why or "no line says which process it is of")
        )
    return align_clocks(RunLog(sorted(processes, key=lambda process: process.opened.time_ns), unread, tuple(missing)))


def _files(path: Path) -> Iterator[Trace]:
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    for file in [path] if path.is_file() else sorted(folder.glob(f"*{ENDING}")):
        try:
            yield file.name, file.read_bytes()
        except OSError as error:
            yield file.name, error


async def _fetch(url: str) -> list[Trace]:
    """Return the traces below *url*."""
    root, _, name = url.rpartition("/")
    backend = open_backend(root if name.endswith(ENDING) else url)
    found: dict[str, bytes | Exception] = {}
    limit = anyio.CapacityLimiter(READS)

    async def fetch(key: str) -> None:
        async with limit:
            try:
                found[key] = await _read_object(backend, key)
            except CheckpointError as error:
                found[key] = error

    try:
        keys = [name] if name.endswith(ENDING) else await _list(backend)
        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(fetch, key)
    finally:
        with anyio.CancelScope(shield=True):
            await backend.close()
    return [(key.rpartition("/")[2], found[key]) for key in keys]


async def _list(backend: Backend) -> list[str]:
    for prefix in (FOLDER, ""):
        keys = [stat.key for stat in (await backend.list(prefix)).objects if stat.key.endswith(ENDING)]
        if keys:
            return keys
    return []


async def _read_object(backend: Backend, key: str) -> bytes:
    reader = await backend.open(key)
    try:
        data = bytearray(reader.size)
        if data:
            await reader.read(0, [memoryview(data)])
        return bytes(data)
    finally:
        await reader.close()


def _decode(lines: Iterable[bytes]) -> tuple[list[ProcessLog], int]:
    processes: dict[tuple[object, ...], ProcessLog] = {}
    current: ProcessLog | None = None
    unread = 0
    for line in lines:
        if not line:
            continue
        try:
            event = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = None
        if event is None or not _is_sound(event):
            unread += 1
        elif isinstance(event, Opened):
            which = event.host, event.pid, event.process, event.rank, event.at_ns, event.time_ns
            # Where two processes share a file, each repeats its line after the other one has written: its log goes on.
            current = processes.setdefault(which, ProcessLog(event, []))
        elif current is not None:
            current.events.append(event)
        else:
            unread += 1
    return list(processes.values()), unread


def _is_sound(event: Event) -> bool:
    """Return whether the numbers of *event* are plausible: a flipped bit can yield years that no calendar has."""
    if not 0 <= event.at_ns < LATEST_NS:
        return False
    if isinstance(event, Opened):
        return 0 <= event.time_ns < LATEST_NS and 0 <= event.rank < event.world_size <= MOST_RANKS
    for name in _times[type(event)]:  # noqa: SIM110  a generator takes twice as long, for each event
        if not 0 <= getattr(event, name) < LATEST_S:
            return False
    return True
