"""A training loop that saves without waiting: `ckpt.save` returns when the snapshot is taken.

    python -m aiockpt.tools.examples.train_sync /data/run-7

Stop it at any time, with any signal, and start it again: it continues from the newest committed checkpoint, with the
losses of an uninterrupted run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import aiockpt
from aiockpt.events import Observer
from aiockpt.options import Snapshot
from aiockpt.tools.examples.gpt import DEFAULT_SIZE, GPTSize, build, train_step


def train(
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
    with aiockpt.Checkpointer(
        url, retention=aiockpt.Retention(last=keep), snapshot=snapshot, observers=observers
    ) as ckpt:
        loaded = ckpt.load(state).result()  # the newest valid step; None when there is none yet
        first = 0 if loaded is None else loaded.step + 1
        for step in range(first, steps):
            loss = train_step(model, optimizer, scheduler, batches)
            on_step(step, loss)
            if every and step % every == 0:
                ckpt.save(step, state)  # writing goes on in the background; a failure is raised by the next call
    # at its end the block has waited until all was committed


if __name__ == "__main__":
    train(sys.argv[1])
