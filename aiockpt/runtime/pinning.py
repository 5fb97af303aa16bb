"""Which host memory is registered with a device? Each piece once, for as long as it lives.

Registering costs milliseconds a piece, so it is done when memory is made, never with each save. Memory that is let go
while it is registered would leave the driver a mapping of something else. Thread-safe.
"""

from __future__ import annotations

import logging
from threading import Lock

from aiockpt.runtime.accelerator import Pins

logger = logging.getLogger("aiockpt")


class Pinning:
    """What is pinned of one pool; nothing before `use`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pins: Pins | None = None
        self._refused = False
        self._pinned: dict[int, Pins] = {}

    def use(self, pins: Pins) -> None:
        """Pin with *pins* from now on; whoever comes first pins for all devices."""
        if self._pins is None:  # without the lock, which may be held for the milliseconds of a registration
            self._pins = pins

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin memory that is not pinned yet. Where that is refused, say so once, and go on with pageable memory."""
        with self._lock:
            if self._pins is None or self._refused or address in self._pinned:
                return
            try:
                self._pins.pin(address, size_bytes)
                self._pinned[address] = self._pins
            except RuntimeError as error:
                self._refused = True
                logger.warning(
                    "staging memory cannot be pinned, so copies from devices hold training longer: %s", error
                )

    def unpin(self, address: int) -> None:
        """Take `pin` back, if there was one."""
        pins = self._pinned.pop(address, None)
        if pins is not None:
            try:
                pins.unpin(address)
            except (
                RuntimeError
            ) as error:  # the driver ends before us at the interpreter's end, and its mappings with it
                logger.info("staging memory was not unpinned: %s", error)
