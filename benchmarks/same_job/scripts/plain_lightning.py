"""The job in Lightning, without checkpoints: what the lines of ``with_lightning`` are counted against."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from benchmarks.same_job import job


class Module(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = job.make_model()

    def configure_optimizers(self) -> Any:
        _, optimizer, scheduler = job.build(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        job.begin(self.global_step, self.net, self.optimizers().optimizer, self.lr_schedulers())
        return job.loss_of(self.net, self.global_step)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        job.end(self.net, self.optimizers().optimizer, scheduler)


def main(folder: str) -> None:
    ranks = job.join()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"),
        max_steps=job.STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(range(1 << 20)))


if __name__ == "__main__":
    main(sys.argv[1])
