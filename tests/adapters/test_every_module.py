"""Every module of torch comes back, from one that was used into a fresh one. Through the public API."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import aiockpt

Case = tuple[Callable[[], Any], tuple[Any, ...]]
IMAGE, ROW, SEQUENCE = torch.rand(2, 4, 8, 8), torch.rand(3, 4), torch.rand(2, 5, 4)


def volume(axes: int) -> torch.Tensor:
    return torch.rand(2, 4, *[6] * axes)


def _class(name: str) -> Any:
    return getattr(nn, name)


ARGUMENTS: dict[str, Case] = {
    **{
        f"{name}{n}d": (partial(_class(f"{name}{n}d"), *given, **how), (volume(n),))
        for n in (1, 2, 3)
        for name, given, how in (
            ("Conv", (4, 6, 3), {}),
            ("ConvTranspose", (4, 6, 3), {}),
            ("BatchNorm", (4,), {}),
            ("InstanceNorm", (4,), {"affine": True, "track_running_stats": True}),
            ("LazyConv", (6, 3), {}),
            ("LazyConvTranspose", (6, 3), {}),
            ("LazyBatchNorm", (), {}),
            # torch's own load_state_dict() leaves an affine one with num_features of 0, which its forward refuses.
            ("LazyInstanceNorm", (), {"affine": False}),
        )
    },
    "LazyLinear": (lambda: nn.LazyLinear(3), (ROW,)),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5, 10]),
        (ROW, torch.tensor([0, 7, 15])),
    ),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 3), (ROW, ROW)),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(weight=torch.rand(4)), (ROW, torch.tensor([0, 1, 2]))),
    "BCELoss": (lambda: nn.BCELoss(weight=torch.rand(3, 4)), (ROW, torch.rand(3, 4))),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)), (ROW, torch.rand(3, 4))),
    "NLLLoss": (lambda: nn.NLLLoss(weight=torch.rand(4)), (ROW, torch.tensor([0, 1, 2]))),
    "MultiMarginLoss": (lambda: nn.MultiMarginLoss(weight=torch.rand(4)), (ROW, torch.tensor([0, 1, 2]))),
    "Embedding": (lambda: nn.Embedding(9, 4, padding_idx=0, max_norm=1.0), (torch.tensor([[1, 2], [3, 8]]),)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 4, mode="sum"), (torch.tensor([[1, 2], [3, 8]]),)),
    "GRU": (lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True), (SEQUENCE,)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), (ROW,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (IMAGE,)),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, proj_size=2, batch_first=True), (SEQUENCE,)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), (ROW,)),
    "LayerNorm": (lambda: nn.LayerNorm([8, 8]), (IMAGE,)),
    "Linear": (lambda: nn.Linear(4, 3), (ROW,)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, kdim=4, add_bias_kv=True), (SEQUENCE,) * 3),
    "PReLU": (lambda: nn.PReLU(4), (IMAGE,)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (ROW,)),
    "RNN": (lambda: nn.RNN(4, 3), (SEQUENCE,)),
    "RNNCell": (lambda: nn.RNNCell(4, 3), (ROW,)),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0), (SEQUENCE, SEQUENCE)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0), (SEQUENCE, SEQUENCE)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (SEQUENCE,)),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 2, enable_nested_tensor=False),
        (SEQUENCE,),
    ),
}


class Listed(nn.Module):
    """Parameters in lists and dicts, modules under odd names, one shared, one missing, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([nn.Parameter(torch.randn(4)), torch.randn(4)])
        self.more = nn.ParameterDict({"a b": nn.Parameter(torch.randn(4)), "7": nn.Parameter(torch.randn(4))})
        self.parts = nn.ModuleDict({"x-y": nn.Linear(4, 4), "0": nn.ModuleList([nn.Linear(4, 4), nn.Identity()])})
        self.again = self.parts["x-y"]
        self.register_module("nothing", None)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.seen: int = int(torch.randint(1000, ()))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "t": self.some[0] * 2}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> Any:
        scale: Any = self.table
        x = x * self.some[0] + self.some[1] + self.more["a b"] * scale + self.seen
        return self.again(self.parts["0"][0](x))  # type: ignore[index]


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


def parametrised() -> Any:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def old_weight_norm() -> Any:
    return nn.utils.weight_norm(nn.Linear(4, 3))


def pruned() -> Any:
    prune: Any = import_module("torch.nn.utils.prune")
    layer: Any = nn.Linear(4, 3)
    prune.random_unstructured(layer, "weight", amount=0.5)
    return layer


def averaged() -> Any:
    model: Any = AveragedModel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), use_buffers=True)
    model.update_parameters(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    return model


def scripted() -> Any:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))


def prepared() -> Any:
    """Fake-quantised for training, with observers that have state of their own."""
    quantization: Any = torch.ao.quantization
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    model.train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model)


def quantised() -> Any:
    quantise: Any = torch.ao.quantization.quantize_dynamic
    return quantise(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), {nn.Linear})


OTHERS: dict[str, Case] = {
    "lists and dicts": (Listed, (ROW,)),
    "parametrised": (parametrised, (ROW,)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (ROW,)),
    "weight_norm, the old one": (old_weight_norm, (ROW,)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), (ROW,)),
    "spectral_norm, the old one": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), (ROW,)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (ROW,)),
    "pruned": (pruned, (ROW,)),
    "averaged": (averaged, (ROW,)),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), backend="eager"), (ROW,)),
    "scripted": (scripted, (ROW,)),
    "prepared for quantised training": (prepared, (ROW,)),
    "quantised": (quantised, (SEQUENCE,)),
    "on meta, then made": (lambda: nn.Linear(4, 3, device="meta").to_empty(device="cpu"), (ROW,)),
    "double": (lambda: nn.Linear(4, 3).double(), (ROW.double(),)),
    "bfloat16": (lambda: nn.Linear(4, 3).bfloat16(), (ROW.bfloat16(),)),
    "channels last": (lambda: _class("Conv2d")(4, 6, 3).to(memory_format=torch.channels_last), (IMAGE,)),
    "complex": (lambda: nn.Linear(4, 3, dtype=torch.complex64), (ROW.to(torch.complex64),)),
    "empty": (lambda: nn.Sequential(), (ROW,)),
}


def is_plain_class(name: str) -> bool:
    """Whether torch.nn has a module of this name that needs no arguments, and that is not in the table."""
    cls = getattr(nn, name)
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)) or name in ARGUMENTS or name == "Container":
        return False
    given = inspect.signature(cls.__init__).parameters.values()
    return not [
        one
        for one in given
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"
    ]


PLAIN: dict[str, Case] = {name: (getattr(nn, name), ()) for name in dir(nn) if is_plain_class(name)}
CASES = {**ARGUMENTS, **OTHERS, **PLAIN}


def used(case: Case, seed: int) -> Any:
    """Return a module that was trained a little, so that buffers and lazy parameters are what training makes of them."""
    torch.manual_seed(seed)
    module, arguments = case[0](), case[1]
    if arguments:
        module(*arguments)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor.float()).to(tensor.dtype).abs() * 0.1)
    return module


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach().int_repr() if value.is_quantized else value.detach()
        return str(value.dtype), tuple(value.shape), plain.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def outcome(module: Any, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(5)
    module.eval()
    return bits(module(*arguments))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_module_of_torch_comes_back_into_a_fresh_one(name: str) -> None:
    case = CASES[name]
    trained, fresh = used(case, 1), case[0]()
    with aiockpt.Checkpointer(f"memory://every-module-{name}") as ckpt:
        for step in range(2):  # the second one is a warm walk
            ckpt.save(step, {"model": trained}).result()
        loaded = ckpt.load({"model": fresh}).result()
        expected = bits(trained.state_dict())
        assert bits(fresh.state_dict()) == expected
        if case[1]:
            assert outcome(fresh, case[1]) == outcome(trained, case[1])
        assert loaded is not None
        assert loaded.missing == loaded.unexpected == loaded.differences == loaded.left_out == ()
        again = used(case, 2)
        ckpt.save(2, {"model": trained.state_dict()}).result()
        expected = bits(trained.state_dict())
        ckpt.load({"model": again}, 2).result()
        assert bits(again.state_dict()) == expected


def test_there_are_more_than_a_hundred() -> None:
    assert len(CASES) > 120
