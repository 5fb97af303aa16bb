"""Traces: every event, in whole lines, whatever ends the program, and out of its way."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import torch

import aiockpt
from aiockpt.events import BackgroundTask, BytesWritten, Committed, Observer, Opened
from aiockpt.monitor import TraceFile
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.trace import alive_after_s
from tests.run_python import run_python
from tests.watch import Watch, until

STATE: dict[str, Any] = {"x": torch.arange(1000)}


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [msgspec.json.decode(line) for line in text.splitlines()]


def save_once(root: Path, *observers: Observer, step: int = 1) -> None:
    with aiockpt.Checkpointer(root, observers=observers) as ckpt:
        ckpt.save(step, STATE).result()


def test_every_event_is_a_line_in_order_behind_one_that_tells_the_wall_clock(tmp_path: Path) -> None:
    path, watch = tmp_path / "trace.jsonl", Watch()
    save_once(tmp_path / "run", TraceFile(path), watch)
    began, *rest = lines(path)
    assert began["type"] == "Opened"
    assert abs(began["time_ns"] - time.time_ns()) < 600e9
    assert [began, *rest] == [msgspec.json.decode(msgspec.json.encode(event)) for event in watch.events]
    assert {"SaveStarted", "SnapshotTaken", "BytesWritten", "DataWritten", "Committed"} <= {it["type"] for it in rest}


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for step in (1, 2):
        save_once(tmp_path / "run", TraceFile(path), step=step)
    assert [line["type"] for line in lines(path)].count("Opened") == 2


def test_one_trace_serves_one_checkpointer_after_another(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = TraceFile(path)
    for step in (1, 2):
        save_once(tmp_path / "run", trace, step=step)
    assert [line["step"] for line in lines(path) if line["type"] == "Committed"] == [1, 2]


def test_the_first_rank_says_that_it_lives_while_nothing_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with aiockpt.Checkpointer(tmp_path / "run", observers=[TraceFile(trace)]) as ckpt:
        until(lambda: trace.exists() and b"Alive" in trace.read_bytes(), "it says so")
        ckpt.save(1, {"x": torch.ones(3)}).result()
    opened, alive, *others = (line["type"] for line in lines(trace))
    assert (opened, alive, others[-1]) == ("Opened", "Alive", "Closed")
    assert "SaveStarted" in others


def test_signs_of_life_come_at_a_tenth_of_the_quiet_time_and_a_hundred_in_an_hour() -> None:
    at_s = [0.0]
    while at_s[-1] < 3600:
        at_s.append(at_s[-1] + alive_after_s(at_s[-1]))
    assert len(at_s) < 110
    for before, after in pairwise(at_s):
        assert after - before == pytest.approx(max(1.0, min(before / 10, 60.0)))


async def test_other_ranks_do_not_say_that_they_live(tmp_path: Path) -> None:
    def written(rank: int) -> bytes:
        path = tmp_path / f"{rank}.jsonl"
        return path.read_bytes() if path.exists() else b""

    traces = [TraceFile(tmp_path / f"{rank}.jsonl") for rank in range(2)]
    async with anyio.create_task_group() as tasks:
        for rank, trace in enumerate(traces):
            trace.on_event(Opened(at_ns=0, time_ns=0, pid=1, host="h", rank=rank, world_size=2, urls=()))
            tasks.start_soon(trace.run)
        await anyio.to_thread.run_sync(until, lambda: written(0).count(b"Alive") == 2, "the first one does, twice")
        for trace in traces:
            await trace.aclose()
    assert b"Opened" in written(1)
    assert b"Alive" not in written(1)


def test_half_a_line_of_a_killed_process_is_left_alone_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"type":"Comm')
    save_once(tmp_path / "run", TraceFile(path))
    first, *rest = path.read_bytes().splitlines()
    assert first == b'{"type":"Comm'
    assert msgspec.json.decode(rest[0])["type"] == "Opened"


def test_the_lines_are_complete_when_the_program_ends_without_closing(tmp_path: Path) -> None:
    program = (
        "import sys, torch, aiockpt\n"
        "from aiockpt.monitor import TraceFile\n"
        "ckpt = aiockpt.Checkpointer(sys.argv[1] + '/run', observers=[TraceFile(sys.argv[1] + '/trace.jsonl')])\n"
        "ckpt.save(7, {'x': torch.arange(1000)})\n"
    )
    run_python("-c", program, tmp_path)
    assert lines(tmp_path / "trace.jsonl")[-1]["type"] == "Closed"


def test_a_trace_that_cannot_be_written_is_logged_and_harms_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = TraceFile(tmp_path / "no such folder" / "trace.jsonl")
    with caplog.at_level(logging.ERROR, "aiockpt"):
        save_once(tmp_path / "run", trace)
    assert [record.getMessage().endswith("stopped working") for record in caplog.records] == [True]
    assert "0 events queued" in repr(trace)


async def test_an_event_is_only_queued_while_the_file_is_slow(tmp_path: Path) -> None:
    path, gate = tmp_path / "trace.jsonl", threading.Event()
    loop = asyncio.get_running_loop()
    blocked = [loop.run_in_executor(None, gate.wait) for _ in range(40)]  # no thread is left for the file
    trace = TraceFile(path)
    running = asyncio.ensure_future(trace.run())
    await asyncio.sleep(0)  # it begins
    for step in range(100):
        trace.on_event(BytesWritten(at_ns=0, step=step, bytes=1))
    assert "100 events queued" in repr(trace)
    gate.set()
    await asyncio.gather(*blocked)
    await trace.aclose()
    await running
    assert [line["step"] for line in lines(path)] == list(range(100))


class Stubborn(Watch):
    """Goes wrong, or does not end, in the ways it is told to."""

    def __init__(self, *, raises: bool = False, ends: bool = True, close_raises: bool = False) -> None:
        super().__init__()
        self.raises, self.ends, self.close_raises = raises, ends, close_raises
        self.closed, self.cancelled = asyncio.Event(), False

    async def run(self) -> None:
        if self.raises:
            raise ZeroDivisionError
        try:
            await (self.closed if self.ends else asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def aclose(self) -> None:
        self.closed.set()
        if self.close_raises:
            raise ZeroDivisionError


def test_a_plain_observer_is_no_companion_and_a_trace_is() -> None:
    assert not isinstance(Watch(), BackgroundTask)
    assert isinstance(TraceFile("x"), BackgroundTask)


@pytest.mark.parametrize("trouble", [{"raises": True}, {"close_raises": True}])
def test_a_companion_that_fails_is_logged_harms_nothing_and_receives_no_more_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: dict[str, bool]
) -> None:
    companion = Stubborn(**trouble)
    with caplog.at_level(logging.ERROR, "aiockpt"):
        save_once(tmp_path / "run", companion)
    assert len(caplog.records) == 1
    assert bool(companion.events) is not companion.raises, "nobody would take them from its queue"


def test_a_companion_that_does_not_end_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiockpt.runtime.background.FINISH_S", 0.01)
    companion = Stubborn(ends=False)
    save_once(tmp_path / "run", companion)
    assert companion.cancelled
    assert "did not end" in caplog.text


def test_without_a_name_it_is_beside_the_run_and_the_run_is_as_before(tmp_path: Path) -> None:
    run = tmp_path / "a run, 100%"
    save_once(run, TraceFile())
    assert lines(run / "monitor" / "rank-00000.jsonl")[-1]["type"] == "Closed"
    assert list(tmp_path.iterdir()) == [run]
    with aiockpt.Checkpointer(run) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [1]
        ckpt.verify().result()


def test_a_name_may_have_the_rank_in_it(tmp_path: Path) -> None:
    save_once(tmp_path / "run", TraceFile(tmp_path / "trace-{rank}.jsonl"))
    assert lines(tmp_path / "trace-0.jsonl")


def test_without_a_folder_a_name_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with aiockpt.Checkpointer("memory://without-a-folder", observers=[TraceFile()]) as ckpt:
        ckpt.save(1, STATE).result()
    assert "name the file" in caplog.text


class Mesh:
    """What of a ``DeviceMesh`` is asked for."""

    def __init__(self, names: tuple[str, ...] | None, coordinate: list[int] | None) -> None:
        self.mesh_dim_names, self._coordinate = names, coordinate

    def get_coordinate(self) -> list[int] | None:
        return self._coordinate


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"dp": 3, "tp": 1}, {"dp": 3, "tp": 1}),
        (Mesh(("dp", "tp"), [3, 1]), {"dp": 3, "tp": 1}),
        (Mesh(("dp", "tp"), None), {}),
        (None, {}),
    ],
)
def test_where_the_rank_stands_in_the_mesh_is_told_first(tmp_path: Path, mesh: Any, told: dict[str, int]) -> None:
    save_once(tmp_path / "run", TraceFile(mesh=mesh))
    assert lines(tmp_path / "run" / "monitor" / "rank-00000.jsonl")[0]["mesh"] == told


def test_a_mesh_without_names_is_refused() -> None:
    with pytest.raises(aiockpt.UsageError, match="mesh_dim_names"):
        TraceFile(mesh=Mesh(None, [0]))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


SAVES = """
import sys, time, torch, aiockpt
from aiockpt.monitor import TraceFile
from aiockpt.monitor.read_run import read_run
with aiockpt.Checkpointer(sys.argv[1], observers=[TraceFile(sys.argv[2])]) as ckpt:
    print("ready", flush=True)
    for step in range(int(sys.argv[3])):
        sys.stdin.readline()
        ckpt.save(step, {"x": torch.ones(1000)}).result()
        print(step, flush=True)
"""


def test_of_two_jobs_that_write_to_one_file_in_turns_each_has_what_it_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path / name), str(trace), "3"], **pipes)
            )
            for name in ("one", "two")
        ]
        for said in ("ready", "0", "1", "2"):
            for job in jobs:
                assert job.stdin is not None
                assert job.stdout is not None
                if said != "ready":
                    job.stdin.write("\n")
                    job.stdin.flush()
                assert job.stdout.readline().strip() == said
                size = -1
                while size != trace_size(trace):  # what it tells of this save is there
                    size = trace_size(trace)
                    time.sleep(0.1)
        assert [job.wait(250) for job in jobs] == [0, 0]
    told = read_run(trace)
    assert len(told.processes) == 2
    assert told.unread == 0
    for log, job in zip(sorted(told.processes, key=lambda one: one.opened.pid), jobs, strict=True):
        assert log.opened.pid == job.pid
        assert [event.step for event in log.events if isinstance(event, Committed)] == [0, 1, 2]
        assert log.closed


def trace_size(trace: Path) -> int:
    return trace.stat().st_size if trace.exists() else 0


def test_the_last_line_says_that_it_was_closed_unless_it_was_killed(tmp_path: Path) -> None:
    script = SAVES + "    if len(sys.argv) > 4: import os; os.kill(os.getpid(), 9)\n"
    for how, status in (((), 0), (("killed",), -9)):
        trace = tmp_path / f"trace{status}.jsonl"
        run_python("-c", script, tmp_path / f"run{status}", trace, 1, *how, status=status, input="\n")
        (log,) = read_run(trace).processes
        assert log.closed == (not how)
        assert log.opened.process != ""
