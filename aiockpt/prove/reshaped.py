"""The comparison of a resume on other ranks: what must be equal, and what can only be close.

- Equal: every tensor of the state, put together from the parts that ranks hold, and every plain value, right after the load;
  and the samples of each step, in whatever order, where all ranks together are given as many as before.
- Close: the loss of each step, as the mean over ranks: sums are taken in another order.
- Not compared: what belongs to single ranks (random generators, positions of loaders, which are dealt anew).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from aiockpt.prove.compare import DATA, LOSS, TRAINING, Difference, Findings, row_of
from aiockpt.prove.records import Labelled, Loaded, Place, Stepped, View
from aiockpt.prove.starts import Calendar, Start

CLOSE = 1e-3
"""How far losses may be off, relatively, by default; float32 sums in another order, amplified by some steps."""
_ALL_BITS = (1 << 64) - 1
_OF_RANKS = ("per rank", "loader")


def compare_reshaped(
    straight: Start,
    start: Start,
    before: Sequence[Start],
    findings: Findings,
    closeness: float | None,
    *,
    to_the_end: bool,
) -> None:
    """Compare *start*, which may have other ranks than *straight*, and than those *before* it in its line."""
    step = start.loaded
    if step is not None:
        loads = [record for rank in start.ranks for record in start.of(Loaded, rank) if record.step == step]
        saved = next(filter(None, (_saved(one, loads[0].url, step) for one in reversed(before))), None)
        loaded = [record.state for record in loads if record.url == loads[0].url]
        if saved and loaded:
            _compare_states(saved, loaded, step, start.name, findings)
    _compare_training(straight, start, findings, CLOSE if closeness is None else closeness, to_the_end)


def _saved(start: Start, url: str, step: int) -> list[View]:
    """Return the state of *step* on each rank, where this start saved it."""
    views = []
    for rank in start.ranks:
        saved = [one for one in start.of(Labelled, rank) if one.saved and (one.url, one.step) == (url, step)]
        views += [one.state for one in saved[-1:]]
    return views


def _compare_states(saved: Sequence[View], loaded: Sequence[View], step: int, name: str, findings: Findings) -> None:
    parts = {**saved[0].parts, **loaded[0].parts}
    expected, found = (_whole(views) | _values(views[0]) for views in (saved, loaded))
    rows: dict[str, list[str]] = {}
    for leaf in dict.fromkeys([*expected, *found]):
        rows.setdefault(row_of(leaf, parts), []).append(leaf)
    for row, leaves in rows.items():
        off = [leaf for leaf in leaves if expected.get(leaf) != found.get(leaf)]
        at = f"right after the load of step {step}"
        pair = (expected.get(off[0], "none"), found.get(off[0], "none")) if off else ("", "")
        findings.note(row, _difference(row, off[0], at, (-1, 0), pair, name) if off else None)


def _whole(views: Iterable[View]) -> dict[str, str]:
    """Return a digest of each tensor as all ranks have it together; each part counts once."""
    kinds: dict[str, str] = {}
    sums: dict[str, dict[str, str]] = {}
    for view in views:
        for name, (kind, boxes) in view.boxes.items():
            kinds[name] = kind
            sums.setdefault(name, {}).update(boxes)
    return {
        name: f"{kind} {sum(int(digest, 16) for digest in sums[name].values()) & _ALL_BITS:016x}"
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


def _compare_training(straight: Start, start: Start, findings: Findings, closeness: float, to_the_end: bool) -> None:
    calendar = Calendar(straight.ranks[0])
    expected, found = _steps(straight), _steps(start)
    for number, (place, records) in enumerate(found.items()):
        twins = expected.get(place)
        at = f"at {calendar.tell(place)}"
        if twins is None:
            findings.note(
                "steps", _difference("steps", "a step", at, (number, 0), ("no such step", "a step"), start.name)
            )
            continue
        if sum(one.rows for one in twins) == sum(one.rows for one in records) > 0:
            pair = _samples(twins), _samples(records)
            row = TRAINING + DATA
            off = pair[0] != pair[1]
            findings.note(row, _difference(row, "the samples", at, (number, 1), pair, start.name) if off else None)
        losses = _loss(twins), _loss(records)
        if losses[0] is not None and losses[1] is not None:
            row, (one, other) = TRAINING + LOSS, (losses[0], losses[1])
            near = one == other or abs(one - other) <= closeness * max(abs(one), abs(other))
            pair = repr(one), repr(other)
            findings.note(row, None if near else _difference(row, "mean loss", at, (number, 2), pair, start.name))
    if to_the_end and found and list(found)[-1] != list(expected)[-1]:
        pair = calendar.tell(list(expected)[-1]), calendar.tell(list(found)[-1])
        findings.note("steps", _difference("steps", "where it ends", "at the end", (1 << 30, 0), pair, start.name))


def _steps(start: Start) -> Mapping[Place, list[Stepped]]:
    """Return the optimizer steps of all ranks, by place."""
    found: dict[Place, list[Stepped]] = {}
    for rank in start.ranks:
        for record in start.of(Stepped, rank):
            found.setdefault(record.place, []).append(record)
    return found


def _samples(records: Iterable[Stepped]) -> str:
    return f"{sum(int(record.samples, 16) for record in records) & _ALL_BITS:016x}"


def _loss(records: Iterable[Stepped]) -> float | None:
    losses = [float(loss) for record in records for loss in record.losses]
    return fmean(losses) if losses else None


def _difference(row: str, what: str, at: str, order: tuple[int, int], pair: tuple[str, str], start: str) -> Difference:
    return Difference(row=row, what=what, at=at, order=order, expected=pair[0], found=pair[1], start=start)
