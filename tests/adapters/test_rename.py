"""Does ``map=`` find its names, and is an entry that renames nothing told?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aiockpt.adapters.rename import Renaming
from aiockpt.errors import StateMismatchError, UsageError


def trained(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def test_a_mapping_renames_by_its_longest_prefix_at_a_boundary() -> None:
    rename = Renaming({"net": "model", "net.head": "classifier"})
    assert [rename(name) for name in ("net.w", "net.head.w", "net.headline", "network")] == [
        "model.w",
        "classifier.w",
        "model.headline",
        "network",
    ]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"nett": "model"}, r"{'nett': 'model'} 'nett' is no name in the state \(near it: 'net'\)$"),
        ({"net": "modle"}, r"'modle' is no name in the checkpoint \(near it: 'model'\)$"),
        ({"net.waight": "model.weight"}, r"'net.waight' is no name in the state \(near it: 'net.weight'"),
        ({"model": "net"}, r"turn it round: {'net': 'model'}$"),
        ({"net": "model", "step.x": "step"}, r"in {'step.x': 'step'} 'step.x' is no name in the state"),
    ],
)
def test_an_entry_that_renames_nothing_is_refused_with_the_names_near_it(
    save: Any, mapping: dict[str, str], message: str, strict: bool
) -> None:
    saved = save({"model": trained(1.0), "step": 1})
    net = trained(2.0)
    with pytest.raises(UsageError, match=message) as caught:
        saved.open({"net": net, "step": 0}, rename=mapping, strict=strict)
    assert "from names in the state to names in the checkpoint" in str(caught.value)
    assert net.weight[0, 0].item() == 2.0


@pytest.mark.parametrize("only", [["step"], ["net"]])
def test_an_entry_of_what_only_leaves_out_is_no_mistake(save: Any, only: list[str]) -> None:
    saved = save({"model": trained(1.0), "count": 5})
    found: dict[str, Any] = {"net": trained(2.0), "step": 0}
    saved.load(found, only=only, rename={"net": "model", "step": "count"})
    assert (found["net"].weight[0, 0].item() == 1.0) == (only == ["net"])


def test_an_entry_for_what_other_ranks_hold_is_no_mistake(save: Any) -> None:
    saved = save({"model": trained(1.0), "head": torch.ones(1)})
    stage = {"net": trained(2.0)}
    rename = {"net": "model", "top": "head"}
    saved.load(stage, rename=rename, judge_unexpected=False)
    with pytest.raises(UsageError, match="'top' is no name in the state"):
        saved.load(stage, rename=rename)


def test_what_a_renamed_leaf_was_looked_for_as_is_told(save: Any) -> None:
    saved = save({"model": trained(1.0)})
    with pytest.raises(StateMismatchError, match=r"net.bias2: .* \(asked for as 'model.bias2', because of map=\)"):
        saved.open({"net": {"weight": trained(0).weight, "bias2": torch.ones(2)}}, rename={"net": "model"})


def test_a_function_may_leave_names_as_they_are(save: Any) -> None:
    found = {"step": 0}
    save({"step": 3}).load(found, rename=lambda name: name.replace("no such", "thing"))
    assert found == {"step": 3}


def test_what_is_neither_a_mapping_nor_a_function_is_refused(save: Any) -> None:
    with pytest.raises(UsageError, match="not a list"):
        save({"step": 3}).open({"step": 0}, rename=["step"])
