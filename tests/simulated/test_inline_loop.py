"""A checkpointer on one thread does the same each time, and refuses what needs another thread."""

import dataclasses
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.testing.faults import FaultyFiles
from aiockpt.testing.recording import RecordingFiles
from tests.inline_process import Process, local, states_equal, tiny_state
from tests.simulated.inline_loop import InlineLoop
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import run_inline, simulated_world


def calls_of_a_run() -> list[str]:
    files = RecordingFiles(SimulatedFiles())
    backend, world = local(files, seed=1)

    async def main() -> None:
        process = Process(backend, world, retention=aiockpt.Retention(last=1))
        for step in (1, 2, 3):
            await process.save(step, tiny_state(step))
        state = tiny_state(-1)
        await process.load(state)
        assert states_equal(state, tiny_state(3))

    run_inline(main)
    return [f"{call.verb} {call.path} {call.target} {call.offset} {call.size}" for call in files.calls]


def test_two_runs_with_one_seed_make_the_same_calls_in_the_same_order() -> None:
    calls = calls_of_a_run()
    assert len(calls) > 100
    assert calls == calls_of_a_run()


def test_what_is_cancelled_ends_and_what_runs_beside_goes_on() -> None:
    async def main() -> None:
        process = Process(MemoryBackend(), simulated_world())
        first, second = process.ckpt.save(1, tiny_state(1)), process.ckpt.save(2, tiny_state(2))
        first.cancel()
        await process.idle()
        assert isinstance(first.exception(), aiockpt.SaveCancelledError)
        assert second.result().step == 2
        assert process.used_slabs == 0

    run_inline(main)


class CrashError(BaseException):
    """The process dies."""


class DyingFiles(FaultyFiles):
    def fdatasync(self, fd: int) -> None:
        raise CrashError


def test_a_simulated_crash_reaches_who_waits_for_the_background() -> None:
    backend, world = local(DyingFiles(SimulatedFiles()))

    async def main() -> None:
        process = Process(backend, world)
        process.ckpt.save(1, tiny_state(1))
        with pytest.raises(CrashError):
            await process.idle()

    run_inline(main)


def test_a_call_outside_the_event_loop_is_refused(tmp_path: Path) -> None:
    ckpt = aiockpt.Checkpointer(
        tmp_path, on_error="warn", world=dataclasses.replace(simulated_world(), make_loop=InlineLoop)
    )
    with pytest.raises(aiockpt.BlockingCallError, match="InlineLoop"):
        ckpt.load(tiny_state(0))
    with pytest.raises(aiockpt.BlockingCallError, match="InlineLoop"):
        ckpt.close()
