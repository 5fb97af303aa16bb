"""What one process does: a visit, which is one or more turns, carried out in a subprocess, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from benchmarks.report import Samples


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Some contenders in one scenario: one alone, or all that the scenario compares within one process.

    Attributes:
        folder: an empty folder below which the turn writes.
        repetitions: timed saves or loads, after the first.
        settings: those of the scenario, by name.
        number: of the round.
        smoke: show that it runs, in so few steps that the figures are worth nothing.
    """

    scenario: str
    contenders: tuple[str, ...]
    size_bytes: int
    folder: str
    repetitions: int
    settings: dict[str, Any] = {}
    number: int = 0
    smoke: bool = False


class Outcome(msgspec.Struct):
    """What came of a visit.

    Attributes:
        samples: (scenario, row) and its samples.
        unavailable: contender → why it is not available here.
        notes: scenario → what it has to say in words.
    """

    samples: list[tuple[str, str, Samples]] = msgspec.field(default_factory=list)
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)
    notes: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def add(self, turn: Turn, row: str, samples: Samples) -> None:
        """Count the samples of one row in."""
        self.samples.append((turn.scenario, row, samples))

    def note(self, turn: Turn, text: str) -> None:
        """Say *text* below the tables, once."""
        said = self.notes.setdefault(turn.scenario, [])
        if text not in said:
            said.append(text)


Measure = Callable[[Turn, Outcome], None]


def resolve(name: str) -> Any:
    """Import what *name*, ``module:attribute`` below this package, means."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"benchmarks.{module}"), attribute)


def perform(turns: list[Turn]) -> Outcome:
    """Carry out *turns* in this process, one after the other."""
    from benchmarks.scenarios import SCENARIOS

    outcome = Outcome()
    for turn in turns:
        measure: Measure = resolve(SCENARIOS[turn.scenario].measure)
        measure(turn, outcome)
    return outcome
