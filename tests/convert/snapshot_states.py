"""What the snapshots of torchsnapshot in the tests hold; tests/convert/snapshots has what the real library made of it."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

WRITTEN = Path(__file__).with_name("snapshots")
"""``one`` and ``two``: as torchsnapshot 0.1.0 wrote them on one rank and on two."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).to(dtype).view(shape)


def trained(start: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, whose numbers begin with *start*."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 + start)
    for parameter in model.parameters():
        parameter.data.copy_(numbers(*parameter.shape, start=start))
        slots = {name: numbers(*parameter.shape, start=start + 7) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(start)), **slots}
    return model, optimizer


def values() -> dict[str, Any]:
    """Return one of everything that it writes in a way of its own."""
    return {
        "step": 3,
        "rate": 0.1,
        "infinite": float("inf"),
        "name": "x/y ü\n",
        "raw": b"ab\x00\xff",
        "yes": True,
        "nothing": None,
        "pair": (1, 2),
        "size": torch.Size([2]),
        "no keys": {(1, 2): 3},
        "keys": {"a/b": numbers(2), 3: "x", "%41": 1, "-4": 2, "3 ": 4, "": {"/": [0]}},
        "ordered": OrderedDict(z=1, a=2),
        "list": [1, [2, numbers(2, 2).t()], *range(12)],
        "empty": {},
        "no items": [],
        "byte": numbers(3, dtype=torch.uint8),
        "double": numbers(2, dtype=torch.float64),
        "half": numbers(4, dtype=torch.bfloat16),
        "complex": numbers(2, dtype=torch.complex64),
        "scalar": torch.tensor(3.0),
        "flags": torch.tensor([True, False]),
    }


def of_rank(rank: int) -> dict[str, Any]:
    """Return what rank 0 or 1 has for itself."""
    return {
        "rank": rank,
        "common": 5,
        "pickled": (1, float("nan")),
        "kind": True if rank else 1,
        "zeros": torch.zeros(2, dtype=torch.int32 if rank else torch.float32),
        "tensor": numbers(3, start=rank),
        "equal": numbers(4),
        "chunked": numbers(40, start=rank),
        "chunks": numbers(40),
        "nested": {"list": [0, rank], "same": [1, float("nan")], f"only {rank}": rank},
    }


def written_on_two() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of `app_state` on two ranks, and what the second of them had otherwise."""
    differs = ("rank", "tensor", "chunked", "kind", "zeros")
    common = of_rank(0)
    common["nested"]["only 1"] = 1
    state = {
        "replicated": {"big": numbers(6, 8), "small": numbers(2), "text": "all"},
        "sharded": {"rows": numbers(7, 3)},
        "mine": common,
        "stage": {"of": 1, "weight": numbers(2, 2)},
    }
    return state, {"mine": {**{key: of_rank(1)[key] for key in differs}, "nested": {"list": [0, 1]}}}


def mixed(seed: int) -> dict[str, Any]:
    """Return a state of random form, as `torchsnapshot.StateDict` takes it."""
    chosen = random.Random(seed)

    def node(depth: int) -> Any:
        kind = chosen.randrange(4 if depth else 2)
        if kind == 0:
            dtype = chosen.choice([torch.float32, torch.float64, torch.uint8, torch.float16, torch.bool, torch.int16])
            return numbers(*(chosen.randint(1, 4) for _ in range(chosen.randrange(4))), dtype=dtype)
        if kind == 1:
            return chosen.choice([None, True, 7, -0.5, "a%2Fb", b"\x00", (1, "b")])
        if kind == 2:
            return [node(depth - 1) for _ in range(chosen.randrange(4))]
        keys = chosen.sample(["a", "b/c", "%", "0", 1, 2, "x y"], chosen.randrange(5))
        return {key: node(depth - 1) for key in keys}

    return {f"part {number}": node(4) for number in range(4)}
