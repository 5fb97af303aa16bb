"""The checks of estimates on several ranks: each writes what it was said to write."""

import torch
import torch.distributed as dist
from torch import nn

from aiockpt.sizing.to_come import ONLY_SEEN, SUPPOSED
from tests.ranks.adapters_checks import job
from tests.ranks.adapters_worker import check
from tests.ranks.engine_checks import PARALLELISMS, open_checkpointer, shared_folder

AS_SUPPOSED = ("ddp", "fsdp2", "tp", "tp-fsdp2")
"""Where each rank can tell by itself what it will write; under hybrid sharding it takes too much for its own."""


class Wide(nn.Module):
    """What is larger than the headers of its files, with a buffer that each rank has its own of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
        self.register_buffer("seen", torch.zeros(300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).relu())
        return found


@check(4)
def what_a_rank_was_said_to_write_is_what_it_writes() -> None:
    root, rank = shared_folder(), dist.get_rank()
    for kind in ("ddp", "fsdp2", "hsdp", "tp", "tp-fsdp2", "fsdp1"):
        state = job(PARALLELISMS[kind], Wide, 0)
        with open_checkpointer(kind, root / kind) as ckpt:
            if rank == 1:
                ckpt.estimate(state).result()  # one alone may ask
            before = ckpt.estimate(state).result()
            state["model"](torch.ones(2, 256)).square().mean().backward()
            state["optimizer"].step()
            ckpt.save(1, state).result()
            after = ckpt.estimate(state).result()
            stored = sum(tensor.bytes for tensor in ckpt.describe(1).result().tensors)
            own = sum(file.stat().st_size for file in (root / kind).glob(f"step-*/a-*/d/r{rank:05d}-*"))
        assert SUPPOSED in before.assumptions, kind
        assert ONLY_SEEN in after.assumptions, kind
        assert SUPPOSED not in after.assumptions, kind
        assert after.rank_file_bytes == own, (kind, after.rank_file_bytes, own)
        if kind != "fsdp1":  # where a rank does not know of what lies on others alone
            assert after.step_bytes == stored, (kind, after.step_bytes, stored)
            assert abs(before.step_bytes - stored) <= 0.01 * stored, (kind, before.step_bytes, stored)
        if kind in AS_SUPPOSED:
            assert abs(before.rank_file_bytes - own) <= 0.02 * own, (kind, before.rank_file_bytes, own)
            assert before.files == after.files, kind
        assert before.rank_file_bytes >= 0.98 * own, (kind, before.rank_file_bytes, own)
        dist.barrier()
        on_disk = sum(file.stat().st_size for file in (root / kind).rglob("*") if file.is_file())
        if kind != "fsdp1":
            assert abs(after.disk_bytes - on_disk) <= 0.05 * on_disk, (kind, after.disk_bytes, on_disk)
        dist.barrier()
