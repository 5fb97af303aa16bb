"""A healthy run in virtual time, seen as the launcher sees it: steps, long phases of all kinds, records and samples."""

import random
from collections import Counter
from collections.abc import Iterator

from aiockpt.launch.detector import Detector, StackSample
from aiockpt.runtime.progress import ProgressRecord

JITTER = 3.0
LOOKS_APART_S = 0.1
COLLECTIVE = ("all_reduce (/x/torch/distributed/distributed_c10d.py:1)", "main (train.py:9)")


class VirtualRun:
    """Two ranks in lock step: a step takes a third to three times the median; now and then rank 0 does something else.

    Args:
        seed: of the median step (20 ms to 60 s), the long phases and all else.
        hours: how long it runs.
    """

    def __init__(self, seed: int, hours: float, *, hang_s: float | None = None) -> None:
        self.dice = random.Random(seed)
        self.detector = Detector(hang_s=hang_s)
        self.outcomes: Counter[str] = Counter()
        self.now_s, self.end_s = 1000.0, 1000.0 + 3600 * hours
        self.median_s = 10 ** self.dice.uniform(-1.7, 1.8)
        self.steps = 0
        self.mark_s = self.step_s = self.now_s
        self.kind = ""
        self.cpu_s, self.moved, self.wakes, self.beside_s = 0.0, 0, 0, 0.0

    def run(self) -> Counter[str]:
        """Train to the end; raise where a hang is decided."""
        first_s = self.dice.uniform(0, 900)  # it compiles
        self.pass_time(first_s, "moves")
        looked_s = 0.0
        while self.now_s < self.end_s:
            self.now_s += self.step_time()
            self.steps += 1
            self.mark_s = self.step_s = self.now_s
            if self.now_s - looked_s >= LOOKS_APART_S:
                looked_s = self.now_s
                self.look()
            if self.dice.random() < min(0.3, self.median_s / 600):
                kind = self.dice.choice(("moves", "computes", "reads", "a program", "polls", "a slow save"))
                self.outcomes[f"phases: {kind}"] += 1
                self.pass_time(10 ** self.dice.uniform(0, 3.3), kind)
        self.outcomes["hours"] += round((self.end_s - 1000.0) / 3600)
        return self.outcomes

    def step_time(self) -> float:
        return self.median_s * float(JITTER ** self.dice.uniform(-1, 1))

    def pass_time(self, seconds: float, kind: str) -> None:
        """Let rank 0 do something for so long that is no step, while rank 1 waits."""
        self.kind = kind
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            apart_s = LOOKS_APART_S if self.detector.noticed is None and seconds < 60 else 1.0
            self.cpu_s += apart_s * (0.9 if kind == "computes" else 0.01)
            self.moved += int(apart_s * (3e6 if kind == "reads" else 100))
            self.wakes += sum(1 for _ in self.polls(apart_s)) if kind == "polls" else 0
            self.beside_s = self.now_s if kind == "a slow save" and self.dice.random() < apart_s / 30 else self.beside_s
            self.now_s += apart_s
            self.look()
        self.kind = ""

    def polls(self, apart_s: float) -> Iterator[None]:
        if self.dice.random() < apart_s / 5:
            yield

    def look(self) -> None:
        stage = "train"
        row = ProgressRecord(
            pid=1, thread=1, step=self.steps - 1, steps=self.steps, stage=stage, step_s=self.step_s, mark_s=self.mark_s
        )
        notice = self.detector.observe(self.now_s, {0: row, 1: row})
        if notice is not None:
            self.outcomes["notices in a long phase" if self.kind else "FALSE NOTICES"] += 1
        if not self.detector.is_sample_due(self.now_s):
            return
        self.wakes += 1  # by the sample itself
        verdict = self.detector.add(self.now_s, {0: self.sample(), 1: StackSample(place=COLLECTIVE)})
        assert not verdict.hung, (
            f"a healthy run is ended: {self.kind or 'a step'} after {self.now_s - self.mark_s:.0f} s"
        )

    def sample(self) -> StackSample:
        line = self.dice.randrange(1000) if self.kind in ("moves", "") else 7
        waits = {"a program": "a program", "a slow save": "aiockpt"}.get(self.kind, "")
        return StackSample(
            place=(f"evaluate (train.py:{line})",),
            cpu_s=self.cpu_s,
            moved_bytes=self.moved,
            wakes=self.wakes,
            beside_s=self.beside_s,
            waits_for=waits,  # type: ignore[arg-type]
        )
