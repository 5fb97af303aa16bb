"""Libraries that write one file: ``torch.save`` and safetensors. They do not flush, so this module does."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import pages
from benchmarks import state as states
from benchmarks.contenders import Contender, Pending
from benchmarks.state import State


class _OneFile(Contender):
    def location(self, step: int) -> Path:
        return self.folder / f"step-{step}.file"

    def unflushed(self, step: int) -> Pending:
        """Return the rest of a save whose file is written but not flushed."""

        def wait() -> None:
            pages.sync(self.location(step))
            pages.sync(self.folder)

        return Pending(lambda: True, wait)


class TorchSave(_OneFile):
    """``torch.save``, then ``fsync``; ``torch.load(weights_only=True)``, then copy into the tensors."""

    def save(self, step: int, state: State) -> Pending:
        torch.save(state, self.location(step))
        return self.unflushed(step)

    def load(self, step: int, state: State) -> None:
        states.fill(state, torch.load(self.location(step), weights_only=True))


class Safetensors(_OneFile):
    """``safetensors.torch.save_file``, then ``fsync``; ``load_file``, then copy into the tensors."""

    def __init__(self) -> None:
        self._library: Any = import_module("safetensors.torch")

    def save(self, step: int, state: State) -> Pending:
        self._library.save_file(dict(states.leaves(state)), self.location(step))
        return self.unflushed(step)

    def load(self, step: int, state: State) -> None:
        loaded = self._library.load_file(self.location(step))
        for name, tensor in states.leaves(state):
            tensor.copy_(loaded[name])
