"""Ranks that all end in the same call, with the same step, whichever of them is told. Real processes on gloo."""

import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.preemption.programs import Program, start_ranks
from tests.small_run import small_checkpointer

WORLD_SIZE = 3

TOGETHER = """
state = {"shared": torch.zeros(40, 10), f"own{rank}": torch.zeros(100), "value": -1}
with aiockpt.Checkpointer(root, every=EVERY, limits=small, on_preempt=ON_PREEMPT) as ckpt:
    for step in range(ckpt.resume(state), 100_000):
        if COLLECTIVE:
            torch.distributed.all_reduce(torch.ones(1))
        state["shared"].fill_(step)
        state[f"own{rank}"].fill_(step + rank)
        state["value"] = step
        if step == 25:
            say("go")
        ckpt.step(step, state)
        time.sleep(PAUSE)
"""


ANEW = "aiockpt.Preemption(recent_s=0)"
"""The default would flush an earlier step where saving takes long; how long it takes is the machine's matter."""


def script(*, every: int = 10**9, on_preempt: str = ANEW, collective: bool = True, pause: str = "0.002") -> str:
    words = {"EVERY": str(every), "ON_PREEMPT": on_preempt, "COLLECTIVE": str(collective), "PAUSE": pause}
    text = TOGETHER
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def newest(root: Path) -> int | None:
    """Load what all ranks saved on one, check it, and return the step."""
    own = {f"own{rank}": torch.zeros(100) for rank in range(WORLD_SIZE)}
    shared = torch.zeros(40, 10)
    state = {"shared": shared, "value": -1, **own}
    with small_checkpointer(root) as ckpt:
        loaded = ckpt.load(state).result()
    if loaded is None:
        return None
    assert state["value"] == loaded.step
    assert torch.equal(shared, torch.full((40, 10), float(loaded.step)))
    for rank in range(WORLD_SIZE):
        assert torch.equal(own[f"own{rank}"], torch.full((100,), float(loaded.step + rank)))
    return loaded.step


def ends(programs: list[Program]) -> list[int]:
    return [program.end() for program in programs]


def logs(programs: list[Program]) -> str:
    return "\n----\n".join(program.log for program in programs)


@pytest.mark.parametrize("told", [[0], [2], [0, 1, 2]], ids=["rank 0", "rank 2", "all"])
def test_whichever_rank_is_told_all_end_in_the_same_call_with_a_step_that_is_read_back(
    tmp_path: Path, told: list[int]
) -> None:
    programs = start_ranks(tmp_path, script(), WORLD_SIZE)
    for program in programs:
        program.wait_said("go")
    for rank in told:
        programs[rank].send()
        time.sleep(random.Random(rank).random() / 20)
    assert ends(programs) == [75] * WORLD_SIZE, logs(programs)
    step = newest(tmp_path / "run")
    assert step is not None
    for program in programs:
        assert f"the run ends; step {step} is saved and committed, read back" in program.log


def test_ranks_that_are_far_apart_end_in_the_call_that_none_has_passed(tmp_path: Path) -> None:
    programs = start_ranks(tmp_path, script(collective=False, pause="0.005 + 0.01 * rank"), WORLD_SIZE)
    for program in programs:
        program.wait_said("go")
    programs[1].send(signal.SIGUSR1)
    assert ends(programs) == [75] * WORLD_SIZE, logs(programs)
    assert newest(tmp_path / "run") is not None


def test_a_recent_snapshot_is_flushed_on_all_ranks(tmp_path: Path) -> None:
    programs = start_ranks(tmp_path, script(every=20, on_preempt="aiockpt.Preemption(recent_s=1000)"), WORLD_SIZE)
    for program in programs:
        program.wait_said("go")
    programs[2].send()
    assert ends(programs) == [75] * WORLD_SIZE, logs(programs)
    step = newest(tmp_path / "run")
    assert step is not None
    assert step % 20 == 0
    assert "is flushed and committed" in programs[0].log


def test_the_others_of_a_dead_rank_wait_for_it_no_longer_than_they_need_to_see_it(tmp_path: Path) -> None:
    """A launcher sends SIGTERM to the ranks that are left, and the restart waits for their end.

    Rank 0 would wait until all ranks know what was read back, the dead one, too.
    """
    for_ever = "from aiockpt.session.preemption import decision\ndecision.GOODBYE_S = 10_000.0\n"
    programs = start_ranks(tmp_path, for_ever + script(every=20, collective=False, pause="0.05"), WORLD_SIZE)
    for program in programs:
        program.wait_said("go")
    programs[1].process.kill()
    programs[0].send()
    codes = ends(programs)
    assert (codes[0], codes[2]) == (77, 77), logs(programs)
    for program in (programs[0], programs[2]):
        assert "rank 1 is gone: its process" in program.log
        assert "nothing from rank 1 within" not in program.log
    assert newest(tmp_path / "run") is not None
