"""Has a tensor changed since the call that saves it, although its copy is made later? By torch's counters, and some bytes.

Torch counts the changes of every tensor (``tensor._version``), those through views, slices and ``detach()`` too, and of all
views together. Of what it does not count (``.data``, numpy, fused kernels, ``_foreach_*`` on DTensors) 16 bytes from the
middle of each tensor in host memory may tell; on a device, to look would be to wait. The table of what sees which change is
`aiockpt.lazy.guards`. Guarantees:

- What was counted between the note and a check is told, by the names of the tensors.
- Nothing is read from where a tensor is no more.
- A note costs about 0.1 µs a tensor, a check at an optimizer's step the same: all loops are C code.

Torch counts *after* its kernel: a check while one runs sees its bytes at best. So there is a second check, on a thread of
the program and when the copy is over (`aiockpt.engine.job`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, ne
from typing import Any

import torch

from aiockpt.errors import TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.pipeline.address_check import Places
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.state.shards import TensorShard

SAMPLE_BYTES = 16
_version = attrgetter("_version")


class VersionNotes:
    """Notes what tensors are like, and remembers where that is read for the next save of the same ones.

    Args:
        accelerator: knows which tensors are on a device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._shards: Sequence[TensorShard] = ()
        self._sources = _Sources((), accelerator)

    def note(self, shards: Sequence[TensorShard]) -> VersionCheck | None:
        """Return a check of *shards* against what they are now; None for none.

        Args:
            shards: of tensors that have counters; the very same sequence where they are the same, and where they were.
        """
        if shards is not self._shards:
            self._shards, self._sources = shards, _Sources(shards, self._accelerator)
        return VersionCheck(self._sources) if shards else None

    def forget(self) -> None:
        """Let go of the last tensors."""
        self._shards, self._sources = (), _Sources((), self._accelerator)


class VersionCheck:
    """What tensors were like at a call. They are kept alive, and compared."""

    def __init__(self, sources: _Sources) -> None:
        self._sources = sources
        self._versions = sources.versions()
        self._samples = sources.plain.read(), sources.spread.read()

    def check_places(self) -> None:
        """Raise TornSnapshotError when a tensor is not where it was."""
        self._sources.places.check()

    def check(self) -> None:
        """Compare places, counters and samples; on any thread.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        sources = self._sources
        sources.places.check()
        self._tell(
            [*self._counted(), *sources.plain.changed(self._samples[0]), *sources.spread.changed(self._samples[1])]
        )

    def check_again(self) -> None:
        """The same once more, when the copy is over: counters, and samples of what has none that can be relied upon.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        sources = self._sources
        changed = self._counted()
        if sources.spread.numbers:
            sources.places.check(sources.spread.numbers)
            changed += sources.spread.changed(self._samples[1])
        self._tell(changed)

    def _counted(self) -> list[int]:
        versions = self._sources.versions()
        if versions == self._versions:
            return []
        return list(compress(self._sources.numbers, map(ne, versions, self._versions)))

    def _tell(self, changed: Sequence[int]) -> None:
        if not changed:
            return
        names = [self._sources.names[number] for number in sorted(set(changed))]
        raise TornSnapshotError(
            f"{list_names(names)} changed after the call of the save and before the next optimizer step, while the snapshot "
            "was copied: nothing was published. Change the state inside `with ckpt.mutating():`, or name what other things "
            "than optimizers change in Checkpointer(mutable=[…]); the next save copies these in the call.",
            names,
        )


class _Sources:
    """Where the counters, places and samples of tensors are read."""

    def __init__(self, shards: Sequence[TensorShard], accelerator: Accelerator) -> None:
        self.names = [shard.name for shard in shards]
        self.places = Places(shards)
        spread = [number for number, shard in enumerate(shards) if shard.outer is not None]
        self._counted: list[torch.Tensor] = [*(shard.data for shard in shards), *(shards[n].outer for n in spread)]
        self.numbers = [*range(len(shards)), *spread]
        on_host = {number for number, shard in enumerate(shards) if _is_on_host(shard.data, accelerator)}
        self.plain = _Samples(shards, sorted(on_host.difference(spread)))
        self.spread = _Samples(shards, sorted(on_host.intersection(spread)))

    def versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # classes with a say in what is read of them
            return list(map(_version, self._counted))


class _Samples:
    """Some bytes of some tensors, by their *numbers*. Only while the tensors are where they were."""

    def __init__(self, shards: Sequence[TensorShard], numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._windows = [_window(shards[number].data) for number in numbers]

    def read(self) -> bytes:
        return b"".join(self._windows)

    def changed(self, before: bytes) -> list[int]:
        now = self.read()
        if now == before:
            return []
        changed, start = [], 0
        for number, window in zip(self.numbers, self._windows, strict=True):
            end = start + len(window)
            if now[start:end] != before[start:end]:
                changed.append(number)
            start = end
        return changed


def _is_on_host(tensor: torch.Tensor, accelerator: Accelerator) -> bool:
    return tensor.device.type == "cpu" and accelerator.device_of(tensor) is None and tensor.numel() > 0


def _window(tensor: torch.Tensor) -> Any:
    """Return the memory of a sample: in the middle, for the first rows of a table are often zero, and stay so."""
    size_bytes, offset = tensor.element_size(), 0
    if tensor.is_contiguous():
        offset = tensor.numel() // 2 * size_bytes
        size_bytes = min(SAMPLE_BYTES, tensor.nbytes - offset)
    return (ctypes.c_char * size_bytes).from_address(tensor.data_ptr() + offset)
