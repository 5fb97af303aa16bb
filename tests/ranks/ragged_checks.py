"""The checks of tensors that are cut raggedly, as veScale documents its RaggedShard."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from aiockpt.adapters.native import StateWalker
from tests.ranks.adapters_checks import raises
from tests.ranks.adapters_worker import check, gather, mesh_of


@dataclasses.dataclass(frozen=True)
class RaggedShard(Placement):
    """A part of the flattened tensor for each rank: ``local_units`` says how large; blocks of trailing axes stay whole."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class StridedRaggedShard(RaggedShard):
    """A ragged cut of what another placement has cut before."""

    split_factor: int = 2


def spread(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any], *, axis: int = 0, flat: bool = True) -> DTensor:
    """Return *full* as the DTensor that veScale makes of it: its local tensor is flat, or has the trailing axes."""
    ragged: Any = placements[axis]
    unit, index = full.numel() // sum(ragged.local_units), mesh.get_local_rank(axis)
    start = sum(ragged.local_units[:index]) * unit
    local = full.flatten()[start : start + ragged.local_units[index] * unit].clone()
    if not flat:
        local = local.view(-1, *full.shape[len(ragged.dims) :])
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(full.shape, full.stride(), full.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


@check(4)
def ragged_shards_are_put_together_again_and_cut_otherwise() -> None:
    torch.manual_seed(0)
    flat, square = mesh_of(4), mesh_of(2, 2)
    for shape, dims, units in (
        ((10, 6), (0,), (1, 2, 1, 1)),
        ((8, 3), (0,), (1, 2, 1, 0)),
        ((4, 5, 6), (0, 1), (3, 0, 1, 1)),
        ((30,), (0,), (0, 0, 0, 1)),
        ((7, 9), (0, 1), (1, 1, 1, 4)),
    ):
        full = torch.randn(shape)
        for local_is_flat in (True, False):
            saved = gather({"x": spread(full, flat, [RaggedShard(dims, units)], flat=local_is_flat)})
            assert torch.equal(saved.full["x"], full), (shape, units)
            for made in (
                spread(full * 0, flat, [RaggedShard(dims, units[::-1])], flat=local_is_flat),
                distribute_tensor(full * 0, flat, [Shard(0)], src_data_rank=None),
                full * 0,
            ):
                saved.load({"x": made})
                saved.equals(gather({"x": made}))
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        held = spread(torch.arange(6.0), half, [RaggedShard((0,), (1, 2))])
    else:
        meta = TensorMeta(torch.Size([6]), (1,), torch.float32)
        spec = DTensorSpec(half, (RaggedShard((0,), (1, 2)),), tensor_meta=meta)
        held = DTensor(torch.empty(0), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    assert torch.equal(gather({"x": held}).full["x"], torch.arange(6.0))
    full = torch.randn(6, 4)
    for placements, axis in (
        ([RaggedShard((0,), (1, 2)), Replicate()], 0),
        ([Replicate(), RaggedShard((0,), (2, 1))], 1),
    ):
        saved = gather({"x": spread(full, square, placements, axis=axis)})
        assert torch.equal(saved.full["x"], full)


@check(4)
def optimizer_state_of_ragged_parameters_is_made_as_they_are() -> None:
    mesh = mesh_of(4)
    full = torch.arange(60.0).view(10, 6)

    def make(units: tuple[int, ...], *, with_state: bool) -> tuple[nn.Module, torch.optim.AdamW]:
        module = nn.Module()
        module.weight = nn.Parameter(spread(full, mesh, [RaggedShard((0,), units)]))
        optimizer = torch.optim.AdamW(module.parameters())
        if with_state:
            moments = {
                name: spread(full * factor, mesh, [RaggedShard((0,), units)]) for name, factor in MOMENTS.items()
            }
            optimizer.state[module.weight] = {"step": torch.tensor(3.0), **moments}
        return module, optimizer

    module, optimizer = make((1, 2, 1, 1), with_state=True)
    saved = gather({"model": module, "optimizer": optimizer})
    other, later = make((2, 0, 0, 3), with_state=False)
    saved.load({"model": other, "optimizer": later})
    (state,) = later.state.values()
    assert state["exp_avg"].placements == (RaggedShard((0,), (2, 0, 0, 3)),)
    saved.equals(gather({"model": other, "optimizer": later}))


MOMENTS = {"exp_avg": 2.0, "exp_avg_sq": 3.0}


@check(4)
def ragged_shards_that_do_not_add_up_are_refused() -> None:
    flat, square = mesh_of(4), mesh_of(2, 2)
    full = torch.randn(10, 6)
    even = spread(full, flat, [RaggedShard((0,), (1, 2, 1, 1))])

    def refused(says: str, mesh: DeviceMesh, *placements: Any) -> None:
        spec = DTensorSpec(mesh, placements, tensor_meta=even._spec.tensor_meta)
        tensor = DTensor(even._local_tensor, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        raises(says, lambda: StateWalker().walk({"x": tensor}))

    refused("beside Replicate", square, RaggedShard((0,), (1, 2)), Shard(1))
    refused("beside Replicate", square, RaggedShard((0,), (1, 2)), RaggedShard((0,), (1, 2)))
    refused("beside Replicate", flat, StridedRaggedShard((0,), (1, 2, 1, 1)))
    for units in ((1, 2, 1), (1, 2, 1, 3), (0, 0, 0, 0), (-1, 2, 3, 1)):
        refused("divide into its units", flat, RaggedShard((0,), units))
    if dist.get_rank() < 2:
        refused("one behind another", flat, RaggedShard((0,), (2, 1, 1, 1)))
