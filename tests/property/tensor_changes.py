"""The changes of the table of `aiockpt.lazy.guards` that need nothing but a tensor, plain or a DTensor."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def counters_of(tensor: torch.Tensor) -> tuple[int, ...]:
    parts = [tensor, tensor._local_tensor] if isinstance(tensor, DTensor) else [tensor]
    return tuple(part._version for part in parts)


def set_counters(tensor: torch.Tensor, versions: tuple[int, ...]) -> None:
    parts = (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,)
    torch._C._autograd._unsafe_set_version_counter(parts, versions)  # pyright: ignore[reportAttributeAccessIssue]


def like(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(tensor, value)


@torch.no_grad()
def in_place(tensor: torch.Tensor) -> None:
    tensor.lerp_(like(tensor, 7.0), 0.5)


@torch.no_grad()
def by_view(tensor: torch.Tensor) -> None:
    part = tensor.view(-1) if isinstance(tensor, DTensor) else tensor.detach().view(-1)[1:]
    part.add_(1)


def by_module(tensor: torch.Tensor) -> None:
    holder = nn.ParameterList()
    holder.append(tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))
    holder.load_state_dict({"0": like(tensor.detach(), 3.0)})


@torch.no_grad()
def locally(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        tensor.to_local().add_(1)


@torch.no_grad()
def foreach(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 1.5)  # pyright: ignore[reportPrivateImportUsage]


def by_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def by_numpy(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    array = local.detach().numpy()
    array += 1


@torch.no_grad()
def fused(tensor: torch.Tensor) -> None:
    others = [[like(tensor, 1.0)] for _ in range(3)]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_([tensor], *others, [], [torch.tensor(1.0)], amsgrad=False, maximize=False, **rates)  # type: ignore[call-overload]


def resize(tensor: torch.Tensor) -> None:
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    storage.resize_(2 * storage.nbytes())


MAKE: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": in_place,
    "view": by_view,
    "init": lambda tensor: nn.init.constant_(tensor, 0.25),
    "load_state_dict": by_module,
    "local": locally,
    "foreach": foreach,
    "data": by_data,
    "numpy": by_numpy,
    "fused": fused,
    "resized": resize,
}
