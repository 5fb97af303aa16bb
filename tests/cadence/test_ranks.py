"""The same steps saved by all ranks, however far apart they are. Ranks as threads, with checkpointers and without."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import aiockpt
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.loop import LoopThread
from tests.cadence.runs import save
from tests.ranks.crew import QUICK, SMALL, Crew
from tests.simulated.simulation import SimulatedClock


class Member:
    """One rank's cadence, without a checkpointer: its saves cost what the test says."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        deadline_s: float = 20.0,
        make: Callable[[], aiockpt.Cadence] = lambda: aiockpt.Cadence(0.1),
    ) -> None:
        self.loop = LoopThread(f"rank-{rank}", on_exit=lambda: None)
        self.clock = SimulatedClock(rank * 10**15)
        self.cadence = make()
        self.saved: list[int] = []
        self._end = self.cadence.join(
            self.loop, Incarnation(store, "a test", rank, world_size, "", id="one"), self.clock, deadline_s=deadline_s
        )

    def train(self, step: int, pause_s: float = 0.1, step_s: float = 0.05) -> bool:
        """Train one step of simulated time; save it when it is due."""
        self.clock.advance(step_s)
        due = self.cadence.due(step)
        if due:
            self.saved.append(step)
            save(self.cadence, self.clock, step, pause_s)
        return due

    def close(self) -> None:
        self._end()
        self.loop.close()


@contextmanager
def members(world_size: int, **options: Any) -> Iterator[list[Member]]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    crew = [Member(rank, world_size, store, **options) for rank in range(world_size)]
    try:
        yield crew
    finally:
        for member in crew:
            member.close()


def on_all(crew: list[Member], work: Callable[[Member], object]) -> None:
    with ThreadPoolExecutor(len(crew)) as threads:
        for outcome in [threads.submit(work, member) for member in crew]:
            outcome.result()


class CadenceCrew(Crew):
    """The ranks of one job, each with options of its own."""

    def __init__(self, world_size: int, url: Path, options_of: Callable[[int], dict[str, Any]]) -> None:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.world_size = world_size
        self.checkpointers = [
            aiockpt.Checkpointer(
                url,
                ranks=aiockpt.Ranks(rank, world_size, store),
                limits=aiockpt.Limits(io=SMALL, deadlines=QUICK),
                **options_of(rank),
            )
            for rank in range(world_size)
        ]


def test_all_ranks_save_the_same_steps_when_each_goes_at_its_own_pace() -> None:
    with members(4) as crew:
        on_all(crew, lambda member: [member.train(step, pause_s=0.01 * (step % 7 + 1)) for step in range(400)])
        assert all(member.saved == crew[0].saved for member in crew)
        assert len(crew[0].saved) > 10


def test_ranks_that_cost_most_say_nothing_and_only_rank_0_decides() -> None:
    with members(2) as crew:
        on_all(
            crew, lambda member: [member.train(step, pause_s=0.01 + 5.0 * (member is crew[1])) for step in range(200)]
        )
        assert crew[0].saved == crew[1].saved
        assert crew[1].cadence.explain().startswith("Rank 0 decides. Save every ")
        assert crew[1].cadence.measured.saves == 0


def test_a_rank_ahead_of_rank_0_waits_for_it_and_never_saves_alone() -> None:
    with members(2) as crew, ThreadPoolExecutor(1) as threads:
        ahead = threads.submit(lambda: [crew[1].train(step) for step in range(30)])
        with pytest.raises(TimeoutError):
            ahead.result(0.3)  # rank 0 has not begun: nothing is decided
        assert crew[1].saved == []
        for step in range(30):
            crew[0].train(step)
        ahead.result()
        assert crew[1].saved == crew[0].saved != []


def test_a_rank_whose_rank_0_is_gone_gives_up_at_the_deadline_and_names_it() -> None:
    with members(2, deadline_s=0.3) as crew, pytest.raises(aiockpt.RankTimeoutError, match="rank 0") as caught:
        crew[1].train(0)
    assert caught.value.ranks == (0,) or list(caught.value.ranks) == [0]


def test_a_pause_longer_than_the_deadline_that_nobody_waited_in_does_no_harm() -> None:
    with members(2, deadline_s=0.2) as crew:
        crew[0].train(0)
        until = crew[0].cadence._note.until
        for step in range(until):
            crew[1].train(step)  # by now it polls for the next note, and rank 0 evaluates for long
        channel = crew[1].cadence._channel
        assert channel is not None
        assert channel._asked is not None
        time.sleep(0.5)
        assert not channel._asked.done()
        for step in range(1, until + 5):
            crew[0].train(step)
        crew[1].train(until)
        assert crew[1].cadence._note.until > until


def test_what_is_decided_reaches_the_others_before_they_need_it() -> None:
    with members(2) as crew:
        waits = 0
        channel = crew[1].cadence._channel
        assert channel is not None
        wait = channel.wait

        def count_wait() -> Any:
            nonlocal waits
            waits += 1
            return wait()

        channel.wait = count_wait  # type: ignore[method-assign]
        for step in range(100):  # side by side, as ranks are that exchange gradients
            crew[0].train(step)
            asked = channel._asked
            if asked is not None:
                asked.result(20)  # the notice of 0.25 s has passed, in simulated time
            crew[1].train(step)
        assert waits <= 3  # the first, and while the steps were not measured yet
        assert crew[0].saved == crew[1].saved


def test_after_going_back_all_ranks_agree_again() -> None:
    with members(3) as crew:
        on_all(crew, lambda member: [member.train(step) for step in [*range(60), *range(20, 120)]])
        assert all(member.saved == crew[0].saved for member in crew)
        assert crew[0].saved != sorted(crew[0].saved)  # some steps before 60 were saved when they came again


def test_notes_that_all_have_read_are_removed() -> None:
    with members(3) as crew:
        on_all(crew, lambda member: [member.train(step) for step in range(300)])
        for member in crew:
            member.close()
        channel = crew[0].cadence._channel
        assert channel is not None
        assert channel._number > 5
        store: Any = channel._board._store
        left = store.num_keys()
        assert left <= 3 + 2 * 4  # one name for each rank; and of the last notes some are not read yet


def test_a_rank_that_would_have_to_wait_inside_an_event_loop_refuses() -> None:
    import asyncio

    async def main() -> None:
        crew[1].train(0)

    with members(2) as crew, pytest.raises(aiockpt.BlockingCallError, match="rank 0"):
        asyncio.run(main())


def test_one_cadence_serves_one_checkpointer(tmp_path: Path) -> None:
    cadence = aiockpt.Cadence()
    with (
        aiockpt.Checkpointer(tmp_path, every=cadence),
        pytest.raises(aiockpt.UsageError, match="serves a Checkpointer already"),
    ):
        aiockpt.Checkpointer(tmp_path, observers=[cadence])


def test_several_processes_without_a_checkpointer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(aiockpt.UsageError):
        aiockpt.Cadence().due(0)


@pytest.mark.parametrize("as_observer", [False, True])
def test_checkpointers_of_all_ranks_save_the_same_steps(tmp_path: Path, as_observer: bool) -> None:
    cadences = [aiockpt.Cadence(0.5) for _ in range(3)]
    state = {"w": torch.zeros(4000)}

    def train(rank: int, ckpt: aiockpt.Checkpointer) -> list[int]:
        saved: list[int] = []
        step = 0
        while len(saved) < 3:  # which all ranks reach at the same step, or they would wait for each other in vain
            step += 1
            time.sleep(0.002)
            if as_observer and cadences[rank].due(step):
                saved.append(ckpt.save(step, state).step)
            elif not as_observer and (future := ckpt.step(step, state)) is not None:
                saved.append(future.step)
        ckpt.wait()
        return saved

    def options(rank: int) -> dict[str, Any]:
        return {"observers": [cadences[rank]]} if as_observer else {"every": cadences[rank]}

    with CadenceCrew(3, tmp_path, options) as crew:
        saved = crew.on_all(train)
        steps = crew.checkpointers[0].steps().result()
    assert saved[0] == saved[1] == saved[2]
    assert sorted(info.step for info in steps) == saved[0]
    assert cadences[0].measured.saves > 0


def test_closing_a_checkpointer_does_not_wait_for_a_note_that_never_comes(tmp_path: Path) -> None:
    cadences = [aiockpt.Cadence(), aiockpt.Cadence()]
    state = {"w": torch.zeros(10)}
    with CadenceCrew(2, tmp_path, lambda rank: {"every": cadences[rank]}) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.step(0, state))
        channel = cadences[1]._channel
        assert channel is not None
        channel.prefetch()
        begun = time.monotonic()
        crew.on_all(lambda rank, ckpt: ckpt.close())
        assert time.monotonic() - begun < 10  # of a deadline of 20


def test_one_process_saves_by_itself_through_the_policy_form(tmp_path: Path) -> None:
    cadence = aiockpt.Cadence(0.5)
    state = {"w": torch.zeros(1000)}
    with aiockpt.Checkpointer(tmp_path, every=cadence) as ckpt:
        saved: list[int] = []
        step = 0
        while len(saved) < 3:
            future = ckpt.step(step, state)
            step += 1
            if future is not None:
                saved.append(future.result().step)
        assert {info.step for info in ckpt.steps().result()} == set(saved)
    assert saved[0] == 2
