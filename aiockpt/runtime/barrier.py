"""Who keeps the optimizer from changing what is still being copied? A barrier that cannot be forgotten.

While a snapshot is being copied on another thread, a global optimizer-step pre-hook holds every optimizer of the process
until the *whole* ticket is copied (DECISIONS 15). The hook is installed when the first such snapshot starts and removed
when none is left. Version counters are no guard: fused optimizers change data without bumping them (PEERS: traps).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aiockpt.errors import StorageTimeoutError
from aiockpt.runtime.future import Stage

GiveUp = Callable[[BaseException], object]


class MutationBarrier:
    """Holds whoever is about to change the state until it is copied. Thread-safe.

    Args:
        timeout_s: how long one wait may last. A copy that is stuck for longer fails its save, and training goes on: the
            state is about to change under it, and a torn snapshot is never published.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._copying: dict[Stage[None], GiveUp] = {}
        self._handle: RemovableHandle | None = None

    def guard(self, snapshotted: Stage[None], give_up: GiveUp) -> None:
        """Hold optimizers from now until *snapshotted* is settled; *give_up* fails a save whose copy is stuck."""
        with self._lock:
            self._copying[snapshotted] = give_up
            if self._handle is None:
                self._handle = register_optimizer_step_pre_hook(self._before_step)
        snapshotted._inner.add_done_callback(lambda _: self._release(snapshotted))

    def wait(self) -> None:
        """Block until no snapshot is being copied."""
        for snapshotted, give_up in list(self._copying.items()):
            snapshotted._wait_anyway(self._timeout_s)
            if not snapshotted.done():
                give_up(
                    StorageTimeoutError(f"the snapshot was not copied within {self._timeout_s:g} s; it is given up")
                )

    def _before_step(self, *_: Any) -> None:
        self.wait()

    def _release(self, snapshotted: Stage[None]) -> None:
        with self._lock:
            self._copying.pop(snapshotted, None)
            if not self._copying and self._handle is not None:
                self._handle.remove()
                self._handle = None
