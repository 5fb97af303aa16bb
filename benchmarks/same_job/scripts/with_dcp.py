"""torch.distributed.checkpoint: a Stateful around get_state_dict, async_save, and folders kept by hand."""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from benchmarks.same_job import job


class AppState(Stateful):
    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def whole(folder: str) -> list[Path]:
    return sorted(path.parent for path in Path(folder).glob("step-*/.metadata"))


def keep_three(folder: str) -> None:
    if dist.get_rank() == 0:
        for path in whole(folder)[:-3]:
            shutil.rmtree(path)


def main(folder: str) -> None:
    model, optimizer, scheduler = job.build()
    state = {"app": AppState(model, optimizer), "scheduler": scheduler, "step": -1}
    if found := whole(folder):
        dcp.load(state, checkpoint_id=found[-1])
    group = dist.new_group(backend="gloo")
    saving = None
    for step in range(state["step"] + 1, job.STEPS):
        job.train(step, model, optimizer, scheduler)
        if step % job.EVERY == 0:
            if saving is not None:
                saving.result()
                keep_three(folder)
            path = f"{folder}/step-{step:06}"
            saving = dcp.async_save(state | {"step": step}, checkpoint_id=path, process_group=group)
    if saving is not None:
        saving.result()
        keep_three(folder)


if __name__ == "__main__":
    main(sys.argv[1])
