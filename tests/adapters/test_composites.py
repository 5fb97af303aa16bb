"""Tensors that are made of other tensors are saved and filled. Through the public API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.selection import Selection
from aiockpt.adapters.target import open_target
from aiockpt.errors import CheckpointError, StateMismatchError, UnsupportedStateError, UsageError
from aiockpt.state.codecs import DEFAULT_CODECS
from tests.adapters.conftest import Through

_wrap: Any = torch.Tensor._make_wrapper_subclass


class Scaled(torch.Tensor):
    """A tensor held as int8 codes with a scale for each block, as optimizers of 8 bits hold their state."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, block: int, extra: Any = None) -> Any:
        return _wrap(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, block: int, extra: Any = None) -> None:
        self.codes, self.scale, self.block, self.extra = codes, scale, block, extra

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"block": self.block, **({} if self.extra is None else {"extra": self.extra})}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context["block"], context.get("extra"))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({self.codes.shape})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            (me,) = args
            return cls(me.codes, me.scale, me.block, me.extra)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Scaled):
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(func)


class Opaque:
    """Something that a class knows and that is no plain value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Opaque({self.name})"


def scaled(seed: int, block: int = 4, rows: int = 8, extra: Any = None) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-100, 100, (rows, 4), dtype=torch.int8, generator=generator)
    return Scaled(codes, torch.rand(rows * 4 // block, generator=generator), block, extra)


def equal(one: Scaled, other: Scaled) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale) and one.block == other.block


@pytest.fixture
def declared() -> Iterator[None]:
    with torch.serialization.safe_globals([Scaled]):
        yield


def test_a_wrapper_subclass_is_filled_part_by_part_in_place(through: Through) -> None:
    state, found = {"deep": {"t": scaled(1)}}, {"deep": {"t": scaled(2)}}
    live, codes = found["deep"]["t"], found["deep"]["t"].codes
    result = through(state, found)
    assert found["deep"]["t"] is live
    assert live.codes is codes
    assert equal(live, state["deep"]["t"])
    assert result.missing == result.unexpected == result.differences == ()


def quantised_layer(seed: int) -> Any:
    layer: Any = nn.Linear(4, 8)
    layer.weight = nn.Parameter(scaled(seed), requires_grad=False)
    layer.register_buffer("table", scaled(seed + 1))
    return nn.Sequential(layer, nn.Linear(8, 2))


@pytest.mark.parametrize("snapshot", ["eager", "lazy", "device"])
def test_weights_of_a_wrapper_class_go_with_their_module(tmp_path: Path, snapshot: Any) -> None:
    model, found = quantised_layer(1), quantised_layer(7)
    with aiockpt.Checkpointer(tmp_path / "run", snapshot=snapshot) as ckpt:
        ckpt.save(1, {"m": model}).result()
        with torch.no_grad():
            model[0].weight.codes.add_(1)
        ckpt.save(2, {"m": model}).result()
        names = {tensor.name for tensor in ckpt.describe().result().tensors}
        ckpt.load({"m": found}).result()
    assert {"m.0.weight.codes", "m.0.weight.scale", "m.0.table.codes", "m.0.bias", "m.1.weight"} <= names
    assert equal(model[0].weight, found[0].weight)
    assert equal(model[0].table, found[0].table)


class Quantising(torch.optim.Optimizer):
    """SGD whose momentum is kept as `Scaled`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = Scaled(torch.zeros(p.shape, dtype=torch.int8), torch.ones(p.numel() // 4), 4)
                momentum = state["momentum"]
                momentum.codes.add_((p.grad * 10).to(torch.int8))
                momentum.scale.mul_(0.5)
                p.sub_(momentum.codes * momentum.scale.repeat_interleave(4).view(p.shape), alpha=0.1)


def train(steps: int, model: nn.Linear, optimizer: Quantising) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Any = functional.mse_loss(model(torch.ones(2, 4)), torch.full((2, 8), 3.0), reduction="sum")
        loss.backward()
        optimizer.step()


def job() -> tuple[nn.Linear, Quantising]:
    model = nn.Linear(4, 8)
    return model, Quantising(model.parameters())


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stepped"])
def test_optimizer_state_of_a_declared_class_goes_on(through: Through, fresh: bool) -> None:
    (model, optimizer), (other, another) = job(), job()
    train(3, model, optimizer)
    if not fresh:
        train(1, other, another)
    through({"m": model, "o": optimizer}, {"m": other, "o": another})
    assert equal(optimizer.state[model.weight]["momentum"], another.state[other.weight]["momentum"])
    for one in ((model, optimizer), (other, another)):
        train(2, *one)
    assert torch.equal(model.weight, other.weight)


def test_one_of_an_undeclared_class_is_refused_by_name(through: Through) -> None:
    (model, optimizer), (other, another) = job(), job()
    train(1, model, optimizer)
    with pytest.raises(
        UsageError, match=r"o.state.m.weight.momentum: saved as a .*Scaled.*add_safe_globals\(\[Scaled\]\)"
    ):
        through({"m": model, "o": optimizer}, {"m": other, "o": another})


@pytest.mark.parametrize(
    ("here", "told"),
    [
        (lambda: scaled(2, block=8), "knows .'block': 8., and other things in the checkpoint"),
        (lambda: scaled(2, rows=4), r"shape \(4, 4\)\) in the state, .* shape \(8, 4\)\) in the checkpoint"),
        (lambda: torch.zeros(8, 4), r"an ordinary tensor \(torch.float32\) in the state, one of .*Scaled"),
    ],
)
def test_another_kind_than_was_saved_is_a_mismatch(
    through: Through, here: Callable[[], torch.Tensor], told: str
) -> None:
    with pytest.raises(StateMismatchError, match=told):
        through({"t": scaled(1)}, {"t": here()})
    with pytest.raises(StateMismatchError):
        through({"t": here()}, {"t": scaled(1)})


def test_quantised_and_plain_models_refuse_each_other(through: Through) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain[0].register_buffer("table", torch.zeros(8, 4))
    with pytest.raises(StateMismatchError, match=r"m.0.weight: an ordinary tensor .* in the state, one of .*Scaled"):
        through({"m": quantised_layer(1)}, {"m": plain})
    with pytest.raises(StateMismatchError, match=r"m.0.weight: .*Scaled.* in the state, an ordinary tensor"):
        through({"m": plain}, {"m": quantised_layer(1)})
    with pytest.raises(StateMismatchError, match=r"m.0.weight: in the state but not in the checkpoint"):
        through({"m": nn.Sequential()}, {"m": quantised_layer(1)})


def test_values_of_a_class_are_compared_as_shown(through: Through) -> None:
    state, found = {"t": scaled(1, extra=Opaque("a"))}, {"t": scaled(2, extra=Opaque("a"))}
    through(state, found)
    assert equal(state["t"], found["t"])
    with pytest.raises(StateMismatchError, match=r"Opaque\(b\).*Opaque\(a\)"):
        through(state, {"t": scaled(2, extra=Opaque("b"))})


class Nested(Scaled):
    """Its codes are made of others, too."""


def test_a_saved_quantised_module_and_its_state_dict_load_each_other(through: Through) -> None:
    for extra in (None, Opaque("a")):
        model, found = quantised_layer(1), quantised_layer(7)
        for one in (model, found):
            one[0].table.extra = extra
        through({"m": model}, {"m": found.state_dict()})
        assert equal(model[0].table, found[0].table)  # a state_dict() shares its memory
        assert equal(model[0].weight, found[0].weight)
        again = quantised_layer(9)
        again[0].table.extra = extra
        through({"m": model.state_dict()}, {"m": again})
        assert equal(model[0].weight, again[0].weight)


def test_a_self_loading_module_gets_one_of_its_class(through: Through) -> None:
    def make(seed: int) -> Any:
        model = quantised_layer(seed)
        model[0].table.extra = Opaque("a")
        model[0].register_load_state_dict_pre_hook(lambda *args: None)
        return model

    model, found = make(1), make(7)
    live = found[0].weight
    through({"m": model}, {"m": found})
    assert found[0].weight is live
    assert equal(model[0].weight, live)
    assert equal(model[0].table, found[0].table)


def test_a_wrapper_in_a_wrapper_is_filled(through: Through) -> None:
    def make(seed: int) -> Scaled:
        return Nested(scaled(seed), torch.rand(3), 1)

    state, found = {"t": make(1)}, {"t": make(5)}
    inner = found["t"].codes
    through(state, found)
    assert found["t"].codes is inner
    assert equal(state["t"].codes, found["t"].codes)  # type: ignore[arg-type]
    assert torch.equal(state["t"].scale, found["t"].scale)


@pytest.mark.usefixtures("declared")
def test_one_in_a_list_comes_back(through: Through) -> None:
    state: dict[str, Any] = {"l": [1, {"t": scaled(1)}]}
    found: dict[str, Any] = {"l": [0, {"t": scaled(2)}]}
    through(state, found)
    assert equal(state["l"][1]["t"], found["l"][1]["t"])


@pytest.mark.usefixtures("declared")
def test_one_in_a_list_is_made_anew_and_told(through: Through) -> None:
    found: dict[str, Any] = {"l": [scaled(2)]}
    here = found["l"][0]
    result = through({"l": [scaled(1)]}, found)
    assert found["l"][0] is not here
    assert [told.partition(": ")[0] for told in result.differences] == ["l[0]"]


def test_one_in_a_list_is_refused_with_ways_out(through: Through) -> None:
    with pytest.raises(UsageError, match=r"l\[0\]: .*in a list.*add_safe_globals\(\[Scaled\]\), or .* key of a dict"):
        through({"l": [scaled(1)]}, {"l": [scaled(2)]})


def dense() -> Any:
    return torch.randn(4, 6) * (torch.rand(4, 6) > 0.5)


def per_channel(dtype: torch.dtype) -> torch.Tensor:
    floats = dtype == torch.quint4x2
    return torch.quantize_per_channel(
        torch.randn(4, 6), torch.rand(4) + 0.1, torch.rand(4) if floats else torch.tensor([0, 1, 2, 3]), 0, dtype
    )


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: dense().to_sparse(),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (3, 3)),
        lambda: dense().to_sparse_csr(),
        lambda: dense().to_sparse_csc(),
        lambda: dense().to_sparse_bsr((2, 2)),
        lambda: dense().to_sparse_bsc((2, 2)),
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), float(torch.rand(1)) + 0.1, 3, torch.qint8),
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8),
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint32),
        lambda: per_channel(torch.qint8),
        lambda: per_channel(torch.quint4x2),
    ],
)
def test_sparse_and_quantised_tensors_fill_what_is_here(through: Through, make: Callable[[], torch.Tensor]) -> None:
    from aiockpt.adapters.composites import decompose

    module, other = nn.Module(), nn.Module()
    module.register_buffer("b", make())
    other.register_buffer("b", make())
    state: dict[str, Any] = {"t": make(), "m": module, "deep": [make()]}
    found: dict[str, Any] = {"t": make(), "m": other, "deep": None}
    live = found["t"]
    through(state, found)
    assert found["t"] is live
    pairs = ((state["t"], live), (module.b, other.b), (state["deep"][0], found["deep"][0]))
    for one, two in pairs:
        mine, theirs = decompose(one), decompose(two)
        assert (one.dtype, one.layout, one.shape) == (two.dtype, two.layout, two.shape)
        assert all(torch.equal(mine.tensors[key], theirs.tensors[key]) for key in mine.tensors)
        assert mine.facts == theirs.facts


class Pair(torch.Tensor):
    """A class that torch cannot take apart, and that the user has registered."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Any:
        return _wrap(cls, kept.shape)

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def __repr__(self) -> str:  # type: ignore[override]
        return "Pair"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].kept)
        raise NotImplementedError(func)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in ("_by_class", "_by_name"):
        monkeypatch.setattr(DEFAULT_CODECS, registry, dict(getattr(DEFAULT_CODECS, registry)))
    aiockpt.register_codec("pair", Pair, lambda pair: {"kept": pair.kept}, lambda plain: Pair(plain["kept"]))


@pytest.mark.usefixtures("registered")
def test_a_registered_codec_is_asked_for_tensors_wherever_they_are(through: Through) -> None:
    def make(value: float) -> dict[str, Any]:
        layer: Any = nn.Linear(2, 2)
        layer.weight = nn.Parameter(Pair(torch.full((2, 2), value)), requires_grad=False)
        return {"t": Pair(torch.full((3,), value)), "m": nn.Sequential(layer), "l": [Pair(torch.full((1,), value))]}

    state, found = make(1.0), make(0.0)
    through(state, found)
    assert torch.equal(found["t"].kept, torch.ones(3))
    assert torch.equal(found["m"][0].weight.kept, torch.ones(2, 2))
    assert torch.equal(found["l"][0].kept, torch.ones(1))


def test_a_wrapper_without_parts_is_refused(through: Through) -> None:
    with pytest.raises(UnsupportedStateError, match=r"t: .*Pair.*keeps its value elsewhere.*register_codec"):
        through({"t": Pair(torch.ones(2))}, {})


def test_a_frozen_quantised_base_is_left_out_with_what_it_is(through: Through, tmp_path: Path) -> None:
    model, found = quantised_layer(1), quantised_layer(7)
    with aiockpt.Checkpointer(tmp_path / "run", only=aiockpt.trainable()) as ckpt:
        ckpt.save(1, {"m": model}).result()
        assert ckpt.describe().result().left_out == {"m.0.weight": ("F32", (8, 4))}
        loaded = ckpt.load({"m": found}).result()
    assert loaded is not None
    assert loaded.left_out == ("m.0.weight",)
    assert equal(model[0].table, found[0].table)
    assert not equal(model[0].weight, found[0].weight)


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*TypedStorage")
def test_modules_of_torch_ao_that_hold_packed_weights_come_back(through: Through) -> None:
    quantize: Any = torch.ao.quantization.quantize_dynamic

    if "none" in torch.backends.quantized.supported_engines and len(torch.backends.quantized.supported_engines) == 1:
        pytest.skip("no quantised kernels here")
    saved = quantize(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), {nn.Linear})
    found = quantize(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), {nn.Linear})
    through({"m": saved}, {"m": found})
    assert torch.equal(saved(torch.ones(2, 4)), found(torch.ones(2, 4)))


def _mutations(node: Any) -> Iterator[Any]:
    """Yield trees that differ from *node* in one place."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield {other: item for other, item in node.items() if other != key}
            for wrong in (None, -1, 2**70, "float64", "x", [], [2**40, 2**40], {}, {"$": "tensor", "name": "nowhere"}):
                yield {**node, key: wrong}
            for inner in _mutations(value):
                yield {**node, key: inner}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: scaled(1),
        lambda: dense().to_sparse(),
        lambda: dense().to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8),
        lambda: per_channel(torch.qint8),
    ],
    ids=["subclass", "COO", "CSR", "quantised", "per channel"],
)
def test_what_was_never_saved_is_refused_whatever_it_says(save: Any, make: Callable[[], torch.Tensor]) -> None:
    saved = save({"t": make()})
    tree = saved.stored.values
    for here in (make, lambda: None):
        for wrong in _mutations(tree["t"]):
            found = msgspec.structs.replace(saved.stored, values={"t": wrong})
            try:
                target = open_target({"t": here()}, found)
                for shard in target.wanted:
                    shard.data.zero_()
                target.apply()
            except CheckpointError:
                pass


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("here", ["the same", None])
def test_indices_that_make_no_sparse_tensor_are_refused(save: Any, here: str | None) -> None:
    one = torch.eye(3).to_sparse_csr()
    target = open_target({"t": here and one.clone()}, save({"t": one}).stored)
    for shard in target.wanted:
        shard.data.zero_()
    with pytest.raises(CheckpointError, match="crow_indices"):
        target.apply()


def test_a_rule_asks_again_where_torch_has_no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.adapters.watch._guards", lambda tensors: None)
    model: Any = nn.Linear(2, 2).requires_grad_(False)
    walker, rule = StateWalker(), Selection(only=aiockpt.trainable())
    assert sorted(walker.walk({"m": model}, rule).left_out) == ["m.bias", "m.weight"]
    model.bias.requires_grad_(True)
    assert sorted(walker.walk({"m": model}, rule).left_out) == ["m.weight"]
    assert walker.cold_walks == 2


def test_weights_of_a_wrapper_class_go_to_a_tier_of_weights(tmp_path: Path) -> None:
    model, found = quantised_layer(1), quantised_layer(7)
    tiers = [aiockpt.Tier(tmp_path / "near"), aiockpt.Tier(tmp_path / "far", content="weights")]
    with aiockpt.Checkpointer(tiers) as ckpt:
        ckpt.save(1, {"m": model, "x": 1}).result()
    with aiockpt.Checkpointer(tmp_path / "far") as ckpt:
        ckpt.load({"m": found}, 1).result()
    assert equal(model[0].weight, found[0].weight)
