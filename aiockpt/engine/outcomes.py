"""Reports of how saves and loads ended: to the future, the log and, for a failure not yet retrieved, the next call.

Guarantees:

- A failure is reported once, at the first request, in the way that was chosen; it never loses the save that reports it
  (docs/decisions.md#a-failed-save-never-loses-the-next-one).
- Each save and each load that worked is one line of the log, at level INFO, on rank 0 alone: the step, its size, the
  seconds, and where. What fails is logged where it fails.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque

from aiockpt.errors import BackgroundSaveError
from aiockpt.futures import LoadResult, SaveFuture, SaveResult
from aiockpt.options import OnError
from aiockpt.units import size

logger = logging.getLogger("aiockpt")


class Failures:
    """Failed saves, oldest first, until the caller has received them. Any thread.

    Args:
        limit: how many are kept at most; all for None.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._untold: deque[SaveFuture] = deque(maxlen=limit)

    def add(self, failed: SaveFuture) -> None:
        """Keep a save that has failed."""
        self._untold.append(failed)

    def report(self, policy: OnError, just_started: SaveFuture) -> None:
        """Apply ``on_error`` to the failures not yet reported.

        Raises:
            BackgroundSaveError: the policy is "raise"; *just_started* was started all the same.
        """
        if policy == "raise":
            self.raise_all(just_started)
            return
        for failure in self.take(just_started):
            if callable(policy):
                policy(failure)
            else:
                warnings.warn(
                    f"the save of step {failure.step} failed: {failure.exception()!r}", RuntimeWarning, stacklevel=3
                )

    def raise_all(self, just_started: SaveFuture | None = None) -> None:
        """Raise the failures not yet reported, whatever the policy.

        Raises:
            BackgroundSaveError: there are some.
        """
        failed = self.take(just_started)
        if failed:
            raise BackgroundSaveError(failed, just_started) from failed[0].exception()

    def take(self, just_started: SaveFuture | None = None) -> list[SaveFuture]:
        """Return the failed saves whose error was not retrieved from their future, each once.

        One that this very call has started may have failed already: the next call reports it.
        """
        ended = [self._untold.popleft() for _ in range(len(self._untold))]
        self._untold.extend(future for future in ended if future is just_started)
        return [future for future in ended if future is not just_started and not future.delivered]


def log_saved(saved: SaveResult, world_size: int) -> None:
    """Log a save that is committed, on one of the ranks that made it."""
    if saved.existed:
        logger.info("step %d is committed already, and left as it is, in %s", saved.step, saved.url)
        return
    whose = f" of rank 0 of {world_size}" if world_size > 1 else ""
    logger.info(
        "saved step %d%s: %s%s in %.2f s, to %s",
        saved.step,
        f" (generation {saved.generation})" if saved.generation > 1 else "",
        size(saved.bytes),
        whose,
        saved.seconds,
        saved.url,
    )


def log_loaded(loaded: LoadResult | None, *, forked: bool = False) -> None:
    """Log a load whose tensors are filled, or one that found no checkpoint at all."""
    if loaded is None:
        logger.info("nothing to load: there is no checkpoint yet")
        return
    over = f", {len(loaded.skipped)} newer passed over" if loaded.skipped else ""
    differing = f", {len(loaded.differences)} differences" if loaded.differences else ""
    logger.info(
        "%s %s: %s in %.2f s, from %s%s%s",
        "forked from" if forked else "loaded",
        "a foreign checkpoint" if loaded.step < 0 else f"step {loaded.step}",
        size(loaded.bytes),
        loaded.seconds,
        loaded.url,
        over,
        differing,
    )
