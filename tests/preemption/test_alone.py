"""Runs that are told to end: they keep what they have, and say so. Real processes, real signals."""

import errno
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.preemption.programs import run_and_end, start
from tests.small_run import SMALL, small_checkpointer


def newest(root: Path) -> int | None:
    """Load the newest step as a new process would, and return its value, after checking its tensor."""
    state: dict[str, Any] = {"weight": torch.zeros(200, 100), "value": -1}
    with small_checkpointer(root) as ckpt:
        loaded = ckpt.load(state).result()
    if loaded is None:
        return None
    assert loaded.step == state["value"]
    assert torch.equal(state["weight"], torch.full((200, 100), float(loaded.step)))
    return loaded.step


STEPS = """
with aiockpt.Checkpointer(root, every=EVERY, limits=small, on_preempt=ON_PREEMPT) as ckpt:
    for step in range(ckpt.resume(state), 100_000):
        train(step)
        if step == 25:
            say("go")
        reached = step
        try:
            ckpt.step(step, state)
        except aiockpt.Preempted as ended:
            say(f"ended {ended.step} of {reached}, {ended.code}, {ended.verified}, {ended.reason}")
            raise
        time.sleep(0.002)
"""


ANEW = "aiockpt.Preemption(recent_s=0)"
"""The default would flush an earlier step where saving takes long; how long it takes is the machine's matter."""


def steps(every: int = 1_000_000, on_preempt: str = ANEW) -> str:
    return STEPS.replace("EVERY", str(every)).replace("ON_PREEMPT", on_preempt)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_step_that_is_reached_and_the_status_says_that_it_was_read_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    program = run_and_end(tmp_path, steps(), number)
    step = newest(tmp_path / "run") or 0
    assert step >= 25
    assert f"{number.name}: the run ends; step {step} is saved and committed, read back and compared" in program.log
    assert "Traceback" not in program.log


def test_without_reading_back_the_status_is_another(tmp_path: Path) -> None:
    program = run_and_end(tmp_path, steps(on_preempt="aiockpt.Preemption(verify=False)"), status=76)
    assert "not read back" in program.log


def test_a_snapshot_that_is_recent_enough_is_flushed_and_no_new_one_made(tmp_path: Path) -> None:
    program = run_and_end(tmp_path, steps(every=20, on_preempt="aiockpt.Preemption(recent_s=1000)"))
    step = newest(tmp_path / "run")
    assert step is not None
    assert step % 20 == 0
    assert f"step {step} is flushed and committed" in program.log


def test_a_program_that_calls_save_ends_there_with_that_very_step(tmp_path: Path) -> None:
    script = """
with aiockpt.Checkpointer(root, limits=small, on_preempt=ON_PREEMPT) as ckpt:
    for step in range(100_000):
        train(step)
        if step == 30:
            say("go")
        if step % 10 == 0:
            ckpt.save(step, state)
        time.sleep(0.002)
"""
    run_and_end(tmp_path, script.replace("ON_PREEMPT", ANEW))
    step = newest(tmp_path / "run") or 0
    assert step >= 30
    assert step % 10 == 0


def test_inside_a_long_call_of_c_the_last_snapshot_is_flushed_and_the_log_says_which(tmp_path: Path) -> None:
    script = """
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.faults import Fault, FaultyFiles


class SlowFiles(OsFiles):
    def fdatasync(self, fd):
        time.sleep(0.5)
        OsFiles.fdatasync(fd)


with aiockpt.Checkpointer(LocalBackend(root, world=World(files=SlowFiles())), limits=small, on_preempt="save") as ckpt:
    train(7)
    ckpt.save(7, state)
    long_call()
"""
    program = start(tmp_path, script)
    program.wait_said("inside")
    program.send()
    assert program.wait_logged("SIGTERM: the run ends in the next step() or save(), with") < 1.0
    assert "step 7 is flushed now" in program.log
    program.wait_logged("the newest committed step is 7")
    assert program.process.poll() is None
    program.process.kill()
    program.end()
    assert newest(tmp_path / "run") == 7


def test_inside_a_long_call_of_c_with_nothing_saved_the_log_says_that(tmp_path: Path) -> None:
    script = """
with aiockpt.Checkpointer(root, limits=small, on_preempt="save") as ckpt:
    long_call()
"""
    program = start(tmp_path, script)
    program.wait_said("inside")
    program.send()
    program.wait_logged("no save is in flight")
    program.process.kill()
    program.end()
    assert newest(tmp_path / "run") is None


def test_a_signal_while_it_closes_loses_nothing_and_what_comes_after_ends_as_before(tmp_path: Path) -> None:
    script = """
with aiockpt.Checkpointer(root, limits=small, on_preempt="save") as ckpt:
    train(3)
    ckpt.save(3, state)
    os.kill(os.getpid(), signal.SIGTERM)
say("goes on", signal.getsignal(signal.SIGTERM))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""
    program = start(tmp_path, script)
    assert program.end() == -signal.SIGTERM, program.log
    assert "no step() or save() after it" in program.log
    assert newest(tmp_path / "run") == 3


LEAVING = """
import atexit

options = aiockpt.Preemption(grace_s=GRACE)
try:
    with aiockpt.Checkpointer(root, limits=small, on_preempt=options) as ckpt:
        for step in range(100_000):
            train(step)
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step(step, state)
finally:
    LEAVE
"""


@pytest.mark.parametrize(
    "leave",
    ["os.kill(os.getpid(), signal.SIGTERM)", "atexit.register(os.kill, os.getpid(), signal.SIGTERM)"],
)
def test_a_run_that_has_ended_keeps_its_status_when_the_next_signal_comes(leave: str, tmp_path: Path) -> None:
    program = start(tmp_path, LEAVING.replace("GRACE", "200").replace("LEAVE", leave))
    assert program.end() == 75, program.log


def test_who_goes_on_after_the_end_of_the_run_can_be_ended_when_its_grace_is_over(tmp_path: Path) -> None:
    leave = "time.sleep(1.5); say('go'); time.sleep(100)"
    program = start(tmp_path, LEAVING.replace("GRACE", "1.4").replace("LEAVE", leave))
    assert program.stop() == -signal.SIGTERM, program.log


def test_a_program_that_is_done_ends_well(tmp_path: Path) -> None:
    program = start(tmp_path, steps().replace("100_000", "30"))
    assert program.end() == 0, program.log


def test_a_writer_process_outlives_the_signals_and_saves_the_last_step(tmp_path: Path) -> None:
    program = start(tmp_path, steps().replace("limits=small", "limits=small, worker='process'"))
    program.wait_said("go")
    for child in children(program.process.pid):
        os.kill(child, signal.SIGUSR1)
        os.kill(child, signal.SIGTERM)
    program.send()
    assert program.end() == 75, program.log
    assert (newest(tmp_path / "run") or 0) >= 25


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ---------------------------------------------------------------------- in this very process


@pytest.fixture
def state() -> dict[str, Any]:
    return {"weight": torch.zeros(200, 100), "value": -1}


def tell(number: int = signal.SIGUSR1) -> None:
    """Tell this process to end; return when the loop thread knows: the test is faster than any training."""
    heard = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if "the run ends in the next step() or save()" in record.getMessage():
            heard.set()
        return True

    logger = logging.getLogger("aiockpt")
    logger.addFilter(note)
    try:
        os.kill(os.getpid(), number)
        assert heard.wait(250)
    finally:
        logger.removeFilter(note)


def reach(ckpt: aiockpt.Checkpointer, step: int, state: dict[str, Any]) -> aiockpt.SaveFuture | None:
    state["weight"].fill_(step)
    state["value"] = step
    return ckpt.step(step, state)


def end_at(ckpt: aiockpt.Checkpointer, step: int, state: dict[str, Any]) -> tuple[int | None, object]:
    """Tell this process to end, and reach *step*; return the step that the end names, and the status."""
    tell()
    with pytest.raises(aiockpt.Preempted) as ended:
        reach(ckpt, step, state)
    return ended.value.step, ended.value.code


def test_who_catches_it_and_goes_on_is_told_again_and_saves_nothing(tmp_path: Path, state: dict[str, Any]) -> None:
    with small_checkpointer(tmp_path, on_preempt="save") as ckpt:
        assert reach(ckpt, 1, state) is None
        tell()
        with pytest.raises(aiockpt.Preempted) as first:
            reach(ckpt, 2, state)
        with pytest.raises(aiockpt.Preempted) as second:
            reach(ckpt, 3, state)
        assert second.value is first.value
        assert [info.step for info in ckpt.steps().result()] == [2]
    assert (first.value.step, first.value.code, first.value.reason) == (2, 75, "SIGUSR1")


def test_other_threads_save_on_and_never_end_the_run(tmp_path: Path, state: dict[str, Any]) -> None:
    ended: list[BaseException] = []

    def elsewhere() -> None:
        try:
            ckpt.save(5, state).result()
        except BaseException as error:  # noqa: BLE001
            ended.append(error)

    with small_checkpointer(tmp_path, on_preempt="save") as ckpt:
        tell()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(aiockpt.Preempted):
            reach(ckpt, 6, state)
    assert not ended


def test_a_state_that_cannot_be_saved_ends_the_run_too_and_names_the_last_step_that_was(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    with small_checkpointer(tmp_path, on_preempt=aiockpt.Preemption(recent_s=0)) as ckpt:
        reach(ckpt, 1, state)
        ckpt.save(1, state).result()
        tell()
        with pytest.raises(aiockpt.Preempted) as ended:
            ckpt.step(2, {**state, "value": object()})
    assert (ended.value.step, ended.value.code) == (1, 77)
    assert isinstance(ended.value.__cause__, aiockpt.UnsupportedStateError)


def test_a_folder_that_cannot_be_flushed_keeps_the_last_step_all_the_same(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    files = FaultyFiles(OsFiles(), [Fault(do="fail", verb="fsync", times=None, error=errno.EINVAL)])
    place = LocalBackend(tmp_path, world=World(files))
    with small_checkpointer(place, on_preempt=aiockpt.Preemption(recent_s=0)) as ckpt:
        assert not ckpt.save(1, state).result().durable
        assert end_at(ckpt, 2, state) == (2, 75)


def test_when_full_skip_does_not_skip_the_last_save(tmp_path: Path, state: dict[str, Any]) -> None:
    with aiockpt.Checkpointer(
        tmp_path, on_preempt="save", limits=aiockpt.Limits(io=SMALL, max_in_flight=1, when_full="skip")
    ) as ckpt:
        tell()
        ckpt_save = threading.Thread(target=lambda: ckpt.save(1, state))
        ckpt_save.start()
        ckpt_save.join()
        with pytest.raises(aiockpt.Preempted) as ended:
            ckpt.save(2, state)
    assert (ended.value.step, ended.value.code) == (2, 75)


async def test_inside_an_event_loop_it_ends_as_well(tmp_path: Path, state: dict[str, Any]) -> None:
    async with small_checkpointer(tmp_path, on_preempt="save") as ckpt:
        reach(ckpt, 1, state)
        assert end_at(ckpt, 2, state) == (2, 75)


def test_the_last_step_goes_to_the_fastest_durable_tier_though_its_rule_does_not_take_it(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    tiers = [aiockpt.Tier("memory://preempted"), aiockpt.Tier(tmp_path / "disk", every=10)]
    with small_checkpointer(tiers, on_preempt="save") as ckpt:
        reach(ckpt, 7, state)
        assert end_at(ckpt, 8, state) == (8, 75)
    with small_checkpointer(tmp_path / "disk") as ckpt:
        assert ckpt.latest().result() == 8


class SlowFiles(OsFiles):
    """A disk whose flushes take their time."""

    late_s = 0.4

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Flush, late."""
        time.sleep(self.late_s)
        os.fdatasync(fd)


def test_of_two_durable_tiers_the_last_step_goes_to_the_one_that_was_faster(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    slow, fast = LocalBackend(tmp_path / "slow", world=World(files=SlowFiles())), LocalBackend(tmp_path / "fast")
    anew = aiockpt.Preemption(recent_s=0)
    with small_checkpointer([aiockpt.Tier(slow), aiockpt.Tier(fast)], on_preempt=anew) as ckpt:
        first = ckpt.save(1, state)
        assert first.result().url == slow.url
        first.committed(fast).result()
        assert end_at(ckpt, 2, state) == (2, 75)
    for place, step in ((tmp_path / "fast", 2), (tmp_path / "slow", 1)):
        with small_checkpointer(place) as ckpt:
            assert ckpt.latest().result() == step


def test_the_last_step_is_saved_however_recent_the_last_snapshot_is(tmp_path: Path, state: dict[str, Any]) -> None:
    files = SlowFiles()
    place = LocalBackend(tmp_path / "run", world=World(files=files))
    with small_checkpointer(place, on_preempt="save") as ckpt:
        ckpt.save(1, state).result()  # takes seconds; a later one is taken to do so, too
        files.late_s = 0.0
        ckpt.save(2, state).result()
        reach(ckpt, 3, state)
        assert end_at(ckpt, 4, state) == (4, 75)


def test_a_step_that_is_flushed_from_memory_passes_over_a_durable_tier_whose_rule_does_not_take_it(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    rarely, slow = tmp_path / "rarely", LocalBackend(tmp_path / "slow", world=World(files=SlowFiles()))
    tiers = [aiockpt.Tier("memory://flushed"), aiockpt.Tier(rarely, every=10), aiockpt.Tier(slow)]
    flushes = aiockpt.Preemption(recent_s=1000)
    with small_checkpointer(tiers, on_preempt=flushes) as ckpt:
        save = ckpt.save(7, state)
        tell()
        with pytest.raises(aiockpt.Preempted, match="step 7 is flushed and committed") as ended:
            reach(ckpt, 8, state)
        assert save.result().url == slow.url
    assert (ended.value.step, ended.value.code) == (7, 75)
    for place, steps_there in ((rarely, []), (tmp_path / "slow", [7])):
        with small_checkpointer(place) as ckpt:
            assert [info.step for info in ckpt.steps().result()] == steps_there


@pytest.mark.parametrize(
    ("options", "words"),
    [({"signals": ("TERM",)}, "SIGTERM"), ({"grace_s": 0}, "grace_s"), ({"ends_at": "noon"}, "seconds since 1970")],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(aiockpt.UsageError, match=words):
        aiockpt.Preemption(**options)


@pytest.mark.parametrize(("on_preempt", "words"), [("stop", "'save'"), (aiockpt.Preemption(ends_at=12.0), "ago")])
def test_what_cannot_be_done_is_refused_before_anything_is_taken(tmp_path: Path, on_preempt: Any, words: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(aiockpt.UsageError, match=words):
        aiockpt.Checkpointer(tmp_path, on_preempt=on_preempt)
    assert signal.getsignal(signal.SIGTERM) is before
