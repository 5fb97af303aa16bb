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


def main(options: dict[str, object]) -> None:
    """Train, and save in the background."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    job = Job(dropout=0.1, **options)  # type: ignore[arg-type]  # as they were written
    model = unwrapped(job).sharded_state_dict()
    first = 0
    if dist_checkpointing.latest("runs/gpt") is not None:
        optimizer = dist_checkpointing.optimizer_state(job.optimizer, model, is_loading=True)
        asked = {"model": model, "optimizer": optimizer, "rng_state": random_state(), "iteration": 0}
        loaded = dist_checkpointing.load(asked, "runs/gpt")
        unwrapped(job).load_state_dict(loaded["model"])
        dist_checkpointing.load_optimizer_state(job.optimizer, loaded["optimizer"])
        set_random_state(loaded["rng_state"])
        first = loaded["iteration"]
    for iteration in range(first + 1, STEPS + 1):
        job.step(iteration)
        if iteration % EVERY == 0:
            state = {
                "model": model,
                "optimizer": dist_checkpointing.optimizer_state(job.optimizer, model),
                "rng_state": random_state(),
                "iteration": iteration,
            }
            dist_checkpointing.save(state, f"runs/gpt/iter_{iteration:07}", async_sharded_save=True)
    dist_checkpointing.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(variable, value)
    main({name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
