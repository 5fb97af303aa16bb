"""A checkpoint finds its way back, and every difference is named before anything changes."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.rng import RNG, per_rank
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import TensorRef, open_target, read_tree
from aiockpt.errors import ManifestError, StateMismatchError, UsageError
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.tree import Opaque
from tests.adapters.conftest import Thing


def job(value: float) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "thing": Thing({"mean": torch.full((2,), value), "n": value}),
        "own": per_rank(value),
        "ema": {"w": torch.full((3,), value), "n": value},
        "step": value,
    }


def test_before_applying_only_tensors_change(save: Any) -> None:
    saved, found = save(job(1.0)), job(2.0)
    before = save(found)
    open_target(found, saved.stored)
    assert before.equals(found)
    target = saved.open(found)
    assert (found["step"], found["own"].value, found["thing"].state["n"]) == (2.0, 2.0, 2.0)
    assert repr(target) == f"<LoadTarget of 6 tensors, 0 missing, {len(target.steps)} to apply>"
    target.apply()
    assert saved.equals(found)
    found["step"] = 9
    target.apply()
    assert found["step"] == 9


def test_what_could_not_be_applied_is_tried_again(save: Any) -> None:
    class Stubborn(Thing):
        refusals = 1

        def load_state_dict(self, state: Any) -> None:
            self.refusals -= 1
            if self.refusals == 0:
                raise RuntimeError("not yet")
            super().load_state_dict(state)

    saved = save({"a": 1, "s": Thing(2), "b": 3})
    found: dict[str, Any] = {"a": 0, "s": Stubborn(), "b": 0}
    target = saved.open(found)
    with pytest.raises(StateMismatchError, match="not yet"):
        target.apply()
    target.apply()
    assert (found["a"], found["s"].state, found["b"]) == (1, 2, 3)


def test_every_difference_is_named_at_once(save: Any) -> None:
    saved = save(
        {
            "model": nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)}),
            "t": torch.ones(2),
            "ema": {"w": torch.ones(1), "old": torch.ones(1)},
            "extra": 1,
        }
    )
    found: dict[str, Any] = {
        "model": nn.ModuleDict({"a": nn.Linear(2, 4), "c": nn.Linear(2, 2)}),
        "t": torch.ones(2, dtype=torch.float64),
        "ema": {"w": torch.ones(1)},
        "step": 0,
        "thing": Thing(),
        "rng": RNG(),
    }
    before = save({"model": found["model"]})
    with pytest.raises(StateMismatchError) as caught:
        saved.open(found)
    assert list(caught.value.problems) == [
        "ema.old: in the checkpoint but not in the state",
        "model.a.bias: shape (4,) in the state, (3,) in the checkpoint",
        "model.a.weight: shape (4, 2) in the state, (3, 2) in the checkpoint",
        "model.b.bias: in the checkpoint but not in the state",
        "model.b.weight: in the checkpoint but not in the state",
        "model.c.bias: in the state but not in the checkpoint; "
        "the checkpoint has it below 'model.b': map={'model.c': 'model.b'}",
        "model.c.weight: in the state but not in the checkpoint; "
        "the checkpoint has it below 'model.b': map={'model.c': 'model.b'}",
        "rng: in the state but not in the checkpoint",
        "step: in the state but not in the checkpoint",
        "t: torch.float64 in the state, torch.float32 in the checkpoint",
        "thing: in the state but not in the checkpoint",
    ]
    assert str(caught.value).startswith("step-00000001 does not fit the state:")
    assert before.equals({"model": found["model"]})


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(save: Any) -> None:
    saved = save({"a": torch.ones(2), "b": torch.ones(3), "n": 5, "gone": {"x": torch.ones(1)}})
    found: dict[str, Any] = {"a": torch.zeros(2), "b": torch.zeros(4), "n": 0, "new": torch.zeros(1), "m": 1}
    target = saved.load(found, strict=False)
    assert torch.equal(found["a"], torch.ones(2))
    assert found["n"] == 5
    assert (target.missing, target.unexpected) == (("new", "m"), ("gone",))
    assert len(target.problems) == 3
    assert target.written == {"a", "n"}


def test_keys_that_only_the_checkpoint_has_are_listed_not_refused(save: Any) -> None:
    saved, found = save(job(1.0)), job(2.0)
    target = saved.load({"model": found["model"]})
    assert target.missing == ()
    assert target.unexpected == ("ema", "optimizer", "own", "step", "thing")
    assert torch.equal(found["model"].bias, job(1.0)["model"].bias)


@pytest.mark.parametrize(
    ("only", "changed"),
    [
        (["model"], {"model.weight", "model.bias"}),
        (["model.weight", "step"], {"model.weight", "step"}),
        (["ema.w"], {"ema.w"}),
        (["ema", "thing"], {"ema.w", "ema.n", "thing"}),
    ],
)
def test_only_chooses_by_prefixes_of_names(save: Any, only: list[str], changed: set[str]) -> None:
    saved, found = save(job(1.0)), job(2.0)
    before = save(found)
    target = saved.load(found, only=only)
    assert target.written == changed
    after = save(found)
    for name, data in after.bytes.items():
        is_new = any(name == prefix or name.startswith(f"{prefix}.") for prefix in changed)
        assert torch.equal(data, (saved if is_new else before).bytes[name])
    for key, node in after.stored.values.items():
        assert node == (saved if key in changed else before).stored.values[key] or f"{key}.n" in changed


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["modle"], "names nothing in the state"),
        (["model.weigh"], "names nothing in the state"),
        (["model", "ema.x"], "names nothing in the state"),
        (["modell"], r"only='modell' \(near it: 'model'"),
        (["thing.mean"], r"'thing.mean' is a part of 'thing', which loads as a whole"),
    ],
)
def test_only_that_names_nothing_is_refused(save: Any, only: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        save(job(1.0)).open(job(2.0), only=only)


def test_only_keeps_to_its_part_when_it_looks_for_differences(save: Any) -> None:
    saved = save({"m": nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})})
    found: dict[str, Any] = {"m": nn.ModuleDict({"a": nn.Linear(1, 1)})}
    assert saved.load(found, only=["m.a"]).unexpected == ()


@pytest.mark.parametrize(
    "rename",
    [
        {"net": "model", "sgd": "optimizer", "average.deep.w": "ema.w", "average.deep": "ema"},
        lambda name: {
            "net": "model",
            "sgd": "optimizer",
        }.get(name, name.replace("net.", "model.").replace("average.deep", "ema")),
    ],
    ids=["mapping", "function"],
)
def test_names_can_be_mapped_to_those_of_the_checkpoint(save: Any, rename: Any) -> None:
    source, other = job(1.0), job(2.0)
    found: dict[str, Any] = {
        "net": other["model"],
        "sgd": other["optimizer"],
        "average": {"deep": other["ema"]},
        "step": 0,
    }
    save(source).load(found, rename=rename)
    assert save({key: source[key] for key in ("model", "optimizer", "ema", "step")}).equals(
        {"model": found["net"], "optimizer": found["sgd"], "ema": found["average"]["deep"], "step": found["step"]}
    )


def test_what_others_hold_is_filled_in_place(save: Any) -> None:
    saved = save({"losses": [1.0, 2.0], "progress": {"epoch": 3, "seen": {"a": 1}}, "tensors": [torch.ones(2), "x"]})
    losses: list[float] = []
    progress: dict[str, Any] = {"stale": 1}
    tensor = torch.zeros(2)
    found: dict[str, Any] = {"losses": losses, "progress": progress, "tensors": [tensor]}
    saved.load(found)
    assert losses == [1.0, 2.0]
    assert progress == {"epoch": 3, "seen": {"a": 1}}
    assert found["tensors"][0] is tensor
    assert torch.equal(tensor, torch.ones(2))


def test_values_that_are_none_are_not_missing(save: Any) -> None:
    found: dict[str, Any] = {"a": 1, "own": per_rank(1)}
    save({"a": None, "own": per_rank(None)}).load(found)
    assert found["a"] is None
    assert found["own"].value is None


def test_a_value_cannot_be_set_in_a_mapping_that_is_fixed(save: Any) -> None:
    with pytest.raises(UsageError, match="cannot be filled"):
        save({"n": 1}).open(MappingProxyType({"n": 0}))


def test_inference_tensors_are_wanted_like_others(save: Any) -> None:
    with torch.inference_mode():
        found = {"t": torch.zeros(2)}
    save({"t": torch.ones(2)}).load(found)
    assert found["t"].tolist() == [1, 1]


def test_damaged_trees_are_refused_before_anything_changes(save: Any) -> None:
    saved, found = save(job(1.0)), job(2.0)
    before = save(found)
    saved.stored.values["thing"]["value"]["mean"]["name"] = "nowhere"
    with pytest.raises(ManifestError, match=r"thing.mean refers to the tensor 'nowhere'"):
        saved.open(found)
    saved.stored.values["thing"]["value"]["mean"] = {"$": "datetime", "value": "never", "fold": 0}
    with pytest.raises(ManifestError, match=r"thing.mean is not a value that was ever saved"):
        saved.open(found)
    assert before.equals(found)


def test_a_codec_that_is_missing_is_named_before_anything_changes(save: Any) -> None:
    saved = save({"a": 1, "thing": Thing(1)})
    saved.stored.values["thing"]["value"] = {"$": "codec", "name": "mine", "value": 3}
    with pytest.raises(UsageError, match=r"thing: saved by the codec 'mine'; register it"):
        saved.open({"a": 0, "thing": Thing()})
    codecs = CodecRegistry()
    codecs.register_codec("mine", Thing, lambda thing: thing.state, Thing)
    found: dict[str, Any] = {"a": 0, "thing": Thing()}
    saved.load(found, codecs=codecs)
    assert found["thing"].state.state == 3


def test_a_device_that_is_not_here_becomes_the_cpu(save: Any) -> None:
    saved = save({"thing": Thing({"t": torch.ones(2)})})
    saved.stored.values["thing"]["value"]["t"]["device"] = "unheard of"
    found: dict[str, Any] = {"thing": Thing()}
    saved.load(found)
    assert found["thing"].state["t"].device.type == "cpu"


def test_the_tensors_of_other_ranks_are_not_unexpected(save: Any) -> None:
    saved = save({"own": per_rank(torch.ones(1))})
    saved.stored.tensors["own@rank1"] = ("F32", (1,))
    assert saved.load({"own": per_rank(None)}).unexpected == ()


def test_a_checkpoint_can_be_read_without_a_state(save: Any) -> None:
    state = {
        **job(1.0),
        "module": nn.BatchNorm1d(2),
        "blob": b"x" * 70_000,
        "buffer": bytearray(70_000),
        "when": (1, {2}),
    }
    saved = save(state)
    saved.stored.values["mine"] = {"$": "codec", "name": "mine", "value": [1]}
    tree = read_tree(saved.stored)
    mine = tree.pop("mine")
    assert isinstance(mine, Opaque)
    assert mine.codec == "mine"
    rate = tree["optimizer"]["groups"][0]
    assert (rate["lr"], rate["params"]) == (1.0, ["model.weight", "model.bias"])
    assert tree["thing"] == {"mean": TensorRef("thing.mean"), "n": 1.0}
    assert tree["ema"] == {"w": TensorRef("ema.w"), "n": 1.0}
    assert (tree["own"], tree["step"], tree["when"], tree["module"]) == (1.0, 1.0, (1, {2}), {})
    assert tree["blob"] == TensorRef("blob")
    assert tree["buffer"] == TensorRef("buffer")


def test_reading_a_damaged_tree_says_so() -> None:
    with pytest.raises(ManifestError, match="a is not an optimizer"):
        read_tree(Stored(tensors={}, alias={}, values={"a": {"$": "optimizer"}}))


def test_a_slice_of_a_tied_parameter_is_no_whole_tensor() -> None:
    stored = Stored({"a": ("F32", (2, 2))}, {"b": "a"}, {})
    matcher = Matcher(stored, only=None, strict=True, rename=None, codecs=CodecRegistry())
    part, flat = torch.zeros(2), FlatRange((2, 2), 0, 2)
    assert matcher.enter(("a",), "a", part, flat)
    assert matcher.enter(("b",), "b", part, flat)
    assert matcher.values.whole == {}
