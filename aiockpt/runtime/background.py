"""Task of an observer that runs beside the engine: started with it, ended with it, and never in its way."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiockpt.errors import CheckpointError
from aiockpt.events import BackgroundTask, Event, EventSource, Observer
from aiockpt.runtime.world import Loop

FINISH_S = 60.0
"""How long an observer may finish its own work (`aiockpt.events.BackgroundTask`) when the checkpointer is closed."""

logger = logging.getLogger("aiockpt")


def run_background(
    loop: Loop, observer: BackgroundTask, emit: Callable[[Event], object], drop: Callable[[Observer], object]
) -> Callable[[], None]:
    """Start the task of *observer* on *loop*; return a function that ends it, by force when late. Its errors are logged.

    Args:
        emit: passes an event to all observers, on the loop thread.
        drop: ends the events of an observer, on the loop thread: after an error nothing would take them from its queue.
    """
    if isinstance(observer, EventSource):
        observer.set_emitter(emit)
    running = loop.submit(observer.run)

    def log_error(_: object) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            drop(observer)
            if isinstance(error, CheckpointError):  # its message is enough
                logger.error("observer %r stopped working: %s", observer, error)
            else:
                logger.error("observer %r stopped working", observer, exc_info=error)

    def end() -> None:
        try:
            loop.submit(observer.aclose).result(FINISH_S)
            running.exception(FINISH_S)
        except Exception:
            logger.exception("observer %r did not end", observer)
        finally:
            running.cancel()

    running.add_done_callback(log_error)
    return end
