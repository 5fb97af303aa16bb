"""Who is told of a save that failed in the background? Its future; else the next call, in the way that was chosen.

Guarantees: a failure is told once, to whoever asks first; it never loses the save that tells of it
(docs/decisions.md#a-failed-save-never-loses-the-next-one).
"""

from __future__ import annotations

import warnings

from aiockpt.engine.context import Engine
from aiockpt.errors import BackgroundSaveError
from aiockpt.futures import SaveFuture


def report_failures(engine: Engine, just_started: SaveFuture) -> None:
    """Apply ``on_error`` to the failures that nobody has heard of.

    Raises:
        BackgroundSaveError: the policy is "raise"; *just_started* was started all the same.
    """
    policy = engine.options.on_error
    if policy == "raise":
        raise_failures(engine, just_started)
        return
    for failure in undelivered(engine, just_started):
        if callable(policy):
            policy(failure)
        else:
            warnings.warn(
                f"the save of step {failure.step} failed: {failure.exception()!r}", RuntimeWarning, stacklevel=3
            )


def raise_failures(engine: Engine, just_started: SaveFuture | None = None) -> None:
    """Raise the failures that nobody has heard of, whatever the policy.

    Raises:
        BackgroundSaveError: there are some.
    """
    failed = undelivered(engine, just_started)
    if failed:
        raise BackgroundSaveError(failed, just_started) from failed[0].exception()


def undelivered(engine: Engine, just_started: SaveFuture | None = None) -> list[SaveFuture]:
    """Return the failed saves whose error nobody has taken from their future, each once.

    One that this very call has started may have failed already: the next call tells of it.
    """
    ended = [engine.failed.popleft() for _ in range(len(engine.failed))]
    engine.failed.extend(future for future in ended if future is just_started)
    return [future for future in ended if future is not just_started and not future.delivered]
