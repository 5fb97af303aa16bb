"""The checks of reading once with real processes: what several ranks want is read by one of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from tests.ranks.adapters_worker import check, gather, mesh_of
from tests.ranks.engine_checks import DEADLINES, open_checkpointer, shared_folder, trained

SMALL = aiockpt.IO(pool_bytes=1 << 22, slab_bytes=1 << 18, block_bytes=1 << 16, read_bytes=1 << 18)
WIDTH, LAYERS = 256, 16
NBYTES = LAYERS * WIDTH * WIDTH * 4


def net(value: float) -> nn.Module:
    """Return a model of 4 MiB full of numbers that follow from *value*."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) + value * 1e6 + number)
    return layers


def holds(model: nn.Module, value: float) -> bool:
    return all(torch.equal(one, other) for one, other in zip(model.parameters(), net(value).parameters(), strict=True))


def total(count: int) -> int:
    """Return the sum over all ranks."""
    found = torch.tensor(count)
    dist.all_reduce(found)
    return int(found)


def save_replicas(root: Path, *steps: int) -> None:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=SMALL, deadlines=DEADLINES)) as ckpt:
        for step in steps:
            ckpt.save(step, {"model": DistributedDataParallel(net(step))}).result()


def open_with_group(root: Path, group: Any, io: aiockpt.IO = SMALL) -> aiockpt.Checkpointer:
    limits = aiockpt.Limits(io=io, deadlines=DEADLINES)
    return aiockpt.Checkpointer(root, ranks=aiockpt.Ranks(load_group=group), limits=limits)


@check(4)
def replicas_are_read_once_and_received_by_the_others() -> None:
    root = shared_folder()
    save_replicas(root, 1)
    model = net(0)
    with open_with_group(root, dist.group.WORLD) as ckpt:
        for _ in range(2):
            nn.init.zeros_(model[0].weight)  # type: ignore[index]
            loaded = ckpt.load({"model": DistributedDataParallel(model)}).result()
            assert loaded is not None
            assert holds(model, 1)
            assert loaded.received_bytes + loaded.read_bytes >= NBYTES
            assert NBYTES <= total(loaded.read_bytes) <= 1.1 * NBYTES
            assert loaded.read_bytes <= 1.2 * NBYTES / 4


@check(4)
def without_a_group_every_replica_is_read_by_each() -> None:
    root = shared_folder()
    save_replicas(root, 1)
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=SMALL, deadlines=DEADLINES)) as ckpt:
        loaded = ckpt.load({"model": net(0)}).result()
    assert loaded is not None
    assert loaded.received_bytes == 0
    assert loaded.read_bytes >= NBYTES


@check(4)
def replicas_of_shards_are_read_once_by_the_group_of_each_shard() -> None:
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    groups: list[Any] = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1, 3], backend="gloo")]
    assert dist.get_process_group_ranks(mesh.get_group("replicate")) == dist.get_process_group_ranks(
        groups[dist.get_rank() % 2]
    )
    root = shared_folder()
    expected = _save(root, "hsdp")
    state = trained("hsdp", 2, 1)
    with open_with_group(root, groups[dist.get_rank() % 2], io=aiockpt.IO(block_bytes=4096)) as ckpt:
        loaded = ckpt.load(state).result()
    assert loaded is not None
    assert total(loaded.received_bytes) > 0
    _check_equal(state, expected)


@check(4)
def any_parallelism_reads_once_what_another_one_saved() -> None:
    group = dist.new_group(backend="gloo")
    for source, targets in {"fsdp2": ("ddp", "hsdp", "tp-fsdp2"), "tp": ("fsdp1", "ddp", "tp")}.items():
        root = shared_folder()
        expected = _save(root, source)
        for target in targets:
            alone, together = trained(target, 2, 1), trained(target, 2, 1)
            with open_checkpointer(target, root) as ckpt:
                read_alone = ckpt.load(alone).result()
            with open_with_group(root, group, io=aiockpt.IO(block_bytes=4096)) as ckpt:
                read_once = ckpt.load(together).result()
            assert read_alone is not None
            assert read_once is not None
            _check_equal(together, expected)
            assert total(read_once.read_bytes) <= total(read_alone.read_bytes), (source, target)


def _save(root: Path, kind: str) -> Any:
    """Save a trained state in blocks of 4 KiB; return it, gathered."""
    state = trained(kind, 1, 2)
    with aiockpt.Checkpointer(
        root, limits=aiockpt.Limits(io=aiockpt.IO(block_bytes=4096), deadlines=DEADLINES)
    ) as ckpt:
        ckpt.save(2, state).result()
    return gather(state)


def _check_equal(state: Mapping[str, Any], expected: Any) -> None:
    found = gather(state)
    for name, full in expected.full.items():
        assert torch.equal(found.full[name], full), name


@check(4)
def what_is_no_group_of_this_rank_is_refused() -> None:
    other: Any = dist.new_group([0, 1], backend="gloo")
    with pytest.raises(aiockpt.UsageError, match="not a process group"):
        aiockpt.Checkpointer("memory://refused", ranks=aiockpt.Ranks(load_group=3))
    if dist.get_rank() > 1:  # torch gives a rank outside a group something else
        with pytest.raises(aiockpt.UsageError, match="not a process group"):
            aiockpt.Checkpointer("memory://refused", ranks=aiockpt.Ranks(load_group=other))
