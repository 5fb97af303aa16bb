"""One line in the log for each save and each load that worked: the step, its size, the seconds, and where.

Level INFO of the logger ``aiockpt``, on rank 0 alone; what fails is logged and raised elsewhere.
"""

from __future__ import annotations

import logging

from aiockpt.engine.coordinator import Coordinator
from aiockpt.futures import LoadResult, SaveResult
from aiockpt.units import size

logger = logging.getLogger("aiockpt")


def log_saved(saved: SaveResult, coordinator: Coordinator) -> None:
    """Log a save that is committed."""
    if coordinator.rank != 0:
        return
    if saved.existed:
        logger.info("step %d is committed already, and left as it is, in %s", saved.step, saved.url)
        return
    whose = f" of rank 0 of {coordinator.world_size}" if coordinator.world_size > 1 else ""
    logger.info(
        "saved step %d%s: %s%s in %.2f s, to %s",
        saved.step,
        f" (generation {saved.generation})" if saved.generation > 1 else "",
        size(saved.bytes),
        whose,
        saved.seconds,
        saved.url,
    )


def log_loaded(loaded: LoadResult | None, coordinator: Coordinator) -> None:
    """Log a load whose tensors are filled, or one that found no checkpoint at all."""
    if coordinator.rank != 0:
        return
    if loaded is None:
        logger.info("nothing to load: there is no checkpoint yet")
        return
    over = f", {len(loaded.skipped)} newer passed over" if loaded.skipped else ""
    differing = f", {len(loaded.differences)} differences" if loaded.differences else ""
    logger.info(
        "loaded step %d: %s in %.2f s, from %s%s%s",
        loaded.step,
        size(loaded.bytes),
        loaded.seconds,
        loaded.url,
        over,
        differing,
    )
