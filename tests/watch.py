"""An observer that keeps every event and waits for one, the lines of the log, and a wait for what no event reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Condition
from typing import TypeVar

from aiockpt.events import Event

E = TypeVar("E", bound=Event)


def until(condition: Callable[[], object], what: str, timeout_s: float = 250, pause_s: float = 0.01) -> None:
    """Look at *condition* until it holds; *what* names it in the error. For what another thread or process does."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {timeout_s} s"
        time.sleep(pause_s)


class Watch:
    """Keeps every event. Events come from the engine's loop thread; the questions are asked on the test's."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._told = Condition()

    def on_event(self, event: Event) -> None:
        with self._told:
            self.events.append(event)
            self._told.notify_all()

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of *kind*, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[Event], timeout_s: float = 250) -> None:
        """Wait until an event of *kind* has come."""
        with self._told:
            assert self._told.wait_for(lambda: self.of(kind), timeout_s), f"no {kind.__name__} within {timeout_s} s"


class Lines(logging.Handler):
    """What aiockpt logs while this is entered, on any thread."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("aiockpt").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("aiockpt").removeHandler(self)
