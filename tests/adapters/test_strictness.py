"""``strict=`` raises the differences of the parts that it is about, and reports those of the others."""

from typing import Any

import pytest
import torch
from torch import nn

from aiockpt.adapters import differences
from aiockpt.errors import StateMismatchError, UsageError


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was saved, and a state that differs from it everywhere."""
    saved = {"model": nn.Linear(2, 2), "config": {"lr": 1.0, "gone": torch.ones(1)}, "extra": 1}
    return saved, {"model": nn.ModuleDict({"0": nn.Linear(2, 2)}), "config": {"lr": 0.5, "new": torch.ones(1)}}


def test_a_part_that_is_not_strict_reports_and_the_rest_raises(save: Any) -> None:
    source, found = states()
    with pytest.raises(StateMismatchError) as caught:
        save(source).open(found, strict={"model": False})
    assert {line.split(":")[0] for line in caught.value.problems} == {"config.gone", "config.new"}
    with pytest.raises(StateMismatchError) as caught:
        save(source).open(found, strict={"config": False})
    assert {line.split(":")[0].split(".")[0] for line in caught.value.problems} == {"model"}


def test_without_strict_parts_what_fits_is_loaded(save: Any) -> None:
    source, found = states()
    target = save(source).load(found, strict={"model": False, "config": False})
    everything = save(source).load(states()[1], strict=False)
    assert sorted(target.problems) == sorted(everything.problems)
    assert sorted(target.missing) == ["config.new", "model.0.bias", "model.0.weight"]
    assert found["config"]["lr"] == 1.0


def test_the_longest_name_decides(save: Any) -> None:
    source, found = states()
    save(source).open(found, strict={"model": False, "config": True, "config.new": False, "config.gone": False})
    with pytest.raises(StateMismatchError) as caught:
        save(source).open(found, strict={"model": False, "model.0.bias": True, "config": False})
    (problem,) = caught.value.problems
    assert problem.startswith("model.0.bias: in the state but not in the checkpoint")


def test_unexpected_names_belong_to_their_part(save: Any) -> None:
    saved = save({"net": {"a": torch.ones(1), "b": torch.ones(1)}})
    found = {"model": {"a": torch.zeros(1)}}
    with pytest.raises(StateMismatchError, match=r"net.b: in the checkpoint but not in the state"):
        saved.open(found, rename={"model": "net"})
    saved.load(found, rename={"model": "net"}, strict={"model": False})
    assert found["model"]["a"].item() == 1.0


def test_ranks_ask_others_about_strict_parts(save: Any) -> None:
    source, found = states()
    target = save(source).open(found, strict={"model": False, "config.new": False}, judge_unexpected=False)
    assert target.unexpected_claimed == ("config.gone",)


def test_an_entry_that_names_nothing_is_refused(save: Any) -> None:
    source, found = states()
    with pytest.raises(UsageError, match=r"strict='modle' \(near it: 'model', 'model.0'\) is nothing in the state"):
        save(source).open(found, strict={"modle": False})


@pytest.mark.parametrize("strict", [None, 1, "model", ["model"], {"model": "no"}, {1: False}])
def test_what_says_neither_is_refused(save: Any, strict: Any) -> None:
    with pytest.raises(UsageError, match="strict= takes True, False, or a dict for parts"):
        save({"a": 1}).open({"a": 1}, strict=strict)


def test_a_part_under_another_key_is_reported(save: Any) -> None:
    stored = save({"model": nn.Linear(2, 2), "extra": 1})
    with pytest.raises(StateMismatchError, match=r"net\.bias: .* it below 'model': map=\{'net': 'model'\}"):
        stored.open({"net": nn.Linear(2, 2)})
    assert not stored.load({"net": nn.Linear(2, 2)}, rename={"net": "model"}).missing


@pytest.mark.parametrize(
    "saved",
    [
        {"model": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)},
        {"model": nn.Linear(2, 2, bias=False)},
        {"model": torch.ones(1)},
    ],
    ids=["two have its names", "it lacks one", "a leaf"],
)
def test_where_it_is_not_clear_no_map_is_named(save: Any, saved: dict[str, Any]) -> None:
    found = {"net": torch.ones(1) if isinstance(saved["model"], torch.Tensor) else nn.Linear(2, 2)}
    with pytest.raises(StateMismatchError) as caught:
        save(saved).open(found)
    assert "map={" not in str(caught.value.problems)


def test_similar_names_are_searched_for_shown_leaves_only(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def near(name: str, names: object) -> str:
        asked.append(name)
        return " (near)"

    monkeypatch.setattr(differences, "near_key", near)
    stored = save({f"old{number:03}": torch.ones(1) for number in range(200)})
    with pytest.raises(StateMismatchError) as caught:
        stored.open({f"new{number:03}": torch.ones(1) for number in reversed(range(200))})
    assert asked == [f"new{number:03}" for number in range(StateMismatchError.SHOWN)]
    assert str(caught.value).count("(near)") == StateMismatchError.SHOWN
