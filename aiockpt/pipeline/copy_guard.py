"""Protocols between a copy and the guard of its state: its pace, and the comparison at its end. No torch."""

from __future__ import annotations

from typing import Protocol


class CopyThrottle(Protocol):
    """Limits how many slabs a copy beside the running program fills, and when (`aiockpt.lazy.throttle`)."""

    @property
    def whole(self) -> bool:
        """Whether slabs for the whole state may have been requested at once."""
        ...

    @property
    def fills_more(self) -> bool:
        """Whether the next slab belongs to the same batch, so that those that are full can wait for it."""
        ...

    def wait(self, left_bytes: int, timeout_s: float) -> None:
        """Wait until a slab is worth filling, *left_bytes* being left to copy; *timeout_s* seconds at most."""

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Note that a slab of *size_bytes* was filled in *seconds*."""


class CopyGuard(Protocol):
    """Guards a state while it is copied."""

    @property
    def throttle(self) -> CopyThrottle | None:
        """The throttle of the copy; None lets it fill every slab that it gets."""
        ...

    @property
    def compares_bytes(self) -> bool:
        """Whether devices must have copied before `compare`."""
        ...

    def compare(self) -> None:
        """Compare the state with what it was at the call; to be called when all is copied, or enqueued on a device.

        Raises:
            TornSnapshotError: the state has changed: the copy is invalid.
        """
