"""How does one rank of the elastic demo train, tell what happens to a file, and die on cue?"""

from __future__ import annotations

import os
import sys

import msgspec
import torch
from torch import distributed

from aiockpt.events import Observer
from aiockpt.examples.child import DieInSave, Teller
from aiockpt.examples.train_elastic import train


class ElasticJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one phase are to do.

    Attributes:
        url: where the checkpoints are.
        tell: the file that a rank tells what happens, but for its rank and ``.jsonl``.
        tensor_parallel: ranks that split a matrix.
        every: save every so many steps; None never saves.
        die_in_save_of: the step in whose save the last rank kills itself; None to live.
    """

    url: str
    tell: str
    tensor_parallel: int
    steps: int
    every: int | None
    die_in_save_of: int | None = None


def run(job: ElasticJob) -> None:
    """Train as *job* says; started by torchrun, once for each rank."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    teller = Teller(os.open(f"{job.tell}.{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    observers: list[Observer] = [teller]
    if job.die_in_save_of is not None and rank == distributed.get_world_size() - 1:
        observers.append(DieInSave(job.die_in_save_of))
    train(
        job.url,
        tensor_parallel=job.tensor_parallel,
        steps=job.steps,
        every=job.every,
        on_step=teller.on_step,
        observers=observers,
    )
    distributed.destroy_process_group()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=ElasticJob))
