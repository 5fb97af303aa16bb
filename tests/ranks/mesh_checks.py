"""The checks of meshes with three axes, pipeline stages and experts, through the whole engine: each loads the others."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import aiockpt
from tests.ranks.adapters_checks import Even, train
from tests.ranks.adapters_worker import Gathered, check, gather, mesh_of
from tests.ranks.engine_checks import CUT, open_checkpointer, shared_folder

State = dict[str, Any]
Jobs = Mapping[str, Callable[[int], State]]
STAGES = ("0", "1")
EXPERTS = tuple("01234567")


class Parts(nn.Module):
    """Some of the parts of a model, by name; a rank may have all of them or a few."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: torch.Tensor) -> Any:
        for part in self.parts.values():
            x = part(x)
        return x


def seeded(names: Sequence[str], seed: int, make: Callable[[nn.Module], nn.Module] = lambda part: part) -> Parts:
    """Return parts that have the same values on whichever ranks they are."""
    parts = {}
    for name in names:
        torch.manual_seed(100 * seed + int(name))
        parts[name] = make(Even())
    return Parts(parts)


def trained(model: nn.Module) -> State:
    """Return the state of a job after a step; ranks may have made different steps, of different parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer, "step": 1}


def save_all(jobs: Jobs, root: Path) -> dict[str, Gathered]:
    """Save a job of each kind, with values of its own; return what each had."""
    expected = {}
    for seed, (kind, make) in enumerate(jobs.items()):
        state = make(seed)
        expected[kind] = gather(state)
        if kind != "single" or dist.get_rank() == 0:
            with open_checkpointer(kind, root / kind) as ckpt:
                ckpt.save(1, state).result()
        dist.barrier()
    return expected


def load_each_other(jobs: Jobs) -> None:
    """Save a job of each kind, and load all into one job of each; all of it must come back, bit by bit."""
    root = shared_folder()
    expected = save_all(jobs, root)
    for target, make in jobs.items():
        state = make(100)
        for source, saved in expected.items():
            with open_checkpointer(target, root / source) as ckpt:
                assert ckpt.load(state).result() is not None
            found = gather(state)
            assert found.full.keys() == saved.full.keys(), (source, target, found.full.keys() ^ saved.full.keys())
            for name, full in saved.full.items():
                assert torch.equal(found.full[name], full), (source, target, name)
            dist.barrier()


# ------------------------------------------------------------------------------------------------ eight ranks


def _hsdp_and_tensor_parallel(seed: int) -> State:
    mesh = mesh_of(2, 2, 2, names=("replicate", "shard", "tensor"))
    model = seeded(STAGES, seed)
    for part in model.parts.values():
        fully_shard(parallelize_module(part, mesh["tensor"], CUT), mesh=mesh["replicate", "shard"])
    return trained(model)


def _stages_of_fsdp2_and_tensor_parallel(seed: int) -> State:
    mesh = mesh_of(2, 2, 2, names=("stage", "data", "tensor"))

    def make(part: nn.Module) -> nn.Module:
        fully_shard(parallelize_module(part, mesh["tensor"], CUT), mesh=mesh["data"])
        return part

    return trained(seeded([STAGES[mesh["stage"].get_local_rank()]], seed, make))


def _fsdp2_of_eight(seed: int) -> State:
    model = seeded(STAGES, seed)
    fully_shard(model, mesh=mesh_of(8))  # most have no row of the six of parts.*.down
    return trained(model)


@check(8)
def meshes_of_three_axes_and_pipeline_stages_load_each_other() -> None:
    load_each_other(
        {
            "hsdp-tp": _hsdp_and_tensor_parallel,
            "pp-fsdp2-tp": _stages_of_fsdp2_and_tensor_parallel,
            "fsdp2": _fsdp2_of_eight,
        }
    )


@check(8)
def training_of_hsdp_and_tensor_parallel_goes_on_bit_by_bit_after_a_load() -> None:
    root = shared_folder()
    state, again = _hsdp_and_tensor_parallel(1), _hsdp_and_tensor_parallel(2)
    with aiockpt.Checkpointer(root) as ckpt:
        ckpt.save(1, state).result()
        losses = [train(state["model"], state["optimizer"]) for _ in range(2)]
        ckpt.load(again).result()
    assert [train(again["model"], again["optimizer"]) for _ in range(2)] == losses


# ------------------------------------------------------------------------------------------------ experts, on four ranks


def _experts(seed: int, names: Sequence[str], make: Callable[[nn.Module], nn.Module] = lambda part: part) -> State:
    """A router that all have, and some experts; each is trained by itself."""
    torch.manual_seed(seed)
    router = nn.Linear(6, len(EXPERTS))
    experts = seeded(names, seed, make)
    groups: list[dict[str, Any]] = [
        {"params": list(router.parameters()), "lr": 0.1},
        {"params": list(experts.parameters())},
    ]
    optimizer = torch.optim.AdamW(groups, foreach=True)
    torch.manual_seed(7)
    x = torch.randn(4, 6)
    for part in (router, *experts.parts.values()):
        part(x).square().mean().backward()
    optimizer.step()
    return {"model": nn.ModuleDict({"router": router, "experts": experts}), "optimizer": optimizer}


def _expert_parallel(seed: int) -> State:
    rank = dist.get_rank()
    return _experts(seed, EXPERTS[2 * rank : 2 * rank + 2])


def _expert_parallel_and_fsdp2(seed: int) -> State:
    mesh = mesh_of(2, 2, names=("expert", "data"))

    def make(part: nn.Module) -> nn.Module:
        fully_shard(part, mesh=mesh["data"])
        return part

    group = mesh["expert"].get_local_rank()
    return _experts(seed, EXPERTS[4 * group : 4 * group + 4], make)


@check(4)
def experts_load_into_any_number_of_expert_groups() -> None:
    load_each_other(
        {
            "ep": _expert_parallel,
            "ep-fsdp2": _expert_parallel_and_fsdp2,
            "single": lambda seed: _experts(seed, EXPERTS),
        }
    )
