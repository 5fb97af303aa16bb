"""The cost of observing a run: of a save with observers, of a report, and of the live view of a running job.

*A save*: two checkpointers save one small state in turns, and one of them has the observers of the guide (`TraceFile`,
`Heartbeat`, `Metrics`). The processor time of all threads from the call until all is written is compared pair by
pair. The state is small, so that the larger variation of copying and hashing does not hide the difference. It is shown
beside the time until a save of the given size is durable.

*A report*: the command, from its start to the page, over the trace of a synthetic run (`tests.monitor.synthetic_run`),
and the page in a real browser, from the start of the navigation until all is drawn. *Top*: the command in a terminal of its
own, while a fifth of all ranks write a new beat each second; its share of one core, and its drawing rate.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

import aiockpt
from aiockpt.events import Observer
from aiockpt.monitor import Heartbeat, Metrics, TraceFile
from aiockpt.monitor.heartbeat import Beat
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn
from tests.monitor.synthetic_run import Fault, SyntheticRun
from tests.servers.chromium import open_browser, why_not

SMALL_BYTES = 1 << 20
SETTLE_S = 0.01
"""Seconds after a save for its records to be written."""
WARM_UP = 3
OPENINGS = 5
BEAT_EVERY_S = 5.0
DRAWN = b"\x1b[H"
"""Escape sequence before each picture: cursor to the upper left corner."""
BEGIN_S = 3.0
"""Seconds for ``top`` to start and to read all beats once."""


def observing(turn: Turn, outcome: Outcome) -> None:
    """Measure the three, one after the other."""
    folder = Path(turn.folder)
    outcome.add(turn, "a save", _save(turn, folder))
    outcome.add(turn, "a report", _report(turn, folder, outcome))
    outcome.add(turn, "top", _top(turn, folder))


# ---------------------------------------------------------------------- a save


def _save(turn: Turn, folder: Path) -> Samples:
    from prometheus_client import CollectorRegistry

    seen: Samples = {"call_s": [], "call_watched_s": [], "cpu_s": [], "cpu_watched_s": []}
    state = _state(SMALL_BYTES)
    observers: list[Observer] = [TraceFile(), Heartbeat(every_s=BEAT_EVERY_S), Metrics(CollectorRegistry())]
    with _checkpointer(folder / "plain", []) as plain, _checkpointer(folder / "watched", observers) as watched:
        for step in range(WARM_UP + turn.repetitions):
            both = [("", plain), ("_watched", watched)]
            for name, ckpt in both if step % 2 else reversed(both):
                call_s, cpu_s = _save_once(ckpt, step, state)
                if step >= WARM_UP:
                    seen[f"call{name}_s"].append(call_s)
                    seen[f"cpu{name}_s"].append(cpu_s)
    for kind in ("call", "cpu"):
        pairs = zip(seen[f"{kind}_watched_s"], seen[f"{kind}_s"], strict=True)
        seen[f"{kind}_added_s"] = [watched_s - plain_s for watched_s, plain_s in pairs]
    seen["durable_s"] = _durable(turn, folder / "large")
    seen["added_fraction"] = [median(seen["cpu_added_s"]) / median(seen["durable_s"])]
    return seen


def _checkpointer(folder: Path, observers: list[Observer]) -> aiockpt.Checkpointer:
    return aiockpt.Checkpointer(folder, retention=aiockpt.Retention(last=1), observers=observers)


def _state(size_bytes: int) -> dict[str, Any]:
    return {"weight": torch.zeros(size_bytes // 4)}


def _save_once(ckpt: aiockpt.Checkpointer, step: int, state: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of the call, and the processor seconds until all is written."""
    state["weight"][:8] = step
    busy_s, begun_s = time.process_time(), time.perf_counter()
    save = ckpt.save(step, state)
    call_s = time.perf_counter() - begun_s
    save.result(60)
    ckpt.wait()
    time.sleep(SETTLE_S)
    return call_s, time.process_time() - busy_s


def _durable(turn: Turn, folder: Path) -> list[float]:
    state = _state(turn.size_bytes)
    with _checkpointer(folder, []) as ckpt:
        return [ckpt.save(step, state).result(300).seconds for step in range(WARM_UP + 10)][WARM_UP:]


# ---------------------------------------------------------------------- a report


def _report(turn: Turn, folder: Path, outcome: Outcome) -> Samples:
    run, page = folder / "run", folder / "page.html"
    ranks, saves = turn.settings["ranks"], turn.settings["saves"]
    slow = Fault(ranks=frozenset({ranks // 2}), stage="write", factor=4.0, since=saves // 3)
    SyntheticRun(saves=saves, mesh={"dp": ranks}, faults=(slow,), restart_after=saves // 2).write(run)
    begun_s = time.perf_counter()
    _command("report", str(run), "--out", str(page))
    seen: Samples = {
        "build_s": [time.perf_counter() - begun_s],
        "trace_bytes": [sum(file.stat().st_size for file in run.iterdir())],
        "page_bytes": [page.stat().st_size],
    }
    if (problem := why_not()) is not None:
        outcome.note(turn, f"the page was not opened: {problem}")
        return seen
    with open_browser() as browser:
        seen["drawn_s"] = [browser.open(page) for _ in range(OPENINGS)]
    return seen


def _command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "aiockpt.tools.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------------- top


def _top(turn: Turn, folder: Path) -> Samples:
    job, ranks, seconds = folder / "job", turn.settings["ranks"], turn.settings["seconds"]
    (job / "monitor").mkdir(parents=True)
    for rank in range(ranks):
        _write_beat(job, rank, ranks, number=1)
    with _beating(job, ranks), _in_terminal("top", str(job)) as (process, drawn):
        time.sleep(BEGIN_S)
        begun_s, busy_s, already = time.perf_counter(), _busy_s(process.pid), len(drawn)
        time.sleep(seconds)
        taken_s, lasted_s = _busy_s(process.pid) - busy_s, time.perf_counter() - begun_s
        pictures = drawn[already:]
    return {
        "core_fraction": [taken_s / lasted_s],
        "apart_s": [after_s - before_s for before_s, after_s in pairwise(pictures)] or [lasted_s],
    }


def _write_beat(job: Path, rank: int, ranks: int, number: int) -> None:
    beat = Beat(
        number=number, time_s=time.time(), every_s=BEAT_EVERY_S, host=f"node-{rank // 8:03}", pid=1000 + rank, rank=rank,
        world_size=ranks, pending=[], durable_step=100, durable_s=10.0, places={}, bytes_per_s=1e9, failed=0, retried=0,
    )  # fmt: skip
    path = job / "monitor" / f"beat-{rank:05}.json"
    path.with_suffix(".new").write_bytes(msgspec.json.encode(beat))
    path.with_suffix(".new").rename(path)


@contextmanager
def _beating(job: Path, ranks: int) -> Iterator[None]:
    """Write a beat of every rank each five seconds, spread evenly."""
    ended = threading.Event()

    def beat() -> None:
        number = 1
        while True:
            number += 1
            for rank in range(ranks):
                if ended.wait(BEAT_EVERY_S / ranks):
                    return
                _write_beat(job, rank, ranks, number)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _in_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], list[float]]]:
    """Run the command in a terminal that is being read; the list gets the second of each picture that it draws."""
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        drawn: list[float] = []
        reader = threading.Thread(target=_read_all, args=(mine, drawn))
        reader.start()
        try:
            yield process, drawn
        finally:
            process.kill()
            process.wait()
            reader.join()
            os.close(mine)


def _read_all(terminal: int, drawn: list[float]) -> None:
    while True:
        try:
            said = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            return
        if not said:
            return
        drawn += [time.perf_counter()] * said.count(DRAWN)


def _busy_s(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
