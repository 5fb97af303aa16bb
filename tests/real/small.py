"""One small training run around whatever is to be proved: a model, an optimizer, and what belongs to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import aiockpt
from aiockpt.prove import Certificate, Proof, certify

WIDTH, BATCH = 6, 8

certified = 0
"""Certificates of this process, for the count of `tests/real/run --count`."""
compared: dict[str, dict[str, Any]] = {}
"""Scripts of trainers: whether the resumed run is the one that was never stopped, with us and with the trainer alone."""


def status_of(module: str, call: str) -> int:
    """Return how a process of its own ends that makes *call* with the names of *module*."""
    return subprocess.run([sys.executable, "-c", f"from {module} import *\n{call}"], check=False).returncode


class Run(NamedTuple):
    """What a run consists of.

    Attributes:
        state: what is saved beside the random generators.
        step: trains on the batch of a step, and returns its loss.
    """

    state: Mapping[str, Any]
    step: Callable[[int], torch.Tensor]


def batch(step: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (8, width) and targets (8, 1) of *step*, always the same ones."""
    inputs = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sin().sum(1, keepdim=True)


def mlp() -> nn.Module:
    """Return a small model that draws random numbers, always with the same weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1, bias=False))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[torch.Tensor], object] = id) -> Any:
    """Return the usual step: forward, backward, optimizer, and then *after*, which is given the loss."""

    def step(number: int) -> torch.Tensor:
        inputs, targets = batch(number)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
            return loss

        loss = optimizer.step(closure)  # type: ignore[arg-type]  # torch says float
        after(loss)  # type: ignore[arg-type]
        return loss  # type: ignore[return-value]

    return step


def prove(make: Callable[[], Run], *, steps: int = 8, every: int = 2, seed: int = 0) -> Certificate:
    """Return the certificate of a run that *make* builds, or fail with what differs first."""

    def train() -> None:
        run = make()
        state = {**run.state, "rng": aiockpt.RNG()}
        torch.manual_seed(2)
        np.random.seed(2)  # some optimizers draw from it
        with aiockpt.Checkpointer("run", every=every) as ckpt:
            for step in range(ckpt.resume(state), steps):
                loss = run.step(step)
                ckpt.step(step, state, metrics={"loss": loss.item()})

    return prove_training(train, seed=seed)


def prove_training(train: Callable[[], object], *, seed: int = 0) -> Certificate:
    """Return the certificate of a function that makes its own checkpointer, or fail with what differs first."""
    global certified
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = certify(train, Proof(seed=seed))
    finally:
        torch.set_num_threads(threads)
    found.check()
    certified += 1
    return found
