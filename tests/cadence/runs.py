"""A run in simulated time: what `benchmarks.measure.cadence` simulates, without failures unless a test wants them."""

from __future__ import annotations

from typing import Any

from aiockpt.events import Event
from aiockpt.policies.cadence import Cadence
from benchmarks.measure.cadence import Kind, Run


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

    def gaps(self) -> list[int]:
        """Steps from each save to the next."""
        return [later - earlier for earlier, later in zip(self.saved, self.saved[1:], strict=False)]
