"""The session of a process under proof: its recorder, and the checkpointers that it has made.

`find_probe` is called when a ``Checkpointer`` is made. It returns None unless the environment names a job, or a function
of this process is being proved.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aiockpt.engine.alone import CallProbe
from aiockpt.prove.assignment import VARIABLE

if TYPE_CHECKING:
    from aiockpt.options import Tier
    from aiockpt.prove.recorder import Recorder
    from aiockpt.prove.training import Training
    from aiockpt.runtime.world import Ranks


class Closes(Protocol):
    """The part of a checkpointer that a session uses."""

    def close(self) -> None: ...


class Session:
    """The recorder of this process, and the checkpointers that it watches."""

    def __init__(self, recorder: Recorder, training: Training) -> None:
        self.recorder = recorder
        self.training = training
        self._checkpointers: list[weakref.ref[Closes]] = []

    def add(self, checkpointer: Closes) -> None:
        self._checkpointers.append(weakref.ref(checkpointer))

    def close(self) -> None:
        """Close the checkpointers that a simulated kill has left open."""
        for reference in self._checkpointers:
            checkpointer = reference()
            if checkpointer is not None:
                with suppress(Exception):  # the result of its saves is the run's own
                    checkpointer.close()


_session: Session | None = None


def enter(session: Session | None) -> None:
    """Make *session* that of this process; None ends it."""
    global _session
    _session = session


def record(name: str, value: object) -> None:
    """Add *value*, called *name*, to the comparison of `aiockpt prove`; outside a proof do nothing.

    Args:
        value: a number, a tensor, or anything with a ``repr`` that is the same for equal values.
    """
    if _session is not None:
        from aiockpt.prove import records
        from aiockpt.prove.digests import text_of

        _session.recorder.check()
        _session.recorder.write(records.Recorded, name=name, value=text_of(value))


def find_probe(checkpointer: Closes, ranks: Ranks, tiers: Sequence[Tier]) -> CallProbe | None:
    """Return the probe for the calls of a *checkpointer* of this process; None outside `aiockpt prove`.

    Also None for a checkpointer whose places are to be left unchanged.
    """
    if _session is None and VARIABLE in os.environ:
        enter(_open_session(ranks))
    if _session is None:
        return None
    from aiockpt.prove.watched_calls import WatchedCalls, url_of

    urls = [url_of(tier.url) for tier in tiers]
    if set(urls) <= set(_session.recorder.job.as_is):
        return None
    _session.add(checkpointer)
    return WatchedCalls(_session.recorder, _session.training, ranks, urls)


def _open_session(ranks: Ranks) -> Session | None:
    from aiockpt.prove.assignment import read_job
    from aiockpt.prove.recorder import FileWriter, Recorder, kill_this_process
    from aiockpt.prove.training import Training

    job = read_job()
    if job is None:
        return None
    folder = Path(job.folder)
    write, kill = FileWriter(folder, ranks.rank), kill_this_process(folder)
    recorder = Recorder(job, write, ranks.rank, ranks.world_size, kill)
    return Session(recorder, Training(recorder))
