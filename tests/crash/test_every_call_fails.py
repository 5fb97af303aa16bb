"""Every call of a save fails, in every way: the save fails with our error or succeeds, and nothing else happens."""

import asyncio
import errno
import random
from collections.abc import Callable
from functools import cache

import pytest

from aiockpt import SaveFuture
from aiockpt.errors import CheckpointError, SaveCancelledError, StorageError, StorageFullError
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.campaigns import failing_calls
from tests.campaigns.drawn_state import DrawnShape
from tests.inline_process import Process, Restarts, local, saved_files, tiny_state
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import crash_states, run_inline

ERRORS = [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EDQUOT, errno.EROFS, errno.EINTR]


RESTARTS = Restarts()


def save_under(
    faults: list[Fault], watch: Callable[[SaveFuture], None] | None = None
) -> tuple[SimulatedFiles, BaseException | None, FaultyFiles, Process]:
    """Save step 2 over a committed step 1 while *faults* happen; return what is left, and how the save ended.

    *watch* is given the save's future at once.
    """
    files = saved_files(1)
    faulty = FaultyFiles(files, faults)
    backend, world = local(faulty, seed=5)

    async def main() -> tuple[BaseException | None, Process]:
        process = Process(backend, world)
        future = await process.save(2, tiny_state(2), watch)
        await backend.close()
        return future.exception(), process

    error, process = run_inline(main)
    return files, error, faulty, process


@cache
def call_count() -> int:
    _, error, faulty, _ = save_under([])
    assert error is None
    return faulty.call_count


def assert_nothing_leaked(files: SimulatedFiles, process: Process) -> None:
    assert files.open_count == 0
    assert process.used_slabs == 0


@pytest.mark.parametrize("error", ERRORS, ids=[errno.errorcode[number] for number in ERRORS])
def test_an_error_at_any_call_leaves_the_old_step_or_the_whole_new_one(error: int) -> None:
    outcomes = set()
    for at in range(1, call_count() + 1):
        files, failure, _, process = save_under([Fault(do="fail", at=at, error=error)])
        value = RESTARTS.load_value(files)
        outcomes.add((failure is None, value))
        assert value == 2.0 if failure is None else value in (1.0, 2.0), f"at call {at}: {failure!r}, loaded {value}"
        if failure is not None:
            assert isinstance(failure, CheckpointError), f"at call {at}: {failure!r}"
            if error in (errno.ENOSPC, errno.EDQUOT) and isinstance(failure, StorageError):
                assert isinstance(failure, StorageFullError)
        assert_nothing_leaked(files, process)
    assert (False, 1.0) in outcomes


def test_a_short_write_at_any_call_is_continued() -> None:
    for at in range(1, call_count() + 1):
        files, failure, _, process = save_under([Fault(do="short", verb="pwrite", at=at)])
        assert failure is None
        assert RESTARTS.load_value(files) == 2.0
        assert_nothing_leaked(files, process)


@pytest.mark.parametrize("flush", ["fdatasync", "fsync"])
def test_a_flush_that_fails_once_is_never_acknowledged_unless_it_was_written_again(flush: str) -> None:
    failed = 0
    for at in range(1, call_count() + 1):
        files, failure, faulty, process = save_under([Fault(do="fail", verb=flush, at=at, error=errno.EIO)])
        if not faulty.schedule.fired:
            break
        if failure is None:  # then the lost bytes do not matter: after any power cut the new step is there
            assert all(RESTARTS.load_value(after) == 2.0 for after in crash_states(files, limit=16))
        else:
            failed += 1
            assert RESTARTS.load_value(files) in (1.0, 2.0)
        assert_nothing_leaked(files, process)
    assert failed


def test_cancellation_at_every_turn_of_the_loop_leaks_nothing() -> None:
    outcomes = set()
    for turns in range(400):
        files, error, process = cancel_after(turns)
        value = RESTARTS.load_value(files)
        outcomes.add(error is None)
        if error is None:
            assert value == 2.0
        else:
            assert isinstance(error, SaveCancelledError)
            assert value in (1.0, 2.0)
        assert_nothing_leaked(files, process)
        if error is None and turns > 50:
            break
    assert outcomes == {True, False}


def cancel_after(turns: int) -> tuple[SimulatedFiles, BaseException | None, Process]:
    """Save step 2 and cancel it after so many turns of the event loop."""

    def watch(future: SaveFuture) -> None:
        def turn(left: int) -> None:
            if left:
                asyncio.get_running_loop().call_soon(turn, left - 1)
            else:
                future.cancel()

        turn(turns)

    files, error, _, process = save_under([], watch)
    return files, error, process


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOENT, errno.EIO])
def test_a_flush_that_failed_is_not_tried_again(error: int, times: int) -> None:
    """What it did not flush may be marked clean: a later flush succeeds, and the power cut takes the step all the same."""
    shape = DrawnShape.draw(random.Random(1))
    for at in range(1, 13):
        failing_calls.save_under([Fault(do="fail", verb="fsync", at=at, times=times, error=error)], shape, seed=at)
