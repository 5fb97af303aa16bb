"""Whatever happened in a place, and whatever is damaged there: histories that are made smaller when one fails.

The processes, the damage, and what must hold are those of the campaign (`tests.campaigns.histories`), which has many more
of them by seed; here Hypothesis draws, so that a history that fails comes down to the few calls that it needs.
"""

import logging
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from aiockpt.errors import CheckpointError
from aiockpt.options import Retention
from tests.campaigns.damage import DAMAGES, Scene
from tests.campaigns.histories import look
from tests.campaigns.history import (
    CALLS,
    CHANGES,
    LITTLE_CAN_BE_REMOVED,
    OUTAGES,
    STEPS,
    History,
    Process,
    crash_at,
    is_away,
)
from tests.example_counts import examples
from tests.seams import NOTES_SKIPPED

DICE = st.randoms(use_true_random=False)
LAST = st.integers(1, 3)


class Histories(RuleBasedStateMachine):
    """A place, the process that works in it, and the damage that is done before the next look at it."""

    history: History
    process: Process | None = None
    scene: Scene | None = None

    @initialize(hard_links=st.booleans())
    def begin(self, hard_links: bool) -> None:
        self.history = History(random.Random(0), hard_links=hard_links)
        self.seed = 0

    def _draw_seed(self) -> int:
        """Names of attempts and the like are not to be made smaller: they differ, and that is all."""
        self.seed += 1
        return self.seed

    def _start(self, process: Process) -> None:
        self._end()
        self.process = process

    def _end(self) -> None:
        if self.process is not None:
            self.process.__exit__(None, None, None)
            self.process = None

    def _work(self, work: Callable[[Process], None]) -> None:
        """Have the process do something; it ends where that fails."""
        assert self.process is not None
        try:
            work(self.process)
        except CheckpointError as error:
            ended, self.process = self.process, None
            ended.__exit__(type(error), error, None)

    @precondition(lambda self: self.scene is None)
    @rule(last=st.none() | LAST)
    def a_process_starts(self, last: int | None) -> None:
        rules = None if last is None else Retention(last=last)
        self._start(Process(self.history, [], rules, self._draw_seed()))

    @precondition(lambda self: self.scene is None)
    @rule(call=st.integers(1, 4 * CALLS))
    def a_process_starts_that_crashes(self, call: int) -> None:
        self._start(Process(self.history, [crash_at(call)], None, self._draw_seed()))

    @precondition(lambda self: self.scene is None)
    @rule()
    def a_process_starts_that_can_remove_little(self) -> None:
        self._start(Process(self.history, [LITTLE_CAN_BE_REMOVED], None, self._draw_seed()))

    @precondition(lambda self: self.scene is None and self._ended_steps())
    @rule(
        dice=DICE,
        verb=st.sampled_from(("preadv", "open", "listdir")),
        error=st.sampled_from(OUTAGES),
        times=st.sampled_from((1, 3)),
    )
    def a_process_starts_in_an_outage(self, dice: random.Random, verb: str, error: int, times: int) -> None:
        self._end()
        away = dice.choice(self.history.saves)
        self._start(Process(self.history, [is_away(away.folder, verb, error, times)], None, self._draw_seed()))

    def _ended_steps(self) -> list[int]:
        return self.history.steps if self.process is None else []

    @precondition(lambda self: self.process is not None)
    @rule(dice=DICE)
    def it_loads(self, dice: random.Random) -> None:
        step = dice.choice([None, *self.history.steps])
        self._work(lambda process: process.load(step))

    @precondition(lambda self: self.process is not None)
    @rule(step=st.sampled_from(STEPS))
    def it_saves(self, step: int) -> None:
        self._work(lambda process: process.do("save", step, 1))

    @precondition(lambda self: self.process is not None and self.history.steps)
    @rule(what=st.sampled_from(CHANGES), dice=DICE, last=st.sampled_from((1, 2)))
    def it_changes_what_is_there(self, what: str, dice: random.Random, last: int) -> None:
        step = dice.choice(self.history.steps)
        self._work(lambda process: process.do(what, step, last))

    @precondition(lambda self: self.history.has_root)
    @rule(damage=st.sampled_from(DAMAGES), dice=DICE)
    def something_is_damaged(self, damage: Callable[[Scene, random.Random], None], dice: random.Random) -> None:
        self._end()
        self.scene = self.scene or Scene(self.history)
        damage(self.scene, dice)

    @precondition(lambda self: self.history.has_root)
    @rule(dice=DICE, goes_on=st.booleans())
    def a_new_process_looks(self, dice: random.Random, goes_on: bool) -> None:
        self._end()
        scene, self.scene = self.scene or Scene(self.history), None
        look(scene, dice, self._draw_seed() + 1000, goes_on=goes_on)

    def teardown(self) -> None:
        self._end()


@pytest.fixture(autouse=True)
def _quietly(caplog: pytest.LogCaptureFixture) -> None:
    """Of thousands of injected faults each is logged."""
    caplog.set_level(logging.CRITICAL, "aiockpt")


SETTINGS = examples(
    60,
    stateful_step_count=14,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def test_after_any_history_the_newest_whole_step_is_found_and_all_that_was_passed_over_is_told() -> None:
    run_state_machine_as_test(Histories, settings=SETTINGS)


def tell_nobody(*_: object, **__: object) -> None:
    """Pass over a step without a word."""


@pytest.mark.timeout(400)
def test_a_broken_guard_is_found_and_the_history_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery tells nobody of what it passes over: a save, a damage and a look show that."""
    monkeypatch.setattr(NOTES_SKIPPED, tell_nobody)
    many = examples(
        1000,
        stateful_step_count=8,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
    )
    with pytest.raises(AssertionError) as found:
        run_state_machine_as_test(Histories, settings=many)
    told = "\n".join(getattr(found.value, "__notes__", []))
    calls = re.findall(r"state\.(\w+)\(", told)
    assert "it_saves" in calls
    assert "something_is_damaged" in calls
    assert len([call for call in calls if call not in ("begin", "a_process_starts", "teardown")]) <= 4, told
