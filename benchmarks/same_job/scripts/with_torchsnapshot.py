"""torchsnapshot: app_state, async_take, and folders kept by hand. 0.1.0 knows no DTensor, so the whole state is gathered."""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torchsnapshot import Snapshot, StateDict

from benchmarks.same_job import job

WHOLE = StateDictOptions(full_state_dict=True)


class AppState:
    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
            options=WHOLE,
        )


def whole(folder: str) -> list[Path]:
    return sorted(path.parent for path in Path(folder).glob("step-*/.snapshot_metadata"))


def keep_three(folder: str) -> None:
    if dist.get_rank() == 0:
        for path in whole(folder)[:-3]:
            shutil.rmtree(path)


def main(folder: str) -> None:
    model, optimizer, scheduler = job.build()
    progress = StateDict(step=-1)
    state = {"app": AppState(model, optimizer), "scheduler": scheduler, "progress": progress}
    if found := whole(folder):
        Snapshot(str(found[-1])).restore(state)
    saving = None
    for step in range(progress["step"] + 1, job.STEPS):
        job.train(step, model, optimizer, scheduler)
        if step % job.EVERY == 0:
            if saving is not None:
                saving.wait()
                keep_three(folder)
            progress["step"] = step
            saving = Snapshot.async_take(f"{folder}/step-{step:06}", state, replicated=["**"])
    if saving is not None:
        saving.wait()
        keep_three(folder)


if __name__ == "__main__":
    main(sys.argv[1])
