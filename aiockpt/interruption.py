"""Is the run to end at this call? Every `step` and `save` asks; where nobody was told to ask, it never is.

`NeverInterrupted` is a run that goes on until it is done or killed; `aiockpt.preemption.handler` listens to schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from aiockpt.events import Observer
from aiockpt.futures import SaveFuture


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

    def reach(self) -> LastCall | None:
        """Hear that the training thread calls ``step`` or ``save``; return whether, and how, the run ends there."""
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

    def reach(self) -> None:
        """Go on."""

    def watch(self, save: SaveFuture) -> None:
        """Nobody asks for it."""

    def stop(self) -> None:
        """Nobody listens."""

    def release(self) -> None:
        """Nothing was taken."""
