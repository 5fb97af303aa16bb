"""Lightning: ModelCheckpoint, whose saves are synchronous where the model is sharded."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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
    keep_three = ModelCheckpoint(
        folder,
        every_n_train_steps=job.EVERY,
        save_top_k=3,
        monitor="step",
        mode="max",
        save_last="link",
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"),
        max_steps=job.STEPS,
        logger=False,
        callbacks=[keep_three],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(range(1 << 20)), ckpt_path="last")


if __name__ == "__main__":
    main(sys.argv[1])
