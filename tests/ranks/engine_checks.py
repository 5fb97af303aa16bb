"""The checks of the whole engine with real processes: any parallelism saves, and any other one loads it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from tests.ranks.adapters_checks import Even, job, train
from tests.ranks.adapters_worker import FOLDERS, check, gather, mesh_of

DEADLINES = aiockpt.Deadlines(ranks_s=30, commit_s=30, close_s=60)
CUT = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _fsdp2(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=mesh_of(4))
    return net


def _hsdp(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    return net


def _tensor_parallel(net: nn.Module) -> nn.Module:
    return parallelize_module(net, mesh_of(4), CUT)


def _tensor_parallel_and_fsdp2(net: nn.Module) -> nn.Module:
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    fully_shard(parallelize_module(net, mesh["tensor"], CUT), mesh=mesh["data"])
    return net


def _fsdp1(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


PARALLELISMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "single": lambda net: net,
    "ddp": DistributedDataParallel,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tensor_parallel,
    "tp-fsdp2": _tensor_parallel_and_fsdp2,
    "fsdp1": _fsdp1,
}


def shared_folder() -> Path:
    """Return a new folder that all ranks know, until the check has ended."""
    name = [tempfile.mkdtemp(prefix="aiockpt-ranks-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    FOLDERS.append(Path(name[0]))
    return FOLDERS[-1]


def trained(kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the state of a job of this parallelism after some steps; other seeds, other values."""
    state = job(PARALLELISMS[kind], Even, seed)
    for _ in range(steps):
        train(state["model"], state["optimizer"])
    return {**state, "step": steps, "own": aiockpt.per_rank(dist.get_rank())}


def open_checkpointer(kind: str, folder: Path) -> aiockpt.Checkpointer:
    """Return a checkpointer as a program of this parallelism has it: a single process knows of no others."""
    ranks = aiockpt.Ranks() if kind == "single" else None
    return aiockpt.Checkpointer(folder, ranks=ranks, limits=aiockpt.Limits(deadlines=DEADLINES))


@check(4)
def any_parallelism_saves_and_any_other_loads() -> None:
    """Each saves a step with values of its own, so that one state serves all loads of a kind."""
    root = shared_folder()
    expected = {}
    for step, source in enumerate(PARALLELISMS):
        state = trained(source, step, 2)
        expected[source] = gather(state)
        if source != "single" or dist.get_rank() == 0:
            with open_checkpointer(source, root) as ckpt:
                ckpt.save(step, state).result()
        dist.barrier()
    for target in PARALLELISMS:
        state = trained(target, 100, 1)
        with open_checkpointer(target, root) as ckpt:
            for step, source in enumerate(PARALLELISMS):
                loaded = ckpt.load({name: state[name] for name in ("model", "optimizer", "step")}, step).result()
                assert loaded is not None, (source, target)
                found = gather(state)
                for name, full in expected[source].full.items():
                    assert torch.equal(found.full[name], full), (source, target, name)
        dist.barrier()


@check(4)
def a_replicated_state_is_written_once_and_by_all_ranks() -> None:
    root = shared_folder()
    state = {"model": DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16))))}
    with open_checkpointer("ddp", root) as ckpt:
        written = ckpt.save(1, state).result().bytes
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, written)
    whole = 16 * 256 * 256 * 4
    assert whole <= sum(everyone) < whole + 4 * 8192
    assert max(everyone) - min(everyone) <= 8192


@check(2)
def training_goes_on_bit_by_bit_after_a_load() -> None:
    root = shared_folder()
    state = trained("fsdp1", 1, 2)
    with open_checkpointer("fsdp1", root) as ckpt:
        ckpt.save(2, state).result()
    losses = [train(state["model"], state["optimizer"]) for _ in range(3)]
    again = trained("fsdp1", 5, 1)
    with open_checkpointer("fsdp1", root) as ckpt:
        ckpt.load(again).result()
    assert again["own"].value == dist.get_rank()
    assert [train(again["model"], again["optimizer"]) for _ in range(3)] == losses
