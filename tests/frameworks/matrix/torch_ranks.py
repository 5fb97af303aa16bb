"""The parallelisms of torch itself: DDP, FSDP1, FSDP2, HSDP, tensor parallelism, both at once; and a plain program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aiockpt
from tests.frameworks.matrix.net import STEPS, Known, Net, batch, groups_of, loss_of, settings_of
from tests.frameworks.matrix.rank import Ways, run, start

Wrap = Callable[[nn.Module], nn.Module]


class Program:
    """A training program with a model that *wrap* makes parallel."""

    def __init__(self, wrap: Wrap, seed: int, rate: float, *, same_data: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = wrap(Net())
        self.optimizer = torch.optim.AdamW(groups_of(self.model.named_parameters()), lr=rate)
        self._rank = 0 if same_data or not dist.is_initialized() else dist.get_rank()

    def train(self, step: int) -> None:
        words = batch(step, self._rank)
        torch.autograd.backward(loss_of(self.model(words), words))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, place: Path) -> None:
        with aiockpt.Checkpointer(place) as ckpt:
            ckpt.save(STEPS, {"model": self.model, "optimizer": self.optimizer})

    def load(self, place: Path) -> None:
        with aiockpt.Checkpointer(place) as ckpt:
            ckpt.load({"model": self.model, "optimizer": self.optimizer}).result()

    def known(self) -> Known:
        whole = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(self.model, options=whole)
        optimizer: Any = get_optimizer_state_dict(self.model, self.optimizer, options=whole)
        if not optimizer:  # the first rank has it
            return {}
        groups = {name: group for group in optimizer["param_groups"] for name in group["params"]}
        return {
            name: {"weight": weights[name], **state, **settings_of(groups[name])}
            for name, state in optimizer["state"].items()
        }


def _ddp(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def _fsdp1(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp2(net: nn.Module, **how: Any) -> nn.Module:
    for layer in net.children():
        fully_shard(layer, **how)
    fully_shard(net, **how)
    return net


def _hsdp(net: nn.Module) -> nn.Module:
    return _fsdp2(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel(net: nn.Module, mesh: Any = None) -> nn.Module:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(net, init_device_mesh("cpu", (4,)) if mesh is None else mesh, plan)


def _fsdp2_over_tensor_parallel(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return _fsdp2(_tensor_parallel(net, mesh["tensor"]), mesh=mesh["data"])


ALONE: Ways = {"plain": partial(Program, lambda net: net)}
TOGETHER: Ways = {
    "DDP": partial(Program, _ddp),
    "FSDP1": partial(Program, _fsdp1),
    "FSDP2": partial(Program, _fsdp2),
    "HSDP": partial(Program, _hsdp),
    "TP": partial(Program, _tensor_parallel, same_data=True),
    "FSDP2 and TP": partial(Program, _fsdp2_over_tensor_parallel, same_data=True),
}


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run one rank; a program alone is no job of torch.distributed."""
    if world_size > 1:
        start(rank, world_size, folder)
    run(TOGETHER if world_size > 1 else ALONE, folder)
