"""`aiockpt top`: which ranks are alive, what each waits for, and which have fallen silent."""

import fcntl
import json
import logging
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from rich.console import Console, RenderableType
from typer.testing import CliRunner

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.events import (
    BytesWritten,
    Committed,
    DataWritten,
    Loaded,
    Opened,
    Replicated,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
    StageEnded,
)
from aiockpt.monitor import Heartbeat, live_job
from aiockpt.monitor.heartbeat import Beat
from aiockpt.monitor.live_job import JobNow, JobWatch
from aiockpt.monitor.under_way import PendingWork, UnderWay
from aiockpt.storage.backend import Backend, Listing
from aiockpt.tools.cli.live_view import follow, view
from aiockpt.tools.cli.main import app
from tests.gates import Gate
from tests.run_python import run_python
from tests.watch import until

STATE: dict[str, Any] = {"x": torch.arange(1000)}
S = 10**9


def beat_of(rank: int, **given: Any) -> Beat:
    usual: dict[str, Any] = {
        "number": 1, "time_s": time.time(), "every_s": 5.0, "host": f"host{rank // 8}", "pid": 100 + rank, "rank": rank,
        "world_size": 4, "pending": [], "durable_step": 10, "durable_s": 3.0, "places": {}, "bytes_per_s": 0.0,
        "failed": 0, "retried": 0,
    }  # fmt: skip
    return Beat(**(usual | given))


def write(root: Path, *beats: Beat) -> None:
    (root / "monitor").mkdir(parents=True, exist_ok=True)
    for beat in beats:
        (root / "monitor" / f"beat-{beat.rank:05}.json").write_bytes(msgspec.json.encode(beat))


def look(root: Path) -> JobNow:
    job = anyio.run(JobWatch(LocalBackend(root)).poll)
    assert job is not None
    return job


def pending(step: int, for_s: float, **given: Any) -> PendingWork:
    return PendingWork(operation="save", step=step, stage="write", for_s=for_s, silent_s=1.0, **given)


def shown(what: RenderableType, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_a_run_that_is_closed_has_said_its_last_durable_step_and_that_it_ended(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, observers=[Heartbeat(every_s=0.02)]) as ckpt:
        for step in (3, 4):
            ckpt.save(step, STATE).result()
        until(lambda: look(tmp_path).ranks[0].beat.number > 2, "it has said something in between")
    job = look(tmp_path)
    assert job.ended
    assert not job.silent
    assert not job.missing
    assert (job.durable_step, job.in_flight, job.failed) == (4, [], 0)
    assert job.ranks[0].beat.pid == os.getpid()


def test_what_was_loaded_is_what_a_crash_would_fall_back_to(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(7, STATE).result()
    with aiockpt.Checkpointer(tmp_path, observers=[Heartbeat()]) as ckpt:
        ckpt.load(STATE).result()
    assert look(tmp_path).durable_step == 7


def test_a_save_that_hangs_is_shown_and_told_with_its_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(LocalBackend(tmp_path), match="*.safetensors")
    with aiockpt.Checkpointer(gate, observers=[Heartbeat(every_s=0.02, overdue_s=0.05)]) as ckpt:
        until((tmp_path / "monitor" / "beat-00000.json").exists, "on a busy disk a beat takes longer than overdue_s")
        save = ckpt.save(12, STATE)
        until(lambda: "save of step 12: in write, for " in caplog.text, "the log names the stage where it waits")
        until(lambda: getattr(look(tmp_path).ranks[0].oldest, "stage", "") == "write", "so does the heartbeat")
        oldest = look(tmp_path).ranks[0].oldest
        gate.open_up()
        save.result()
    assert oldest is not None
    assert (oldest.operation, oldest.step, oldest.stage, oldest.done_bytes) == ("save", 12, "write", 0)
    assert oldest.bytes == 8000
    assert "overdue (0.05 s); pending:" in caplog.text
    assert look(tmp_path).in_flight == []


def test_a_save_goes_through_its_stages() -> None:
    heard, stages = UnderWay(), []
    usual: dict[str, Any] = {"step": 5, "at_ns": 1}
    for event in (
        SaveStarted(bytes=100, tensor_count=1, **usual),
        SnapshotTaken(bytes=100, pause_s=0.1, copy_s=0.1, **usual),
        BytesWritten(bytes=60, step=5, at_ns=2 * S),
        DataWritten(bytes=100, seconds=1, **usual),
        StageEnded(operation="save", stage="vote", seconds=0.1, **usual),
    ):
        heard.receive(event)
        stages.append(heard.pending(3 * S)[0].stage)
        if isinstance(event, BytesWritten):
            work = heard.pending(3 * S)[0]
            assert (work.done_bytes, work.silent_s) == (60, 1.0)
    assert stages == ["snapshot", "write", "write", "vote", "commit"]
    heard.receive(SaveFailed(error="no", seconds=1, **usual))
    assert heard.pending(3 * S) == []
    assert heard.durable(3 * S) is None
    heard.receive(Committed(bytes=100, seconds=2, generation=1, step=6, at_ns=5 * S))
    assert heard.durable(9 * S) == (6, 6.0), "from the call on"


def test_a_load_is_under_way_until_it_ends_or_fails() -> None:
    heard = UnderWay()
    for failed in (False, True):
        for stage in ("find", "match", "plan"):
            heard.receive(StageEnded(operation="load", stage=stage, seconds=1, at_ns=4 * S, step=5))
        (work,) = heard.pending(6 * S)
        assert (work.operation, work.stage, work.for_s) == ("load", "read", 3.0)
        if failed:
            heard.receive(StageEnded(operation="load", stage="read", seconds=1, at_ns=4 * S, step=5, failed=True))
        else:
            heard.receive(Loaded(bytes=1, read_bytes=1, seconds=1, at_ns=5 * S, step=5))
        assert heard.pending(6 * S) == []


def test_what_is_overdue_is_told_again_only_when_it_has_doubled() -> None:
    heard = UnderWay()
    heard.receive(SaveStarted(bytes=1, tensor_count=1, step=1, at_ns=0))
    assert [heard.grew_overdue(second * S, 10) for second in (9, 11, 15, 21, 23, 40, 45)] == [
        False, True, False, False, True, False, False,
    ]  # fmt: skip
    assert heard.grew_overdue(47 * S, 10)


def test_ranks_that_are_killed_fall_silent_and_those_that_never_came_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_job, "GRACE_S", 0.0)
    long_ago = time.time() - 16
    write(tmp_path, beat_of(0), beat_of(1, time_s=long_ago), beat_of(3, time_s=long_ago, ended=True), beat_of(9))
    job = look(tmp_path)
    assert [one.beat.rank for one in job.ranks] == [0, 1, 3], "what a larger job has left is not of this one"
    assert job.silent == [1], "who has ended says nothing more"
    assert job.missing == [2]


async def test_a_rank_is_silent_by_the_clock_of_whoever_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = time.time() + 3600
    watch = JobWatch(LocalBackend(tmp_path))
    for number in (1, 2):
        write(tmp_path, beat_of(0, world_size=1, time_s=ahead, every_s=1000.0, number=number))
        job = await watch.poll()
        assert job is not None
        assert 0 <= job.ranks[0].heard_s < 1000
    await anyio.sleep(0.01)
    job = await watch.poll()
    assert job is not None
    assert job.silent == []
    monkeypatch.setattr(live_job, "GRACE_S", 0.0)
    monkeypatch.setattr(live_job, "MISSED", 0)
    assert job.ranks[0].silent, "nothing new was seen at the last look"


class Counting(LocalBackend):
    reads = 0

    async def get_many(self, keys: Sequence[str], max_bytes: int) -> tuple[bytes | None, ...]:
        self.reads += len(keys)
        return await super().get_many(keys, max_bytes)


async def test_of_a_thousand_ranks_only_the_beats_that_are_new_are_read(tmp_path: Path) -> None:
    backend = Counting(tmp_path)
    watch = JobWatch(backend)
    write(tmp_path, *(beat_of(rank, world_size=1000) for rank in range(1000)))
    await watch.poll()
    assert backend.reads == 1000
    write(tmp_path, beat_of(17, world_size=1000, number=2, pending=[pending(20, 400.0)]))
    job = await watch.poll()
    assert backend.reads == 1001
    assert job is not None
    assert job.in_flight == [20]
    text = shown(view("runs/7", job, height=20))
    rows = [line.split()[0] for line in text.splitlines() if "host" in line][1:]
    assert rows[:3] == ["17", "0", "1"]
    assert "save 20: write" in text
    assert "1000 of 1000 ranks reporting" in text
    assert f"{1000 - len(rows)} ranks more" in text


def test_what_is_wrong_is_said_above_the_table(tmp_path: Path) -> None:
    write(
        tmp_path,
        beat_of(0, failed=1, last_error="step 9: StorageFullError('no space [left]')"),
        beat_of(1, time_s=time.time() - 600, pending=[pending(11, 1.0, bytes=4 << 30, done_bytes=1 << 30)]),
        beat_of(2, pending=[pending(11, 3000.0)], places={"peer://run": 10}),
    )
    text = shown(view(str(tmp_path), look(tmp_path), height=40))
    assert "2 of 4 ranks reporting" in text
    above, _, rows = text.partition("rank  host")
    for told in (
        "silent: rank 1",
        "no report yet: rank 3",
        "no space [left]",
        "step 10 is durable",
        "1 save failed",
        "step 10 to peer://run",
    ):
        assert told in above
    first = rows.splitlines()[1]
    assert first.split()[0] == "1"
    assert "1.0 GiB of 4.0 GiB" in first
    assert "10 min ago" in first


def test_it_fits_into_a_terminal_however_long_the_name_of_the_run_is(tmp_path: Path) -> None:
    write(tmp_path, *(beat_of(rank, world_size=30) for rank in range(29)))
    text = shown(view("s3://bucket/" + "long" * 40, look(tmp_path), height=16), width=60)
    assert len(text.splitlines()) <= 16


def test_two_jobs_that_speak_in_turns_are_told_and_a_start_that_follows_another_is_not(tmp_path: Path) -> None:
    async def main() -> list[list[int]]:
        watch, seen = JobWatch(LocalBackend(tmp_path)), []
        for number, pid in enumerate((100, 200, 200, 100, 200), 1):
            write(tmp_path, beat_of(0, world_size=1, pid=pid, number=number))
            job = await watch.poll()
            assert job is not None
            seen.append(job.doubled)
        text = shown(view(str(tmp_path), await watch.poll(), height=40), width=160)
        assert "two jobs have one place: rank 0" in text
        return seen

    assert anyio.run(main) == [[], [], [], [0], [0]]


def test_what_a_rank_wrote_before_it_ended_is_no_speed_of_the_job(tmp_path: Path) -> None:
    write(tmp_path, beat_of(0, world_size=2, bytes_per_s=5.0), beat_of(1, world_size=2, bytes_per_s=7.0, ended=True))
    assert look(tmp_path).bytes_per_s == 5.0


def test_a_beat_that_cannot_be_read_is_no_rank(tmp_path: Path) -> None:
    write(tmp_path, beat_of(0, world_size=2))
    (tmp_path / "monitor" / "beat-00001.json").write_text('{"number": "of another version"}')
    job = look(tmp_path)
    assert (len(job.ranks), job.missing, job.damaged) == (1, [], ["monitor/beat-00001.json"])


class Deaf(LocalBackend):
    """A place that takes no beats for a while."""

    failures = 0

    async def put(self, key: str, data: bytes, *, flushed: bool = True) -> None:
        if key.startswith("monitor/") and self.failures < 5:
            self.failures += 1
            raise aiockpt.StorageError("not today", key=key)
        await super().put(key, data, flushed=flushed)


def test_beats_that_cannot_be_written_harm_no_save_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaf: Backend = Deaf(tmp_path)
    monkeypatch.setattr("aiockpt.monitor.heartbeat.open_backend", lambda _: deaf)
    with aiockpt.Checkpointer(tmp_path / "run", observers=[Heartbeat(every_s=0.01)]) as ckpt:
        ckpt.save(1, STATE).result()
        until((tmp_path / "monitor").exists, "a beat could be written")
    assert caplog.text.count("could not be written; will retry") == 1
    assert look(tmp_path).ended


def test_a_heartbeat_goes_to_a_place_that_others_see(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = [aiockpt.Tier("memory://near"), aiockpt.Tier(tmp_path / "far")]
    with aiockpt.Checkpointer(tiers, observers=[Heartbeat()]) as ckpt:
        ckpt.save(1, STATE).result()
    assert look(tmp_path / "far").ended
    with (
        caplog.at_level(logging.WARNING),
        aiockpt.Checkpointer("memory://alone", observers=[Heartbeat()]) as ckpt,
    ):
        ckpt.save(1, STATE).result()
    assert "other hosts can see no place of the run" in caplog.text


@pytest.mark.parametrize("given", [{"every_s": 0}, {"overdue_s": -1.0}])
def test_times_are_more_than_nothing(given: dict[str, Any]) -> None:
    with pytest.raises(aiockpt.UsageError, match=next(iter(given))):
        Heartbeat(**given)


async def test_it_may_be_closed_before_it_began() -> None:
    heart = Heartbeat()
    await heart.aclose()
    with anyio.fail_after(250):
        await heart.run()


def test_beats_tell_what_was_written_since_the_last_one() -> None:
    heart = Heartbeat()
    heart.on_event(Opened(at_ns=0, time_ns=0, pid=1, host="h", rank=0, world_size=1, urls=()))
    heart.on_event(BytesWritten(bytes=1 << 40, at_ns=1))
    assert heart.beat().bytes_per_s > 0
    assert heart.beat().bytes_per_s == 0


def test_a_beat_tells_which_step_other_hosts_hold() -> None:
    heart = Heartbeat()
    heart.on_event(Opened(at_ns=0, time_ns=0, pid=1, host="h", rank=0, world_size=1, urls=()))
    heart.on_event(Replicated(at_ns=1, step=7, url="peer://run", seconds=0.1))
    assert heart.beat().places == {"peer://run": 7}


def test_the_command_looks_once_where_there_is_no_terminal(tmp_path: Path) -> None:
    run = CliRunner()
    assert "no rank has said anything yet" in run.invoke(app, ["top", str(tmp_path)]).output
    write(tmp_path, beat_of(0, world_size=1))
    assert "1 of 1 rank reporting" in run.invoke(app, ["top", str(tmp_path)]).output
    found = json.loads(run.invoke(app, ["top", str(tmp_path), "--json"]).output)
    assert found["ranks"][0]["beat"]["host"] == "host0"
    assert isinstance(run.invoke(app, ["top", str(tmp_path / "nowhere")]).exception, aiockpt.UsageError)


def test_in_a_terminal_it_goes_on_until_the_job_has_ended_or_somebody_ends_it(tmp_path: Path) -> None:
    write(tmp_path, beat_of(0, world_size=1))
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's & has it ignored
    program = f"{heeding}; from aiockpt.tools.cli.main import app; app()"
    command = [sys.executable, "-c", program, "top", str(tmp_path), "--every", "0.1"]
    for ends in ("job", "interrupt"):
        write(tmp_path, beat_of(0, world_size=1))
        mine, theirs = pty.openpty()
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            seen = _read_until(mine, b"1 of 1 rank reporting")
            assert b"\x1b[?1049h" in seen, "a screen of its own, which leaves the terminal as it was"
            if ends == "job":
                write(tmp_path, beat_of(0, world_size=1, ended=True, number=2))
                _read_until(mine, b"\x1b[?1049l")
            else:
                process.send_signal(signal.SIGINT)
                _read_until(mine, b"\x1b[?1049l")
            assert process.wait(250) == 0
        os.close(mine)


FAILING = """
import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from aiockpt.backends.local import LocalBackend
from aiockpt.tools.cli.main import main
from aiockpt.errors import StorageError
import aiockpt.tools.cli.live_view, anyio
aiockpt.tools.cli.live_view.UNANSWERED_S = 0.1
lists, flag = LocalBackend.list, Path(sys.argv.pop())


async def fail(self, prefix):
    if flag.exists():
        if flag.read_text() == "hangs":
            while flag.exists():
                await anyio.sleep(0.01)
        raise StorageError("mount is away", key=prefix)
    return await lists(self, prefix)


LocalBackend.list = fail
main()
"""


def test_in_a_terminal_it_outlives_storage_that_fails_or_hangs_and_says_so_meanwhile(tmp_path: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    write(run, beat_of(0, world_size=1))
    command = [sys.executable, "-c", FAILING, "top", str(run), "--every", "0.1", str(flag)]
    mine, theirs = pty.openpty()
    fcntl.ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process, _killed(process):
        os.close(theirs)
        _read_until(mine, b"1 of 1 rank reporting")
        for how, told in (("fails", b"mount is away"), ("hangs", b"it hangs")):
            flag.write_text(how)
            seen = _read_until(mine, told)
            assert b"storage has not answered for" in seen
            flag.unlink()
            _read_until(mine, b"\x1b[H\x1b[1m1 of 1 rank")  # the first line is the job again
        write(run, beat_of(0, world_size=1, ended=True, number=2))
        _read_until(mine, b"\x1b[?1049l")
        assert process.wait(250) == 0
    os.close(mine)


async def test_of_many_ranks_it_looks_as_often_as_a_small_part_of_a_core_allows(tmp_path: Path) -> None:
    write(tmp_path, *(beat_of(rank, world_size=300) for rank in range(300)))

    class Counting(LocalBackend):
        looks = 0

        async def list(self, prefix: str) -> Listing:
            self.looks += 1
            write(tmp_path, *(beat_of(rank, world_size=300, number=self.looks + 1) for rank in range(300)))
            return await super().list(prefix)

    backend = Counting(tmp_path)
    with anyio.move_on_after(3):
        await follow("run", backend, 0.01)
    assert 1 < backend.looks < 10


def test_storage_that_fails_at_the_first_look_is_an_error(tmp_path: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    write(run, beat_of(0, world_size=1))
    flag.write_text("fails")
    done = run_python("-c", FAILING, "top", run, "--once", flag, status=3)
    assert "mount is away" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def _killed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no process behind, whatever a test does not find."""
    try:
        yield
    finally:
        process.kill()


def _read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen and select.select([terminal], [], [], 60)[0]:
        try:
            seen += os.read(terminal, 65536)
        except OSError:
            break
    assert wanted in seen, seen[-2000:]
    return seen


def test_a_heartbeat_that_is_damaged_is_told_as_damaged(tmp_path: Path) -> None:
    write(tmp_path, *(beat_of(rank) for rank in (0, 2, 3)))
    first, second = (tmp_path / "monitor" / f"beat-{rank:05}.json" for rank in (0, 1))
    second.write_bytes(b'{"number": 1, "time')
    job = look(tmp_path)
    assert (job.damaged, job.missing, len(job.ranks)) == (["monitor/beat-00001.json"], [], 3)
    assert "damaged, or of another version of aiockpt: monitor/beat-00001.json" in shown(view("run", job, 40))
    assert "3 of 4 ranks reporting" in shown(view("run", job, 40))
    for path in (tmp_path / "monitor").iterdir():
        path.unlink()
    first.write_bytes(b"")
    alone = CliRunner().invoke(app, ["top", str(tmp_path)]).output
    assert "damaged, or of another version of aiockpt: monitor/beat-00000.json" in alone
    assert "no rank has said anything" not in alone


def test_a_heartbeat_that_was_damaged_is_well_again_with_the_next_one(tmp_path: Path) -> None:
    write(tmp_path, beat_of(0, world_size=1))
    (tmp_path / "monitor" / "beat-00000.json").write_bytes(b"[]")
    watch = JobWatch(LocalBackend(tmp_path))
    first = anyio.run(watch.poll)
    write(tmp_path, beat_of(0, world_size=1, number=2))
    then = anyio.run(watch.poll)
    assert first is not None
    assert then is not None
    assert (first.damaged, first.ended, then.damaged, len(then.ranks)) == (["monitor/beat-00000.json"], False, [], 1)
