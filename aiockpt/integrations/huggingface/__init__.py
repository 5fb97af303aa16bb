"""The Trainer of Hugging Face on this engine: ``attach(trainer)``, and nothing else changes.

    trainer = Trainer(model, args, train_dataset=data)
    attach(trainer, resume=True)
    trainer.train()

docs/frameworks/huggingface.md is the page for users.
"""

from aiockpt.integrations.huggingface.renames import renames
from aiockpt.integrations.huggingface.trainer import attach

__all__ = ["attach", "renames"]
