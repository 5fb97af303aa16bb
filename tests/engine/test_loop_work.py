"""The time that a save of many tensors holds the interpreter, beside that of one of few."""

import sys
from types import FrameType
from typing import cast

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.options import Snapshot
from aiockpt.runtime.loop import LoopThread


def calls_of_a_warm_save(tensors: int, snapshot: Snapshot) -> int:
    """Return how many functions, of Python and of C, Python calls on the loop thread for one save."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(tensors)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with aiockpt.Checkpointer("memory://", snapshot=snapshot) as ckpt:
        state = {"model": model, "optimizer": optimizer}
        for step in range(3):
            ckpt.save(step, state).result()
        portal = cast(LoopThread, ckpt._engine.loop)._portal
        portal.call(sys.setprofile, count)
        ckpt.save(3, state).result()
        portal.call(sys.setprofile, None)
    return calls


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_the_loop_does_little_for_each_known_tensor(snapshot: Snapshot) -> None:
    few, many = calls_of_a_warm_save(100, snapshot), calls_of_a_warm_save(2100, snapshot)
    assert (many - few) / 2000 < 3
