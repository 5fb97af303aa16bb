"""The plan of an update, followed on paper: whatever a tensor is now, it becomes that of the target."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import CorruptionError
from aiockpt.publish.form import FileNote, VersionIndex, VersionNotes
from aiockpt.publish.update_plan import UpdatePlan, plan_update

History = list[dict[str, int]]
"""For each version, the value of each tensor; a digest is the value's text, a frame their difference."""


def index(history: History, number: int, *, full: bool, fold: bool = False, file_bytes: int = 10) -> VersionIndex:
    now = history[number]
    before = {name: "" if full else str(history[number - 1][name]) for name in now}
    notes = VersionNotes(
        kind="full" if full else "delta",
        step=number,
        run="",
        attempt=str(number),
        sequence=number,
        created_ns=0,
        of=number if fold else None,
        layout="",
        weight_bytes=25,
        files={"a": FileNote(file_bytes)},
        tensors={name: (before[name], str(value)) for name, value in now.items()},
    )
    changed = {name: "a" for name, (old, new) in notes.tensors.items() if old != new}
    return VersionIndex(("full_v" if fold else "weight_v") + str(number), number, notes, changed)


def carry_out(plan: UpdatePlan, history: History, now: dict[str, int | None]) -> dict[str, int | None]:
    done = dict(now)
    for name, how in plan.tensors.items():
        value = done.get(name) if how.full is None else history[how.full.number][name]
        if how.base is not None:
            assert how.full is None, "read and copied"
            value = int(how.base)
        for delta in how.deltas:
            assert name in delta.weight_map, "a frame that is not there"
            assert value is not None, "a frame for a torn tensor"
            value += history[delta.number][name] - history[delta.number - 1][name]
        done[name] = value
    return done


@given(st.data())
def test_every_tensor_becomes_that_of_the_target(data: st.DataObject) -> None:
    names = ["a", "b", "c"]
    target = data.draw(st.integers(0, 8))
    values = st.integers(0, 2)
    history: History = [{name: data.draw(values) for name in names} for _ in range(target + 1)]
    start = data.draw(st.integers(0, target))
    chain = [index(history, number, full=False) for number in range(target, start, -1)]
    is_full = data.draw(st.booleans()) or start == 0
    chain.append(index(history, start, full=is_full))
    least = start if is_full else start - 1
    folds = [
        index(history, number, full=True, fold=True)
        for number in range(max(least, 0), target + 1)
        if data.draw(st.booleans())
    ]
    now: dict[str, int | None] = {}
    for name in names:
        was = data.draw(st.one_of(st.none(), st.integers(max(least, 0), target)))
        now[name] = None if was is None else history[was][name]
    digests = {name: str(value) for name, value in now.items() if value is not None}
    base = {str(value) for value in data.draw(st.sets(values))}
    once = {name: {str(history[number][name]) for number in range(max(least, 0), target + 1)} for name in names}
    if any(value is None and not base & once[name] for name, value in now.items()) and not (is_full or folds):
        with pytest.raises(CorruptionError, match="no full version is left"):
            plan_update(digests, chain, folds, "pub", base)
        return
    plan = plan_update(digests, chain, folds, "pub", base)
    assert all(how.base in {None, *base} for how in plan.tensors.values())
    assert carry_out(plan, history, now) == history[target]
    used = {one.number for how in plan.tensors.values() for one in how.deltas}
    assert [one.number for one in plan.deltas] == sorted(used)


def numbers(versions: Sequence[VersionIndex]) -> list[int]:
    return [one.number for one in versions]


def test_the_cheaper_way_is_taken() -> None:
    history: History = [{"a": number} for number in range(8)]
    chain = [index(history, number, full=False) for number in range(7, 0, -1)]
    fold = index(history, 6, full=True, fold=True)
    by_chain = plan_update({"a": "4"}, chain, [fold], "pub")
    assert (numbers(by_chain.deltas), by_chain.tensors["a"].full) == ([5, 6, 7], None)
    by_fold = plan_update({"a": "1"}, chain, [fold], "pub")
    assert (numbers(by_fold.deltas), by_fold.tensors["a"].full) == ([7], fold)
    assert (by_chain.least, by_fold.least) == (5, 6)


def test_what_is_new_already_is_left() -> None:
    history: History = [{"a": 1, "b": 1}, {"a": 2, "b": 1}]
    plan = plan_update({"a": "2", "b": "1"}, [index(history, 1, full=False)], [], "pub")
    assert plan.tensors == {}
