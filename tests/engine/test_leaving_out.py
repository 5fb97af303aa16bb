"""What the caller leaves out of a save: not there, noted, and no difference when it is loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.selection import Selection
from tests.ranks.crew import Crew


class Adapted(nn.Module):
    """A frozen linear layer with a trained detour around it, as LoRA has them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.Linear(width, 2, bias=False)
        self.lora_B = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return y


def job(layers: int = 2) -> dict[str, Any]:
    model = nn.Sequential(*(Adapted() for _ in range(layers)), nn.BatchNorm1d(4).requires_grad_(False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 7}


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


BASE = [f"model.{n}.base.{leaf}" for n in (0, 1) for leaf in ("weight", "bias")]
FROZEN = sorted([*BASE, "model.2.weight", "model.2.bias"])


@pytest.mark.parametrize("how", ["eager", "lazy", "device", "process"])
def test_adapters_and_optimizer_without_the_base(tmp_path: Path, how: Any) -> None:
    options: dict[str, Any] = {"worker": "process"} if how == "process" else {"snapshot": how}
    trained, fresh = job(), job()
    base = tensors(fresh["model"])
    with aiockpt.Checkpointer(tmp_path / "run", **options) as ckpt:
        for step in range(2):  # the second walk is a warm one
            ckpt.save(step, trained, only=aiockpt.trainable()).result()
        seen = ckpt.describe().result()
        loaded = ckpt.load(fresh).result()
    assert loaded is not None
    assert sorted(seen.left_out) == FROZEN
    assert seen.left_out["model.0.base.weight"] == ("F32", (4, 4))
    assert not {tensor.name for tensor in seen.tensors} & set(FROZEN)
    assert sorted(loaded.left_out) == FROZEN
    assert loaded.missing == loaded.unexpected == loaded.differences == ()
    for name, tensor in tensors(fresh["model"]).items():
        expected = base[name] if f"model.{name}" in FROZEN else trained["model"].state_dict()[name]
        assert torch.equal(tensor, expected), name
    states = [list(one["optimizer"].state.values()) for one in (trained, fresh)]
    assert all(torch.equal(mine["exp_avg"], theirs["exp_avg"]) for mine, theirs in zip(*states, strict=True))


def test_names_prefixes_and_patterns_choose(tmp_path: Path) -> None:
    state = job()
    choices: list[dict[str, Any]] = [
        {"exclude": "model.0"},
        {"exclude": ["model.*.base", "optimizer"]},
        {"only": ["model.0.lora_A.weight", "step"]},
        {"only": "**.lora_?"},
        {"only": ["model"], "exclude": ["**.bias"]},
    ]
    kept: dict[int, set[str]] = {}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        for number, how in enumerate(choices):
            ckpt.save(number, state, **how).result()
            seen = ckpt.describe(number).result()
            names = {tensor.name for tensor in seen.tensors}
            kept[number] = names
            assert not names & seen.left_out.keys()
    assert not [name for name in kept[0] if name.startswith("model.0")]
    assert "optimizer.state.model.0.lora_A.weight.exp_avg" in kept[0]
    assert kept[1] == {f"model.{name}" for name in state["model"].state_dict()} - set(BASE)
    assert kept[2] == {"model.0.lora_A.weight"}
    assert kept[3] == {f"model.{n}.lora_{x}.weight" for n in (0, 1) for x in "AB"}
    assert kept[4] == {f"model.{name}" for name in state["model"].state_dict() if not name.endswith("bias")}


def test_what_was_left_out_is_not_missing(tmp_path: Path) -> None:
    larger = job(3)
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, job(2), exclude=["model.*.base"]).result()
        with pytest.raises(aiockpt.StateMismatchError) as caught:
            ckpt.load(larger, only=["model"]).result()
    told = str(caught.value)
    assert "model.2.base.weight: in the state but not in the checkpoint" in told
    assert "model.0.base" not in told


def test_another_shape_or_dtype_than_was_left_out_is_a_mismatch(tmp_path: Path) -> None:
    found = nn.ModuleDict({"base": nn.Linear(5, 4), "head": nn.Linear(4, 1)})
    double = nn.ModuleDict({"base": nn.Linear(4, 4).double(), "head": nn.Linear(4, 1)})
    saved = nn.ModuleDict({"base": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"m": saved}, exclude=["m.base"]).result()
        with pytest.raises(
            aiockpt.StateMismatchError, match=r"m.base.weight: torch.float32 of shape \(4, 5\) in the state, .*\(4, 4\)"
        ):
            ckpt.load({"m": found}).result()
        with pytest.raises(
            aiockpt.StateMismatchError, match=r"m.base.weight: torch.float64 of shape .* in the state, torch.float32"
        ):
            ckpt.load({"m": double}).result()


def test_whole_objects_and_values_may_be_left_out(tmp_path: Path) -> None:
    state = {**job(), "log": {"losses": [1, 2]}, "rng": aiockpt.RNG(), "nested": {"a": 1, "t": torch.ones(2)}}
    found = {**job(), "log": {"losses": []}, "rng": aiockpt.RNG(), "nested": {"a": 0, "t": torch.zeros(2)}}
    before = copy.deepcopy(found["optimizer"].state_dict())
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state, exclude=["optimizer", "log", "rng", "step", "nested.a"]).result()
        loaded = ckpt.load(found).result()
    assert loaded is not None
    assert loaded.left_out == ("optimizer", "step", "log", "rng", "nested.a")
    assert loaded.missing == loaded.differences == ()
    assert str(found["optimizer"].state_dict()) == str(before)
    assert found["log"] == {"losses": []}
    assert found["nested"]["a"] == 0
    assert torch.equal(found["nested"]["t"], torch.ones(2))


def test_items_behind_left_out_ones_keep_their_places(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    found: dict[str, Any] = {"some": [nn.Linear(2, 2), 0, {"x": 0}, other], "two": (torch.zeros(2), 0, nn.Linear(2, 2))}
    state = {"some": [nn.Linear(2, 2), 1, {"x": 7}, one], "two": (torch.ones(2), 2, nn.Linear(2, 2))}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state, exclude=["some[1]", "some[2]", "two[0]"]).result()
        loaded = ckpt.load(found).result()
    assert loaded is not None
    assert loaded.left_out == ("some[1]", "some[2]", "two[0]")
    assert found["some"][1:3] == [0, {"x": 0}]
    assert found["two"][1] == 2
    assert torch.equal(found["two"][0], torch.zeros(2))
    assert torch.equal(other.weight, one.weight)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"exclude": ["modle"]}, r"exclude='modle' \(near it: 'model'"),
        ({"only": ["model.9"]}, "only='model.9'.* names nothing in the state"),
        ({"exclude": ["optimizer.state.model.0"]}, "is a part of 'optimizer', which is saved as a whole or not at all"),
        ({"only": []}, r"only=\[\] saves nothing"),
        ({"only": [1]}, "only=.*a name of the state, or a list"),
        ({"exclude": 3}, "exclude=3"),
        ({"exclude": aiockpt.trainable()}, "exclude=.*a name of the state"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, how: dict[str, Any], told: str) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(aiockpt.UsageError, match=told):
            ckpt.save(1, job(), **how)
        assert ckpt.steps().result() == ()


def test_thawed_and_owned_parameters_are_saved(tmp_path: Path) -> None:
    state = job()
    with aiockpt.Checkpointer(tmp_path / "run", only=aiockpt.trainable(), every=1) as ckpt:
        ckpt.step(0, state).result()  # type: ignore[union-attr]
        state["model"][0].base.weight.requires_grad_(True)
        ckpt.step(1, state).result()  # type: ignore[union-attr]
        state["model"][0].base.weight.requires_grad_(False)
        state["optimizer"].add_param_group({"params": [state["model"][0].base.weight]})
        ckpt.step(2, state).result()  # type: ignore[union-attr]
        left = [ckpt.describe(step).result().left_out for step in range(3)]
        ckpt.step(3, state, only="**").result()  # type: ignore[union-attr]
        assert ckpt.describe(3).result().left_out == {}
    assert ["model.0.base.weight" in one for one in left] == [True, False, False]


def test_full_and_partial_saves_of_one_state_take_turns_warm() -> None:
    state, walker = job(), StateWalker()
    whole, part = walker.walk(state), walker.walk(state, Selection(only=aiockpt.trainable()))
    for _ in range(2):
        whole, part = walker.walk(state), walker.walk(state, Selection(only=aiockpt.trainable()))
    assert walker.cold_walks == 2
    assert len(part.tensors) + len(part.left_out) == len(whole.tensors)


def test_a_rule_finds_modules_and_optimizers_in_lists_and_tuples_too() -> None:
    state, owned = job(), nn.Linear(2, 2).requires_grad_(False)
    nested = {"nets": [state["model"], (owned,)], "optimizers": (torch.optim.SGD(owned.parameters()),)}
    part = StateWalker().walk(nested, Selection(only=aiockpt.trainable()))
    assert sorted(part.left_out) == [name.replace("model", "nets[0]", 1) for name in FROZEN]


def test_a_base_that_cannot_be_stored_may_be_left_out(tmp_path: Path) -> None:
    model = nn.ModuleDict({"base": nn.Linear(2, 2, device="meta"), "head": nn.Linear(2, 1)})
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"m": model}, exclude="m.base").result()
        assert ckpt.load({"m": model}).result().left_out == ("m.base.weight", "m.base.bias")  # type: ignore[union-attr]


def test_a_self_loading_layer_keeps_what_was_left_out(tmp_path: Path) -> None:
    def make() -> Any:
        layer: Any = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        layer.parametrizations.weight.original1.requires_grad_(False)
        return nn.Sequential(layer)

    saved, found = make(), make()
    kept = found[0].parametrizations.weight.original1.clone()
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"m": saved}, only=aiockpt.trainable()).result()
        loaded = ckpt.load({"m": found}).result()
    assert loaded is not None
    assert loaded.left_out == ("m.0.parametrizations.weight.original1",)
    assert torch.equal(found[0].parametrizations.weight.original1, kept)
    assert torch.equal(found[0].parametrizations.weight.original0, saved[0].parametrizations.weight.original0)


def test_a_part_of_a_state_dict_loads_into_modules(tmp_path: Path) -> None:
    saved, found = job()["model"], job()["model"]
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"m": saved.state_dict()}, exclude=["m.*base*"]).result()
        assert len(ckpt.load({"m": found}).result().left_out) == 4  # type: ignore[union-attr]
        ckpt.save(2, {"m": saved}, exclude=["m.*.base"]).result()
        assert len(ckpt.load({"m": found.state_dict()}).result().left_out) == 4  # type: ignore[union-attr]
    assert torch.equal(saved[0].lora_A.weight, found[0].lora_A.weight)


def test_reading_what_was_left_out_says_so(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, job(), exclude=["model.*.base"]).result()
        with pytest.raises(aiockpt.StateMismatchError, match=r"model.0.base.weight: left out when this step was saved"):
            ckpt.read(1, "model.0.base.weight").result()


def test_a_tier_of_weights_knows_what_was_left_out(tmp_path: Path) -> None:
    found = job()
    tiers = [aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(tmp_path / "far", content="weights")]
    with aiockpt.Checkpointer(tiers, only=aiockpt.trainable()) as ckpt:
        ckpt.save(1, job()).result()
    with aiockpt.Checkpointer(tmp_path / "far") as ckpt:
        loaded = ckpt.load({"model": found["model"]}, 1).result()
    assert loaded is not None
    assert sorted(loaded.left_out) == FROZEN


def test_ranks_leave_out_together(tmp_path: Path) -> None:
    def stage(rank: int) -> dict[str, Any]:
        layer = nn.ModuleDict({"base": nn.Linear(3, 3), "head": nn.Linear(3, 1)})
        shared = nn.Linear(2, 2)
        nn.init.constant_(shared.weight, 0.5)  # what ranks have differently is refused
        return {"model": nn.ModuleDict({str(rank): layer, "shared": shared})}

    saved, found = [stage(0), stage(1)], [stage(0), stage(1)]
    with Crew(2, tmp_path / "run", exclude=["model.1.base", "model.shared.bias"]) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, saved[rank]).result())
        loaded = crew.on_all(lambda rank, ckpt: ckpt.load(found[rank]).result())
        left = crew.checkpointers[1].describe(1).result().left_out
    assert sorted(left) == ["model.1.base.bias", "model.1.base.weight", "model.shared.bias"]
    assert [one.left_out for one in loaded if one] == [
        ("model.shared.bias",),
        ("model.1.base.weight", "model.1.base.bias", "model.shared.bias"),
    ]
    assert torch.equal(saved[0]["model"]["0"]["base"].weight, found[0]["model"]["0"]["base"].weight)


@pytest.mark.parametrize("owns", ["all parameters", "the frozen ones"])
def test_a_rule_that_leaves_nothing_out_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture, owns: str) -> None:
    state = job()
    parameters = state["model"].parameters()
    state["optimizer"] = torch.optim.AdamW(
        one for one in parameters if owns == "all parameters" or not one.requires_grad
    )
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        for step in range(3):
            ckpt.save(step, state, only=aiockpt.trainable()).result()
        assert not ckpt.describe().result().left_out
        (warning,) = (line for line in caplog.messages if "trainable()" in line)
        assert "all 6 frozen parameters" in warning
        ckpt.save(3, state, exclude="model.*.base").result()
        assert sorted(ckpt.describe().result().left_out) == sorted(BASE)


class OfTwoStages(nn.Module):
    """A layer around one of the base, as PEFT has it, with the adapters of two stages."""

    adapter_layer_names = ("lora",)

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora = nn.ModuleDict({"first": nn.Linear(4, 4, bias=False), "task": nn.Linear(4, 4, bias=False)})
        self.requires_grad_(False).lora["task"].requires_grad_(True)


def test_adapters_that_are_not_trained_now_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(OfTwoStages(), OfTwoStages())
    with aiockpt.Checkpointer(tmp_path / "run", only=aiockpt.trainable()) as ckpt:
        ckpt.save(1, {"model": model}).result()
        ckpt.save(2, {"model": model, "more": 1}).result()
        assert "model.1.lora.first.weight" in ckpt.describe().result().left_out
    (told,) = [record.message for record in caplog.records if "no base model has" in record.message]
    assert "0.lora.first.weight, 1.lora.first.weight;" in told
    assert "base_layer" not in told
