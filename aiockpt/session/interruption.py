"""Interruption, the early end of a run: every `step` and `save` checks for it; by default it never comes.

`NeverInterrupted` is a run that goes on until it is done or killed; `aiockpt.session.preemption.handler` listens to
schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from aiockpt.events import Observer
from aiockpt.futures import SaveFuture


class ReachedCall(msgspec.Struct, frozen=True):
    """A call of ``step`` or ``save``.

    Attributes:
        prepare: checks what is asked for, and returns what starts a save of *state*.
    """

    step: int
    state: Mapping[str, Any]
    prepare: Callable[[], Callable[[], SaveFuture]]


class LastCall(Protocol):
    """The call in which a run ends."""

    def finish(self, step: int, save: Callable[[], SaveFuture], *, asked: bool) -> NoReturn:
        """Make what is worth keeping durable, with a *save* of the state or without, and end the program.

        Args:
            asked: whether the program itself wants this save.
        """
        ...


class Interruption(Protocol):
    """What may end a run before it is done.

    Attributes:
        listens: whether anything may.
        observers: to be notified of events.
    """

    @property
    def listens(self) -> bool: ...
    @property
    def observers(self) -> Sequence[Observer]: ...

    def reach(self, call: ReachedCall) -> LastCall | None:
        """Enter a call of ``step`` or ``save`` on the training thread; return whether, and how, the run ends there."""
        ...

    def leave(self, *, failing: bool) -> BaseException | None:
        """Save the state of the last call where the run must end after it and the program is leaving.

        Args:
            failing: whether it leaves by an exception; the signal behind it may come a moment later.

        Returns:
            What says how the run ended; None where it need not, or the state has changed since.
        """
        ...

    def watch(self, save: SaveFuture) -> None:
        """Record a save that was started."""

    def stop(self) -> None:
        """Listen no more, before the loop ends. Any thread; idempotent."""

    def release(self) -> None:
        """Give back what listened, after everything is committed. Any thread; idempotent."""


class NeverInterrupted:
    """A run that goes on until it is done, or killed: every method does nothing."""

    listens = False
    observers: Sequence[Observer] = ()

    def reach(self, call: ReachedCall) -> None:
        """Does nothing."""

    def leave(self, *, failing: bool) -> None:
        """Does nothing."""

    def watch(self, save: SaveFuture) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""
