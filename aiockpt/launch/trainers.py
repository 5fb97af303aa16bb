"""The trainers of one attempt on this node, seen from outside: their records, their stacks, what the kernel counts.

Guarantees: only a process that has told its id in a progress record is signalled, only in a stall, and only while it
handles that signal; the stack of its training thread comes from a handler in C, so also where the interpreter is held.
Python's calls of the system go on; a ``sleep`` in C returns early. What cannot be read is empty.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from aiockpt.launch.detector import StackSample, WaitsFor
from aiockpt.runtime.progress import STACKS, ProgressReader, ProgressRecord, rank_path

NO_ANSWER = "no answer"
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
_ENGINE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"


class Trainers:
    """The trainers of *ranks*, which share *folder* with this process."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.ranks, self._folder = tuple(ranks), folder
        self._paths = {rank: rank_path(folder, rank) for rank in ranks}
        self._readers = {rank: ProgressReader(path) for rank, path in self._paths.items()}
        self._seen_bytes: dict[Path, int] = {}

    def read(self) -> dict[int, ProgressRecord]:
        """Return the records of those that have begun one."""
        read = {rank: reader.read() for rank, reader in self._readers.items()}
        return {rank: record for rank, record in read.items() if record is not None}

    def request_stacks(self, records: Mapping[int, ProgressRecord]) -> None:
        """Have the training threads write their stacks."""
        for rank, record in records.items():
            self._read_new(self._paths[rank].with_suffix(".stacks"))
            if _handles_request(record):
                with suppress(OSError):
                    # The kernel has this very thread handle it, where that can.
                    os.kill(record.thread, STACKS)

    def sample(self, records: Mapping[int, ProgressRecord]) -> dict[int, StackSample]:
        """Return a look at each process: its place is what it has written since the request."""
        return {rank: self._sample(rank, record) for rank, record in records.items()}

    def _sample(self, rank: int, record: ProgressRecord) -> StackSample:
        place = find_place(self._read_new(self._paths[rank].with_suffix(".stacks")))
        # A thread that leaves the kernel at this moment may take a signal that was meant for the main one.
        if record.thread == record.pid and place and place[-1].startswith("_bootstrap "):
            place = ()
        proc = f"/proc/{record.pid}"
        return StackSample(
            place=place or (f"{NO_ANSWER}; the kernel says {_find(f'{proc}/status', 'State') or 'gone'}",),
            cpu_s=_cpu_s(record.pid),
            moved_bytes=_sum(f"{proc}/io", "rchar", "wchar"),
            wakes=_sum(f"{proc}/status", "voluntary_ctxt_switches"),
            beside_s=record.beside_s,
            waits_for=_waits_for(place),
            gone=not _handles_request(record),
        )

    def notes(self) -> Iterator[tuple[int, str]]:
        """Yield what trainers have noted for people since the last call."""
        for rank, path in self._paths.items():
            if text := self._read_new(path.with_suffix(".notes")):
                yield rank, text.strip()

    def first_crash(self, ranks: Sequence[int]) -> tuple[int, str, str] | None:
        """Return the rank among *ranks* whose exception came first, its type, and its file and line; None without any."""
        paths = {rank: self._paths[rank].with_suffix(".crash") for rank in ranks}
        written = {rank: path.stat().st_mtime_ns for rank, path in paths.items() if path.exists()}
        if not written:
            return None
        rank = min(written, key=written.__getitem__)
        kind, where, *_ = [*_read(str(paths[rank])).splitlines(), "", ""]
        return rank, kind, where

    def has_others(self) -> bool:
        """Return whether processes have told of other ranks, as those of a launcher below this one do."""
        known = {path.with_suffix(".progress") for path in self._paths.values()}
        return any(path not in known for path in self._folder.glob("*.progress"))

    def urls(self) -> tuple[str, ...]:
        """Return where they save."""
        texts = (_read(str(path.with_suffix(".urls"))) for path in self._paths.values())
        return next((tuple(text.splitlines()) for text in texts if text), ())

    def keep(self, target: Path) -> bool:
        """Copy all that people can read to *target*; return whether there is anything.

        Raises:
            OSError: it cannot be written to.
        """
        found = [path for path in self._folder.iterdir() if path.suffix != ".progress" and path.stat().st_size]
        if found:
            target.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copyfile(path, target / f"{path.name}.txt")
        return bool(found)

    def close(self) -> None:
        """Release the records."""
        for reader in self._readers.values():
            reader.close()

    def _read_new(self, path: Path) -> str:
        """Return what has been appended to a file since the last call."""
        with suppress(OSError), path.open("rb") as file:
            file.seek(self._seen_bytes.get(path, 0))
            data = file.read()
            self._seen_bytes[path] = file.tell()
            return data.decode(errors="replace")
        return ""


def find_place(text: str) -> tuple[str, ...]:
    """Return the frames of the last stack in *text*, the innermost first: ``function (file:line)``."""
    frames: list[str] = []
    for line in text.splitlines():
        if match := _FRAME.match(line):
            frames.append(f"{match[3]} ({match[1]}:{match[2]})")
        else:
            frames.clear()
    return tuple(frames)


def _handles_request(record: ProgressRecord) -> bool:
    """Return whether the thread of a record handles `STACKS`, which ends any other process.

    The id may be that of another process by now, or that of one in a container, which is another's here.
    """
    caught = _find(f"/proc/{record.pid}/task/{record.thread}/status", "SigCgt") or "0"
    return bool(int(caught, 16) >> (STACKS - 1) & 1)


def _waits_for(place: tuple[str, ...]) -> WaitsFor:
    if any("/subprocess.py:" in frame for frame in place):
        return "a program"
    if any("/torch/utils/data/" in frame for frame in place):
        return "a loader"
    # What the standard library waits for is its caller's; a method of the program that aiockpt calls is the program's.
    caller = next((frame for frame in place if f"({_LIBRARY}" not in frame or "site-packages" in frame), "")
    return "aiockpt" if f"({_ENGINE}" in caller else ""


def _cpu_s(pid: int) -> float:
    """Return what a process and those that it has started have used."""
    # Behind the name, which may hold anything: state, …, utime, stime, cutime, cstime.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    used = _TICKS_S * sum(map(int, fields[11:15]))
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        used += sum(_cpu_s(int(child)) for child in _read(str(children)).split())
    return used


def _sum(path: str, *names: str) -> int:
    """Return the sum of some numbers of a file of lines ``name: number``."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return sum(int(value) for name, _, value in lines if name in names)


def _find(path: str, name: str) -> str:
    """Return the value of a line ``name: value``."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
