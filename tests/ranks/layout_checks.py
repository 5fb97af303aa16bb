"""The checks of tensors whose axes lie in another order in memory, on several ranks, through the whole engine."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from tests.ranks.adapters_worker import check, mesh_of
from tests.ranks.engine_checks import DEADLINES, shared_folder

State = dict[str, Any]


class Turned(torch.optim.Optimizer):
    """Keeps the moment of a matrix with its columns one after the other, as optimizers that rotate gradients do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = turned(torch.zeros_like(parameter))
                state["moment"].lerp_(parameter.grad, 0.5)
                parameter.sub_(state["moment"], alpha=group["lr"])


def turned(tensor: Any) -> Any:
    """Return *tensor* with its columns one after the other in the memory of this rank, where it is a matrix."""
    if tensor.dim() != 2:
        return tensor
    if isinstance(tensor, DTensor):
        local = turned(tensor.to_local())
        shape, stride = tensor.shape, (1, tensor.shape[0])
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        )
    return tensor.t().contiguous().t()


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def make(seed: int, kind: str) -> State:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4, bias=False))
    if kind == "FSDP2":
        fully_shard(model)
    elif kind == "DDP":
        model = DistributedDataParallel(model)
    return {"model": model, "optimizer": Turned(model.parameters())}


def train(state: State, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(100 + number)
        state["model"](torch.randn(3, 4)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def moments(state: State) -> list[tuple[tuple[int, ...], list[float]]]:
    """Return how the moments lie in memory here, and their elements."""
    found = [local(state["optimizer"].state[one]["moment"]) for one in state["model"].parameters()]
    return [(one.stride(), one.flatten().tolist()) for one in found]


@check(2)
def made_state_of_an_optimizer_lies_in_memory_as_on_the_ranks_that_saved_it() -> None:
    for kind in ("DDP", "FSDP2"):
        root = shared_folder()
        saved, fresh = make(1, kind), make(2, kind)
        train(saved, 2)
        with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
            ckpt.save(1, saved).result()
            told = {tensor.name: tensor.axes for tensor in ckpt.describe(1).result().tensors}
            ckpt.load(fresh).result()
        assert [axes for name, axes in told.items() if "moment" in name and "weight" in name] == [(1, 0)] * 2, told
        assert moments(fresh) == moments(saved), kind
        assert any(stride[0] == 1 for stride, _ in moments(fresh)), kind
        train(saved, 2)
        train(fresh, 2)
        assert moments(fresh) == moments(saved), kind


@check(2)
def what_ranks_have_in_different_orders_says_nothing_of_the_whole() -> None:
    root, rank = shared_folder(), dist.get_rank()
    mesh = mesh_of(2)
    whole = torch.arange(24.0).view(6, 4)
    state = {"cut": distribute_tensor(whole.clone(), mesh, [Shard(0)])}
    if rank:
        state["cut"] = turned(state["cut"])
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
        ckpt.save(1, state).result()
        assert ckpt.describe(1).result().tensors[0].axes is None
        assert torch.equal(ckpt.read(1, "cut").result(), whole)
        into = {"cut": turned(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))}
        ckpt.load(into).result()
    assert torch.equal(into["cut"].to_local(), whole.chunk(2)[rank])
