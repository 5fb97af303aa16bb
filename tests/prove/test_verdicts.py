"""What a proof concludes from runs that failed in odd places: never that they are equal."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from aiockpt.prove.certificate import Certificate, Evidence, judge
from aiockpt.prove.compare import STEPS, Findings
from aiockpt.prove.proof import _Proof
from aiockpt.prove.records import Begun, Died, Ended, Labelled, LoadDone, SaveDone, Stepped, View
from aiockpt.prove.starts import Proof, Start

BEGUN = Begun(rank=0, world_size=1, urls=["u"])


def view(value: int) -> View:
    digest = f"{value:016x}"
    return View({"model.w": digest}, {"model": "module"}, {"model.w": ("f32 (1,)", [("0+1", digest)])}, {})


def steps(label: int | None, loss: str, count: int = 5) -> list[Any]:
    about: dict[str, Any] = {"settings": {}, "slots": {}, "weights": {}, "gradients": {}, "names": {}, "random": []}
    data: dict[str, Any] = {"optimizer": "o", "inputs": ["d"], "samples": "00", "rows": 1, "losses": [loss]}
    return [Stepped(label=label, count=number, **about, **data) for number in range(1, count + 1)]


def saved(step: int, label: int | None) -> Labelled:
    return Labelled(label=label, count=5, url="u", step=step, saved=True, state=view(step), metrics={})


def loaded(state: View, *, withheld: bool = False) -> LoadDone:
    return LoadDone(label=5, count=0, url="u", step=5, fits=True, withheld=withheld, state=state)


END = Ended(label=10, weights={}, slots={})
TO_5 = [BEGUN, *steps(None, "1.0"), saved(5, None), SaveDone(label=5, step=5, calls=1)]
STRAIGHT = Start("straight", {0: [*TO_5, *steps(5, "1.0"), saved(10, 5), END]}, 1.0, status=0)
KILLED = Start("killed", {0: [*TO_5, *steps(5, "1.0", 1), Died(label=5, count=1, where="x")]}, 1.0)
GOES_ON = [BEGUN, loaded(view(5)), *steps(5, "1.0"), saved(10, 5), END]
RESUMED = Start("resumed", {0: GOES_ON}, 1.0, status=0)
CONTROL = Start("control", {0: [BEGUN, loaded(view(99), withheld=True), *steps(5, "2.0"), END]}, 1.0, status=0)


def verdict(
    how: Proof,
    resumed: Start = RESUMED,
    control: Start = CONTROL,
    again: Start | None = None,
    killed: Start = KILLED,
    straight: Start = STRAIGHT,
) -> Certificate:
    proof: Any = _Proof.__new__(_Proof)
    runner: Any = SimpleNamespace(method="m", command=["x"])
    proof._how, proof._runner, proof._starts = how, runner, [straight, killed, resumed, control]
    found, of_control = proof._compare(straight, [killed, resumed]), Findings()
    proof._compare_one(straight, control, [killed], of_control, to_the_end=False)
    twice = None if again is None else Findings()
    if again is not None:
        proof._compare_one(straight, again, [], twice, to_the_end=True)
    return judge(runner, how, proof._starts, Evidence(found, of_control, twice, set(), set()))


def test_a_run_that_goes_on_equally_is_certified() -> None:
    assert verdict(Proof()).verdict == "certified"


def test_a_rank_that_closes_in_the_middle_because_another_one_dies_is_no_difference() -> None:
    closed = Ended(label=5, weights={"o w": "1"}, slots={})
    records = [*TO_5, *steps(5, "1.0", 1), closed, Died(label=5, count=1, where="x")]
    assert verdict(Proof(), killed=Start("killed", {0: records}, 1.0)).verdict == "certified"


@pytest.mark.parametrize(
    ("straight", "resumed", "expected"),
    [
        ([(None, "1.0"), (None, "2.0"), (None, "3.0")], [(None, "3.0")], "certified"),
        ([(None, "1.0"), (None, "2.0"), (None, "3.0")], [(None, "1.0")], "differs"),
        ([(1, "1.0"), (2, "2.0")], [(2, "2.0")], "certified"),
        ([(1, "1.0"), (2, "2.0")], [(3, "2.0")], "differs"),
    ],
)
def test_printed_losses_are_compared_by_their_steps_else_from_the_end(
    straight: list[Any], resumed: list[Any], expected: str
) -> None:
    starts = replace(STRAIGHT, printed=straight), replace(RESUMED, printed=resumed)
    assert verdict(Proof(), starts[1], straight=starts[0]).verdict == expected


def test_a_resumed_command_that_makes_no_step_is_another_run() -> None:
    idle = Start("resumed", {0: [BEGUN, loaded(view(5))]}, 1.0, status=0)
    found = verdict(Proof(resume_with=["y"]), idle)
    assert (found.verdict, found.first and found.first.row) == ("differs", STEPS)


def test_a_control_that_fails_at_once_proves_nothing() -> None:
    failed = Start("control", {0: [BEGUN]}, 1.0, status=1, tail="OSError: address in use")
    assert verdict(Proof(), control=failed).verdict == "proves nothing"


def test_a_second_uninterrupted_run_that_fails_proves_nothing() -> None:
    failed = Start("again", {0: [BEGUN]}, 1.0, status=1, tail="boom")
    ends = Start("resumed", {0: GOES_ON[:2]}, 1.0, status=1, tail="boom")
    assert verdict(Proof(), ends, again=failed).verdict == "proves nothing"


@pytest.mark.parametrize("loss", ["inf", "-inf", "nan"])
def test_losses_without_end_are_close_to_none(loss: str) -> None:
    diverged = Start("resumed", {0: [*GOES_ON[:2], *steps(5, loss), *GOES_ON[-2:]]}, 1.0, status=0)
    assert verdict(Proof(close=1e-3), diverged).verdict == "differs"
