"""Who does what in one process? A visit: an order, carried out in a subprocess, and its outcome."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks import state as states
from benchmarks.contenders import CONTENDERS, make, taking_part
from benchmarks.floor_scenarios import FLOORS, FLOORS_OF
from benchmarks.report import Samples
from benchmarks.scenarios import SCENARIOS
from benchmarks.state import State


class Turn(msgspec.Struct, frozen=True):
    """One participant in one scenario."""

    scenario: str
    participant: str


class Visit(msgspec.Struct, frozen=True):
    """What one subprocess does: *turns*, with a state of *size_bytes*, below *folder*.

    Attributes:
        repetitions: timed saves or loads of one turn, after the first.
    """

    turns: tuple[Turn, ...]
    size_bytes: int
    folder: str
    repetitions: int


class Outcome(msgspec.Struct, frozen=True):
    """What came of a visit: the samples of each turn, and participant → why it is not available here."""

    samples: list[tuple[Turn, Samples]]
    unavailable: dict[str, str]


def perform(visit: Visit) -> Outcome:
    """Carry out *visit* in this process."""
    names = dict.fromkeys(turn.participant for turn in visit.turns)
    unavailable = {name: reason for name in names if (reason := _unavailable(name))}
    state = states.build(visit.size_bytes)
    samples = []
    for index, turn in enumerate(visit.turns):
        if turn.participant not in unavailable:
            folder = Path(visit.folder) / str(index)
            folder.mkdir(parents=True)
            samples.append((turn, _take(turn, state, folder, visit.repetitions)))
    return Outcome(samples, unavailable)


def _unavailable(name: str) -> str | None:
    """Import the library of *name*, before memory is measured; return why that cannot be, or None."""
    try:
        if name in CONTENDERS:
            make(name)
    except ImportError as error:
        return str(error)
    return None


def _take(turn: Turn, state: State, folder: Path, repetitions: int) -> Samples:
    floor = FLOORS.get(turn.participant)
    if floor:
        return floor(state, folder, repetitions)
    return SCENARIOS[turn.scenario](make(turn.participant), state, folder, repetitions)


def participants(scenario: str) -> tuple[str, ...]:
    """Return who takes part in *scenario*, floors first."""
    return (*FLOORS_OF[scenario], *taking_part(scenario))
