"""Does something still move? What transfers bytes says so, for whoever waits only while it does.

It is said by calls that succeeded, by what sees bytes pass, and ahead of time by what nobody can look into. Who listens does
so for its own task and those begun in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

OnProgress = Callable[[float], object]
"""Told that something moved, and for how many seconds from now nothing can be expected to be seen."""
_on_progress: ContextVar[OnProgress | None] = ContextVar("on_progress", default=None)


def note_progress(unseen_s: float = 0.0) -> None:
    """Say that something moved, or that for *unseen_s* seconds from now something may, unseen."""
    on_progress = _on_progress.get()
    if on_progress is not None:
        on_progress(unseen_s)


@contextmanager
def told_of_progress(on_progress: OnProgress) -> Iterator[None]:
    """Have *on_progress* told of what moves inside the block, and in tasks begun there."""
    token = _on_progress.set(on_progress)
    try:
        yield
    finally:
        _on_progress.reset(token)
