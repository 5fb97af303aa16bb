"""Steps of a place for the integrations: the same list on all ranks, the newest valid step first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

import aiockpt
from aiockpt.errors import BackgroundSaveError, CorruptionError, RankFailedError, StepNotFoundError, StorageError

logger = logging.getLogger("aiockpt")

T = TypeVar("T")


def ask_first_rank(ask: Callable[[], T]) -> T:
    """Return on all ranks the result of *ask* on rank 0. Every rank calls it; a single process calls *ask* itself.

    Raises:
        CheckpointError: the error of *ask* on rank 0, on all ranks.
        RankFailedError: *ask* raised another error there; rank 0 raises that.
    """
    if not dist.is_initialized():
        return ask()
    answer: list[Any] = [None, None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = ask()
        except aiockpt.CheckpointError as error:
            answer[1] = failed = error
        except Exception as error:  # noqa: BLE001  raised below: the others wait in the broadcast
            answer[1], failed = RankFailedError(f"rank 0 failed: {type(error).__name__}: {error}"), error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise failed or answer[1]
    found: T = answer[0]
    return found


def valid_steps(ckpt: aiockpt.Checkpointer) -> list[int]:
    """Return the committed steps whose manifest is whole, the newest first."""
    return [info.step for info in ckpt.steps().result() if info.problem is None]


def raise_if_lost(ckpt: aiockpt.Checkpointer) -> None:
    """Raise if there are steps, but no valid one, so that no run begins anew by mistake. Every rank calls it."""
    ckpt.load({}).result()


def delete_step(ckpt: aiockpt.Checkpointer, step: int) -> bool:
    """Delete a step that a limit does not keep; return whether it is gone. If the storage refuses, log it: it is no reason
    to end a training.
    """
    try:
        ckpt.delete(step).result()
    except StepNotFoundError:  # another node, or retention=, may have deleted it
        return True
    except StorageError as error:
        logger.warning("step %d stays, because it cannot be deleted: %s", step, error)
        return False
    return True


class TheirsBesideOurs(NamedTuple):
    """A checkpoint that a framework itself wrote, compared with the newest step here.

    A run that went on without aiockpt has a later time and a larger number. A later time alone may be that of a copy, and a
    run that went back has smaller numbers: of those the user is told, who may choose the other one.
    """

    is_later: bool
    is_larger: bool

    @property
    def went_on(self) -> bool:
        """Whether it is of a run that went on without aiockpt."""
        return self.is_later and self.is_larger

    def __str__(self) -> str:
        number = f"{'a larger' if self.is_larger else 'no larger'} number"
        return f"{number} and {'a later' if self.is_later else 'an earlier'} time (copies may lose times)"


def compare_with_theirs(
    ckpt: aiockpt.Checkpointer, step: int, written_ns: int, is_larger: bool | None
) -> TheirsBesideOurs | None:
    """Compare a checkpoint that a framework itself wrote with *step*; None where neither its time nor its number is newer.

    Args:
        written_ns: when it was written.
        is_larger: whether its number is larger than that of the step; None where it has no number, and the time decides.
    """
    is_later = written_ns > ckpt.describe(step).result().info.created_ns
    found = TheirsBesideOurs(is_later, is_later if is_larger is None else is_larger)
    return found if found.is_later or found.is_larger else None


def load_newest(
    steps: Sequence[int], load: Callable[[int], T], may_go_back: Callable[[int], bool] = lambda _: True
) -> T:
    """Return the result of *load* for the first of *steps* that is not damaged; log each step that is skipped.

    Args:
        steps: at least one.
        may_go_back: called with a step that failed; returns whether an older one may be loaded.

    Raises:
        CorruptionError, StepNotFoundError: from the last step, or from one that may not be skipped.
    """
    for step in steps[:-1]:
        try:
            return load(step)
        except (CorruptionError, StepNotFoundError) as error:
            if not may_go_back(step):
                raise
            logger.warning("step %d: cannot be loaded (%s); an older step is tried", step, error)
    return load(steps[-1])


def begin_save(
    save: Callable[[], aiockpt.SaveFuture], expect: Callable[[aiockpt.SaveFuture], None]
) -> aiockpt.SaveFuture:
    """Begin a save, and pass its future to *expect*; the error of an earlier save is raised only after that.

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
