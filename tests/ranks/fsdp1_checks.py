"""The checks of what FSDP1 flattens in an order or a part of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from aiockpt.adapters.native import StateWalker
from tests.ranks.adapters_checks import Even, job, raises, train, wrap_fsdp1
from tests.ranks.adapters_worker import Gathered, check, gather, mesh_of


class Images(nn.Module):
    """Convolutions whose weights lie in memory with the channels last, one of them 1×1, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 2, 1)
        self.turned = nn.Parameter(torch.randn(6, 3).t())

    def forward(self, x: torch.Tensor) -> Any:
        images = (x @ self.turned.t()).view(4, 3, 1, 1).expand(4, 3, 2, 2)
        return self.narrow(self.wide(images).relu())


def channels_last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def same_full(found: Gathered, expected: Gathered) -> None:
    """Check that the two have the same tensors, but for what sums in another order may change."""
    assert found.full.keys() == expected.full.keys()
    for name, tensor in expected.full.items():
        torch.testing.assert_close(found.full[name], tensor, msg=name)


def saved_as_plain(make: Callable[[nn.Module], nn.Module], model: Callable[[], nn.Module]) -> Gathered:
    """Return what a job holds after a step, having checked that before and after it that is what a plain job holds."""
    plain, flat = job(lambda net: net, model, 1), job(make, model, 1)
    start = gather(plain)
    for name, full in gather(flat).full.items():
        assert torch.equal(full, start.full[name]), name
    for state in (plain, flat):
        train(state["model"], state["optimizer"])
    saved = gather(flat)
    same_full(saved, gather(plain))
    return saved


@check(2)
def fsdp1_keeps_parameters_whose_axes_lie_in_another_order() -> None:
    def fsdp1(net: nn.Module) -> nn.Module:
        return wrap_fsdp1(channels_last(net), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))

    saved = saved_as_plain(fsdp1, Images)
    for make in (fsdp1, lambda net: net, wrap_fsdp1):
        other = job(make, Images, 2)
        saved.load(other)
        saved.equals(gather(other))


@check(4)
def fsdp1_over_tensor_parallel_parameters_knows_the_full_ones() -> None:
    mesh = mesh_of(2, 2, names=("data", "tensor"))

    def make(net: nn.Module) -> nn.Module:
        parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return FullyShardedDataParallel(
            net, device_mesh=mesh["data"], device_id=torch.device("cpu"), use_orig_params=True
        )

    saved = saved_as_plain(make, Even)
    for other in (job(make, Even, 2), job(lambda net: net, Even, 3)):
        saved.load(other)
        saved.equals(gather(other))


@check(2)
def fsdp1_over_what_it_cannot_explain_is_refused() -> None:
    model: Any = wrap_fsdp1(Even())
    flat = model._handle.flat_param
    flat._param_extensions = (object(), *flat._param_extensions[1:])
    raises("spread in its own way", lambda: StateWalker().walk({"m": model}))
    model = wrap_fsdp1(channels_last(Images()))
    flat = model._handle.flat_param
    flat._strides = tuple(tuple(2 * step for step in strides) for strides in flat._strides)
    raises("with gaps", lambda: StateWalker().walk({"m": model}))
