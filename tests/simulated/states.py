"""Random states, as training programs hold them: trees of containers, values, tensors, modules, optimizers, schedulers.

A state is drawn in two steps. A *blueprint* describes the structure (kinds, keys, dtypes, shapes, layouts, ties), and
`build` makes objects of it: equal ones with the same seed, other values in the same structure with another seed. So the
state to load into is as fresh as that of a program that has just started.

The guide to states allows all of these; a refusal by `save` is a bug. `blueprints` is a Hypothesis strategy,
`draw_blueprint` accepts any source of random numbers.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import math
import pathlib
import random
import string
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Path = tuple[Any, ...]
"""Keys and indices from the top of a state to one place in it."""


class Blueprint(msgspec.Struct, frozen=True, gc=False):
    """Description of one place of a state.

    Attributes:
        kind: a key of `PLAIN`, ``"tensor"``, ``"tied"`` (the tensor of an earlier place, or a view of it), a container,
            ``"module"``, ``"optimizer"`` or ``"scheduler"``.
        facts: parameters of the kind: a dtype, a shape, the class of a container, the number of a tied tensor.
        keys, items: of a container; sequences have no keys.
    """

    kind: str
    facts: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    items: tuple[Blueprint, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it contains neither tensor nor object."""
        return (
            self.kind not in OBJECTS and self.kind not in ("tensor", "tied") and all(item.plain for item in self.items)
        )


OBJECTS = ("module", "optimizer", "scheduler")
MAPPINGS = {"dict": dict, "ordered": collections.OrderedDict, "defaultdict": collections.defaultdict}
SEQUENCES = ("list", "tuple", "deque")


def _number(dice: random.Random) -> float:
    return dice.choice([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 1e-310, dice.gauss(0, 1e3)])


def _moment(dice: random.Random) -> datetime.datetime:
    zone = dice.choice([None, datetime.UTC, datetime.timezone(datetime.timedelta(hours=2))])
    return datetime.datetime.fromtimestamp(dice.randrange(2**31), tz=datetime.UTC).replace(tzinfo=zone)


def _text(dice: random.Random) -> str:
    return "".join(dice.choices(string.ascii_letters + ".\\$#[] 0é漢\n\0\"'", k=dice.randrange(8)))


PLAIN: dict[str, Callable[[random.Random], Any]] = {
    "none": lambda dice: None,
    "bool": lambda dice: dice.random() < 0.5,
    "int": lambda dice: dice.randrange(-(2**40), 2**40),
    "big int": lambda dice: dice.randrange(2**70, 2**90) * dice.choice([1, -1]),
    "float": _number,
    "complex": lambda dice: complex(_number(dice), _number(dice)),
    "str": _text,
    "bytes": lambda dice: dice.randbytes(dice.randrange(20)),
    "range": lambda dice: range(dice.randrange(9), dice.randrange(20), dice.randrange(1, 4)),
    "np.float64": lambda dice: np.float64(_number(dice)),
    "np.float32": lambda dice: np.float32(dice.gauss(0, 1)),
    "np.int64": lambda dice: np.int64(dice.randrange(-(2**60), 2**60)),
    "np.bool": lambda dice: np.bool_(dice.random() < 0.5),
    "decimal": lambda dice: decimal.Decimal(dice.randrange(10**9)) / 1000,
    "datetime": _moment,
    "date": lambda dice: datetime.date.fromordinal(dice.randrange(1, 3_000_000)),
    "time": lambda dice: datetime.time(dice.randrange(24), dice.randrange(60)),
    "timedelta": lambda dice: datetime.timedelta(seconds=dice.randrange(-(10**6), 10**6)),
    "uuid": lambda dice: uuid.UUID(int=dice.getrandbits(128)),
    "path": lambda dice: pathlib.PurePosixPath("a") / str(dice.randrange(99)),
    "dtype": lambda dice: dice.choice([torch.float32, torch.bfloat16, torch.int8]),
    "device": lambda dice: torch.device(dice.choice(["cpu", "cuda:1", "meta"])),
    "size": lambda dice: torch.Size([dice.randrange(5) for _ in range(dice.randrange(3))]),
    "counter": lambda dice: collections.Counter(dice.choices("abcd", k=dice.randrange(9))),
    "set": lambda dice: {dice.randrange(50) for _ in range(dice.randrange(6))},
    "set of mixed": lambda dice: {dice.choice([1, "a", b"b", None, 2.5, (1, "t")]) for _ in range(dice.randrange(4))},
    "frozenset": lambda dice: frozenset(_text(dice) for _ in range(dice.randrange(4))),
    "bytearray": lambda dice: bytearray(dice.randbytes(dice.randrange(9))),
    "array": lambda dice: array.array("d", [dice.random() for _ in range(dice.randrange(5))]),
    "numbers": lambda dice: [dice.random() for _ in range(dice.randrange(70))],
    "integers": lambda dice: [dice.randrange(1000) for _ in range(dice.randrange(70))],
    "recent": lambda dice: collections.deque([dice.random() for _ in range(dice.randrange(4))], maxlen=5),
    "ndarray": lambda dice: np.frombuffer(dice.randbytes(24), dtype="<f4").copy().reshape(2, 3),
    "ndarray of ints": lambda dice: np.array([dice.randrange(99) for _ in range(4)], dtype=np.int16),
}
"""Each kind of plain value, and how one of it is drawn; containers of plain values vary in length."""

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "channels last", "expanded", "sliding windows")
TIES = ("same", "view", "transpose")
SHAPES = [(), (0,), (1,), (7,), (3, 4), (2, 0, 3), (5, 1), (2, 3, 4, 5), (33,)]
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(3, 2),
    "batch norm": lambda: torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3)),
    "tied": lambda: _tied(),
    "embedding": lambda: torch.nn.Embedding(5, 3, padding_idx=0),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8),
    "parametrized": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)),
    "named oddly": lambda: torch.nn.ModuleDict({"a-b": torch.nn.Linear(1, 2), "0": torch.nn.LayerNorm(2)}),
    "without parameters": lambda: torch.nn.ReLU(),
    "bfloat16": lambda: torch.nn.GRU(2, 3).to(torch.bfloat16),
}
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda some: torch.optim.SGD(some, lr=0.1),
    "momentum": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9),
    "AdamW": lambda some: torch.optim.AdamW(some),
    "amsgrad": lambda some: torch.optim.Adam(some, amsgrad=True),
    "Adagrad": lambda some: torch.optim.Adagrad(some),
    "two groups": lambda some: torch.optim.RMSprop(_two_groups(some)),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda one: torch.optim.lr_scheduler.StepLR(one, 2),
    "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 9),
    "plateau": lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=1),
    "sequence": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [torch.optim.lr_scheduler.LinearLR(one, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(one, 0.9)],
        milestones=[2],
    ),
}
KEYS = [
    "a",
    "b.c",
    "",
    "$",
    "#0",
    "[7]",
    "k\\",
    "é",
    "config",
    "state",
    "params",
    0,
    7,
    -3,
    True,
    None,
    2.5,
    (1, "x"),
    b"k",
]


def _two_groups(some: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": some[:1]}, {"params": some[1:], "lr": 0.5}]


def _tied() -> torch.nn.Module:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    return torch.nn.Sequential(first, second)


# ------------------------------------------------------------------ blueprints


def blueprints() -> SearchStrategy[Blueprint]:
    """Return a Hypothesis strategy of blueprints of whole states."""
    from hypothesis import strategies

    return strategies.randoms(use_true_random=False).map(draw_blueprint)


def draw_blueprint(dice: random.Random) -> Blueprint:
    """Return the blueprint of a whole state: a dict with text as keys."""
    keys = dice.sample(
        ["model", "optimizer", "step", "meta", "a.b", "losses", "$", "x", "é", "config"], dice.randrange(1, 6)
    )
    return Blueprint("dict", keys=tuple(keys), items=tuple(_draw(dice, 3, _Tensors()) for _ in keys))


class _Tensors:
    """The tensors and objects drawn so far, for those that refer to them."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.modules = 0
        self.optimizers = 0


def _draw(dice: random.Random, depth: int, seen: _Tensors, objects: bool = True) -> Blueprint:
    """Return the blueprint of one place; modules and the like only with *objects*."""
    chance = dice.random()
    if depth and chance < 0.4:
        return _draw_container(dice, depth, seen, objects)
    if chance < 0.62:
        return _draw_tensor(dice, seen)
    if objects and chance < 0.7:
        return _draw_object(dice, seen)
    return Blueprint(dice.choice(sorted(PLAIN)))


def _draw_container(dice: random.Random, depth: int, seen: _Tensors, objects: bool) -> Blueprint:
    kind = dice.choice([*MAPPINGS, "dict", *SEQUENCES, "list"])
    if kind in MAPPINGS:
        keys = dice.sample(KEYS, dice.randrange(5))
        keys = [key for place, key in enumerate(keys) if key not in keys[:place]]
        objects &= kind != "defaultdict" and all(type(key) in (str, int) for key in keys)
        return Blueprint(kind, keys=tuple(keys), items=tuple(_draw(dice, depth - 1, seen, objects) for _ in keys))
    objects &= kind != "deque"
    return Blueprint(kind, items=tuple(_draw(dice, depth - 1, seen, objects) for _ in range(dice.randrange(4))))


def _draw_tensor(dice: random.Random, seen: _Tensors) -> Blueprint:
    if seen.shapes and dice.random() < 0.25:
        return Blueprint("tied", (dice.randrange(len(seen.shapes)), dice.choice(TIES)))
    shape = dice.choice(SHAPES)
    seen.shapes.append(shape)
    return Blueprint("tensor", (dice.choice(DTYPES), shape, dice.choice(LAYOUTS)))


def _draw_object(dice: random.Random, seen: _Tensors) -> Blueprint:
    if seen.optimizers and dice.random() < 0.3:
        return Blueprint("scheduler", (dice.choice(sorted(SCHEDULERS)), dice.randrange(seen.optimizers)))
    if seen.modules and dice.random() < 0.5:
        seen.optimizers += 1
        return Blueprint("optimizer", (dice.choice(sorted(OPTIMIZERS)), dice.randrange(seen.modules)))
    seen.modules += 1
    return Blueprint("module", (dice.choice(sorted(MODULES)),))


# ------------------------------------------------------------------ objects


def build(blueprint: Blueprint, seed: int) -> Any:
    """Make the state of a blueprint; another *seed* gives other values in the same structure."""
    return _Builder(seed).make(blueprint)


class _Builder:
    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._tensors: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def make(self, blueprint: Blueprint) -> Any:
        kind, facts = blueprint.kind, blueprint.facts
        if kind in PLAIN:
            return PLAIN[kind](self._dice)
        match kind:
            case "tensor":
                self._tensors.append(self._tensor(*facts))
                return self._tensors[-1]
            case "tied":
                return self._tied(*facts)
            case "module" | "optimizer" | "scheduler":
                return getattr(self, f"_{kind}")(*facts)
        items = [self.make(item) for item in blueprint.items]
        if kind in MAPPINGS:
            made: dict[Any, Any] = collections.defaultdict(list) if kind == "defaultdict" else MAPPINGS[kind]()
            made.update(zip(blueprint.keys, items, strict=True))
            if kind == "ordered":  # as a state_dict() is
                vars(made)["_metadata"] = {"": {"version": self._dice.randrange(9)}}
            return made
        return {"list": list, "tuple": tuple, "deque": collections.deque}[kind](items)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> torch.Tensor:
        if layout == "transposed" and len(shape) == 2:
            return self._filled(dtype, shape[::-1]).t()
        if layout == "strided" and shape:
            return self._filled(dtype, (*shape[:-1], 2 * shape[-1]))[..., ::2]
        if layout == "offset" and shape:
            return self._filled(dtype, (shape[0] + 2, *shape[1:]))[1 : shape[0] + 1]
        if layout == "expanded" and shape:
            return self._filled(dtype, (1, *shape[1:])).expand(shape)
        if layout == "sliding windows" and len(shape) == 2:
            return self._filled(dtype, (sum(shape),)).as_strided(shape, (1, 1))
        made = self._filled(dtype, shape)
        return (
            made.contiguous(memory_format=torch.channels_last)
            if layout == "channels last" and len(shape) == 4
            else made
        )

    def _filled(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.tensor([self._dice.random() < 0.5 for _ in range(math.prod(shape))], dtype=dtype).reshape(
                shape
            )
        raw = bytearray(self._dice.randbytes(max(1, math.prod(shape) * dtype.itemsize)))
        return (
            torch.frombuffer(raw, dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize]
            .clone()
            .view(dtype)
            .reshape(shape)
        )

    def _tied(self, number: int, how: str) -> torch.Tensor:
        base = self._tensors[number]
        if how == "transpose" and base.dim() == 2:
            return base.t()
        if how == "view" and base.is_contiguous():
            return base.view(-1)
        return base

    def _module(self, name: str) -> torch.nn.Module:
        torch.manual_seed(self._dice.getrandbits(32))
        module = MODULES[name]()
        with torch.no_grad():
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.uniform_(0.5, 1.5)
                else:
                    buffer.add_(self._dice.randrange(9))
        self._modules.append(module)
        return module

    def _optimizer(self, name: str, number: int) -> torch.optim.Optimizer:
        parameters = list(self._modules[number].parameters()) or [torch.nn.Parameter(torch.zeros(2))]
        if not list(self._modules[number].parameters()):
            self._modules[number].register_parameter("late", parameters[0])
        optimizer = OPTIMIZERS[name](parameters)
        for _ in range(self._dice.randrange(3)):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype)
            optimizer.step()
        optimizer.zero_grad()
        self._optimizers.append(optimizer)
        return optimizer

    def _scheduler(self, name: str, number: int) -> Any:
        optimizer = self._optimizers[number]
        scheduler = SCHEDULERS[name](optimizer)
        for _ in range(self._dice.randrange(4)):
            optimizer.step()
            scheduler.step(self._dice.random()) if name == "plateau" else scheduler.step()
        return scheduler
