"""Why a resumed run of the Trainer is not the same run: another position in the data, or another order of them.

The Trainer's own resume differs in the same way.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger("aiockpt")


def log_position(trainer: Any, folder: str, epoch: int, batch_count: int, per_epoch: int | None) -> None:
    """Log if a run resumes elsewhere than it was saved, because the Trainer counts its position in steps.

    Args:
        epoch: the epoch in which training resumes.
        batch_count: number of its batches that are skipped.
        per_epoch: number of steps in an epoch; None if the length of the data is unknown.
    """
    args, state = trainer.args, trainer.state
    size, before = args.train_batch_size, state.train_batch_size
    if args.auto_find_batch_size:
        return
    if before not in (None, size):
        logger.warning(
            "%s: batches have %d samples, and had %d when it was saved; the Trainer counts its position in steps, so some "
            "samples are left out or come twice; resume with batches of %d for the same run",
            *(folder, size, before, before),
        )
    elif per_epoch and state.epoch and not args.ignore_data_skip:
        # The saved position in batches of now. The last step of an epoch may have fewer of them than the others.
        most = per_epoch * args.gradient_accumulation_steps
        ahead = [
            (state.epoch - epoch) * count - batch_count for count in (most - args.gradient_accumulation_steps + 1, most)
        ]
        # What is less than a batch comes from the last batch of an epoch, which another number of ranks divides otherwise.
        if min(ahead) > 0.999 or max(ahead) < -0.999:
            logger.warning(
                "%s: it was saved at epoch %.2f, and is resumed at epoch %.2f; the Trainer counts its position in steps, so "
                "some samples are left out or come twice; resume with the same gradient_accumulation_steps, number of ranks "
                "and data for the same run",
                *(folder, state.epoch, epoch + batch_count / most),
            )


def log_order(trainer: Any, folder: str, epoch: int, batch_count: int) -> None:
    """Log why the rest of a resumed epoch comes in another order than in an uninterrupted run.

    Args:
        epoch: the epoch in which training resumes.
        batch_count: number of its batches that are skipped.
    """
    strategy, data = getattr(trainer.args, "train_sampling_strategy", "random"), trainer.train_dataset
    is_seeded = trainer.accelerator.use_seedable_sampler and strategy == "random"
    if not batch_count or not epoch or is_seeded or strategy not in ("random", "group_by_length"):
        return
    if not isinstance(data, torch.utils.data.IterableDataset):
        reason = "use_seedable_sampler=False" if strategy == "random" else f"train_sampling_strategy={strategy!r}"
        logger.warning(
            "%s: %s: the Trainer draws the rest of this epoch in another order, so some samples come twice, and others not; "
            "save_strategy='epoch' resumes as the same run",
            *(folder, reason),
        )
