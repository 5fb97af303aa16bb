"""Detection of tensors that changed since the call that saves them, by torch's counters, some bytes, and their addresses.

Torch counts the changes of every tensor (``tensor._version``), those through views, slices and ``detach()`` too, and of all
views together. Changes that it does not count (``.data``, numpy, fused kernels, ``_foreach_*`` on DTensors) may show in 16
bytes from the middle of a tensor in host memory; on a device, reading them would block. The table in `aiockpt.lazy.guards`
determines what is compared of each tensor. Guarantees:

- Every change counted between the note and a check is reported, by the names of the tensors.
- Nothing is read from the former address of a tensor.
- A note costs about 0.1 µs a tensor, a check at an optimizer's step the same: all loops are C code.

When the checks are made is in `aiockpt.lazy.snapshotter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, ne

import torch

from aiockpt.adapters.addresses import middle_of
from aiockpt.errors import TornSnapshotError
from aiockpt.format.names import list_names
from aiockpt.lazy.guards import COMPARED, Guard, Where
from aiockpt.pipeline.snapshot import AddressCheck
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.state.shards import TensorShard

_version = attrgetter("_version")


class VersionCheck:
    """The versions and samples of tensors at a call, compared with later ones. Keeps the tensors alive.

    Args:
        sources: where these are read; shared by all saves of the same tensors at the same addresses.
    """

    def __init__(self, sources: VersionSources) -> None:
        self._sources = sources
        self._versions = sources.versions()
        self._samples = sources.counted_samples.read(), sources.uncounted_samples.read()

    def check_addresses(self) -> None:
        """Raise TornSnapshotError when a tensor is not where it was."""
        self._sources.addresses.check(self._sources.placed)

    def check(self) -> None:
        """Compare addresses, counters and samples; on any thread.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        sources, (counted, uncounted) = self._sources, self._samples
        # First: the samples of a tensor that has moved would be read from memory that was freed.
        self.check_addresses()
        self._report(
            [
                *self._counted(),
                *sources.counted_samples.changed(counted),
                *sources.uncounted_samples.changed(uncounted),
            ]
        )

    def recheck(self) -> None:
        """Compare once more, when the copy is over: counters, and samples of tensors without a reliable counter.

        Raises:
            TornSnapshotError: tensors have changed; they are named.
        """
        sources = self._sources
        changed = self._counted()
        if sources.uncounted_samples.numbers:
            sources.addresses.check(sources.uncounted_samples.numbers)
            changed += sources.uncounted_samples.changed(self._samples[1])
        self._report(changed)

    def _counted(self) -> list[int]:
        versions = self._sources.versions()
        if versions == self._versions:
            return []
        return list(compress(self._sources.numbers, map(ne, versions, self._versions)))

    def _report(self, changed: Sequence[int]) -> None:
        if not changed:
            return
        names = [self._sources.names[number] for number in sorted(set(changed))]
        raise TornSnapshotError(
            f"{list_names(names)} changed after the call of the save and before the next optimizer step, while the snapshot "
            "was copied: nothing was published. Change the state inside `with ckpt.mutating():`, or name what other things "
            "than optimizers change in Checkpointer(lazy=Lazy(mutable=[…])); the next save copies these in the call.",
            names,
        )


class VersionSources:
    """Where the counters, addresses and samples of tensors are read, as `COMPARED` says.

    Args:
        shards: of tensors that have counters.
        accelerator: knows which of them are on a device.

    Attributes:
        numbers: of the tensors whose counters `versions` returns, in that order.
        placed: the numbers of those whose addresses are compared; None for all.
        counted_samples, uncounted_samples: the samples of plain tensors, and of DTensors, where ``_foreach_*`` counts
            nothing: these are compared twice.
    """

    def __init__(self, shards: Sequence[TensorShard], accelerator: Accelerator) -> None:
        self.names = [shard.name for shard in shards]
        self.addresses = AddressCheck(shards)
        self._where: list[Where] = [_where(shard, accelerator) for shard in shards]
        inner, outer = self._with("counter"), self._with("outer counter")
        self._counted: list[torch.Tensor] = [*(shards[n].data for n in inner), *(shards[n].outer for n in outer)]
        self.numbers = [*inner, *outer]
        placed = self._with("place")
        self.placed = None if len(placed) == len(shards) else placed
        sampled = [number for number in self._with("sample") if shards[number].data.numel()]
        self.uncounted_samples = _Samples(shards, [n for n in sampled if shards[n].outer is not None])
        self.counted_samples = _Samples(shards, [n for n in sampled if shards[n].outer is None])

    def _with(self, guard: Guard) -> list[int]:
        return [number for number, where in enumerate(self._where) if guard in COMPARED[where]]

    def versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # classes that override what is read of them
            return list(map(_version, self._counted))


class _Samples:
    """Sampled bytes of the tensors with these *numbers*. Valid only while the tensors keep their addresses."""

    def __init__(self, shards: Sequence[TensorShard], numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._windows = [middle_of(shards[number].data) for number in numbers]

    def read(self) -> bytes:
        return b"".join(self._windows)

    def changed(self, before: bytes) -> Iterable[int]:
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


def _where(shard: TensorShard, accelerator: Accelerator) -> Where:
    """Return the column of the table that *shard* is in."""
    on_host = shard.data.device.type == "cpu" and accelerator.device_of(shard.data) is None
    if shard.outer is None:
        return "host" if on_host else "device"
    return "dtensor_host" if on_host else "dtensor_device"
