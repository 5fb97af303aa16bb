"""``safetensors``: a header of JSON, then the bytes, in one file."""

from __future__ import annotations

from safetensors.torch import load_file, save_file

from benchmarks import state as states
from benchmarks.contenders import Pending
from benchmarks.contenders.one_file import OneFile
from benchmarks.state import State


class Safetensors(OneFile):
    """``safetensors.torch.save_file``, then ``fsync``; ``load_file``, then copy into the tensors."""

    suffix = "safetensors"

    def save(self, step: int, state: State) -> Pending:
        save_file(dict(states.leaves(state)), self.location(step))
        return self.unflushed(step)

    def load(self, step: int, state: State) -> None:
        loaded = load_file(self.location(step))
        for name, tensor in states.leaves(state):
            tensor.copy_(loaded[name])
