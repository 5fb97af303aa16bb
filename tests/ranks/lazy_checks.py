"""The checks of lazy saves with real processes: parameters that are spread in every way are watched where torch counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiockpt
from aiockpt.pipeline import snapshot as copying
from tests.lazy.copy_gate import CopyGate
from tests.ranks.adapters_checks import train
from tests.ranks.adapters_worker import check, gather
from tests.ranks.engine_checks import DEADLINES, shared_folder, trained

SPREAD = ("ddp", "fsdp2", "hsdp", "tp", "tp-fsdp2", "fsdp1")
"""Plain tensors, shards, shards that have replicas, shards of either axis, strided shards, flat ranges."""


@contextmanager
def gated() -> Iterator[CopyGate]:
    gate = CopyGate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_copy_beside", gate(copying._copy_beside))
        try:
            yield gate
        finally:
            gate.open.set()


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in gather(state).full.items()}


def change_by_hand(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.add_(1)


@check(4)
def a_lazy_save_of_what_is_spread_is_the_state_of_its_call_or_none() -> None:
    root = shared_folder()
    for kind in SPREAD:
        state, expected = trained(kind, 1, 2), {}
        with (
            gated() as gate,
            aiockpt.Checkpointer(
                root / kind, snapshot="lazy", on_error="warn", limits=aiockpt.Limits(deadlines=DEADLINES)
            ) as ckpt,
        ):
            gate.open.set()
            for step in range(2):  # forward, backward and steps of the optimizer tear nothing
                expected[step] = full(state)
                save = ckpt.save(step, state)
                train(state["model"], state["optimizer"])
                save.result()
            gate.open.clear()
            torn = ckpt.save(2, state)
            change_by_hand(state)
            dist.barrier()  # a rank that is told of another's tear looks for none of its own
            gate.open.set()
            assert isinstance(torn.exception(), aiockpt.TornSnapshotError | aiockpt.RankError), (kind, torn)
            dist.barrier()
            gate.open.clear()
            expected[3] = full(state)
            save = ckpt.save(3, state)  # what tore is copied in this call
            change_by_hand(state)
            gate.open.set()
            save.result()
            assert [found.step for found in ckpt.steps().result()] == [3, 1, 0], kind
            for step, was in expected.items():
                ckpt.load({name: state[name] for name in ("model", "optimizer")}, step).result()
                found = full(state)
                assert all(torch.equal(found[name], tensor) for name, tensor in was.items()), (kind, step)
        dist.barrier()
