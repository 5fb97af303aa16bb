"""Differences between records, and where they are said to be. Made-up records, one habit of scripts each."""

from collections.abc import Sequence

import msgspec
import pytest

from aiockpt.prove.compare import Comparison, Difference, Findings, Reference, saved_views
from aiockpt.prove.proof import draw_kills
from aiockpt.prove.records import (
    AnyRecord,
    Begun,
    Died,
    Ended,
    Labelled,
    LoadDone,
    SaveDone,
    Stepped,
    View,
    decode,
    encode,
)
from aiockpt.prove.starts import Calendar, Start, keyed

STATE = View({"model.w": "1"}, {"model": "module"})


def stepped(label: int | None, count: int, data: Sequence[str] = (), loss: str = "1.0") -> Stepped:
    inputs = list(data) or [f"batch {label} {count}"]
    return Stepped(
        label=label, count=count, optimizer="SGD", settings={"lr of group 0": "0.1"}, slots={"momentum g0.p0": "m"},
        weights={"g0.p0": f"w{label}"}, gradients={"g0.p0": "g"}, names={"g0.p0": "model.w"}, inputs=inputs, samples="0",
        rows=4, random=[{"torch": f"{one}!"} for one in inputs], losses=[loss] * len(inputs),
    )  # fmt: skip


def labelled(label: int | None, count: int, step: int, *, saved: bool = True, state: View = STATE) -> Labelled:
    return Labelled(label=label, count=count, step=step, saved=saved, state=state, metrics={})


def loaded(step: int, state: View = STATE, *, fits: bool = True) -> LoadDone:
    return LoadDone(label=step, count=0, step=step, fits=fits, withheld=False, state=state)


def straight(steps: int = 4) -> list[AnyRecord]:
    """Return a run that saves each step, from 0."""
    told: list[AnyRecord] = [stepped(None, 1), labelled(None, 1, 0)]
    for step in range(1, steps):
        told += [stepped(step - 1, 1), labelled(step - 1, 1, step)]
    return told


def first(
    records: Sequence[AnyRecord], *, to_the_end: bool = False, close: float | None = None, end: Sequence[AnyRecord] = ()
) -> Difference | None:
    findings = Findings()
    reference = [*straight(), *end]
    comparison = Comparison(Reference(reference), findings, "resumed", 0, close)
    comparison.run(records, saved_views([reference]), to_the_end=to_the_end)
    return findings.first()


REST: list[AnyRecord] = [stepped(1, 1), labelled(1, 1, 2), stepped(2, 1), labelled(2, 1, 3)]


def test_a_resume_that_does_the_same_has_no_difference() -> None:
    assert first([loaded(1), *REST], to_the_end=True) is None


def ended(label: int, weights: dict[str, str]) -> Ended:
    return Ended(label=label, count=0, weights=weights, slots=dict.fromkeys(weights, "m"))


def test_a_start_that_takes_no_step_has_no_weights_to_compare_at_its_end() -> None:
    """It loads the last save; of what its optimizers hold nothing was seen."""
    end = [ended(3, {"g0.p0": "w2"})]
    assert first([loaded(3), ended(3, {})], to_the_end=True, end=end) is None
    other = first([loaded(3), ended(3, {"g0.p0": "other"})], to_the_end=True, end=end)
    assert other is not None
    assert "weights" in other.row


def test_of_several_checkpointers_that_are_closed_the_last_one_is_the_end() -> None:
    """A resume may open one to look for a step, and one to load it."""
    end = [ended(3, {"g0.p0": "w2"})]
    assert first([ended(0, {}), ended(0, {}), loaded(1), ended(1, {}), *REST, *end], to_the_end=True, end=end) is None
    found = first([loaded(1), *REST, ended(3, {"g0.p0": "other"})], to_the_end=True, end=end)
    assert found is not None


def test_a_look_at_other_data_before_the_first_step_after_a_resume_is_none() -> None:
    peeking = stepped(1, 1, ["a look", "batch 1 1"])
    assert first([loaded(1), peeking, *REST[1:]], to_the_end=True) is None
    later = stepped(2, 1, ["a look", "batch 2 1"])
    found = first([loaded(1), *REST[:2], later])
    assert found is not None
    assert (found.row, found.at) == ("training: data", "at step 3")


def test_after_a_first_step_that_is_equal_other_data_come_before_the_generators_that_the_load_left_otherwise() -> None:
    otherwise = loaded(1, View({"model.w": "1"}, {"model": "module"}, random={"torch": "other"}))
    for data, row in ((["batch 1 1"], "training: data"), (["batch 1 0"], "training: random torch")):
        found = first([otherwise, stepped(1, 1, data), REST[1], stepped(2, 1, ["batch 9 9"])])
        assert found is not None
        assert found.row == row


def test_other_data_are_told_with_where_the_straight_run_had_them() -> None:
    found = first([loaded(1), stepped(1, 1, ["batch 0 1"])])
    assert found is not None
    assert (found.row, found.at) == ("training: data", "at step 2")
    assert found.note == "the straight run was given that at step 1"
    found = first([loaded(1), stepped(1, 1, ["what"])])
    assert found is not None
    assert found.note == "the straight run was never given that"


def test_a_run_that_ends_early_or_late_or_counts_in_another_way_is_found() -> None:
    found = first([loaded(1), *REST[:2]], to_the_end=True)
    assert found is not None
    assert (found.row, found.expected, found.found) == ("steps", "step 3", "step 2")
    found = first([loaded(1), *REST, stepped(3, 1)], to_the_end=True)
    assert found is not None
    assert (found.row, found.expected) == ("steps", "no such step")
    found = first([loaded(1), stepped(1, 1), labelled(1, 1, 1)])
    assert found is not None
    assert (found.row, found.expected, found.found) == ("steps", "2", "1")


def test_what_a_load_left_in_another_way_is_found_unless_it_was_asked_for_in_part() -> None:
    other = View({"model.w": "2"}, {"model": "module"})
    found = first([loaded(1, other), *REST])
    assert found is not None
    assert (found.row, found.what, found.at) == ("model", "model.w", "right after the load of step 1")
    assert first([loaded(1, other, fits=False), *REST]) is None
    assert first([loaded(1, View({}, {})), *REST]) is None, "what was not asked for shows in what follows"


def test_of_a_control_what_it_did_not_load_is_a_difference_also_where_a_part_was_asked_for() -> None:
    part = loaded(1, View({"model.w": "2"}, {"model": "module"}), fits=False)
    assert first([part]) is None
    assert first([msgspec.structs.replace(part, withheld=True)]) is not None


def test_losses_may_be_close_and_data_not() -> None:
    assert first([loaded(1), stepped(1, 1, loss="1.0001")], close=1e-3) is None
    assert first([loaded(1), stepped(1, 1, loss="1.1")], close=1e-3) is not None
    assert first([loaded(1), stepped(1, 1, loss="nan")], close=1e-3) is not None
    assert first([loaded(1), stepped(1, 1, ["batch 0 1"])], close=1e-3) is not None


def test_generators_that_nothing_draws_from_are_known_by_the_rows_of_generators_alone() -> None:
    state = View({"rng.torch": "1", "model.w": "1"}, {"rng": "per rank", "model": "module"})
    still: list[AnyRecord] = [*(stepped(step, 1, ["the same"]) for step in range(3)), labelled(2, 1, 3, state=state)]
    assert Reference(still).idle() == {"training: random torch", "rng torch"}  # and no "record torch" of the script
    assert Reference(straight()).idle() == set()


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (straight(), ["step 0", "step 2"]),
        (
            [stepped(None, 1), stepped(None, 2), labelled(None, 2, 1), stepped(1, 1), stepped(1, 2), labelled(1, 2, 3)],
            ["step 0", "step 2"],
        ),
        (
            [stepped(None, 1), stepped(None, 2), labelled(None, 2, 0), stepped(0, 1), stepped(0, 2), labelled(0, 2, 1)],
            ["1 optimizer step after the start", "1 optimizer step after step 1"],
        ),
    ],
    ids=["each step", "every second step", "epochs"],
)
def test_places_are_told_by_the_numbers_of_the_script(records: list[AnyRecord], words: list[str]) -> None:
    calendar = Calendar(records)
    assert [calendar.describe((None, 1)), calendar.describe((1, 1))] == words


def test_records_are_read_as_they_were_written_but_for_a_last_line_that_was_cut() -> None:
    told = [Begun(rank=0, world_size=1, urls=["file:///x"]), *straight(), loaded(1), Died(where="here")]
    lines = [encode(record) for record in told]
    assert decode(lines) == told
    assert decode([*lines[:-1], lines[-1][:-5]]) == told[:-1]
    assert len({key for key, _ in keyed(told)}) == len(straight())


@pytest.mark.parametrize("seed", range(20))
def test_kills_come_after_the_first_save_in_the_order_of_training(seed: int) -> None:
    told = [*straight(12), *[SaveDone(step=step, calls=5) for step in range(12)]]
    kills = draw_kills(Start("straight", {0: told}, 1.0), 3, seed)
    assert [kill.kind for kill in kills] == ["save", "step", "save"]
    places = [(kill.label or 0) - (kill.kind == "save") for kill in kills]
    assert places == sorted(places)
    assert all(kill.label is not None and kill.label >= (kill.kind == "save") for kill in kills)
    assert all(0 <= kill.call < 5 for kill in kills)


def test_a_run_with_one_save_at_its_end_is_too_short() -> None:
    assert draw_kills(Start("straight", {0: [stepped(None, 1), labelled(None, 1, 0)]}, 1.0), 2, 0) == []
