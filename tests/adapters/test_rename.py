"""``map=`` and ``rename=`` find their names, and an entry that renames nothing is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from aiockpt.adapters.rename import Renaming, Rules
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
        ({"model": "net"}, r"swap its sides: {'net': 'model'}$"),
        ({"net": "model", "step.x": "step"}, r"in {'step.x': 'step'} 'step.x' is no name in the state"),
    ],
)
def test_an_entry_that_renames_nothing_is_refused(
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


class Net(nn.Module):
    """A body and a head, whose body has the name that is given."""

    def __init__(self, body: str, value: float) -> None:
        super().__init__()
        self.add_module(body, trained(value))
        self.head = trained(value)


def after_one_step(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_rules_rename_and_the_optimizer_follows(save: Any) -> None:
    old, new = Net("encoder", 1.0), Net("backbone", 2.0)
    saved = save({"model": old, "optimizer": after_one_step(old), "step": 1})
    optimizer = torch.optim.AdamW(new.parameters(), lr=0.1)
    target = saved.load(
        {"model": new, "optimizer": optimizer, "step": 0}, rename=Rules([(r"^model\.encoder\.", "model.backbone.")])
    )
    assert [parameter.tolist() for parameter in new.parameters()] == [one.tolist() for one in old.parameters()]
    assert all(optimizer.state[parameter]["exp_avg"].any() for parameter in new.parameters())
    assert target.renamed == {
        "model.encoder.bias": "model.backbone.bias",
        "model.encoder.weight": "model.backbone.weight",
    }


def test_rules_do_no_harm_to_what_has_the_new_names_already(save: Any) -> None:
    found = Net("backbone", 2.0)
    target = save({"model": Net("backbone", 1.0)}).load(
        {"model": found}, rename=Rules([(r"^model\.encoder\.", "model.backbone.")])
    )
    assert found.head.weight[0, 0].item() == 1.0
    assert target.renamed == {}


def test_a_rule_renames_no_new_name_again(save: Any) -> None:
    saved = save({"model": {"language": {"w": torch.ones(1)}}})
    found = {"model": {"language": {"w": torch.zeros(1)}}}
    saved.load(found, rename=Rules([(r"^model\.", "model.language.")]))
    assert found["model"]["language"]["w"].item() == 1.0


def test_rules_may_exchange_names_and_move_whole_objects(save: Any) -> None:
    saved = save({"a": torch.zeros(1), "b": torch.ones(1), "net": trained(3.0)})
    found: dict[str, Any] = {"a": torch.full((1,), 5.0), "b": torch.full((1,), 5.0), "model": trained(0.0)}
    saved.load(found, rename=Rules([("^a$", "c"), ("^b$", "a"), ("^c$", "b"), (r"^net\b", "model")]))
    assert (found["a"].item(), found["b"].item(), found["model"].weight[0, 0].item()) == (1.0, 0.0, 3.0)


def test_rules_that_make_one_name_of_two_are_refused(save: Any) -> None:
    saved = save({"x1": torch.zeros(1), "x2": torch.ones(1)})
    with pytest.raises(UsageError, match="rename= makes 'x' of 'x1' and 'x2': which is meant"):
        saved.open({"x": torch.zeros(1)}, rename=Rules([(r"\d", "")]))


def test_a_name_that_was_given_away_is_missing(save: Any) -> None:
    saved = save({"a": torch.zeros(1)})
    with pytest.raises(StateMismatchError, match="a: in the state, and rename= makes b of what the checkpoint has"):
        saved.open({"a": torch.ones(1), "b": torch.ones(1)}, rename=Rules([("^a$", "b")]))


@pytest.mark.parametrize("pair", ["abc", ("(", "x"), ("a", r"\1"), ("a",), (1, "x"), ("a", 2)])
def test_what_is_no_rule_is_refused(pair: Any) -> None:
    with pytest.raises(UsageError, match="rename= takes pairs of a regular expression"):
        Rules([pair])


class Average:
    """A holder of averaged weights that takes no other names, as many have written it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {key: one.clone() for key, one in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["shadow"].keys() != self.shadow.keys():
            raise KeyError
        self.shadow = state["shadow"]


def average(name: str, value: float) -> dict[str, Any]:
    model = nn.ModuleDict({name: trained(value)})
    return {"model": model, "ema": Average(model)}


@pytest.mark.parametrize(
    "rules",
    [
        Rules([("old", "new")]),
        Rules([(r"^(model|ema.shadow)\.old\.", r"\1.new.")]),
        Rules(lambda name: name.replace("old.", "new.")),
        {"model.new": "model.old", "ema.shadow.new": "ema.shadow.old"},
        lambda name: name.replace("new", "old"),
    ],
)
def test_rules_reach_the_keys_that_an_object_has_saved(save: Any, rules: Any) -> None:
    found = average("new", 2.0)
    save(average("old", 1.0)).load(found, rename=rules)
    assert found["model"]["new"].weight[0, 0].item() == found["ema"].shadow["new.weight"][0, 0].item() == 1.0
    again = average("new", 3.0)
    save(found).load(again, rename=rules if isinstance(rules, Rules) else None)
    assert again["ema"].shadow["new.weight"][0, 0].item() == 1.0


@pytest.mark.parametrize("rules", [Rules([(r"^model\.old", "model.new")]), {"model.new": "model.old"}])
def test_keys_that_rules_miss_are_refused_before_changes(save: Any, rules: Any) -> None:
    found = average("new", 2.0)
    message = r"ema: ema.shadow has new.bias, new.weight in .*, old.bias, old.weight in .* sees as ema.shadow.old.bias"
    saved = save(average("old", 1.0))
    with pytest.raises(StateMismatchError, match=message):
        saved.load(found, rename=rules)
    assert found["model"]["new"].weight[0, 0].item() == found["ema"].shadow["new.weight"][0, 0].item() == 2.0
    saved.load(found, rename=rules, strict={"ema": False})
    assert found["model"]["new"].weight[0, 0].item() == 1.0
    assert found["ema"].shadow["new.weight"][0, 0].item() == 2.0
