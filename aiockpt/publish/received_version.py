"""A version that a receiver hands out: its folder, what changed, and the changed elements themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from aiockpt.adapters.tensors import torch_dtype
from aiockpt.format.dtypes import itemsize
from aiockpt.publish.form import VersionIndex
from aiockpt.publish.frames import FrameReader, load_zstd
from aiockpt.publish.local_copy import LocalCopy
from aiockpt.publish.mapped import MappedTensors


class Patch(msgspec.Struct, frozen=True):
    """What changed in a tensor: *values* of its flat elements at *positions*; None stands for all of them."""

    name: str
    positions: torch.Tensor | None
    values: torch.Tensor


class ReceivedVersion:
    """A version that is handed out; its folder does not change before the loop comes back.

    Args:
        changed: name → the frames of what changed in it, one for each delta; None stands for all of it.

    Attributes:
        version: its number; *step* of the run that its weights are of.
        folder: a Hugging Face folder.
        published_ns: when it was published, in nanoseconds since 1970, by the publisher's clock.
    """

    def __init__(
        self,
        copy: LocalCopy,
        target: VersionIndex,
        changed: Mapping[str, Sequence[MappedTensors] | None],
        refuse: Callable[[], None],
    ) -> None:
        self.version: int = target.number
        self.step: int = target.notes.step
        self.folder: Path = copy.path
        self.published_ns: int = target.notes.created_ns
        self._copy = copy
        self._changed = changed
        self._refuse = refuse

    def again(self) -> None:
        """Hand this version out again, as one of which all has changed, unless there is a newer one then.

        Call it where an engine did not take the version. The loop's next turn comes after a pause, which doubles up to
        a minute.
        """
        self._refuse()

    def changed(self) -> list[str]:
        """Return the names of the tensors that differ from the version that was handed out before; at first all."""
        return list(self._changed)

    def patches(self) -> Iterator[Patch]:
        """Yield the elements that have changed, tensor by tensor; whole ones where it did not come as deltas."""
        zstd = load_zstd()
        for name, frames in self._changed.items():
            local = self._copy.weights.tensors[name]
            raw = torch.from_numpy(self._copy.weights.view(name)).view(torch_dtype(local.entry.dtype))
            if frames is None:
                yield Patch(name, None, raw.clone())
                continue
            size = local.end - local.start
            xor = np.zeros(size, np.uint8)
            for one in frames:
                xor ^= FrameReader(zstd, one.view(name).data, name).read(size)
            differ = xor.reshape(-1, itemsize(local.entry.dtype)).any(axis=1)
            positions = torch.from_numpy(np.flatnonzero(differ))
            yield Patch(name, positions, raw[positions])

    def __repr__(self) -> str:
        return f"<version {self.version}, of step {self.step}, in {self.folder}>"
