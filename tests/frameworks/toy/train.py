"""A script of the made-up framework with the switch: ``python -m tests.frameworks.toy.train``."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.frameworks.toy.framework import Trainer
from tests.frameworks.toy.integration import attach

if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    trainer = Trainer(Path("unused"))
    with attach(trainer, "runs/toy"):
        trainer.resume()
        trainer.fit(12)
        trainer.end()
    if dist.is_initialized():
        dist.destroy_process_group()
