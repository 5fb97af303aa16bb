"""A small training script of Megatron's GPT with the switch: ``torchrun … -m tests.frameworks.mcore.train [tp=2] [pp=2] …``.

It goes on where the run of ``runs/gpt`` ends.
"""

from __future__ import annotations

import ast
import os
import sys

import torch
import torch.distributed as dist

from aiockpt.integrations import megatron as dist_checkpointing
from tests.frameworks.mcore.job import Job, random_state, set_random_state, unwrapped

STEPS, EVERY = 16, 2


def go_on(job: Job, place: str, until: int, every: int, step: int | None = None) -> int:
    """Train from the newest step, or from *step*; return where it began."""
    model = unwrapped(job).sharded_state_dict()
    first = 0
    if dist_checkpointing.latest(place) is not None:
        optimizer = dist_checkpointing.optimizer_state(job.optimizer, model, is_loading=True)
        asked = {"model": model, "optimizer": optimizer, "rng_state": random_state(), "iteration": 0}
        loaded = dist_checkpointing.load(asked, place if step is None else f"{place}/iter_{step:07}")
        unwrapped(job).load_state_dict(loaded["model"])
        dist_checkpointing.load_optimizer_state(job.optimizer, loaded["optimizer"])
        set_random_state(loaded["rng_state"])
        first = int(loaded["iteration"])
    for iteration in range(first + 1, until + 1):
        job.step(iteration)
        if iteration % every == 0:
            state = {
                "model": model,
                "optimizer": dist_checkpointing.optimizer_state(job.optimizer, model),
                "rng_state": random_state(),
                "iteration": iteration,
            }
            dist_checkpointing.save(state, f"{place}/iter_{iteration:07}", async_sharded_save=True)
    dist_checkpointing.wait()
    return first


def main(options: dict[str, object]) -> None:
    """Train, and save in the background."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    go_on(Job(dropout=0.1, **options), "runs/gpt", STEPS, EVERY)  # type: ignore[arg-type]  # as they were written
    dist.destroy_process_group()


if __name__ == "__main__":
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(variable, value)
    main({name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
