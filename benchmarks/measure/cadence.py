"""Test of whether `aiockpt.Cadence` saves at the right moments: days of training, simulated in a minute.

Runs with failures (a seed; the same failure times for all contenders) show the *goodput*: training that lasted, as a share
of the time. The cadence, whose only input is the mean time to failure and which measures the rest, is compared with the best
of many fixed intervals, found by trying all of them on the same failures, and with common habits. After a failure the
process starts again and the cadence has no memory, as in a real run. Whether saves share the storage depends on the kind of
run; steps, pauses and writes are noisy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from aiockpt.events import Committed, Event, SaveStarted, SnapshotTaken
from aiockpt.policies.cadence import Cadence
from benchmarks.steps import seconds
from benchmarks.visit import Outcome, Turn
from tests.simulated.simulation import SimulatedClock

FIXED = (1, 2, 3, 5, 8, 12, 20, 30, 45, 70, 100, 150, 220, 330, 500, 700, 1000, 1500, 2500)
MAX_OVERHEAD = 0.03
DUE_CALLS = 2000


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of run; seconds.

    Attributes:
        pause_s: how long a save holds the training; *write_s*: until it is committed, with exclusive use of the storage.
        drag: how much longer a step takes beside a write; a fraction.
        noise: standard deviation of the logarithm of pauses and writes; a tenth of it for steps.
        shared: whether two writes at once take twice as long.
        slow: from when, until when and by which factor the storage is slow.
        failing: whether processes fail, every *mttf_s* on average; *restart_s* is lost with each.
    """

    step_s: float = 2.0
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


KINDS = {
    "a short pause": Kind(pause_s=0.5, write_s=20),
    "a long pause": Kind(pause_s=5, write_s=60),
    "writes that slow steps": Kind(pause_s=0.1, write_s=30, drag=0.1),
    "many failures": Kind(pause_s=0.5, write_s=20, mttf_s=600, hours=48),
    "hardly any pause, slow storage": Kind(pause_s=0.001, write_s=45),
    "hardly any pause, fast storage": Kind(pause_s=0.001, write_s=1.5),
    "storage 8 × slower for a day": Kind(pause_s=0.05, write_s=20, slow=(24 * 3600.0, 48 * 3600.0, 8.0)),
}


class Policy(Protocol):
    """A policy that decides when to save."""

    def due(self, step: int, /) -> bool: ...
    def on_event(self, event: Event, /) -> None: ...


class Every:
    """A save every *steps* steps."""

    def __init__(self, steps: int, clock: SimulatedClock | None = None) -> None:
        self._steps = steps

    def due(self, step: int) -> bool:
        return step % self._steps == 0

    def on_event(self, event: Event) -> None:
        pass


class Write(msgspec.Struct):
    """An unfinished save: *left_s* of writing, with exclusive use of the storage."""

    step: int
    begun_ns: int
    left_s: float


class Run:
    """One simulated run.

    Args:
        start: makes the policy of a new process; called again after each failure.
    """

    def __init__(self, kind: Kind, start: Callable[[SimulatedClock], Policy], seed: int) -> None:
        self.kind = kind
        self.clock = SimulatedClock(0)
        self.step = 0
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
        if not self.kind.failing:
            return float("inf")
        return self.now_s + self._fate.expovariate(1 / self.kind.mttf_s)

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock.now_ns / 1e9

    def go(self) -> None:
        """Train until the end of the run."""
        ends_s = self.kind.hours * 3600
        while self.now_s < ends_s:
            self.train()
            if self.now_s >= self._next_failure_s:
                self._fail()
            elif self.policy.due(self.step):
                self.save()
            self.step += 1

    def train(self) -> None:
        """Take one step."""
        took_s = self.kind.step_s * self._noisy(0.1) * (1 + self.kind.drag * bool(self._writing))
        self.trained_s += took_s
        self._pass(took_s)

    def save(self) -> None:
        """Save: wait for room, copy, go on."""
        begun_ns = self.clock.now_ns
        while len(self._writing) >= self.kind.in_flight:
            self._pass(self._until_next_commit())
        self._tell(SaveStarted(at_ns=self.clock.now_ns, step=self.step, bytes=1, tensor_count=1))
        self._pass(self.kind.pause_s * self._noisy())
        pause_s = (self.clock.now_ns - begun_ns) / 1e9
        self._writing.append(Write(self.step, begun_ns, self.kind.write_s * self._noisy()))
        self._tell(SnapshotTaken(at_ns=self.clock.now_ns, step=self.step, bytes=1, pause_s=pause_s, copy_s=pause_s))
        self.blocked_s += pause_s
        self.saved.append(self.step)

    def _tell(self, event: Event) -> None:
        self.policy.on_event(event)

    def _noisy(self, share: float = 1.0) -> float:
        return self._chance.lognormvariate(0.0, self.kind.noise * share)

    def _speed(self) -> float:
        """Return the seconds of writing that each unfinished save gains in a second."""
        begins_s, ends_s, factor = self.kind.slow
        slow = factor if begins_s <= self.now_s < ends_s else 1.0
        return 1 / slow / (len(self._writing) if self.kind.shared else 1)

    def _until_next_commit(self) -> float:
        return min(under_way.left_s for under_way in self._writing) / self._speed()

    def _pass(self, seconds: float) -> None:
        """Advance the time and the writes."""
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
        """Lose all uncommitted work, and begin again."""
        self.failures += 1
        self._writing.clear()
        self.step = self.committed
        self.clock.advance(self.kind.restart_s)
        self._next_failure_s = self._draw_failure()
        self.policy = self._start(self.clock)

    @property
    def goodput(self) -> float:
        """Training that lasted, as a share of the time."""
        return self.step * self.kind.step_s / self.now_s


def runs_of(kind: Kind, start: Callable[[SimulatedClock], Policy], seeds: Sequence[int]) -> list[Run]:
    """Return the finished runs of a policy, one for each seed."""
    runs = [Run(kind, start, seed) for seed in seeds]
    for run in runs:
        run.go()
    return runs


def summarize(name: str, runs: Sequence[Run]) -> dict[str, float]:
    """Return the results of a policy, the mean of *runs*; the interval in steps."""
    saves = sum(len(run.saved) for run in runs)
    trained_s = sum(run.trained_s for run in runs)
    return {
        f"{name}_goodput_fraction": sum(run.goodput for run in runs) / len(runs),
        f"{name}_blocked_fraction": sum(run.blocked_s for run in runs) / trained_s,
        f"{name}_saves_count": saves,
        f"{name}_interval_steps": trained_s / runs[0].kind.step_s / max(1, saves),
    }


def measure(kind: Kind, seeds: Sequence[int]) -> tuple[dict[str, float], str]:
    """Run the cadence and every fixed interval on the same failures; return all figures, and the cadence's explanation."""
    runs = runs_of(kind, partial(make_cadence, kind), seeds)
    found = summarize("cadence", runs)
    for steps in FIXED:
        found |= summarize(f"every_{steps}", runs_of(kind, partial(Every, steps), seeds))
    best = max(FIXED, key=lambda steps: found[f"every_{steps}_goodput_fraction"])
    best_found = {name: value for name, value in found.items() if name.startswith(f"every_{best}_")}
    found |= {name.replace(f"every_{best}_", "best_"): value for name, value in best_found.items()}
    cadence, step = runs[0].policy, runs[0].step
    assert isinstance(cadence, Cadence)
    why = cadence.explain()

    def ask() -> None:
        for number in range(1, DUE_CALLS + 1):
            cadence.due(step + number)

    return {
        **found,
        "failures_count": sum(run.failures for run in runs),
        "regret_fraction": 1 - found["cadence_goodput_fraction"] / found["best_goodput_fraction"],
        "due_s": seconds(ask) / DUE_CALLS,
    }, why


def make_cadence(kind: Kind, clock: SimulatedClock) -> Cadence:
    """Return the cadence of a new process."""
    return Cadence(MAX_OVERHEAD, mttf=kind.mttf_s, clock=clock)


def cadence(turn: Turn, outcome: Outcome) -> None:
    """Simulate every chosen kind of run, for the hours of the settings if given."""
    for name in turn.settings["kinds"] or KINDS:
        kind = KINDS[name]
        if turn.settings["hours"]:
            kind = msgspec.structs.replace(kind, hours=turn.settings["hours"])
        found, why = measure(kind, turn.settings["seeds"])
        outcome.add(turn, name, {metric: [value] for metric, value in found.items()})
        outcome.note(turn, f"*{name}*: {why}")
