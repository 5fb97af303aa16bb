"""The steps of a place as the switches save them and go on from them: the same on all ranks, the newest valid one first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

import aiockpt
from aiockpt.errors import BackgroundSaveError, CorruptionError, StepNotFoundError

logger = logging.getLogger("aiockpt")

T = TypeVar("T")


def ask_first_rank(ask: Callable[[], T]) -> T:
    """Return what rank 0 gets from *ask*, on all ranks. Every rank calls it; a single process calls *ask* itself.

    Raises:
        CheckpointError: what *ask* raised on rank 0, on all ranks.
    """
    if not dist.is_initialized():
        return ask()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = ask()
        except aiockpt.CheckpointError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    found: T = answer[0]
    return found


def valid_steps(ckpt: aiockpt.Checkpointer) -> list[int]:
    """Return the committed steps whose manifest is whole, the newest first."""
    return [info.step for info in ckpt.steps().result() if info.problem is None]


def raise_if_lost(ckpt: aiockpt.Checkpointer) -> None:
    """Raise where there are steps and none of them is valid: no run begins anew by mistake. Every rank calls it."""
    ckpt.load({}).result()


def load_newest(
    steps: Sequence[int], load: Callable[[int], T], may_go_back: Callable[[int], bool] = lambda _: True
) -> T:
    """Return what *load* makes of the first of *steps* that is not damaged; each that is passed over is logged.

    Args:
        steps: at least one.
        may_go_back: whether an older step may be loaded after one that failed; asked with that one.

    Raises:
        CorruptionError, StepNotFoundError: of the last one, or of one that may not be passed over.
    """
    for step in steps[:-1]:
        try:
            return load(step)
        except (CorruptionError, StepNotFoundError) as error:
            if not may_go_back(step):
                raise
            logger.warning("step %d is not resumed from: %s", step, error)
    return load(steps[-1])


def begin_save(
    save: Callable[[], aiockpt.SaveFuture], expect: Callable[[aiockpt.SaveFuture], None]
) -> aiockpt.SaveFuture:
    """Begin a save, and pass its future to *expect*, also where an earlier one failed, which is raised afterwards.

    Raises:
        BackgroundSaveError: an earlier save failed.
    """
    try:
        future = save()
    except BackgroundSaveError as error:
        if error.future is not None:
            expect(error.future)
        raise
    expect(future)
    return future
