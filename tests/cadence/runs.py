"""A run in simulated time: what `benchmarks.measure.cadence` simulates, without failures unless a test wants them."""

from __future__ import annotations

from typing import Any

from aiockpt.events import Committed, Event, SaveStarted, SnapshotTaken
from aiockpt.policies.cadence import Cadence
from benchmarks.measure.cadence import Kind, Run
from tests.simulated.simulation import SimulatedClock


class Watched(Run):
    """A run whose events can be read afterwards, and what the interval was at each save."""

    def __init__(self, seed: int = 0, *, max_overhead: float = 0.03, mttf: float | None = None, **kind: Any) -> None:
        settings = {"step_s": 1.0, "pause_s": 0.1, "write_s": 1.0, "failing": False, "hours": 1.0}
        self.events: list[Event] = []
        self.intervals: list[tuple[int, str]] = []
        super().__init__(
            Kind(**{**settings, **kind}), lambda clock: Cadence(max_overhead, mttf=mttf, clock=clock), seed
        )

    @property
    def cadence(self) -> Cadence:
        assert isinstance(self.policy, Cadence)
        return self.policy

    def save(self) -> None:
        super().save()
        self.intervals.append((self.cadence.interval.steps, self.cadence.interval.rule))

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        super()._tell(event)

    @classmethod
    def whole(cls, seed: int = 0, **options: Any) -> Watched:
        """Return a run that has ended."""
        run = cls(seed, **options)
        run.go()
        return run

    def gaps(self) -> list[int]:
        """Steps from each save to the next."""
        return [later - earlier for earlier, later in zip(self.saved, self.saved[1:], strict=False)]


def save(cadence: Cadence, clock: SimulatedClock, step: int, pause_s: float = 0.02) -> None:
    """Have *cadence* hear of a save that takes that long."""
    cadence.on_event(SaveStarted(at_ns=clock.now_ns, step=step, bytes=1, tensor_count=1))
    clock.advance(pause_s)
    cadence.on_event(SnapshotTaken(at_ns=clock.now_ns, step=step, bytes=1, pause_s=pause_s, copy_s=pause_s))
    cadence.on_event(Committed(at_ns=clock.now_ns, step=step, bytes=1, seconds=pause_s, generation=1))
