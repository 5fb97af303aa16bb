"""A visit: one or more turns, carried out in a subprocess, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from benchmarks.report import Samples


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of one scenario: one contender alone, or all that the scenario compares within one process.

    Attributes:
        folder: an empty folder below which the turn writes.
        repetitions: timed saves or loads, after the first.
        settings: those of the scenario, by name.
        number: of the round.
        smoke: a check that it runs, in so few steps that the figures are meaningless.
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
    """The outcome of a visit.

    Attributes:
        samples: (scenario, row) and its samples.
        unavailable: contender → reason why it is not available here.
        notes: scenario → its notes in words.
    """

    samples: list[tuple[str, str, Samples]] = msgspec.field(default_factory=list)
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)
    notes: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def add(self, turn: Turn, row: str, samples: Samples) -> None:
        """Add the samples of one row."""
        self.samples.append((turn.scenario, row, samples))

    def note(self, turn: Turn, text: str) -> None:
        """Add the note *text*, shown below the tables, once."""
        said = self.notes.setdefault(turn.scenario, [])
        if text not in said:
            said.append(text)


Measure = Callable[[Turn, Outcome], None]


def resolve(name: str) -> Any:
    """Import the object *name*, ``module:attribute`` below this package."""
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
