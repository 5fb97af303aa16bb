"""An async trainer: the same checkpointer, awaited; every stage of a save is a future.

    python -m aiockpt.tools.examples.train_async /data/run-7

The training step runs on a worker thread, so that the event loop stays free for other tasks: here for those that wait
until their save is durable, and print that.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence

import aiockpt
from aiockpt.events import Observer
from aiockpt.options import Snapshot
from aiockpt.tools.examples.gpt import DEFAULT_SIZE, GPTSize, build, train_step

log = logging.getLogger(__name__)


async def train(
    url: str,
    *,
    size: GPTSize = DEFAULT_SIZE,
    steps: int = 120,
    every: int | None = 5,
    keep: int = 3,
    snapshot: Snapshot = "eager",
    on_step: Callable[[int, float], object] = print,
    observers: Sequence[Observer] = (),
) -> None:
    """Train from the newest checkpoint below *url* up to *steps*, saving every *every* steps (None: never).

    Args:
        snapshot: "eager" copies the state in the call, "lazy" beside the next forward and backward.
    """
    model, optimizer, scheduler, batches = build(size, steps)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": batches,  # anything with state_dict() and load_state_dict()
        "rng": aiockpt.RNG(),  # so that dropout goes on where it was
    }
    async with (
        aiockpt.Checkpointer(
            url, retention=aiockpt.Retention(last=keep), snapshot=snapshot, observers=observers
        ) as ckpt,
        asyncio.TaskGroup() as announcements,
    ):
        loaded = await ckpt.load(state)  # the newest valid step; None when there is none yet
        first = 0 if loaded is None else loaded.step + 1
        for step in range(first, steps):
            loss = await asyncio.to_thread(train_step, model, optimizer, scheduler, batches)
            on_step(step, loss)
            if every and step % every == 0:
                save = ckpt.save(step, state)
                announcements.create_task(announce(save))
                await save.snapshotted()  # the state may change from here on; writing goes on in the background


async def announce(save: aiockpt.SaveFuture) -> None:
    """Wait until *save* is durable, and print that."""
    committed = await save
    log.info("step %d is durable: %.1f MiB in %.3f s", committed.step, committed.bytes / 2**20, committed.seconds)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(train(sys.argv[1]))
