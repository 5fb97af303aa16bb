"""One rank of a job that saves and loads through torch.distributed.checkpoint, with plain DCP and with our storage.

Every rank runs `CHECKS` in the same order; ``tests.ranks.forked`` starts it. What a check gets wrong is in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aiockpt
from aiockpt.convert.foreign import load, open_checkpoint, save_as_step
from aiockpt.integrations.dcp import AiockptReader, AiockptWriter

dcp: Any = import_module("torch.distributed.checkpoint")
OPTIONS = StateDictOptions()


class Net(nn.Module):
    """Two layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


def plain() -> nn.Module:
    return Net()


def fsdp2() -> nn.Module:
    model = Net()
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def hsdp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return cast(nn.Module, fully_shard(Net(), mesh=mesh))


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return cast(nn.Module, fully_shard(model, mesh=mesh["dp"]))


JOBS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "fsdp2": fsdp2, "hsdp": hsdp, "tp": tensor_parallel}


def job(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained job of a kind; of one seed all kinds have the same values at first."""
    torch.manual_seed(seed)
    model = JOBS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + seed)
    for step in range(2):
        torch.manual_seed(1000 * seed + step)
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer, "step": step, "words": ["a", {"b": (1, None)}]}


def full(value: Any) -> Any:
    """Return a state dict with whole tensors."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list):
        return [full(item) for item in value]
    return value


def same(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for place, item in enumerate(expected):
            same(found[place], item, f"{path}[{place}]")
    else:
        assert type(found) is type(expected), path
        assert found == expected, path


def each_sharding_loads_into_each(folder: Path) -> None:
    for seed, saved in enumerate(JOBS):
        model, optimizer = job(saved, seed)
        state = state_of(model, optimizer, seed)
        dcp.save(state, storage_writer=AiockptWriter(folder / saved))
        expected = full(state)
        for wanted in JOBS:
            other, other_optimizer = job(wanted, 9)
            target = state_of(other, other_optimizer, -1)
            dcp.load(target, storage_reader=AiockptReader(folder / saved))
            same(full(target), expected, f"{saved} into {wanted}")
            set_state_dict(
                other,
                other_optimizer,
                model_state_dict=target["model"],
                optim_state_dict=target["optimizer"],
                options=OPTIONS,
            )
            same(full(state_of(other, other_optimizer, seed)), expected, f"{saved} set into {wanted}")


def modules_load_what_dcp_has_saved(folder: Path) -> None:
    for saved in ("fsdp2", "tp"):
        model, optimizer = job("plain", 9)
        with aiockpt.Checkpointer(folder / saved) as ckpt:
            ckpt.load({"model": model, "optimizer": optimizer}).result()
        expected, expected_optimizer = job(saved, list(JOBS).index(saved))
        same(
            full(state_of(model, optimizer, 0)),
            full(state_of(expected, expected_optimizer, 0)),
            f"{saved} into modules",
        )


def what_plain_dcp_has_saved_is_read_and_converted(folder: Path) -> None:
    for seed, saved in enumerate(JOBS):
        model, optimizer = job(saved, seed)
        state = state_of(model, optimizer, seed)
        dcp.save(state, checkpoint_id=folder / f"theirs-{saved}")
        dist.barrier()
        found = open_checkpoint(folder / f"theirs-{saved}")
        for wanted in JOBS:
            other, other_optimizer = job(wanted, 9)
            load(found, {"model": other, "optimizer": other_optimizer})
            same(full(state_of(other, other_optimizer, seed)), full(state), f"{saved} into {wanted}")
        if dist.get_rank() == 0:
            save_as_step(found, folder / f"made-of-{saved}", ranks=aiockpt.Ranks())
        dist.barrier()
        other, other_optimizer = job("fsdp2", 9)
        with aiockpt.Checkpointer(folder / f"made-of-{saved}") as ckpt:
            ckpt.load({"model": other, "optimizer": other_optimizer}).result()
        same(full(state_of(other, other_optimizer, seed)), full(state), f"{saved} converted")


def an_asynchronous_save_is_that_of_the_call(folder: Path) -> None:
    model, optimizer = job("fsdp2", 3)
    state = state_of(model, optimizer, 3)
    expected = full(state)
    writer = AiockptWriter(folder / "later")
    saving = dcp.async_save(state, storage_writer=writer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    target = state_of(*job("hsdp", 4), 0)
    dcp.load(target, storage_reader=AiockptReader(folder / "later"))
    same(full(target), expected)
    writer.close()


def a_rank_that_fails_ends_the_save_of_all(folder: Path) -> None:
    class Broken(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 2:
                raise OSError("no such thing")
            return super().resolve_data(write_item)

    writer, state = AiockptWriter(folder / "broken"), state_of(*job("fsdp2", 0), 0)
    with pytest.raises(dcp.CheckpointException, match="no such thing") as refused:
        dcp.save(state, storage_writer=writer, planner=Broken())
    assert set(refused.value.failures) == {0, 1, 2, 3}
    dcp.save(state, storage_writer=writer)
    dcp.load(target := state_of(*job("tp", 1), 0), storage_reader=AiockptReader(folder / "broken"))
    same(full(target), full(state))


def plans_that_are_remembered_save_what_is_there(folder: Path) -> None:
    model, optimizer = job("fsdp2", 0)
    writer = AiockptWriter()
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        state = state_of(model, optimizer, step)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=folder / f"cached-{step}", storage_writer=writer, planner=planner)
        dcp.load(target := state_of(*job("hsdp", 1), 0), storage_reader=AiockptReader(folder / f"cached-{step}"))
        same(full(target), full(state))


def each_rank_for_itself(folder: Path) -> None:
    own = folder / f"own-{dist.get_rank()}"
    dcp.save({"x": torch.full((3,), dist.get_rank())}, checkpoint_id=own, storage_writer=AiockptWriter(), no_dist=True)
    dcp.load(
        found := {"x": torch.zeros(3, dtype=torch.int64)},
        checkpoint_id=own,
        storage_reader=AiockptReader(),
        no_dist=True,
    )
    assert found["x"].tolist() == [dist.get_rank()] * 3


def a_group_of_some_ranks(folder: Path) -> None:
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    mesh = DeviceMesh.from_group(groups[number], "cpu")
    full_tensor = torch.arange(5.0) + number
    state = {"x": distribute_tensor(full_tensor, mesh, [Shard(0)])}
    writer = AiockptWriter(folder / f"group-{number}", process_group=groups[number])
    dcp.save(state, storage_writer=writer, process_group=groups[number])
    dist.barrier()
    if number == 0:
        with pytest.raises(
            dcp.CheckpointException, match="runs on 2 ranks, and the group that AiockptWriter knows has 4"
        ):
            dcp.save(state, storage_writer=AiockptWriter(folder / "unknown"), process_group=groups[0])
    dcp.load(found := {"x": torch.zeros(5)}, storage_reader=AiockptReader(folder / f"group-{1 - number}"), no_dist=True)
    assert torch.equal(found["x"], torch.arange(5.0) + 1 - number)


def without_collectives(folder: Path) -> None:
    state = state_of(*job("fsdp2", 0), 0)
    dcp.save(state, storage_writer=AiockptWriter(folder / "alone"), use_collectives=False)
    dcp.load(target := state_of(*job("tp", 1), 0), storage_reader=AiockptReader(folder / "alone"))
    same(full(target), full(state))


CHECKS = [
    each_sharding_loads_into_each,
    modules_load_what_dcp_has_saved,
    what_plain_dcp_has_saved_is_read_and_converted,
    an_asynchronous_save_is_that_of_the_call,
    a_rank_that_fails_ends_the_save_of_all,
    plans_that_are_remembered_save_what_is_there,
    each_rank_for_itself,
    a_group_of_some_ranks,
    without_collectives,
]


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run the checks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    outcomes: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(folder)
            outcomes[check.__name__] = ""
        except Exception:  # noqa: BLE001  the parent judges
            outcomes[check.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()
