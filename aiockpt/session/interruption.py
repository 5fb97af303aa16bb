"""Is the run to end at this call? Every `step` and `save` asks; where nobody was told to ask, it never is.

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
        observers: to be told of events.
    """

    @property
    def listens(self) -> bool: ...
    @property
    def observers(self) -> Sequence[Observer]: ...

    def reach(self, call: ReachedCall) -> LastCall | None:
        """Hear that the training thread calls ``step`` or ``save``; return whether, and how, the run ends there."""
        ...

    def leave(self, *, failing: bool) -> BaseException | None:
        """Save the state of the last call where the run was told to end after it and the program is leaving.

        Args:
            failing: whether it leaves by an exception; the signal behind it may come a moment later.

        Returns:
            What says how the run ended; None where it was not told to, or the state has changed since.
        """
        ...

    def watch(self, save: SaveFuture) -> None:
        """Hear of a save that was started."""

    def stop(self) -> None:
        """Listen no more, before the loop ends. Any thread; idempotent."""

    def release(self) -> None:
        """Give back what listened, after everything is committed. Any thread; idempotent."""


class NeverInterrupted:
    """A run that goes on until it is done, or killed."""

    listens = False
    observers: Sequence[Observer] = ()

    def reach(self, call: ReachedCall) -> None:
        """Go on."""

    def leave(self, *, failing: bool) -> None:
        """Save nothing."""

    def watch(self, save: SaveFuture) -> None:
        """Nobody asks for it."""

    def stop(self) -> None:
        """Nobody listens."""

    def release(self) -> None:
        """Nothing was taken."""
