"""Does `aiockpt.Cadence` save at the right moments? ``python -m benchmarks.cadence``; days of training in a minute.

Simulated runs with failures (a seed; the same failure times for all contenders) show the *goodput*: training that lasted,
as a share of the time. The cadence, which is told nothing but the mean time to failure and measures the rest, is
compared with the best of many fixed intervals, found by trying all of them on the same failures, and with habits.

After a failure the process starts again and the cadence has forgotten everything, as in a real run. Saves share the
storage, or not, as the scenario says; steps, pauses and writes are noisy. What is not shown: anything real. How saves
disturb training is measured by `python -m benchmarks`, and by the cadence itself.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from aiockpt.cadence import Cadence
from aiockpt.events import Committed, Event, SaveStarted, SnapshotTaken
from aiockpt.testing.simulation import SimulatedClock
from benchmarks.report import write

FIXED = (1, 2, 3, 5, 8, 12, 20, 30, 45, 70, 100, 150, 220, 330, 500, 700, 1000, 1500, 2500)
HABITS = (1, 100, 1000)
SEEDS = (1, 2, 3)
MAX_OVERHEAD = 0.03


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of run; seconds.

    Attributes:
        pause_s: how long a save holds the training; *write_s*: until it is committed, with the storage to itself.
        drag: how much longer a step takes beside a write; a fraction.
        noise: standard deviation of the logarithm of pauses and writes; a tenth of it for steps.
        shared: whether two writes at once take twice as long.
        slow: from when, until when and by which factor the storage is slow.
        failing: whether processes fail, every *mttf_s* on average; *restart_s* is lost with each.
    """

    name: str
    step_s: float
    pause_s: float
    write_s: float
    drag: float = 0.0
    noise: float = 0.2
    shared: bool = True
    slow: tuple[float, float, float] = (0.0, 0.0, 1.0)
    failing: bool = True
    mttf_s: float = 2 * 3600.0
    restart_s: float = 120.0
    in_flight: int = 2
    hours: float = 96.0


SCENARIOS = (
    Scenario(name="a short pause", step_s=2, pause_s=0.5, write_s=20),
    Scenario(name="a long pause", step_s=2, pause_s=5, write_s=60),
    Scenario(name="writes that slow steps", step_s=2, pause_s=0.1, write_s=30, drag=0.1),
    Scenario(name="many failures", step_s=2, pause_s=0.5, write_s=20, mttf_s=600, hours=48),
    Scenario(name="hardly any pause, slow storage", step_s=2, pause_s=0.001, write_s=45),
    Scenario(name="hardly any pause, fast storage", step_s=2, pause_s=0.001, write_s=1.5),
    Scenario(
        name="storage 8 × slower for a day", step_s=2, pause_s=0.05, write_s=20, slow=(24 * 3600.0, 48 * 3600.0, 8.0)
    ),
)


class Policy(Protocol):
    """Whoever decides when to save."""

    def due(self, step: int, /) -> bool: ...
    def on_event(self, event: Event, /) -> None: ...


class Every:
    """A save each so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    @classmethod
    def start(cls, steps: int, clock: SimulatedClock) -> Every:
        """Return the policy of a process that begins."""
        return cls(steps)

    def due(self, step: int) -> bool:
        return step % self._steps == 0

    def on_event(self, event: Event) -> None:
        pass


class Write(msgspec.Struct):
    """A save on its way: *left_s* of writing, with the storage to itself."""

    step: int
    begun_ns: int
    left_s: float


class Run:
    """One simulated run; *outcome* is what it came to.

    Args:
        start: makes the policy of a process that begins; called again after each failure.
    """

    def __init__(self, scenario: Scenario, start: Callable[[SimulatedClock], Policy], seed: int) -> None:
        self.scenario = scenario
        self.clock = SimulatedClock(0)
        self.step = self.done_steps = 0
        self.committed = -1
        self.blocked_s = self.trained_s = 0.0
        self.failures = 0
        self.saved: list[int] = []
        self._start = start
        self.policy = start(self.clock)
        self._writing: list[Write] = []
        self._chance = random.Random(seed)
        self._fate = random.Random(f"failures {seed}")
        self._next_failure_s = self._draw_failure()

    def _draw_failure(self) -> float:
        if not self.scenario.failing:
            return float("inf")
        return self.now_s + self._fate.expovariate(1 / self.scenario.mttf_s)

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock.now_ns / 1e9

    def go(self) -> None:
        """Train until the hours are over."""
        ends_s = self.scenario.hours * 3600
        while self.now_s < ends_s:
            self.train()
            if self.now_s >= self._next_failure_s:
                self._fail()
            elif self.policy.due(self.step):
                self.save()
            self.step += 1

    def train(self) -> None:
        """Take one step."""
        it = self.scenario
        took_s = it.step_s * self._noisy(0.1) * (1 + it.drag * bool(self._writing))
        self.trained_s += took_s
        self._pass(took_s)

    def save(self) -> None:
        """Save: wait for room, copy, go on."""
        begun_ns = self.clock.now_ns
        while len(self._writing) >= self.scenario.in_flight:
            self._pass(self._until_next_commit())
        self._tell(SaveStarted(at_ns=self.clock.now_ns, step=self.step, bytes=1, tensor_count=1))
        self._pass(self.scenario.pause_s * self._noisy())
        pause_s = (self.clock.now_ns - begun_ns) / 1e9
        self._writing.append(Write(self.step, begun_ns, self.scenario.write_s * self._noisy()))
        self._tell(SnapshotTaken(at_ns=self.clock.now_ns, step=self.step, bytes=1, pause_s=pause_s, copy_s=pause_s))
        self.blocked_s += pause_s
        self.saved.append(self.step)

    def _tell(self, event: Event) -> None:
        self.policy.on_event(event)

    def _noisy(self, share: float = 1.0) -> float:
        return self._chance.lognormvariate(0.0, self.scenario.noise * share)

    def _speed(self) -> float:
        """Return how much of a save is written in a second, of each that is."""
        begins_s, ends_s, factor = self.scenario.slow
        slow = factor if begins_s <= self.now_s < ends_s else 1.0
        return 1 / slow / (len(self._writing) if self.scenario.shared else 1)

    def _until_next_commit(self) -> float:
        return min(under_way.left_s for under_way in self._writing) / self._speed()

    def _pass(self, seconds: float) -> None:
        """Let time go by, and writes go on."""
        while self._writing and (next_s := self._until_next_commit()) <= seconds:
            self._write(next_s)
            seconds -= next_s
            first = min(self._writing, key=lambda under_way: under_way.left_s)
            self._writing.remove(first)
            self.committed = max(self.committed, first.step)
            took_s = (self.clock.now_ns - first.begun_ns) / 1e9
            self._tell(Committed(at_ns=self.clock.now_ns, step=first.step, bytes=1, seconds=took_s, generation=1))
        self._write(seconds)

    def _write(self, seconds: float) -> None:
        speed = self._speed() if self._writing else 0.0
        for under_way in self._writing:
            under_way.left_s -= seconds * speed
        self.clock.advance(seconds)

    def _fail(self) -> None:
        """Lose all that is not committed, and begin again."""
        self.failures += 1
        self._writing.clear()
        self.step = self.committed
        self.clock.advance(self.scenario.restart_s)
        self._next_failure_s = self._draw_failure()
        self.policy = self._start(self.clock)

    @property
    def goodput(self) -> float:
        """Training that lasted, as a share of the time."""
        return self.step * self.scenario.step_s / self.now_s


class Contender(msgspec.Struct, frozen=True):
    """One policy in one scenario: the mean of all seeds. *every* is the mean of its interval, in steps."""

    name: str
    goodput: float
    blocked_fraction: float
    saves: int
    every: float


class Row(msgspec.Struct, frozen=True):
    """One scenario; *why* is what the cadence said at the end of the first run, *due_s* what one call of ``due`` takes."""

    scenario: Scenario
    failures: int
    cadence: Contender
    best_fixed: Contender
    fixed: list[Contender]
    why: str
    due_s: float

    @property
    def regret(self) -> float:
        """What the cadence loses to the best fixed interval; a fraction of its goodput."""
        return 1 - self.cadence.goodput / self.best_fixed.goodput


class Report(msgspec.Struct, frozen=True):
    """One benchmark; all of it follows from the seeds but ``due_s``."""

    seeds: tuple[int, ...]
    max_overhead: float
    rows: list[Row]


def contend(
    name: str, scenario: Scenario, start: Callable[[SimulatedClock], Policy], seeds: Sequence[int]
) -> Contender:
    """Return how a policy fares."""
    runs = [Run(scenario, start, seed) for seed in seeds]
    for run in runs:
        run.go()
    return summarize(name, runs)


def summarize(name: str, runs: Sequence[Run]) -> Contender:
    """Return the mean of *runs*."""
    saves = sum(len(run.saved) for run in runs)
    trained_s = sum(run.trained_s for run in runs)
    return Contender(
        name=name,
        goodput=sum(run.goodput for run in runs) / len(runs),
        blocked_fraction=sum(run.blocked_s for run in runs) / trained_s,
        saves=saves,
        every=trained_s / runs[0].scenario.step_s / max(1, saves),
    )


def measure(scenario: Scenario, seeds: Sequence[int]) -> Row:
    """Let the cadence and every fixed interval run the same failures."""
    runs = [Run(scenario, lambda clock: make_cadence(scenario, clock), seed) for seed in seeds]
    for run in runs:
        run.go()
    fixed = [contend(f"every {steps}", scenario, partial(Every.start, steps), seeds) for steps in FIXED]
    cadence = runs[0].policy
    assert isinstance(cadence, Cadence)
    return Row(
        scenario=scenario,
        failures=sum(run.failures for run in runs),
        cadence=summarize("cadence", runs),
        best_fixed=max(fixed, key=lambda one: one.goodput),
        fixed=fixed,
        why=cadence.explain(),
        due_s=time_due(cadence, runs[0].step),
    )


def make_cadence(scenario: Scenario, clock: SimulatedClock) -> Cadence:
    """Return the cadence of a process that begins."""
    return Cadence(MAX_OVERHEAD, mttf=scenario.mttf_s, clock=clock)


def time_due(cadence: Cadence, step: int, calls: int = 2000) -> float:
    """Return the seconds of this machine that one call takes."""
    begun = time.perf_counter()
    for number in range(1, calls + 1):
        cadence.due(step + number)
    return (time.perf_counter() - begun) / calls


def run(scenarios: Sequence[Scenario], seeds: Sequence[int]) -> Report:
    """Run all *scenarios*."""
    return Report(tuple(seeds), MAX_OVERHEAD, [measure(scenario, seeds) for scenario in scenarios])


def render(report: Report) -> str:
    """Return the table, as Markdown."""
    headings = (
        "run",
        "cadence: goodput",
        "every … steps",
        "blocked",
        "best fixed interval: goodput",
        "every … steps",
        "the cadence loses",
        *(f"every {steps}" for steps in HABITS),
    )
    rows = []
    for row in report.rows:
        by_name = {one.name: one for one in row.fixed}
        cells = (
            row.scenario.name,
            f"{row.cadence.goodput:.2%}",
            f"{row.cadence.every:.0f}",
            f"{row.cadence.blocked_fraction:.2%}",
            f"{row.best_fixed.goodput:.2%}",
            f"{row.best_fixed.every:.0f}",
            f"{row.regret:+.2%}",
            *(f"{by_name[f'every {steps}'].goodput:.2%}" for steps in HABITS),
        )
        rows.append(f"| {' | '.join(cells)} |")
    reasons = [f"- *{row.scenario.name}*: {row.why}" for row in report.rows]
    due_s = max(row.due_s for row in report.rows)
    return "\n".join(
        [
            f"| {' | '.join(headings)} |",
            f"|{' --- |' * len(headings)}",
            *rows,
            "",
            *reasons,
            "",
            f"One call of `due`: at most {due_s * 1e6:.1f} µs.",
        ]
    )


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cadence", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="of failures and noise")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    parser.add_argument(
        "--smoke", action="store_true", help="two hours of one scenario: shows that it runs, no figures"
    )
    arguments = parser.parse_args()
    scenarios = [msgspec.structs.replace(SCENARIOS[3], hours=2)] if arguments.smoke else list(SCENARIOS)
    report = run(scenarios, arguments.seeds)
    print(render(report))
    if arguments.out:
        write(report, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
