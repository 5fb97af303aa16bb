"""The cost of a lazy save to forward and backward: steps beside it, and steps beside a thread that only writes.

Steps of half a millisecond on one thread (`benchmarks.steps`, the most sensitive kind) run for an *interval* between two
optimizer steps that is more than twice as long as writing takes, so no optimizer ever waits for a copy. A save begins with
the interval; the rest of it is quiet. *Time lost* is the extra time of the steps from the call until the bytes are durable,
and of the 300 after them (old checkpoints are deleted then), over as many quiet steps of the same interval and the one
before. Ways take turns, in another order each time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import state as states
from benchmarks.contenders import Contender, try_make
from benchmarks.contenders.raw import Nothing, RawWriter
from benchmarks.measure.saving import check
from benchmarks.report import Samples
from benchmarks.state import State
from benchmarks.steps import percentile, run_steps, seconds, small_step
from benchmarks.visit import Outcome, Turn

AFTER = 300
"""Steps counted after a durable save."""
ROOM = 2.2
"""Length of the interval, as a multiple of the raw writer's time."""
WARM = 2
"""Rounds that are not counted."""
SMOKE_STEPS = 20


class _Loop:
    """Intervals of small steps that end with an optimizer's."""

    def __init__(self, state: State, work: Path, smoke: bool) -> None:
        self._after = SMOKE_STEPS if smoke else AFTER
        self._state = state
        self._step = small_step(optimizes=False)
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self._saved = 0
        quiet_s = statistics.median(self._run(self._after if smoke else 1000))
        raw = RawWriter(copies=False)
        raw.open(work, state)
        writing_s = max(seconds(lambda: raw.save(0, state).wait()) for _ in range(3))
        self.steps = self._after + round(ROOM * writing_s / quiet_s)
        self._before = self._run(self._after)

    def _run(self, count: int) -> list[float]:
        return run_steps(self._step, lambda done: done >= count)

    def interval(self, way: Contender) -> dict[str, float]:
        """Run one interval, a save at its beginning."""
        os.sync()
        self._optimizer.step()
        self._saved += 1
        begun_s = time.perf_counter()
        saving = way.save(self._saved, self._state)
        called_s = time.perf_counter() - begun_s
        if isinstance(way, Nothing):
            beside = self._run(self.steps // 2)
        else:
            beside = run_steps(self._step, lambda count: count >= self._after and saving.done())
        durable_s = time.perf_counter() - begun_s
        saving.wait()
        behind = self._run(self._after)
        rest = self._run(max(self._after, self.steps - len(beside) - len(behind)))
        quiet = [*self._before, *rest]
        self._before = rest
        counted = len(beside) + len(behind)
        return {
            "lost_s": called_s + sum(beside) + sum(behind) - counted * statistics.fmean(quiet),
            "durable_s": durable_s,
            "steps_count": counted,
            "quiet_p50_s": percentile(quiet, 0.5),
            "beside_p50_s": percentile(beside, 0.5),
            "beside_p99_s": percentile(beside, 0.99),
            "slowed_ratio": percentile(beside, 0.5) / percentile(quiet, 0.5),
        }

    def check(self, way: Contender) -> None:
        """Fail unless a save by *way* loads as the current state."""
        self._saved += 1
        way.save(self._saved, self._state).wait()
        check(way, self._saved, self._state)


def beside(turn: Turn, outcome: Outcome) -> None:
    """Measure intervals, ways in turn."""
    state, work = states.build(turn.size_bytes), Path(turn.folder)
    ways: dict[str, Contender] = {name: made for name in turn.contenders if (made := try_make(turn, name, outcome))}
    for number, way in enumerate(ways.values()):
        way.open(work / str(number), state)
    loop = _Loop(state, work, turn.smoke)
    outcome.note(turn, f"{loop.steps} steps between two optimizer steps.")
    samples: dict[str, Samples] = {name: {} for name in ways}
    warm = 0 if turn.smoke else WARM
    for done in range(warm + turn.repetitions):
        for name in _rotated(list(ways), done):
            found = loop.interval(ways[name])
            for metric, value in found.items() if done >= warm else ():
                samples[name].setdefault(metric, []).append(value)
    for name, way in ways.items():
        if way.checks:
            loop.check(way)
        way.close()
        outcome.add(turn, name, samples[name])


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]
