"""Calls made on the first rank only, with the result broadcast to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

import aiockpt

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
