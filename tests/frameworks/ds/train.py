"""A small training script of DeepSpeed with the switch: ``torchrun … -m tests.frameworks.ds.train [stage=3] …``.

It goes on where the run of ``runs/zero`` ends.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.integrations.deepspeed import attach
from tests.frameworks.ds.job import Job, deepspeed

STEPS, EVERY = 16, 2


class Even(nn.Sequential):
    """Parameters that two ranks share without padding, which ZeRO-3 leaves as the memory was, and so differs in each run."""

    def __init__(self) -> None:
        layers = [nn.Embedding(12, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 12)]
        super().__init__(*layers)


def main(options: dict[str, object]) -> None:
    """Train, and save in the background."""
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    job = Job(module=Even(), **options)  # type: ignore[arg-type]  # as they were written
    words = TensorDataset(torch.randint(0, 12, (48, 8), generator=torch.Generator().manual_seed(5)))
    loader = aiockpt.Loader(DataLoader(words, batch_sampler=aiockpt.ShardedSampler(len(words), 4)))
    attach(job.engine, "runs/zero", state={"loader": loader})
    job.engine.load_checkpoint("runs/zero")
    while job.engine.global_steps < STEPS:
        for (batch,) in loader:
            job.train(batch.flatten())
            if job.engine.global_steps % EVERY == 0:
                job.engine.save_checkpoint("runs/zero", client_state={"done": job.engine.global_steps})
            if job.engine.global_steps == STEPS:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        store = tempfile.NamedTemporaryFile()  # noqa: SIM115  as long as the program
        dist.init_process_group("gloo", init_method=f"file://{store.name}-store", rank=0, world_size=1)
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    words = [word.partition("=") for word in sys.argv[1:]]
    main({name: int(value) if value.isdigit() else value for name, _, value in words})
