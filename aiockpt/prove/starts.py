"""The records of one start of a script, ordered by rank, and by place in the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from aiockpt.prove.assignment import Kill, ProofJob
from aiockpt.prove.records import (
    AnyRecord,
    Begun,
    Died,
    Ended,
    Labelled,
    LoadDone,
    Place,
    Recorded,
    SaveDone,
    Stepped,
    read_records,
)

Key = Hashable
R = TypeVar("R", bound=AnyRecord)


class Start(msgspec.Struct, frozen=True):
    """One start of a script, over.

    Attributes:
        name: for people.
        ranks: the records of each rank, oldest first.
        seconds: how long it took.
        kill: its planned kill; None for a start that was to run to its end.
        status: exit status of its command; None for a killed start.
        tail: the last lines that it printed.
        printed: losses found in its output, (step as printed or None, text).
    """

    name: str
    ranks: Mapping[int, Sequence[AnyRecord]]
    seconds: float
    kill: Kill | None = None
    status: int | None = None
    tail: str = ""
    printed: Sequence[tuple[int | None, str]] = ()

    def of(self, kind: type[R], rank: int = 0) -> list[R]:
        """Return the records of one kind."""
        return [record for record in self.ranks.get(rank, ()) if isinstance(record, kind)]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.of(Begun)[0].world_size if self.of(Begun) else 0

    @property
    def died(self) -> str | None:
        """Where it killed itself, in words; None where it did not."""
        found = [died for rank in self.ranks for died in self.of(Died, rank)]
        return found[0].where if found else None

    @property
    def loaded(self) -> int | None:
        """The step that it went on from; None for a start from nothing."""
        return next((record.step for record in self.of(LoadDone) if record.step is not None), None)

    @property
    def committed(self) -> list[int]:
        """The steps that were durable before it ended, as far as it knew."""
        return [record.step for record in self.of(SaveDone)]


def read_start_ranks(folder: Path) -> dict[int, list[AnyRecord]]:
    """Return the records that the processes of one start wrote into *folder*, by rank.

    Of several processes of one rank (a launcher that starts ranks again, a script that starts another) the first one counts.
    """
    ranks: dict[int, list[AnyRecord]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        ranks.setdefault(int(path.name[4:9]), read_records(path))
    return ranks


def keyed(records: Sequence[AnyRecord]) -> Iterator[tuple[Key, AnyRecord]]:
    """Yield the records that can be compared with another start's, each with the key of its twin there.

    If a start closes several checkpointers, the last one is its end: a resume may open others, to list and to load.
    """
    counts = Counter[Key]()
    ends = [record for record in records if isinstance(record, Ended)]
    for record in records:
        if isinstance(record, Ended) and record is not ends[-1]:
            continue
        if isinstance(record, LoadDone) and record.step is not None:
            counts.clear()
        if isinstance(record, Stepped | Labelled | Recorded | Ended):
            name = record.name if isinstance(record, Recorded) else ""
            key = (type(record).__name__, record.place, name)
            yield (*key, counts[key]), record
            counts[key] += 1


class Calendar:
    """Describes places in the training in words, by the script's own step numbers.

    Args:
        records: of a run from its beginning to its end.
    """

    def __init__(self, records: Sequence[AnyRecord]) -> None:
        labels = [record for record in records if isinstance(record, Labelled)]
        gaps = [
            record.step - record.label == record.count for record in labels if record.label is not None and record.count
        ]
        self._by_step = bool(gaps) and all(gaps)
        self._first = labels[0].step - labels[0].count if labels else 0

    def step(self, place: Place) -> int | None:
        """Return the number of the training step at *place*; None where the script counts in another way."""
        label, count = place
        return (self._first if label is None else label) + count if self._by_step else None

    def describe(self, place: Place) -> str:
        """Return *place* in words."""
        step = self.step(place)
        if step is not None:
            return f"step {step}"
        label, count = place
        after = "the start" if label is None else f"step {label}"
        return f"{count} optimizer step{'' if count == 1 else 's'} after {after}" if count else after


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """How to prove.

    Attributes:
        kills: how often to kill, in turn inside a save and between two steps.
        seed: of the draw of places.
        close: relative tolerance of losses and metrics, for scripts that are not reproducible: weights, gradients
            and optimizer state are then compared only where they are loaded. None: everything bit by bit.
        ignore: rows that do not count, as in the shell: ``"metric *"``.
        as_is: places that the script only reads, such as initial weights; they are not redirected.
        resume_with: the command that resumes, on another world size or with another parallelism; None: the same one.
        timeout_s: of each start.
        loss: a regular expression for losses that are printed: group ``loss`` or the first, and ``step`` if there is one.
    """

    kills: int = 2
    seed: int = 0
    close: float | None = None
    ignore: Sequence[str] = ()
    as_is: Sequence[str] = ()
    resume_with: Sequence[str] | None = None
    timeout_s: float = 3600.0
    loss: str | None = None


class Runner(Protocol):
    """Starts the script."""

    method: str
    command: list[str]

    def run(self, name: str, job: ProofJob, command: Sequence[str] | None = None) -> Start:
        """Return one start when it is over."""
        ...
