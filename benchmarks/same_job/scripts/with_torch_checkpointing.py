"""torch_checkpointing: its manager, its lock around the optimizer, and folders kept by hand.

Of 0.1.1, resharders gather their notes on a CUDA device and direct writes fail on ext4, so it is without both.
"""

import re
import shutil
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.same_job import job

STEP_DIRECTORY = re.compile(r"step_(\d+)")


def whole(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).glob("*") if STEP_DIRECTORY.fullmatch(path.name))


def keep_three(folder: str) -> None:
    if dist.get_rank() == 0:
        for path in whole(folder)[:-3]:
            shutil.rmtree(path)


def main(folder: str) -> None:
    model, optimizer, scheduler = job.build()
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    try:
        start = 0
        if found := whole(folder):
            of_model, of_optimizer = get_state_dict(model, optimizer)
            into = {"model": of_model, "optimizer": of_optimizer, "scheduler": None, "step": 0}
            restored = manager.load(str(found[-1]), into=into)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=restored["model"],
                optim_state_dict=restored["optimizer"],
            )
            scheduler.load_state_dict(restored["scheduler"])
            start = int(restored["step"]) + 1
        saving = None
        for step in range(start, job.STEPS):
            job.train(step, model, optimizer, scheduler, manager.lock())
            if step % job.EVERY == 0:
                if saving is not None:
                    saving.result()
                    keep_three(folder)
                of_model, of_optimizer = get_state_dict(model, optimizer)
                state = {"model": of_model, "optimizer": of_optimizer, "step": step}
                state["scheduler"] = scheduler.state_dict()
                saving = manager.save(f"{folder}/step_{step:06}", state)
        if saving is not None:
            saving.result()
            keep_three(folder)
    finally:
        manager.close()


if __name__ == "__main__":
    main(sys.argv[1])
