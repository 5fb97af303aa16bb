"""Knows which devices a state is on, and how far they were when it was saved; looked up again when the tensors are others.

A copy on a device begins behind all that the device's compute stream had been given at the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from aiockpt.runtime.accelerator import Accelerator, DeviceEvent
from aiockpt.runtime.slabs import SlabPool
from aiockpt.state.shards import TensorShard, are_same


class StateDevices:
    """The devices of the states of one checkpointer.

    Args:
        accelerator: knows which tensors are on a device.
        pool: the slabs that copies go to; pinned for every device that a state is on.
    """

    def __init__(self, accelerator: Accelerator, pool: SlabPool) -> None:
        self._accelerator = accelerator
        self._pool = pool
        self._seen: tuple[TensorShard, ...] = ()
        self._sizes: dict[torch.device, int] = {}

    def sizes(self, tensors: tuple[TensorShard, ...]) -> Mapping[torch.device, int]:
        """Return the devices that *tensors* are on, and how many bytes of them are there; nothing of host memory."""
        if not are_same(tensors, self._seen):
            sizes: dict[torch.device, int] = {}
            for shard in tensors:
                device = self._accelerator.device_of(shard.data)
                if device is not None:
                    sizes[device] = sizes.get(device, 0) + shard.data.nbytes
            self._seen, self._sizes = tensors, sizes
        return self._sizes

    def pin(self, tensors: tuple[TensorShard, ...]) -> None:
        """Have the slabs pinned for the devices of *tensors*."""
        for device in self.sizes(tensors):
            self._pool.pin_with(self._accelerator.stream(device))

    def events(self, tensors: tuple[TensorShard, ...]) -> Sequence[tuple[torch.device, DeviceEvent]]:
        """Return the devices of *tensors*, each with the event behind all that the calling thread gave it so far."""
        return [(device, self._accelerator.now(device)) for device in self.sizes(tensors)]

    def forget(self) -> None:
        """Let go of the last state."""
        self._seen, self._sizes = (), {}
