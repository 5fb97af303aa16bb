"""A death of either process at any time: a snapshot that was taken is committed, and nothing remains of one that was not."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import aiockpt
from aiockpt.worker import process
from tests.small_run import SMALL, Run, small_checkpointer
from tests.watch import until
from tests.worker.worker_child import PACKAGES
from tests.worker.worker_places import Orders, register

DEADLINE_S = 250


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    register(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return Orders(tmp_path / "run")


@contextmanager
def trainer(how: str, orders: Orders) -> Iterator[subprocess.Popen[str]]:
    """Start the child in a session of its own; at the end nothing of it is left."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.worker.worker_child", how, orders.url],
        env={**os.environ, PACKAGES: str(orders.path.with_name("packages"))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


def let_go_on(child: subprocess.Popen[str]) -> None:
    """Have the child save step 2."""
    assert child.stdin is not None
    child.stdin.close()
    child.stdin = None  # `communicate` would flush it


def killed(how: str, orders: Orders) -> tuple[list[str], str]:
    """Run a child to its death, the writer held before its first data file; return the digests and what was logged.

    The writer has the child's standard error: that ends when the writer has ended.
    """
    with trainer(how, orders) as child:
        assert child.stdout is not None
        first = child.stdout.readline().strip()
        assert first, child.communicate()[1]
        orders.hold("create")
        let_go_on(child)
        assert child.wait(DEADLINE_S) == -signal.SIGKILL
        second = (
            child.stdout.readline().strip()
        )  # the first read may have taken it along: `communicate` would not see it
        for writer in writers_of(orders):
            writer.resume()
        assert 2 not in [int(folder.name[5:]) for folder in orders.path.glob("step-*") if any(folder.glob("MANIFEST*"))]
        orders.let_go("create")
        _, log = child.communicate(timeout=DEADLINE_S)
    return [first, second], log


def until_gone(pid: int) -> None:
    """Wait until a process has ended and was reaped."""
    until(lambda: not psutil.pid_exists(pid), f"the end of {pid}")


def steps_of(orders: Orders) -> list[int]:
    with small_checkpointer(orders.path) as ckpt:
        return [info.step for info in ckpt.steps().result()]


@pytest.mark.parametrize("how", ["eager", "lazy", "busy loop", "unread"])
def test_a_snapshot_that_was_taken_is_committed_though_the_trainer_is_killed(how: str, orders: Orders) -> None:
    digests, log = killed(how, orders)
    other = Run(9)
    with small_checkpointer(orders.path) as ckpt:
        for step, digest in ((1, digests[0]), (2, digests[1])):
            assert ckpt.load(other.state, step).result() is not None
            assert other.digest() == digest
            assert ckpt.verify(step).result().step == step
        assert ckpt.latest().result() == 2
    assert "Traceback" not in log, log


def test_a_snapshot_that_was_not_complete_leaves_nothing(orders: Orders) -> None:
    digests, log = killed("half", orders)
    assert steps_of(orders) == [1]
    assert not list(orders.path.glob("step-00000002/a-*/d/*"))
    other = Run(9)
    with small_checkpointer(orders.path) as ckpt:
        loaded = ckpt.load(other.state).result()
        assert loaded is not None
        assert (loaded.step, loaded.skipped) == (1, ())
        assert other.digest() == digests[0]
        ckpt.save(2, other.state).result()
    assert log.count("nothing of it is kept") == 1
    assert "Traceback" not in log, log


def test_a_forked_child_that_lives_on_does_not_keep_the_writer(orders: Orders) -> None:
    """As a loader's worker does: it has copies of the trainer's descriptors, among them the standard error."""
    with trainer("forked", orders) as child:
        let_go_on(child)
        assert child.wait(DEADLINE_S) == -signal.SIGKILL
        (loader,) = [one for one in psutil.process_iter() if _session(one) == child.pid]
        until(lambda: not writers_of(orders), "the end of the writer")
        loader.kill()
    assert steps_of(orders) == [2, 1]


def _session(one: psutil.Process) -> int:
    try:
        return os.getsid(one.pid)
    except ProcessLookupError:
        return -1


def writers_of(orders: Orders) -> list[psutil.Process]:
    """Return the writers of any trainer whose module path has this test's folder."""
    found = []
    for one in psutil.process_iter():
        try:
            if "aiockpt.worker" in one.cmdline() and str(orders.path.parent) in one.environ().get("PYTHONPATH", ""):
                found.append(one)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_whole_job_does_not_end_the_writer(sent: signal.Signals, orders: Orders) -> None:
    with trainer("hangs up", orders) as child:
        assert child.stdout is not None
        child.stdout.readline()
        orders.hold("create")
        let_go_on(child)
        child.stdout.readline()
        assert child.stdout.readline().strip() == "snapshotted"
        (writer,) = writers_of(orders)
        os.killpg(child.pid, sent)
        assert child.wait(DEADLINE_S) == -sent
        if sent != signal.SIGKILL:
            for each in (signal.SIGINT, signal.SIGHUP, sent):  # as a batch system does, to each process of the job
                writer.send_signal(each)
        orders.let_go("create")
        child.communicate(timeout=DEADLINE_S)
    assert steps_of(orders) == [2, 1]


def test_a_program_that_ends_without_waiting_loses_nothing_and_leaves_no_process(orders: Orders) -> None:
    with trainer("ends", orders) as child:
        out, log = child.communicate(timeout=DEADLINE_S)
        assert child.returncode == 0, log
    assert out.count("\n") == 2
    assert not writers_of(orders)
    assert steps_of(orders) == [2, 1]


# ------------------------------------------------------------------ the writer dies


def process_of(ckpt: aiockpt.Checkpointer) -> Any:
    return ckpt._destination._connection.process  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", ["list", "create", "put_new"])
def test_a_writer_that_dies_in_a_save_fails_it_and_the_next_one_starts_another(verb: str, orders: Orders) -> None:
    run = Run()
    one_slab = aiockpt.IO(pool_bytes=16384, slab_bytes=16384, block_bytes=4096, read_bytes=16384)
    io = SMALL if verb == "list" else one_slab  # a slab that did not come back would stop the next save
    with aiockpt.Checkpointer(
        orders.url, worker="process", limits=aiockpt.Limits(io=io, deadlines=aiockpt.Deadlines(slab_s=20))
    ) as ckpt:
        ckpt.save(1, run.state).result()
        ckpt.wait()
        first = process_of(ckpt).pid
        orders.has_reached(verb)
        orders.hold(verb)
        lost = ckpt.save(2, run.state, snapshot="lazy")
        until(lambda: orders.has_reached(verb), verb)
        os.kill(first, signal.SIGKILL)
        error = lost.exception()
        assert isinstance(error, aiockpt.WriterLostError)
        assert "SIGKILL" in str(error)
        assert "aiockpt ls" in str(error)
        orders.let_go(verb)
        assert not psutil.pid_exists(first)  # reaped
        run.train()
        assert ckpt.save(3, run.state).result().step == 3
        assert process_of(ckpt).pid != first
        assert ckpt.statistics().pool.used_slabs == 0
        other = Run(5)
        assert ckpt.load(other.state).result() is not None
        assert other.digest() == run.digest()
    assert steps_of(orders) == [3, 1]


def test_a_writer_that_died_between_two_saves_costs_neither(orders: Orders) -> None:
    run = Run()
    with small_checkpointer(orders.url, worker="process") as ckpt:
        for step in range(3):
            ckpt.save(step, run.state).result()
            pid = process_of(ckpt).pid
            os.kill(pid, signal.SIGKILL)
            until_gone(pid)
    assert steps_of(orders) == [2, 1, 0]


def test_a_writer_that_answers_to_nobody_is_ended_when_its_slabs_are_needed(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.worker.client.END_S", 0.2)
    run = Run()
    with small_checkpointer(orders.url, worker="process") as ckpt:
        ckpt.save(1, run.state).result()
        ckpt.wait()
        stuck = process_of(ckpt)
        os.kill(stuck.pid, signal.SIGSTOP)
        stuck.orders.hang_up()  # as after a message that was not taken in time
        assert ckpt.save(2, run.state).result().step == 2
        assert not psutil.pid_exists(stuck.pid)


def test_closing_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    run = Run()
    me = psutil.Process()
    gc.collect()  # what earlier tests left would be closed meanwhile
    open_fds = []
    for number in range(4):
        with small_checkpointer(tmp_path / str(number), worker="process") as ckpt:
            ckpt.save(1, run.state).result()
            pid = process_of(ckpt).pid
            assert pid in [child.pid for child in me.children()]
        assert not psutil.pid_exists(pid)
        open_fds.append(me.num_fds())
    assert len(set(open_fds)) == 1


def test_a_cancelled_save_is_cancelled_in_the_writer_too(orders: Orders) -> None:
    run = Run()
    with small_checkpointer(orders.url, worker="process") as ckpt:
        ckpt.save(1, run.state).result()
        orders.has_reached("create")
        orders.hold("create")
        save = ckpt.save(2, run.state)
        until(lambda: orders.has_reached("create"), "the first data file")
        assert save.cancel()
        assert isinstance(save.exception(), aiockpt.SaveCancelledError)
        orders.let_go("create")
        ckpt.save(3, run.state).result()
        assert ckpt.statistics().pool.used_slabs == 0
    assert steps_of(orders) == [3, 1]


def test_a_writer_that_is_dead_before_its_first_message_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(fds: tuple[int, ...], nice: int) -> subprocess.Popen[bytes]:
        dead = subprocess.Popen(["sh", "-c", "kill -9 $$"])
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is left to be reaped
        return dead

    monkeypatch.setattr(process, "_start", start)
    with pytest.raises(aiockpt.WriterLostError, match="was ended by SIGKILL, before it had begun"):
        process.WriterProcess(b"setup", 0, 0, 5.0)
