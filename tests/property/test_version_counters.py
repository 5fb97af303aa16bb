"""What torch counts, and what it does not: all of it private behaviour that the guards of a lazy save rely upon."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from aiockpt.lazy.guards import CHANGES, Change, Guard
from tests.property.tensor_changes import MAKE, counters_of, local

ones = torch.ones(64, 8)

COUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "one element": lambda t: t.__setitem__((3, 2), 5.0),
    "a slice": lambda t: t[5:9].fill_(3),
    "view": lambda t: t.view(-1).mul_(2),
    "view of another dtype": lambda t: t.view(torch.int32).add_(1),
    "as_strided": lambda t: t.as_strided((3,), (1,)).fill_(4),
    "t": lambda t: t.t().mul_(2),
    "detach": lambda t: t.detach().add_(1),
    "copy_": lambda t: t.copy_(ones),
    "lerp_": lambda t: t.lerp_(ones, 0.5),
    "masked_fill_": lambda t: t.masked_fill_(t > -9, 7),
    "index_put_": lambda t: t.index_put_((torch.tensor([1]),), torch.ones(8)),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([1]), torch.ones(1, 8)),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 1.0),
    "renorm_": lambda t: t.renorm_(2, 0, 1e-3),
    "out=": lambda t: torch.add(t, 1, out=t),
    "out= of a product": lambda t: torch.mm(torch.ones(64, 4), torch.ones(4, 8), out=t),
    "inside vmap": lambda t: torch.func.vmap(lambda row: row.add_(1))(t),
    "_foreach_add_": lambda t: torch._foreach_add_([t], 1.0),  # pyright: ignore[reportPrivateImportUsage]
    "_foreach_mul_": lambda t: torch._foreach_mul_([t], 3.0),  # pyright: ignore[reportPrivateImportUsage]
    "_foreach_lerp_": lambda t: torch._foreach_lerp_([t], [ones], 0.5),  # pyright: ignore[reportPrivateImportUsage]
    "_foreach_copy_": lambda t: torch._foreach_copy_([t], [ones]),  # pyright: ignore[reportPrivateImportUsage]
    "_foreach_zero_": lambda t: torch._foreach_zero_([t]),  # pyright: ignore[reportPrivateImportUsage]
    "_foreach_addcdiv_": lambda t: torch._foreach_addcdiv_([t], [ones], [ones]),  # pyright: ignore[reportPrivateImportUsage]
}
INITS = (
    "uniform_ normal_ ones_ zeros_ eye_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ trunc_normal_"
)
INITS += " orthogonal_ constant_ sparse_"


@contextlib.contextmanager
def expect(tensor: torch.Tensor, moves: bool) -> Iterator[None]:
    """Check that the block changes *tensor*, and whether torch counts that."""
    before, was = tensor._version, tensor.detach().clone()
    yield
    assert not torch.equal(tensor.detach(), was)
    assert (tensor._version != before) == moves


def parameter() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(64, 8))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", COUNTED)
def test_torch_counts_every_operation_in_place(change: str, inference: bool) -> None:
    tensor = parameter()
    mode: Any = torch.inference_mode if inference else torch.no_grad
    moves = not (inference and change == "view of another dtype")  # that view has a counter of its own
    with expect(tensor, moves=moves), mode():
        COUNTED[change](tensor)


@pytest.mark.parametrize("init", INITS.split())
def test_torch_counts_initialisation(init: str) -> None:
    tensor = parameter()
    extra: Any = {"constant_": (9.0,), "sparse_": (0.5,)}.get(init, ())
    with expect(tensor, moves=True):
        getattr(nn.init, init)(tensor, *extra)


def test_the_counter_belongs_to_all_views_and_to_what_a_parameter_was_made_of() -> None:
    flat = torch.zeros(100)
    made, detached = nn.Parameter(flat[:50]), flat[50:].detach()
    apart = nn.Parameter(flat[:50].data)
    flat.add_(1)
    assert (made._version, detached._version, apart._version) == (1, 1, 0)


def test_a_tensor_of_inference_mode_has_no_counter() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert tensor.is_inference()
    with pytest.raises(RuntimeError, match="do not track version counter"):
        tensor._version  # noqa: B018


def test_torch_does_not_count_what_collectives_write(mesh: DeviceMesh) -> None:
    tensor = parameter()
    dist.broadcast(tensor.detach(), 0)
    dist.all_reduce(tensor.detach())
    assert tensor._version == 0


@pytest.mark.parametrize("on_dtensor", [False, True])
@pytest.mark.parametrize("change", [change for change in CHANGES if change.key in MAKE], ids=lambda change: change.key)
def test_the_table_says_what_is_counted_and_where(change: Change, on_dtensor: bool, mesh: DeviceMesh) -> None:
    plain = torch.ones(64)
    tensor = nn.Parameter(distribute_tensor(plain, mesh, [Shard(0)]) if on_dtensor else plain)
    before, was = counters_of(tensor), local(tensor).clone()
    MAKE[change.key](tensor)
    outer, *inner = [now != then for now, then in zip(counters_of(tensor), before, strict=True)]
    found: Guard = "outer counter" if on_dtensor and outer else "counter" if outer or any(inner) else "sample"
    guard = change.dtensor_host if on_dtensor else change.host
    if guard not in ("place", "–"):
        assert found == guard
        assert not torch.equal(local(tensor), was)
    on_device = change.dtensor_device if on_dtensor else change.device
    assert on_device == ("nothing" if guard == "sample" else guard)


@pytest.mark.parametrize("foreach", [False, True])
def test_forward_and_backward_of_fsdp2_move_no_counter_and_a_step_of_its_optimizer_may(
    foreach: bool, mesh: DeviceMesh
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    before = [counters_of(parameter) for parameter in model.parameters()]
    model(torch.randn(4, 8)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert [counters_of(parameter) for parameter in model.parameters()] == before
    optimizer.step()
    assert ([counters_of(parameter) for parameter in model.parameters()] != before) == (not foreach)
