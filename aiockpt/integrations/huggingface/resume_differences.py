"""Why a resumed run of the Trainer is not the same run: another position in the data, or another order of them.

The Trainer's own resume differs in the same way.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch

from aiockpt.integrations.indices import Generators

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


def log_order(folder: str, epoch: int, batch_count: int, loader: Any) -> None:
    """Log why the data of a resumed run come in another order than in an uninterrupted run.

    Args:
        epoch: the epoch in which training resumes.
        batch_count: number of its batches that are skipped.
        loader: what the Trainer reads; the method that makes it, or its sampler, may be overridden.
    """
    dataset = getattr(loader, "dataset", None)
    if not epoch or dataset is None or isinstance(dataset, torch.utils.data.IterableDataset):
        return
    kind: Any = import_module("accelerate.data_loader").DataLoaderShard
    batches = loader.sampler if isinstance(loader.sampler, torch.utils.data.BatchSampler) else loader.batch_sampler
    # The Trainer tells these the number of the epoch, also behind the batches that it skips.
    told = isinstance(loader, kind) and any(
        hasattr(one, "set_epoch") for one in (batches, getattr(batches, "sampler", None))
    )
    sampler = batches
    while (inner := getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))) is not None:
        sampler = inner
    if told or isinstance(sampler, torch.utils.data.SequentialSampler):
        return
    # At the beginning of an epoch the Trainer has loaded the random numbers of the process, but no generator of a sampler.
    if batch_count or Generators(loader, "sampler", "batch_sampler").read():
        logger.warning(
            "%s: the order of a %s is not drawn by the number of the epoch: %s in another order than without the stop%s",
            *(
                folder,
                type(sampler).__name__,
                "the rest of this epoch may come" if batch_count else "the next epochs come",
            ),
            ", so some samples come twice, and others not; save_strategy='epoch' may resume as the same run"
            if batch_count
            else "",
        )
