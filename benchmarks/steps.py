"""Timed training steps: in quiet, and beside other work.

Small operations make a loop depend on the interpreter and its lock, not on the arithmetic: such training is the easiest to
disturb. The loop's own model is tiny; the saved state is the big one, which the loop does not touch. Torch is held to
one thread here: with more, steps this small measure the thread barrier and not the save.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence

import torch

Clock = Callable[[], float]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that *work* takes, after a garbage collection and a flush of dirty pages."""
    gc.collect()
    os.sync()
    return seconds(work)


def seconds(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the seconds that *work* takes, without preparation."""
    start = clock()
    work()
    return clock() - start


def small_step(*, optimizes: bool = True) -> Callable[[], None]:
    """Return a training step of well under a millisecond: forward, backward, and an optimizer step on a tiny model.

    Args:
        optimizes: whether the optimizer steps, which a lazy snapshot waits for.
    """
    torch.set_num_threads(1)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(48, 48), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(16, 48)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if optimizes:
            optimizer.step()

    return step


def run_steps(
    step: Callable[[], object], enough: Callable[[int], bool], clock: Clock = time.perf_counter
) -> list[float]:
    """Run steps until *enough* returns True for their count; return the seconds of each."""
    took: list[float] = []
    before = clock()
    while not enough(len(took)):
        step()
        now = clock()
        took.append(now - before)
        before = now
    return took


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Return the sample below which *fraction* of them lie (nearest rank)."""
    return sorted(samples)[min(len(samples) - 1, int(fraction * len(samples)))]
