"""The main comparison: saves, loads, training beside saves, and memory, of one process and one state.

Guarantees:

- The saved state is loaded again and compared by digest, outside the clock; a difference fails the visit.
- A load is "cold" or "warm" only when a probe of the page cache has confirmed it.
- Durations start right before the call and end when the checkpoint is durable, or the tensors are filled.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path

from benchmarks import machine, pages
from benchmarks import state as states
from benchmarks.contenders import Contender, Pending, try_make
from benchmarks.report import Samples
from benchmarks.scenarios import SCENARIOS
from benchmarks.state import State
from benchmarks.steps import Clock, percentile, run_steps, small_step, timed
from benchmarks.visit import Measure, Outcome, Turn, resolve

QUIET_STEPS = 1000
SAVING_STEPS = 200
SMOKE_STEPS = 50

MeasureOne = Callable[[Contender, State, Path, Turn], Samples]


def _of_each(measure: MeasureOne) -> Measure:
    """Return a function that measures each contender and floor of a turn, and imports its library before making a state."""

    @wraps(measure)
    def of_each(turn: Turn, outcome: Outcome) -> None:
        for index, name in enumerate(turn.contenders):
            floor = SCENARIOS[turn.scenario].floors.get(name)
            made = resolve(floor) if floor else try_make(turn, name, outcome)
            if made is None:
                continue
            folder = Path(turn.folder) / str(index)
            folder.mkdir()
            state = states.build(turn.size_bytes)
            found = made(state, folder, turn.repetitions) if floor else measure(made, state, folder, turn)
            outcome.add(turn, name, found)

    return of_each


def save_once(contender: Contender, step: int, state: State) -> tuple[float, float]:
    """Save and return the seconds until the state may change, and until the checkpoint is durable."""
    states.stamp(state, step)
    paused_s = 0.0

    def save() -> None:
        nonlocal paused_s
        start = time.perf_counter()
        pending = contender.save(step, state)
        paused_s = time.perf_counter() - start
        pending.wait()

    durable_s = timed(save)
    return paused_s, durable_s


def check(contender: Contender, step: int, state: State) -> None:
    """Fail unless *step* loads as the current *state*."""
    expected = states.digests(state)
    states.clear(state)
    contender.load(step, state)
    states.compare(state, expected)


@_of_each
def save(contender: Contender, state: State, folder: Path, turn: Turn) -> Samples:
    """Pause and time to durable: of the first save of a process, and of those after it."""
    contender.open(folder, state)
    first = save_once(contender, 1, state)
    later = [save_once(contender, 2 + index, state) for index in range(turn.repetitions)]
    check(contender, 1 + turn.repetitions, state)
    contender.close()
    return {
        "pause_first_s": [first[0]],
        "durable_first_s": [first[1]],
        "pause_s": [paused_s for paused_s, _ in later],
        "durable_s": [durable_s for _, durable_s in later],
    }


@_of_each
def warmed(contender: Contender, state: State, folder: Path, turn: Turn) -> Samples:
    """Pause and time to durable of the first save after ``warm_up``."""
    contender.open(folder, state)
    warm_up_s = timed(lambda: contender.warm_up(state))
    paused_s, durable_s = save_once(contender, 1, state)
    check(contender, 1, state)
    contender.close()
    return {"warm_up_s": [warm_up_s], "pause_warmed_s": [paused_s], "durable_warmed_s": [durable_s]}


@_of_each
def load(contender: Contender, state: State, folder: Path, turn: Turn) -> Samples:
    """Seconds to fill the job's tensors, from the disk and from the page cache."""
    contender.open(folder, state)
    save_once(contender, 1, state)
    expected = states.digests(state)

    def load_once(prepare: Callable[[Path], float]) -> float:
        states.clear(state)
        prepare(contender.location(1))
        seconds = timed(lambda: contender.load(1, state))
        states.compare(state, expected)
        return seconds

    cold = [load_once(pages.drop) for _ in range(turn.repetitions)]
    warm = [load_once(pages.warm) for _ in range(turn.repetitions)]
    contender.close()
    return {"cold_s": cold, "warm_s": warm}


@_of_each
def train(contender: Contender, state: State, folder: Path, turn: Turn) -> Samples:
    """The cost of saves to a training loop; the first save, which warms the contender up, is not counted."""
    step = small_step()
    contender.open(folder, state)
    save_once(contender, 1, state)
    quiet_steps = SMOKE_STEPS if turn.smoke else QUIET_STEPS
    seen = [
        slow_down(step, partial(contender.save, 2 + index, state), quiet_steps) for index in range(turn.repetitions)
    ]
    if contender.checks:
        check(contender, 1 + turn.repetitions, state)
    contender.close()
    return {name: [one[name] for one in seen] for name in seen[0]}


def slow_down(
    step: Callable[[], None],
    save: Callable[[], Pending],
    quiet_steps: int = QUIET_STEPS,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Run quiet steps, then *save* and steps until it is durable, and compare; ``lost_s`` counts the call too."""
    os.sync()
    quiet = run_steps(step, lambda count: count >= quiet_steps, clock)
    start = clock()
    pending = save()
    if pending.done():  # a blocking save: the rest of its work is the training thread's own
        pending.wait()
    saving = run_steps(step, lambda count: count >= SAVING_STEPS and pending.done(), clock)
    pending.wait()
    wall_s = clock() - start
    return {
        "lost_s": wall_s - len(saving) * sum(quiet) / len(quiet),
        "quiet_p50_s": percentile(quiet, 0.5),
        "quiet_p99_s": percentile(quiet, 0.99),
        "saving_p50_s": percentile(saving, 0.5),
        "saving_p99_s": percentile(saving, 0.99),
    }


@_of_each
def memory(contender: Contender, state: State, folder: Path, turn: Turn) -> Samples:
    """Memory of this process before its first save; the parent samples the peak from outside (`benchmarks.runner`)."""
    gc.collect()
    before_bytes = machine.memory_bytes(os.getpid())
    contender.open(folder, state)
    for index in range(1 + turn.repetitions):
        save_once(contender, 1 + index, state)
    budget_bytes = contender.budget_bytes()
    contender.close()
    return {"before_bytes": [before_bytes], **({} if budget_bytes is None else {"budget_bytes": [budget_bytes]})}
