"""The checks of replicas with real processes: what ranks have differently is told by name, whatever spreads the rest."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from tests.docs.pages import ROOT, blocks, section
from tests.ranks.adapters_checks import Even, train
from tests.ranks.adapters_worker import check, mesh_of
from tests.ranks.engine_checks import DEADLINES, shared_folder

Made = tuple[dict[str, Any], torch.Tensor, str]
"""A state, the same on all ranks; a tensor of it, or its local part; and its name."""


def _trained(model: nn.Module, **how: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def _net() -> Even:
    torch.manual_seed(3)
    return Even()


def _ddp_parameter() -> Made:
    state = _trained(DistributedDataParallel(_net()))
    return state, state["model"].module.up.weight, "model.up.weight"


def _ddp_momentum() -> Made:
    state = _trained(DistributedDataParallel(_net()))
    weight = state["model"].module.down.weight
    return state, state["optimizer"].state[weight]["exp_avg"], "optimizer.state.model.down.weight.exp_avg"


def _step_count() -> Made:
    state = _trained(_net())
    return state, state["optimizer"].state[state["model"].up.bias]["step"], "optimizer.state.model.up.bias.step"


def _ema_module() -> Made:
    state = {**_trained(DistributedDataParallel(_net())), "ema": torch.optim.swa_utils.AveragedModel(_net())}
    return state, state["ema"].module.up.bias, "ema.module.up.bias"


def _in_a_list() -> Made:
    kept = [{"bank": [torch.ones(7), torch.ones(300, 5)]}]
    return {"kept": kept}, kept[0]["bank"][1], "kept[0].bank[1]"


def _fsdp2_ignored_parameter() -> Made:
    net = _net()
    fully_shard(net, mesh=mesh_of(2), ignored_params={net.get_parameter("down.weight")})
    return _trained(net, foreach=False), net.down.weight, "model.down.weight"


def _fsdp1_ignored_module() -> Made:
    net = _net()
    model = FullyShardedDataParallel(
        net, device_id=torch.device("cpu"), use_orig_params=True, ignored_modules=[net.down]
    )
    return _trained(model), net.down.bias, "model.down.bias"


def _ema_of_local_parts() -> Made:
    """Equal here, as it is where all parts begin with zeros; each rank's own as soon as they are trained."""
    net = _net()
    fully_shard(net, mesh=mesh_of(2))
    ema = {name: torch.zeros_like(weight.to_local()) for name, weight in net.named_parameters()}  # type: ignore[attr-defined]
    return {**_trained(net), "ema": ema}, ema["up.weight"], "ema.up\\.weight"


def _experts_under_local_names() -> Made:
    """Expert or tensor parallelism without DTensors, or a stage of a pipeline: the same names, each rank's own values."""
    state = _trained(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    for tensor in (
        *state["model"].parameters(),
        *(one for kept in state["optimizer"].state.values() for one in kept.values()),
    ):
        tensor.data.fill_(1)
    return state, state["model"][1].weight, "model.1.weight"


def _zero() -> Made:
    model = DistributedDataParallel(_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}, model.module.up.weight, "model.up.weight"


KINDS: list[Callable[[], Made]] = [
    _ddp_parameter,
    _ddp_momentum,
    _step_count,
    _ema_module,
    _in_a_list,
    _fsdp2_ignored_parameter,
    _fsdp1_ignored_module,
    _ema_of_local_parts,
    _experts_under_local_names,
    _zero,
]


def _tell_differences(make: Callable[[], Made], odd_rank: int, **options: Any) -> None:
    """Save what is equal, then what one rank has differently; it must be named on every rank, and no other tensor."""
    root = shared_folder()
    state, tensor, name = make()
    with aiockpt.Checkpointer(
        root, limits=aiockpt.Limits(deadlines=DEADLINES), on_error=lambda future: None, **options
    ) as ckpt:
        ckpt.save(1, state).result()
        alike = tensor.detach().clone()
        if dist.get_rank() == odd_rank:
            with torch.no_grad(), ckpt.mutating():
                tensor.add_(1)
        error = ckpt.save(2, state).exception()
        assert isinstance(error, aiockpt.ReplicasDifferError), (make, error)
        assert error.tensors == (name,), (make, error)
        assert name in str(error)
        with torch.no_grad(), ckpt.mutating():
            tensor.copy_(alike)
        ckpt.save(3, state).result()
        dist.barrier()
        assert [step.step for step in ckpt.steps().result()] == [3, 1]


@check(2)
def what_ranks_have_differently_is_told_by_name_in_the_call() -> None:
    for make in KINDS:
        _tell_differences(make, odd_rank=1)


@check(2)
def what_ranks_have_differently_is_told_of_a_lazy_snapshot() -> None:
    for make in KINDS:
        _tell_differences(make, odd_rank=0, snapshot="lazy")


@check(2)
def what_ranks_have_differently_is_told_by_writer_processes() -> None:
    for make in (_ddp_momentum, _fsdp2_ignored_parameter):
        _tell_differences(make, odd_rank=1, worker="process")


@check(4)
def a_shard_that_its_replicas_have_differently_is_told() -> None:
    def make() -> Made:
        net = _net()
        fully_shard(net, mesh=mesh_of(2, 2, names=("replicate", "shard")))
        weight = net.up.weight
        assert isinstance(weight, DTensor)
        return _trained(net), weight.to_local(), "model.up.weight"

    for odd_rank in (0, 3):
        _tell_differences(make, odd_rank)


@check(2)
def batch_statistics_that_ranks_have_differently_are_those_of_rank_0() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = DistributedDataParallel(net)
    state = _trained(model)
    train(model, state["optimizer"], same=False)
    mean = net[1].running_mean
    assert isinstance(mean, torch.Tensor)
    of_rank_0 = mean.clone()
    dist.broadcast(of_rank_0, 0)
    assert dist.get_rank() == 0 or not torch.equal(mean, of_rank_0)
    for saved in (state, {"model": net.state_dict(), "deep": [{"of": copy.deepcopy(net).state_dict()}]}):
        root = shared_folder()
        with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
            ckpt.save(1, saved).result()
            name = "model.1.running_mean" if saved is state else "model.1\\.running_mean"
            assert torch.equal(ckpt.read(1, name).result(), of_rank_0)


@check(2)
def each_way_out_of_the_guide_brings_back_what_each_rank_had() -> None:
    ways = blocks(section(ROOT / "docs/guide/ranks.md", "Replicas that differ"), "python")
    assert len(ways) == 3
    rank = dist.get_rank()
    for way in ways:
        mine = torch.full((4, 3), 1.0 + rank)
        scope: dict[str, Any] = {"aiockpt": aiockpt, "torch": torch, "model": _net(), "my_experts": mine, "keys": mine}
        exec(way, scope)
        root = shared_folder()
        with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
            ckpt.save(1, scope["state"]).result()
            mine.zero_()
            ckpt.load(scope["state"]).result()
        held = scope["state"].get("queue")
        assert (mine if held is None else held.value["keys"]).eq(1 + rank).all(), way
