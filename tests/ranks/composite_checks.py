"""The check of tensors that are made of others and spread over ranks, as optimizers of 8 bits under FSDP2 have them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import aiockpt
from tests.adapters.test_composites import Scaled, equal, scaled
from tests.ranks.adapters_worker import check, mesh_of
from tests.ranks.engine_checks import DEADLINES, shared_folder


class Viewed(Scaled):
    """The same, that a DTensor can be made of."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.view.default:
            return cls(args[0].codes, args[0].scale, args[0].block)
        return super().__torch_dispatch__(func, types, args, kwargs)


def local(seed: int, rows: int) -> Viewed:
    made = scaled(seed, rows=rows)
    return Viewed(made.codes, made.scale, made.block)


@check(2)
def a_dtensor_around_a_wrapper_class_comes_back_where_the_sharding_is_the_same() -> None:
    root, rank = shared_folder(), dist.get_rank()
    mesh: Any = mesh_of(2)

    def make(seed: int) -> dict[str, Any]:
        uneven, same = local(seed + rank, rows=5 - rank), local(seed + 9, rows=2)
        shape, stride = torch.Size((9, 4)), (4, 1)
        return {
            "cut": DTensor.from_local(uneven, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride),
            "same": DTensor.from_local(same, mesh, [Replicate()], run_check=False),
        }

    one, other = make(1), make(50)
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, one, snapshot="lazy" if step == 2 else "eager").result()
            names = {tensor.name for tensor in ckpt.describe(step).result().tensors}
        assert {"cut.@0:5,0:4.codes", "cut.@5:9,0:4.scale", "same.@0:2,0:4.codes"} <= names, names
        ckpt.load(other).result()
        for name in one:
            assert equal(one[name]._local_tensor, other[name]._local_tensor), name
        whole = {"cut": DTensor.from_local(local(3, rows=9), mesh, [Replicate()], run_check=False)}
        with pytest.raises(aiockpt.StateMismatchError, match=r"(?s)elements 0:9,0:4.*0:5,0:4, 5:9,0:4"):
            ckpt.load(whole).result()
