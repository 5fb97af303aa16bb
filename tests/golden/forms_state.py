"""The states in the golden checkpoints of the stored forms: of optimizers, of values, and of what ranks write together.

Run as a program it writes those of the version that is installed: once for each release, never again. `retired` is what is
stored otherwise since 22 November: commit a217025 wrote it, by this file with the place and one more argument.
"""

import datetime
import enum
import random
import sys
from array import array
from collections import deque
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.data import DataLoader

import aiockpt

State = dict[str, Any]
PLACE = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "forms" / f"v{aiockpt.__version__}")
NUMBERS = 1024
BATCHES = 6
FORMS = ("object", "numbers", "names", "flat", "rare")
"""Of optimizers, each in the step of its place here. `rare` is an object with a parameter that is in no module, with state
that is no tensor, and with state of no parameter."""


class Color(enum.Enum):
    RED = 1


class Net(torch.nn.Module):
    """A module with buffers, extra state and the versions of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.extra = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), "unset"

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


class Coded(torch.Tensor):
    """A tensor that is made of another."""

    __module__ = "tests.golden.forms_state"  # the name in the checkpoint, also when this file is run as a program
    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        made = make(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], {"bits": 8}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, *_: Any) -> Any:
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


class Counting:
    """A source of batches that saves itself."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < BATCHES:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> State:
        return {"at": self.at}

    def load_state_dict(self, state: State) -> None:
        self.at = state["at"]


def fill(tensors: Any) -> None:
    """Write numbers into *tensors* that are exact and differ from one to the other."""
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            tensor.copy_((torch.arange(tensor.numel()).view(tensor.shape) + number) / 8)


def net(*, filled: bool) -> Net:
    model = Net()
    if filled:
        fill(net_tensors(model))
        model.extra = "saved"
    return model


def optimizer_state(form: str, *, filled: bool) -> State:
    """Return a module and its optimizer in a form, with the numbers of the golden checkpoints where it is *filled*."""
    model = net(filled=filled)
    own = [torch.nn.Parameter(torch.zeros(2))] if form == "rare" else []
    groups: list[dict[str, Any]] = [
        {"params": [model.linear.weight], "lr": 0.5},
        {"params": [model.linear.bias, *model.norm.parameters(), *own]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.25 if filled else 9.0)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if filled:
        fill([*net_tensors(model), *own])
        fill(tensor for entry in optimizer.state.values() for tensor in entry.values())
    if form == "rare" and filled:
        optimizer.state[model.linear.weight]["note"] = ["text", 3]
        optimizer.state["seen"] = {"tokens": 5}  # type: ignore[index]
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    if form == "numbers":
        return {"model": model, "optimizer": optimizer.state_dict()}
    if form in ("names", "flat"):
        return {"model": model, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    return {"model": model, "optimizer": optimizer}


def net_tensors(model: Net) -> list[torch.Tensor]:
    return [tensor for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]


def plain_values() -> State:
    """Return a value of each kind that the other golden checkpoints have not."""
    zone = datetime.timezone(datetime.timedelta(hours=2))
    csr = torch.tensor([[0.0, 1.5], [2.5, 0.0]]).to_sparse_csr()
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([1, 2])
    return {
        "floats": [float("nan"), float("-inf"), -0.0, complex(float("inf"), -0.0)],
        "times": [datetime.date(2026, 1, 2), datetime.time(3, 4, fold=1), datetime.timedelta(1, 2, 3)],
        "zone": datetime.datetime(2026, 1, 2, 3, tzinfo=zone),
        "paths": [PurePosixPath("a/b"), PureWindowsPath("c:/d")],
        "bytes": [bytearray(b"ab"), array("d", [0.5])],
        "numbers": [tuple(range(NUMBERS)), [number % 3 == 0 for number in range(NUMBERS)]],
        "window": deque((number / 2 for number in range(NUMBERS)), maxlen=NUMBERS),
        "codec": [Color.RED],
        "numpy": [np.array(["2026-01-02"], "datetime64[D]"), np.float64(0.25), np.bool_(True)],
        "state_dict": net(filled=True).state_dict(),
        "csr": csr,
        "channels": torch.quantize_per_channel(torch.arange(4.0).view(2, 2), scales, zeros, 0, torch.qint8),
        "coded": Coded(torch.arange(6, dtype=torch.int8).view(2, 3)),
    }


def sharded(rank: int = 0, size: int = 1) -> Any:
    sampler = aiockpt.ShardedSampler(2 * BATCHES, batch_size=2, seed=1, rank=rank, size=size)
    return DataLoader(list(range(2 * BATCHES)), batch_sampler=sampler)  # type: ignore[arg-type]


def loaders() -> State:
    """Return what each rank has of its own, and data loaders of two of the three stored forms."""
    counting: Any = Counting()
    state = {"parts": aiockpt.Loader(sharded()), "whole": aiockpt.Loader(counting)}
    return state | {"rng": aiockpt.RNG(), "own": aiockpt.per_rank({"of this rank": (0,)})}


def trained() -> State:
    return {"trained": aiockpt.Loader(sharded(), count="trained")}


def retired(*, filled: bool) -> State:
    """Return what is stored otherwise since: tensors as keys, schedulers without class, no `_metadata`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if filled:
        optimizer.step()
        scheduler.step()
    return {"scheduler": scheduler, "keys": {torch.ones(2): 1, "a": 2} if filled else {"a": 0}} | {
        "state_dict": net(filled=filled).state_dict()
    }


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def begun(state: State) -> list[Any]:
    """Take two batches of each loader, of which the first was trained; return the iterations that are under way."""
    under_way = []
    for loader in (one for one in state.values() if isinstance(one, aiockpt.Loader)):
        under_way.append(iter(loader))
        first, _ = next(under_way[-1]), next(under_way[-1])
        if loader is state.get("trained"):
            loader.trained(first)
    seed(5)
    return under_way


def write(place: Path, *states: State) -> None:
    with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=aiockpt.IO(block_bytes=4096))) as ckpt:
        for step, state in enumerate(states):
            under_way = begun(state)
            sys.stdout.write(f"{ckpt.save(step, state).result()} {len(under_way)}\n")


if __name__ == "__main__":
    aiockpt.register_codec("golden color", Color)
    if sys.argv[2:]:  # by an older commit
        write(PLACE / "retired", retired(filled=True), loaders())
    else:
        write(PLACE / "optimizers", *(optimizer_state(form, filled=True) for form in FORMS))
        write(PLACE / "values", plain_values(), loaders() | trained())
