"""Training text: the source of the standard library that the program runs on, real text that is always there.

Guarantees: the order of the batches is a function of the seed and of the loader's own state, so that a loader whose
state was restored goes on with exactly the batch that would have come next.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # the model reads bytes


def library_text() -> Tensor:
    """Return the modules of the standard library, one after the other by name, as a (bytes,) uint8 tensor."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


class Batches:
    """Windows of a text in an order that is shuffled anew each epoch: an endless loader with a position."""

    def __init__(self, text: Tensor, *, window: int, batch: int, seed: int = 0) -> None:
        self._text = text
        self._window = window
        self._batch = batch
        self._seed = seed
        self._windows = (len(text) - 1) // window
        self._start_epoch(0)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (batch, window) int64; the targets are one byte ahead."""
        if self._position + self._batch > self._windows:
            self._start_epoch(self._epoch + 1)
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        places = chosen[:, None] * self._window + torch.arange(self._window + 1)
        rows = self._text[places].long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return where the loader is; its order follows from that."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where another loader of the same text was."""
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = torch.randperm(self._windows, generator=torch.Generator().manual_seed(self._seed + epoch))
