"""Snapshots written by torchsnapshot: on one rank, and on each of two that ``tests.ranks.forked`` starts.

``python -m tests.frameworks.torchsnapshot_ranks`` writes those of tests/convert/snapshots anew.
"""

from __future__ import annotations

import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard

from tests.convert.snapshot_states import WRITTEN, numbers, of_rank, trained, values, written_on_two
from tests.ranks.forked import run_forked

with warnings.catch_warnings():  # it was written for an older torch
    warnings.simplefilter("ignore")
    from torchsnapshot import (  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]
        RNGState,
        Snapshot,
        StateDict,
    )

__all__ = ["RNGState", "Snapshot", "StateDict"]
SMALL = {
    "TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE": "64",
    "TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE": "24",
}
"""So that small tensors are cut, as it cuts those of more than 512 MiB."""


def take_one(folder: Path) -> None:
    """Write the snapshot of one rank."""
    model, optimizer = trained(1)
    Snapshot.take(str(folder), {"model": model, "optimizer": optimizer, "values": StateDict(**values())})


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Write the snapshot of two ranks into folder/two."""
    os.environ.update(SMALL)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    state, _ = written_on_two()
    app: dict[str, Any] = {
        "replicated": StateDict(**state["replicated"]),
        "sharded": StateDict(rows=_rows(rank)),
        "mine": StateDict(**of_rank(rank)),
    }
    if rank == 1:
        app["stage"] = StateDict(**state["stage"])
    Snapshot.take(str(folder / "two"), app, replicated=["replicated/**"])
    dist.barrier()
    dist.destroy_process_group()


def _rows(rank: int) -> Any:
    """Return this rank's rows of a tensor: 4 of 7, or 3."""
    first, count = (0, 4) if rank == 0 else (4, 3)
    place = ShardMetadata(shard_offsets=[first, 0], shard_sizes=[count, 3], placement=f"rank:{rank}/cpu")
    return init_from_local_shards([Shard(numbers(7, 3)[first : first + count].clone(), place)], 7, 3)


def _write_all() -> None:
    shutil.rmtree(WRITTEN, ignore_errors=True)
    WRITTEN.mkdir()
    take_one(WRITTEN / "one")
    run_forked("tests.frameworks.torchsnapshot_ranks", 2, WRITTEN, 100)
    for left in ("0.log", "1.log", "store"):
        (WRITTEN / left).unlink(missing_ok=True)


if __name__ == "__main__":
    _write_all()
