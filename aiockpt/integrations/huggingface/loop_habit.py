"""Detection of the batches of a loop that a script skips by hand after a resume, instead of training them.

A resumed script may skip the batches that were trained before, or rely on its loader for that. A loop that fetches a second
batch without having used the first is skipping, unless it collects several batches for each step.
"""

from __future__ import annotations

import copy
from typing import Any


class TrainingTraces:
    """The traces that training leaves on an Accelerator's models and optimizers."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.backward_count = 0

    def mark(self) -> tuple[Any, ...]:
        """Return a value that changes with gradients or weights; only counters of the tensors are read."""
        groups = (group for optimizer in self.accelerator._optimizers for group in optimizer.param_groups)
        tensors = (one for group in groups for one in group["params"])
        return (self.backward_count, *((one._version, *_gradient_mark(one.grad)) for one in tensors))


def _gradient_mark(gradient: Any) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


class SkipWindow:
    """The first fetches of a resumed loop, whose batches the script may skip by hand.

    Args:
        count: the number of batches that it may skip.
    """

    def __init__(self, training: TrainingTraces, count: int) -> None:
        self._training = training
        self._left = count
        self._used = False
        self._before = training.mark()
        self._hooks = [model.register_forward_pre_hook(self._note_use) for model in training.accelerator._models]
        self.skipped_count = 0

    def _note_use(self, *_: Any) -> None:
        self._used = True

    def is_skipped(self) -> bool:
        """Return whether the last yielded batch was not used, and must be yielded again; called at the next fetch."""
        if self._left and not self._used and self._training.mark() == self._before:
            self._left -= 1
            self.skipped_count += 1
            return True
        self.close()
        return False

    def close(self) -> None:
        """Stop watching the models."""
        for hook in self._hooks:
            hook.remove()


class Habit:
    """Whether loops collect several batches for each step, judged by how many ``backward()`` follow each fetch.

    Args:
        first: number of calls after the first fetch that any call followed.
        unused_before: fetches before that one.
        unused: later fetches without a following call.
        used: fetches with a following call.
    """

    def __init__(self, first: int = 0, unused_before: int = 0, unused: int = 0, used: int = 0) -> None:
        self.first, self.unused_before, self.unused, self.used = first, unused_before, unused, used
        self._last: int | None = None

    def begin(self, backward_count: int) -> None:
        """Note that a loop begins, after *backward_count* calls, which do not belong to its batches."""
        self.note_fetch(backward_count)
        self._last = None

    def note_fetch(self, backward_count: int) -> None:
        """Note that a batch is fetched, after *backward_count* calls of ``backward()``."""
        count = 0 if self._last is None else backward_count - self._last
        if count:
            self.first = self.first or count
            self.used += 1
        elif self._last is not None and self.used:
            self.unused += 1
        elif self._last is not None:
            self.unused_before += 1
        self._last = backward_count

    def counts(self, backward_count: int) -> list[int]:
        """Return the counts after *backward_count* calls of ``backward()``, as arguments for another `Habit`."""
        now = copy.copy(self)
        now.note_fetch(backward_count)
        return [now.first, now.unused_before, now.unused, now.used]

    @property
    def collects(self) -> bool:
        """Whether several batches are fetched for each step."""
        # In the first step: as many calls as fetches before. Later: a third of the fetches or more without a call.
        at_first = self.used == 1 and self.first == self.unused_before + 1 > 1
        return at_first or 0 < self.used <= 2 * self.unused
