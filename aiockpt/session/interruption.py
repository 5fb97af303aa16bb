"""Interruption, the early end of a run: every `step` and `save` checks for it; by default it never comes.

`aiockpt.engine.alone.NeverInterrupted` is a run that goes on until it is done or killed;
`aiockpt.session.preemption.handler` listens to schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aiockpt.engine.job import SaveRequest
from aiockpt.events import Observer
from aiockpt.futures import SaveFuture

StartSave = Callable[[SaveRequest], SaveFuture]
"""Checks the request for a save, and starts the save."""


class Interruption(Protocol):
    """A source of requests to end a run before it is done.

    Attributes:
        listens: whether there may be such a request.
        observers: to be notified of events.
    """

    @property
    def listens(self) -> bool: ...
    @property
    def observers(self) -> Sequence[Observer]: ...

    def reach(self, request: SaveRequest, start: StartSave, *, asked: bool) -> None:
        """Enter a call of ``step`` or ``save`` on the training thread.

        Args:
            asked: whether the program itself wants this save.

        Raises:
            Preempted: the run ends here; what is worth keeping was made durable, with a save of the state or without.
        """

    def on_exit(self, *, failing: bool) -> BaseException | None:
        """Save the state of the last call where the run must end after it and the program is leaving.

        Args:
            failing: whether it leaves by an exception; the signal behind it may come a moment later.

        Returns:
            The exception that says how the run ended; None where it need not end, or the state has changed since.
        """
        ...

    def watch(self, save: SaveFuture) -> None:
        """Record a save that was started."""

    def stop(self) -> None:
        """Stop listening, before the loop ends. Any thread; idempotent."""

    def release(self) -> None:
        """Restore the signal handlers, after everything is committed. Any thread; idempotent."""
