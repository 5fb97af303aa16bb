"""The comparison of two starts, record by record, in the order in which things happened; pure.

Comparisons are counted in *rows* with names for people: "model", "optimizer exp_avg", "data", "random torch", "loss", …
The first difference of each row is kept.

Two starts of one script are compared at equal places (`aiockpt.prove.records`). Before the first optimizer step after a
resume the script may have drawn other data, such as a peek at the first batch: there the last inputs count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite, isnan
from statistics import fmean
from typing import Any

import msgspec

from aiockpt.format.names import prefixes, split_name
from aiockpt.prove.records import AnyRecord, Ended, Labelled, LoadDone, Place, Recorded, Stepped, View, sum_text
from aiockpt.prove.starts import Calendar, Key, Start, keyed

RESUME = "resume"
"""The row for whether and how a script starts again."""
STEPS, DATA, LOSS, WEIGHTS, GRADIENTS, SETTINGS = "steps", "data", "loss", "weights", "gradients", "settings"
TRAINING = "training: "
"""Prefix of the rows that are recorded at each optimizer step; the others are recorded from the state."""

_KEY = re.compile(r"(?:\\.|[^.\\])+")
_OBJECTS = ("module", "stateful", "loader", "per rank")
"""Kinds of objects with a row of their own, wherever they are in the state."""
_CAUSES = ("stateful", "loader", "per rank", "value")
"""Kinds of objects that determine weights and settings; of the differences at one place they are reported first."""


Order = tuple[int, int]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where one row differs for the first time.

    Attributes:
        row: of the table.
        what: the leaf, or its description in a user's words.
        at: where in the training, in words ("at step 21"); *order* sorts such places.
        expected, found: the values of the straight run and of the resumed run.
        start: the start of the script in which it was found.
        note: a possible explanation, or what to do.
    """

    row: str
    what: str
    at: str
    order: Order
    expected: str
    found: str
    start: str = ""
    rank: int = 0
    note: str = ""


class Row(msgspec.Struct):
    """How often one row was compared, and where it differs first."""

    compared: int = 0
    differing: int = 0
    first: Difference | None = None


class Findings:
    """The results of comparisons, by row."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def judge(
        self, row: str, what: str, expected: str, found: str, *, order: Order, equal: bool | None = None, **where: Any
    ) -> None:
        """Count one comparison of *row*.

        Args:
            equal: whether there is no difference; by default where *expected* is *found*.
            where: further fields of the `Difference`.
        """
        entry = self.rows.setdefault(row, Row())
        entry.compared += 1
        if expected == found if equal is None else equal:
            return
        entry.differing += 1
        if entry.first is None or order < entry.first.order:
            entry.first = Difference(row=row, what=what, expected=expected, found=found, order=order, **where)

    def first(self, without: Collection[str] = ()) -> Difference | None:
        """Return the earliest difference in rows that are not in *without*."""
        found = [row.first for name, row in self.rows.items() if row.first is not None and name not in without]
        return min(found, key=lambda difference: difference.order, default=None)

    def differing(self) -> set[str]:
        """Return the rows that differ anywhere."""
        return {name for name, row in self.rows.items() if row.differing}


class Reference:
    """The records of one rank of the run that was never stopped, by key."""

    def __init__(self, records: Sequence[AnyRecord]) -> None:
        self.calendar = Calendar(records)
        self.by_key: dict[Key, AnyRecord] = {}
        self.order: dict[Key, int] = {}
        self.inputs: dict[str, Place] = {}
        self.names: dict[str, str] = {}
        for number, (key, record) in enumerate(keyed(records)):
            self.by_key[key], self.order[key] = record, number
            if isinstance(record, Stepped):
                self.names.update(record.names)
                for digest in record.inputs:
                    self.inputs.setdefault(digest, record.place)
        self.last = max(self.order, key=self.order.__getitem__, default=None)

    def idle(self) -> set[str]:
        """Return the rows of random generators that nothing draws from: their state never changes."""
        states: dict[str, set[str]] = {}
        owners = {f"{TRAINING}random"}
        for record in self.by_key.values():
            for found in record.random if isinstance(record, Stepped) else ():
                for name, digest in found.items():
                    states.setdefault(name, set()).add(digest)
            if isinstance(record, Labelled):
                owners |= {part for part, kind in record.state.parts.items() if kind == "per rank"}
        return {f"{owner} {name}" for name, found in states.items() if len(found) == 1 for owner in owners}


class Comparison:
    """Compares one rank of one start with the reference.

    Args:
        start: its name.
        closeness: relative difference of losses; weights, gradients and optimizer state may then differ. None: bit by bit.
    """

    def __init__(
        self, reference: Reference, findings: Findings, start: str, rank: int, closeness: float | None = None
    ) -> None:
        self._reference = reference
        self._findings = findings
        self._start, self._rank = start, rank
        self._closeness = closeness
        self._order = 0
        self._at = ""
        self._resumed = self._random_off = self._loaded = False

    def run(self, records: Sequence[AnyRecord], saved: Mapping[tuple[str, int], View], *, to_the_end: bool) -> None:
        """Compare *records*; *to_the_end*: they must reach the end of the reference.

        Args:
            saved: the states of earlier starts, by place and step.
        """
        # Two records may be equal, so each is known by its id, which is its own as long as *records* holds it.
        keys = {id(record): key for key, record in keyed(records)}
        last = None
        for record in records:
            if isinstance(record, LoadDone) and record.step is not None:
                self._resumed = self._loaded = True
                self._compare_load(record, saved.get((record.url, record.step)))
            elif id(record) in keys:
                last = keys[id(record)]
                self._compare_twins(last, record)
        if to_the_end and last != self._reference.last:
            self._compare_ends(last)

    # ------------------------------------------------------------------ where

    def _compare_twins(self, key: Key, record: AnyRecord) -> None:
        twin = self._reference.by_key.get(key)
        if twin is None:
            self._order += 1
            if not self._at:
                self._at = "after the load" if self._loaded else "at the start"
            self._judge(STEPS, "number of steps", "no such step", _describe(record), 0, equal=False)
            return
        self._order = self._reference.order[key]
        self._at = f"at {self._reference.calendar.describe(record.place)}"
        match twin, record:
            case Stepped(), Stepped():
                self._compare_steps(twin, record)
            case Labelled(), Labelled():
                self._at = f"at step {twin.step}"
                self._judge(STEPS, "number of the step", str(twin.step), str(record.step), 0)
                self._compare_states(twin.state, record.state, 1)
                self._compare_random(twin.state.random, record.state.random, 3)
                self._compare_texts("metric ", twin.metrics, record.metrics, 4)
            case Recorded(), Recorded():
                self._at = f"after {self._reference.calendar.describe(record.place)}"
                self._judge(f"record {record.name}", record.name, twin.value, record.value, 0, near=True)
            case Ended(), Ended() if record.weights:  # a start that made no step has seen no weights
                self._at = "at the end"
                self._compare_leaves(WEIGHTS, twin.weights, record.weights, 0)
                self._compare_slots(twin.slots, record.slots, 1)

    def _compare_ends(self, last: Key) -> None:
        expected, found = (self._reference.by_key.get(key) for key in (self._reference.last, last))
        self._order = len(self._reference.order)
        self._at = "at the end"
        self._judge(STEPS, "where it ends", _describe(expected), _describe(found), 0, equal=False)

    # ------------------------------------------------------------------ what

    def _compare_load(self, record: LoadDone, saved: View | None) -> None:
        """Compare the loaded state with the saved one."""
        key = next((key for key, twin in self._reference.by_key.items() if _is_label(twin, record.step)), None)
        self._order = self._reference.order.get(key, -1)
        self._at = f"right after the load of step {record.step}"
        if saved is None:
            return
        asked = {_top(name) for name in record.state.leaves}
        named = View({name: text for name, text in saved.leaves.items() if _top(name) in asked}, saved.parts)
        # A state that is loaded in part, or under other names, is compared by the training that follows.
        self._compare_states(named, record.state, 1, only_equal=not (record.fits or record.withheld))
        self._random_off = any(saved.random.get(name) != found for name, found in record.state.random.items())

    def _compare_steps(self, twin: Stepped, record: Stepped) -> None:
        first, self._resumed = self._resumed, False
        self._compare_texts(f"{TRAINING}{SETTINGS}", twin.settings, record.settings, 1, as_row=True)
        self._compare_leaves(WEIGHTS, twin.weights, record.weights, 2)
        self._compare_slots(twin.slots, record.slots, 3)
        # After a resume calls are matched from the last one backwards; later pairs follow from the earliest.
        pairs = list(zip(reversed(twin.random), reversed(record.random), strict=False)) if first else []
        expected, found = pairs[-1] if pairs else (_ends(twin.random), _ends(record.random))
        # These numbers order the differences at one place. A generator that the load itself left in another state
        # may be why the data (5) differ; otherwise the data come first.
        self._compare_random(expected, found, 4 if self._random_off else 6)
        self._random_off = False
        self._compare_inputs(twin, record, first)
        self._compare_losses(twin, record, first)
        self._compare_leaves(GRADIENTS, twin.gradients, record.gradients, 8)

    def _compare_inputs(self, twin: Stepped, record: Stepped, first: bool) -> None:
        expected, found = _tails(twin.inputs, record.inputs) if first else (twin.inputs, record.inputs)
        if expected or found:
            note = "" if expected == found else self._explain_inputs(expected, found)
            self._judge(
                f"{TRAINING}{DATA}", "what the model was given", _joined(expected), _joined(found), 5, note=note
            )

    def _explain_inputs(self, expected: Sequence[str], found: Sequence[str]) -> str:
        """Return where the straight run had the inputs that were found here."""
        if not found:
            return "it was given nothing"
        other = next((new for new, old in zip(found, [*expected, *[""] * len(found)], strict=False) if new != old), "")
        place = self._reference.inputs.get(other)
        if place is None:
            return "the straight run was never given that"
        return f"the straight run was given that at {self._reference.calendar.describe(place)}"

    def _compare_losses(self, twin: Stepped, record: Stepped, first: bool) -> None:
        expected, found = _tails(twin.losses, record.losses) if first else (twin.losses, record.losses)
        if expected or found:
            self._judge(f"{TRAINING}{LOSS}", "the loss", _joined(expected), _joined(found), 7, near=True)

    def _compare_random(self, expected: Mapping[str, str], found: Mapping[str, str], part: int) -> None:
        note = 'put "rng": aiockpt.RNG() into the state that is saved and loaded, and draw nothing after the load'
        for name in expected:
            row, pair = f"{TRAINING}random {name}", (expected[name], found.get(name, "none"))
            self._judge(row, f"generator of {name}", *pair, part, note=note if pair[0] != pair[1] else "")

    def _compare_slots(self, expected: Mapping[str, str], found: Mapping[str, str], part: int) -> None:
        for slot in dict.fromkeys(key.partition(" ")[0] for key in _keys(expected, found)):
            mine, theirs = (
                {key.partition(" ")[2]: value for key, value in side.items() if key.startswith(f"{slot} ")}
                for side in (expected, found)
            )
            self._compare_leaves(f"optimizer {slot}", mine, theirs, part)

    def _compare_leaves(self, row: str, expected: Mapping[str, str], found: Mapping[str, str], part: int) -> None:
        """Compare leaves of parameters as one row; of several that differ, the first is reported."""
        if self._closeness is not None or not (expected or found):
            return
        off = [key for key in _keys(expected, found) if expected.get(key) != found.get(key)]
        key = off[0] if off else ""
        what = _and_more([self._reference.names.get(key.rpartition(" ")[2], key), *off[1:]])
        self._judge(TRAINING + row, what, expected.get(key, "none"), found.get(key, "none"), part)

    def _compare_states(self, expected: View, found: View, part: int, *, only_equal: bool = False) -> None:
        parts = expected.parts | found.parts
        for row, names, off in _by_row(expected.leaves, found.leaves, parts):
            if not (off and only_equal):
                first = off[0] if off else names[0]
                own = parts.get(_owner(first, expected.parts)) in _CAUSES
                pair = expected.leaves.get(first, "none"), found.leaves.get(first, "none")
                self._judge(row, _and_more(off) if off else row, *pair, part if own else part + 1)

    def _compare_texts(
        self, row: str, expected: Mapping[str, str], found: Mapping[str, str], part: int, *, as_row: bool = False
    ) -> None:
        for name in _keys(expected, found):
            pair = expected.get(name, "none"), found.get(name, "none")
            self._judge(row if as_row else row + name, name, *pair, part, near=not as_row)

    # ------------------------------------------------------------------ the outcome

    def _close(self, expected: str, found: str) -> bool:
        """Return whether two numbers are within the required closeness."""
        if self._closeness is None:
            return False
        try:
            pairs = list(zip(map(float, expected.split(", ")), map(float, found.split(", ")), strict=True))
        except ValueError:
            return False
        return all(_near(own, other, self._closeness) for own, other in pairs)

    def _judge(
        self, row: str, what: str, expected: str, found: str, part: int, *, near: bool = False, **how: Any
    ) -> None:
        if near and self._close(expected, found):
            how["equal"] = True
        where: dict[str, Any] = {"at": self._at, "order": (self._order, part), "start": self._start, "rank": self._rank}
        self._findings.judge(row, what, expected, found, **where, **how)


def _keys(expected: Iterable[str], found: Iterable[str]) -> list[str]:
    """Return the keys of both, those that are expected first."""
    return list(dict.fromkeys([*expected, *found]))


def _by_row(
    expected: Mapping[str, str], found: Mapping[str, str], parts: Mapping[str, str]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each row of two states, its leaves, and those of them that differ."""
    rows: dict[str, list[str]] = {}
    for name in _keys(expected, found):
        rows.setdefault(row_of(name, parts), []).append(name)
    for row, names in rows.items():
        yield row, names, [name for name in names if expected.get(name) != found.get(name)]


def _and_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _near(own: float, other: float, closeness: float) -> bool:
    if not (isfinite(own) and isfinite(other)):
        return own == other or (isnan(own) and isnan(other))
    return own == other or abs(own - other) <= closeness * max(abs(own), abs(other))


def row_of(name: str, parts: Mapping[str, str]) -> str:
    """Return the row of the leaf *name*: its object, and for optimizers and per-rank objects also the part of it."""
    owner = _owner(name, parts)
    kind = parts.get(owner, "value")
    rest = name[len(owner) :].lstrip(".")
    if kind == "optimizer":
        return f"{owner} {rest.rpartition('.')[2]}" if rest.startswith("state.") else f"{owner} settings"
    if kind == "per rank" and rest:
        return f"{owner} {rest.partition('.')[0]}"
    return owner if kind in _OBJECTS else _first_key(owner or name)


def _first_key(name: str) -> str:
    """Return the first key in a name, as it is written there; a dot in the key is escaped."""
    found = _KEY.match(name)
    return found[0] if found else name


def _top(name: str) -> str:
    """Return the top-level key of the state above the leaf *name*."""
    return str(split_name(name)[0])


def _owner(name: str, parts: Mapping[str, str]) -> str:
    """Return the longest of *parts* that is *name* or an ancestor of it; "" where there is none."""
    tensor = name.rpartition("#")[0]  # of which a rank has several boxes
    return next((part for part in (name, tensor, *prefixes(name)) if part in parts), "")


def _tails(some: Sequence[str], others: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the ends of both, cut to the length of the shorter; at least one item of each that is not empty."""
    length = max(1, min(len(some), len(others)))
    return some[-length:], others[-length:]


def _ends(states: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    return states[0] if states else {}


def _joined(texts: Sequence[str]) -> str:
    return ", ".join(texts) if texts else "none"


def _is_label(record: AnyRecord, step: int | None) -> bool:
    return isinstance(record, Labelled) and record.step == step


def _describe(record: AnyRecord | None) -> str:
    match record:
        case None:
            return "nothing"
        case Labelled():
            return f"step {record.step}"
        case Stepped():
            after = "the start" if record.label is None else f"step {record.label}"
            return f"optimizer step {record.count} after {after}"
        case Ended():
            return f"the end, after step {record.label} and {record.count} optimizer steps"
    return f"step {record.label}"


def saved_views(starts: Iterator[Sequence[AnyRecord]] | Sequence[Sequence[AnyRecord]]) -> dict[tuple[str, int], View]:
    """Return the states that *starts* of one rank saved, by place and step; the newest of each."""
    return {
        (record.url, record.step): record.state
        for records in starts
        for record in records
        if isinstance(record, Labelled) and record.saved
    }


# A resume on other ranks. Right after the load, every tensor (assembled from the ranks' parts) and every plain value must be
# equal; so must the samples of each step, in any order, where both steps have as many. The mean loss of each step must be
# close. Values of single ranks are not compared (random generators, positions of loaders).


CLOSE = 1e-3
"""Default relative tolerance of losses: float32 sums in another order, amplified by some steps."""
_OF_RANKS = ("per rank", "loader")
_Judge = Callable[..., None]
"""`Findings.judge`, for one start."""


def compare_reshaped(
    straight: Start,
    start: Start,
    before: Sequence[Start],
    findings: Findings,
    closeness: float | None,
    *,
    to_the_end: bool,
) -> None:
    """Compare *start*, whose ranks may differ from those of *straight* and of the starts *before* it in its line."""
    step, judge = start.loaded, partial(findings.judge, start=start.name)
    if step is not None:
        loads = [record for rank in start.ranks for record in start.of(LoadDone, rank) if record.step == step]
        saved = next(filter(None, (_saved(earlier, loads[0].url, step) for earlier in reversed(before))), None)
        loaded = [record.state for record in loads if record.url == loads[0].url]
        if saved and loaded:
            _compare_states(saved, loaded, f"right after the load of step {step}", judge)
    _compare_training(straight, start, judge, CLOSE if closeness is None else closeness, to_the_end)


def _saved(start: Start, url: str, step: int) -> list[View]:
    """Return the state of *step* on each rank, where this start saved it."""
    views = []
    for rank in start.ranks:
        saved = [seen for seen in start.of(Labelled, rank) if seen.saved and (seen.url, seen.step) == (url, step)]
        views += [seen.state for seen in saved[-1:]]
    return views


def _compare_states(saved: Sequence[View], loaded: Sequence[View], at: str, judge: _Judge) -> None:
    expected, found = (_whole(views) | _values(views[0]) for views in (saved, loaded))
    for row, _, off in _by_row(expected, found, {**saved[0].parts, **loaded[0].parts}):
        first = off[0] if off else ""
        judge(row, first, expected.get(first, "none"), found.get(first, "none"), at=at, order=(-1, 0))


def _whole(views: Iterable[View]) -> dict[str, str]:
    """Return a digest of each tensor, assembled from all ranks; each part counts once."""
    kinds: dict[str, str] = {}
    sums: dict[str, dict[str, str]] = {}
    for view in views:
        for name, (kind, boxes) in view.boxes.items():
            kinds[name] = kind
            sums.setdefault(name, {}).update(boxes)
    return {
        name: f"{kind} {sum_text(sum(int(digest, 16) for digest in sums[name].values()))}"
        for name, kind in kinds.items()
    }


def _values(view: View) -> dict[str, str]:
    """Return the plain values, and the state of objects; not what belongs to single ranks."""
    return {
        name: text
        for name, text in view.leaves.items()
        if name.partition("#")[0] not in view.boxes
        and not any(
            name == part or name.startswith(f"{part}.") for part, kind in view.parts.items() if kind in _OF_RANKS
        )
        and not name.startswith("optimizer.state.")
    }


def _compare_training(straight: Start, start: Start, judge: _Judge, closeness: float, to_the_end: bool) -> None:
    calendar = Calendar(straight.ranks[0])
    expected, found = _steps(straight), _steps(start)
    for number, (place, records) in enumerate(found.items()):
        at = f"at {calendar.describe(place)}"
        twins = expected.get(place)
        if twins is None:
            judge(STEPS, "a step", "no such step", "a step", at=at, order=(number, 0))
            continue
        if sum(twin.rows for twin in twins) == sum(record.rows for record in records) > 0:
            judge(TRAINING + DATA, "the samples", _samples(twins), _samples(records), at=at, order=(number, 1))
        expected_loss, other = _loss(twins), _loss(records)
        if expected_loss is not None and other is not None:
            near = _near(expected_loss, other, closeness)
            judge(TRAINING + LOSS, "mean loss", repr(expected_loss), repr(other), at=at, order=(number, 2), equal=near)
    if to_the_end and list(found)[-1:] != list(expected)[-1:]:
        ends = (calendar.describe(list(steps)[-1]) if steps else "without a step" for steps in (expected, found))
        judge(STEPS, "where it ends", *ends, at="at the end", order=(1 << 30, 0), equal=False)


def _steps(start: Start) -> Mapping[Place, list[Stepped]]:
    """Return the optimizer steps of all ranks, by place."""
    found: dict[Place, list[Stepped]] = {}
    for rank in start.ranks:
        for record in start.of(Stepped, rank):
            found.setdefault(record.place, []).append(record)
    return found


def _samples(records: Iterable[Stepped]) -> str:
    return sum_text(sum(int(record.samples, 16) for record in records))


def _loss(records: Iterable[Stepped]) -> float | None:
    losses = [float(loss) for record in records for loss in record.losses]
    return fmean(losses) if losses else None
