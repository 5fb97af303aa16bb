"""A checkpoint of every iteration: a real training loop, end to end, with and without.

One process trains a network with AdamW. Ways to save after every step take turns with not saving at all. Each runs a block
of steps and then waits until its last checkpoint is durable: that wait counts. The first block of each, which warms it up,
does not. Only the newest checkpoint is kept. At the end a save with a step right behind it is loaded and compared.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import Contender, Pending, try_make
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn

WIDTH = 1024
WARM_STEPS = 2


class Training:
    """A network of *size_bytes* with its optimizer; the *batch* size sets the time of a step."""

    def __init__(self, size_bytes: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = max(1, size_bytes // (3 * 4 * WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._batch = torch.randn(batch, WIDTH)
        self.step()

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()


def every(turn: Turn, outcome: Outcome) -> None:
    """Measure blocks of steps, ways in turn."""
    training = Training(turn.size_bytes, turn.settings["batch"])
    savers: dict[str, Contender] = {name: made for name in turn.contenders if (made := try_make(turn, name, outcome))}
    samples: dict[str, Samples] = {}
    for number, (name, saver) in enumerate(savers.items()):
        saver.open(Path(turn.folder) / str(number), training.state)
        _block(training, saver, 0, WARM_STEPS)
        saver.take_waits()
        samples[name] = {"block_s": [], "call_s": [], "waited_s": [], "loop_s": []}
    first, steps = WARM_STEPS, turn.settings["steps"]
    for _ in range(turn.repetitions):
        for name, saver in savers.items():
            busy_s = saver.loop_cpu_s()
            block_s, calls_s = _block(training, saver, first, steps)
            samples[name]["block_s"].append(block_s)
            samples[name]["call_s"] += calls_s
            samples[name]["waited_s"] += saver.take_waits()
            if busy_s is not None:
                samples[name]["loop_s"].append((saver.loop_cpu_s() or 0.0) - busy_s)
        first += steps
    for name, saver in savers.items():
        if saver.checks:
            _check(saver, training, first)
        saver.close()
        outcome.add(turn, name, samples[name])


def _block(training: Training, saver: Contender, first: int, steps: int) -> tuple[float, list[float]]:
    """Train and save *steps* times; return the seconds until all is durable, and those of each call."""
    calls_s = []
    pending: Pending | None = None
    begun_s = time.perf_counter()
    for step in range(first, first + steps):
        training.step()
        called_s = time.perf_counter()
        pending = saver.save(step, training.state)
        calls_s.append(time.perf_counter() - called_s)
    if pending is not None:
        pending.wait()
        saver.settle()
    return time.perf_counter() - begun_s, calls_s


def _check(saver: Contender, training: Training, step: int) -> None:
    """Fail unless a save, with a step right after it, loads as the state at the call."""
    expected = [tensor.detach().clone() for tensor in training.model.parameters()]
    pending = saver.save(step, training.state)
    training.step()
    pending.wait()
    saver.load(step, training.state)
    if not all(map(torch.equal, training.model.parameters(), expected)):
        raise RuntimeError("what was loaded is not what was saved")
