"""Log lines about the place in a program at which a loader goes on after a load.

A checkpoint is a point in a program, and the resume goes on behind it. Where the script may mean something else, which a
loader cannot see, one line says what happens and what to write.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Mapping
from tokenize import TokenError
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from aiockpt.data.data_source import is_at_end, worker_count

logger = logging.getLogger("aiockpt")

_READ_ONLY = (list, tuple, range, torch.Tensor, TensorDataset)


Place = Literal["within", "last batch", "behind"]
"""Where a checkpoint was made: in a loop, in its last batch, or between two loops."""


def log_resumed(source: Any, epoch: int, place: Place, *, by_step: bool) -> None:
    """Log where a `Loader` of *source* goes on.

    Args:
        epoch: the number that was saved; at a place behind a loop, of the next one.
        by_step: whether the program computes its epoch from the step.
    """
    if place == "last batch":
        warn_of_last_batch(epoch, by_step=by_step)
    elif place == "within":
        logger.info(
            "Loader: goes on with the next batch of epoch %d, and what the script does behind that save does not run",
            epoch,
        )
        _warn_of_random_workers(source)
    elif epoch:
        logger.info(
            "Loader: goes on with epoch %d, and what the script does behind that save, at the end of the epoch before, does "
            "not run",
            epoch,
        )


def warn_of_last_batch(epoch: int, *, by_step: bool) -> None:
    """Warn of what the first loop does after a checkpoint that was made in the last batch of *epoch*."""
    if by_step:
        logger.warning(
            "Loader: saved in the last batch of epoch %d: the first loop is epoch %d (epoch_from_step). What the script "
            "does behind the loop of epoch %d does not run; save behind it where that matters",
            *(epoch, epoch + 1, epoch),
        )
        return
    logger.warning(
        "Loader: saved in the last batch of epoch %d: the first loop is empty, so that what stands behind it runs, and "
        "epoch %d follows. A script that computes its epoch from the step loses one: write Loader(…, epoch_from_step=True)",
        *(epoch, epoch + 1),
    )


def warn_of_left_loop(batch_count: int) -> None:
    """Warn of a loop that was left after *batch_count* batches, before its epoch was over, as another one begins."""
    logger.warning(
        "Loader: a loop was left after %d batches, with its epoch not over, and another begins. If the program counts the "
        "batches of a loop (islice, a break), a resume in such a loop counts from 0 again and trains more of them: count in "
        "the state, as in islice(loader, n - state['batches']), or make each epoch as long as the loop",
        batch_count,
    )


def warn_of_forgotten_skips(source: Any) -> None:
    """Warn of batches that a rewind has skipped, and that other readers of *source* cannot tell apart."""
    logger.warning(
        "Loader: batches that a rewind skips are not known on another number of ranks or workers of a %s: they come again. "
        "Rewind goes back again if they are bad; a ShardedSampler keeps them",
        type(source).__name__,
    )


def warn_of_range(epoch: int, frame: FrameType | None) -> None:
    """Warn if a program whose loader goes on in *epoch* counts its loops over it from a constant on.

    Its first loop was begun by the caller of *frame*. The loop around that is read in the source of that or an outer caller.
    """
    frame = frame and frame.f_back
    while frame is not None:
        if (loop := _loop_around(frame)) is not None:
            if isinstance(loop, ast.For) and any(map(_is_fixed_range, ast.walk(loop.iter))):
                logger.warning(
                    "Loader: goes on in epoch %d, and `for %s in %s` in %s counts anew: that trains as many epochs "
                    "again. Write `while loader.epoch < n`",
                    *(epoch, ast.unparse(loop.target), ast.unparse(loop.iter), frame.f_code.co_filename),
                )
            return
        frame = frame.f_back


def _loop_around(frame: FrameType) -> ast.For | ast.While | None:
    """Return the innermost loop, of the function that runs in *frame*, whose body is at its present line."""
    try:
        lines, first = inspect.getsourcelines(frame)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, ValueError, TokenError):
        return None
    line = frame.f_lineno - max(first - 1, 0)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _is_fixed_range(node: ast.AST) -> bool:
    """Return whether *node* is ``range(n)``, ``range(1, n)`` or tqdm's ``trange``."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Name):
        return False
    return node.func.id in ("range", "trange") and (len(node.args) == 1 or isinstance(node.args[0], ast.Constant))


def log_resumed_bare(source: Any, state: Any, where: str) -> None:
    """Log where a ``StatefulDataLoader``, which counts no epochs, goes on with the *state* that is loaded."""
    if not isinstance(state, Mapping) or "_iterator_finished" not in state:
        return
    if is_at_end(source, state):
        logger.warning(
            "%s: saved in the last batch of an epoch: its next loop is empty, so that what stands behind it runs. A script "
            "that computes its epoch from the step would lose one: write aiockpt.Loader(…, epoch_from_step=True) around it",
            where,
        )
        return
    logger.info(
        "%s: goes on with the next %s, and what the script does behind that save does not run. torchdata counts no epochs "
        "(a script that counts them from 0 trains as many again), and draws one more random number; write aiockpt.Loader(…) "
        "around it, and `while loader.epoch < n`",
        *(where, "epoch" if state["_iterator_finished"] else "batch of the epoch"),
    )
    if not state["_iterator_finished"]:
        _warn_of_random_workers(source)


def _warn_of_random_workers(source: Any) -> None:
    """Warn, in the middle of an epoch, of random numbers that workers of a ``DataLoader`` may draw for its samples."""
    data = getattr(source, "dataset", None)
    if not worker_count(source) or data is None or isinstance(data, IterableDataset):
        return
    while isinstance(data, Subset):
        data = data.dataset
    if not isinstance(data, _READ_ONLY):
        logger.warning(
            "the workers of this %s are seeded anew in the middle of an epoch: if they draw random numbers (augmentation), "
            "the rest of the epoch has others than in a run that was never stopped. Where that matters, draw them in "
            "%s.__getitem__(index) from a generator that is seeded by the index (docs/guide/epochs.md#augmentation)",
            *(type(source).__name__, type(data).__name__),
        )
