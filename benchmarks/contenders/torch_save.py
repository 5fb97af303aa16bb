"""``torch.save``: pickle around tensors, in one zip file."""

from __future__ import annotations

import torch

from benchmarks import state as states
from benchmarks.contenders import Pending
from benchmarks.contenders.one_file import OneFile
from benchmarks.state import State


class TorchSave(OneFile):
    """``torch.save``, then ``fsync``; ``torch.load(weights_only=True)``, then copy into the tensors."""

    suffix = "pt"

    def save(self, step: int, state: State) -> Pending:
        torch.save(state, self.location(step))
        return self.unflushed(step)

    def load(self, step: int, state: State) -> None:
        states.fill(state, torch.load(self.location(step), weights_only=True))
