"""The checks of what people do with a job on many ranks, one thing after the other, through the public API alone.

Of the kind that torch tests its own checkpointing with: state dicts, hybrid sharding, fine-tuning, partial optimizer state.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from tests.ranks.adapters_checks import Even, job, train
from tests.ranks.adapters_worker import check, gather, mesh_of
from tests.ranks.engine_checks import DEADLINES, PARALLELISMS, shared_folder

State = dict[str, Any]


def save(root: Any, step: int, state: State, **how: Any) -> None:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
        ckpt.save(step, state, **how).result()


def load(root: Any, state: State, **how: Any) -> aiockpt.LoadResult:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
        loaded = ckpt.load(state, **how).result()
    assert loaded is not None
    return loaded


@check(4)
def state_dicts_of_torch_load_into_others_and_training_goes_on_bit_by_bit() -> None:
    """As `torch.distributed.checkpoint` is used: state dicts are saved, loaded in place, and set."""
    for kind in ("fsdp2", "hsdp", "ddp", "tp-fsdp2"):
        root = shared_folder()
        one, other = (job(PARALLELISMS[kind], Even, seed) for seed in (1, 2))
        for state in (one, other):  # the other has been trained, too: its state is there to be filled
            train(state["model"], state["optimizer"])
        names = ("model", "optimizer")
        save(root, 1, dict(zip(names, get_state_dict(one["model"], one["optimizer"]), strict=True)))
        losses = [train(one["model"], one["optimizer"]) for _ in range(2)]
        dicts: State = dict(zip(names, get_state_dict(other["model"], other["optimizer"]), strict=True))
        load(root, dicts)
        set_state_dict(
            other["model"], other["optimizer"], model_state_dict=dicts["model"], optim_state_dict=dicts["optimizer"]
        )
        assert [train(other["model"], other["optimizer"]) for _ in range(2)] == losses, kind


@check(4)
def weights_that_other_programs_wrote_fill_the_parts_of_each_rank() -> None:
    """Rows, columns and both, by `fork="hf://…"` and `fork="dcp://…"`."""
    for kind in ("fsdp2", "hsdp", "tp", "tp-fsdp2"):
        root = shared_folder()
        one = Even()
        if dist.get_rank() == 0:
            save_file(
                {name: torch.full_like(tensor, 3.0) for name, tensor in one.state_dict().items()},
                root / "w.safetensors",
            )
            full = {"model": {name: torch.full_like(tensor, 3.0) for name, tensor in one.state_dict().items()}}
            torch.save(full, root / "w.pt")
        dist.barrier()
        for fork in (f"hf://{root}", f"dcp://{root}/w.pt"):
            state = {"model": job(PARALLELISMS[kind], Even, 2)["model"]}
            load(root / f"run-{fork[:2]}", state, fork=fork)
            assert all(bool((full == 3.0).all()) for full in gather(state).full.values()), (kind, fork)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x)))


def _ddp_without_broadcasts(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


def _hsdp(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    return net


@check(4)
def buffers_that_differ_by_rank_come_back_as_rank_0_had_them() -> None:
    kinds: list[Callable[[nn.Module], nn.Module]] = [_ddp_without_broadcasts, _hsdp]
    for make in kinds:
        root = shared_folder()
        state = job(make, Normed, 1)
        train(state["model"], state["optimizer"], same=False)  # each rank has seen other data
        mine = {name.removeprefix("module."): buffer.clone() for name, buffer in state["model"].named_buffers()}
        every: list[Any] = [None] * 4
        dist.all_gather_object(every, mine)
        assert not torch.equal(every[0]["norm.running_mean"], every[3]["norm.running_mean"])
        save(root, 1, state)
        again = job(make, Normed, 2)
        load(root, again)
        for name, buffer in again["model"].named_buffers():
            assert torch.equal(buffer, every[0][name.removeprefix("module.")]), name


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Even(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.backbone(x))


def _tuned(net: nn.Module) -> nn.Module:
    net.get_submodule("backbone").requires_grad_(False)
    fully_shard(net.get_submodule("head"), mesh=mesh_of(4))
    fully_shard(net, mesh=mesh_of(4))
    return net


@check(4)
def a_pretrained_model_is_the_backbone_of_another_which_is_tuned_and_goes_on() -> None:
    root = shared_folder()
    pretrained = job(PARALLELISMS["tp"], Even, 1)
    train(pretrained["model"], pretrained["optimizer"])
    expected = gather({"model": pretrained["model"]})
    save(root / "pretrained", 1, pretrained)
    tuned = job(_tuned, Tuned, 2)
    part = load(root / "pretrained", {"model": tuned["model"]}, strict=False, map={"model.backbone": "model"})
    assert set(part.missing) == {"model.head.weight", "model.head.bias"}
    found = gather({"model": tuned["model"]})
    for name, full in expected.full.items():
        assert torch.equal(found.full[name.replace("model.", "model.backbone.")], full), name
    train(tuned["model"], tuned["optimizer"])
    save(root / "tuned", 2, tuned)
    losses = [train(tuned["model"], tuned["optimizer"]) for _ in range(2)]
    again = job(_tuned, Tuned, 3)
    load(root / "tuned", again)
    assert [train(again["model"], again["optimizer"]) for _ in range(2)] == losses


def _half_trained(make: Callable[[nn.Module], nn.Module], seed: int) -> State:
    """Return a job of two groups, whose second one has no gradients, and so no state."""
    torch.manual_seed(seed)
    model = make(Even())
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        frozen = "down" in name
        parameter.requires_grad_(not frozen)
        groups[frozen].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "lr": 0.02 * seed}, {"params": groups[1], "lr": 0.03 * seed}], lr=0.01
    )
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


@check(4)
def optimizer_state_that_only_some_parameters_have_loads_into_other_shardings() -> None:
    def fsdp1(net: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)

    makes: dict[str, Callable[[nn.Module], nn.Module]] = {"fsdp1": fsdp1, "hsdp": _hsdp, "ddp": DistributedDataParallel}
    for source, make in makes.items():
        root = shared_folder()
        state = _half_trained(make, 1)
        expected = gather(state)
        save(root, 1, state)
        for target, make_other in makes.items():
            other = _half_trained(make_other, 2)
            load(root, other)
            found = gather(other)
            assert found.full.keys() == expected.full.keys(), (source, target)
            assert all(torch.equal(found.full[name], full) for name, full in expected.full.items()), (source, target)
            assert [group["lr"] for group in other["optimizer"].param_groups] == [0.02, 0.03]
