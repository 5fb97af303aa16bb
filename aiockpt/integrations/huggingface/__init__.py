"""The Trainer and the Accelerator of Hugging Face on this engine: ``attach(…)`` is the only change.

    trainer = Trainer(model, args, train_dataset=data)
    attach(trainer, resume=True)
    trainer.train()

    accelerator = Accelerator(project_dir="runs/7")
    attach(accelerator)
    …
    accelerator.load_state()

docs/frameworks/huggingface.md and docs/frameworks/accelerate.md are the pages for users.
"""

from __future__ import annotations

from typing import Any

import aiockpt
from aiockpt.integrations.huggingface import accelerate as _accelerate
from aiockpt.integrations.huggingface import trainer as _trainer
from aiockpt.integrations.huggingface.model_names import renames

__all__ = ["attach", "renames"]


def attach(trainer: Any, place: Any = None, **options: Any) -> aiockpt.Checkpointer:
    """Make a ``Trainer`` or an ``Accelerator`` save and load with aiockpt; return the checkpointer that it uses.

    `aiockpt.integrations.huggingface.trainer.attach` and `aiockpt.integrations.huggingface.accelerate.attach` list the
    arguments of each.
    """
    if hasattr(trainer, "save_state") and hasattr(trainer, "load_state"):
        return _accelerate.attach(trainer, place, **options)
    return _trainer.attach(trainer, place, **options)
