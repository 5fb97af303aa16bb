"""Copies a whole state on its device, in the call, in the order of the compute streams; that takes milliseconds.

Guarantees:

- The copies hold the state as of the call, whatever the program does next; no optimizer waits for anything.
- Training keeps the memory that it needs: there is one such copy at a time, and none where the device has no room beside
  the peak of training. Then the snapshot is lazy, and says why.
- What is in host memory is copied in the call as well. A state that is all there is copied eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import torch

from aiockpt.options import Snapshot
from aiockpt.pipeline.state_devices import StateDevices
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.state.shards import ShardedState

logger = logging.getLogger("aiockpt")


class Taken(msgspec.Struct, frozen=True):
    """A snapshot as it can be had: of which state, how, and why not as it was asked for."""

    state: ShardedState
    snapshot: Snapshot
    reason: str = ""


class DeviceCloner:
    """Copies states on their devices, where there is room."""

    def __init__(self, accelerator: Accelerator, devices: StateDevices) -> None:
        self._accelerator = accelerator
        self._devices = devices

    def clone(self, walked: ShardedState, *, busy: bool) -> Taken:
        """Copy *walked* on its devices, if that is possible.

        Args:
            busy: whether the last such copy is still needed.
        """
        sizes = self._devices.sizes(walked.tensors)
        if not sizes:
            return Taken(walked, "eager", "no tensor is on a device")
        reason = "the last copy on the device is still on its way to the host" if busy else self._why_not(sizes)
        if not reason:
            try:
                return Taken(self._clone(walked), "device")
            except torch.OutOfMemoryError as error:
                reason = f"the device has no memory for a copy: {str(error).partition('.')[0]}"
        logger.warning("the snapshot is lazy: %s", reason)
        return Taken(walked, "lazy", reason)

    def _why_not(self, sizes: Mapping[torch.device, int]) -> str:
        for device, size_bytes in sizes.items():
            missing_bytes = self._accelerator.lend(device, size_bytes)
            if missing_bytes:
                return f"{device} lacks {missing_bytes:,} of {size_bytes:,} bytes for a copy beside what training needs"
        return ""

    def _clone(self, walked: ShardedState) -> ShardedState:
        clone = self._accelerator.clone
        tensors = tuple(msgspec.structs.replace(shard, data=clone(shard.data)) for shard in walked.tensors)
        return msgspec.structs.replace(walked, tensors=tensors)
