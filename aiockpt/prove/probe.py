"""What sees the calls of a ``Checkpointer``: a probe under `aiockpt prove`, and nobody otherwise.

`find_probe` is asked by each ``Checkpointer`` when it is made. It answers with `Unwatched` unless the environment names a
job, or a function of this process is being proved.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from aiockpt.prove.assignment import VARIABLE
from aiockpt.redaction import redact

if TYPE_CHECKING:
    from aiockpt.checkpointer import Checkpointer
    from aiockpt.engine.load import Filled, LoadRequest
    from aiockpt.futures import LoadResult
    from aiockpt.options import Tier
    from aiockpt.prove.recorder import Recorder
    from aiockpt.prove.training import Training
    from aiockpt.runtime.ranks import Ranks
    from aiockpt.runtime.world import World
    from aiockpt.storage.backend import Backend

    State = Mapping[str, Any]


class Session:
    """The recorder of this process, and what it watches."""

    def __init__(self, recorder: Recorder, training: Training) -> None:
        self.recorder = recorder
        self.training = training
        self._checkpointers: list[weakref.ref[Checkpointer]] = []

    def add(self, checkpointer: Checkpointer) -> None:
        """Hear of a checkpointer of this run."""
        self._checkpointers.append(weakref.ref(checkpointer))

    def close(self) -> None:
        """End the checkpointers that a simulated kill has left."""
        for reference in self._checkpointers:
            checkpointer = reference()
            if checkpointer is not None:
                with suppress(Exception):  # what its saves came to is the run's own matter
                    checkpointer.close()


_session: Session | None = None


def enter(session: Session | None) -> None:
    """Make *session* that of this process; None ends it."""
    global _session
    _session = session


def record(name: str, value: object) -> None:
    """Have `aiockpt prove` compare *value*, called *name*, with that of the run that is never stopped; else do nothing.

    Args:
        value: a number, a tensor, or anything with a ``repr`` that is the same for equal values.
    """
    if _session is not None:
        from aiockpt.prove import records
        from aiockpt.prove.digests import text_of

        _session.recorder.check()
        _session.recorder.write(records.Told, name=name, value=text_of(value))


def find_probe(checkpointer: Checkpointer, ranks: Ranks, tiers: Sequence[Tier]) -> Unwatched | CallProbe:
    """Return a probe for a *checkpointer* of this process; one that sees nothing outside of `aiockpt prove`.

    So it is, too, for one whose places are to be left as they are.
    """
    if _session is None and VARIABLE in os.environ:
        enter(_open_session(ranks))
    if _session is None:
        return Unwatched()
    from aiockpt.prove.scratch import url_of

    urls = [url_of(tier.url) for tier in tiers]
    if set(urls) <= set(_session.recorder.job.as_is):
        return Unwatched()
    _session.add(checkpointer)
    return CallProbe(_session, ranks, urls)


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


class Unwatched:
    """Sees nothing, and leaves places and loads as they are; what each method is there for, `CallProbe` says."""

    observers: Sequence[Recorder] = ()

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return *tiers*, and a backend for each."""
        from aiockpt.storage.open import open_backend

        return list(tiers), [open_backend(tier.url, world=world) for tier in tiers]

    def asked(self, request: LoadRequest) -> LoadRequest:
        """Return *request*."""
        return request

    def watch_load(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None] | None:
        """Return what fills the objects; None where there is nothing to fill."""
        return None if filled is None else filled.apply

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Look away."""

    def saved(self, step: int) -> None:
        """Look away."""

    def closing(self) -> None:
        """Look away."""


class CallProbe:
    """Sees the calls of one checkpointer, and gives it a scratch place."""

    def __init__(self, session: Session, ranks: Ranks, urls: Sequence[str]) -> None:
        self._recorder, self._training = session.recorder, session.training
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._urls = list(urls)
        self._url = redact(urls[0])
        self._closed = False

    @property
    def observers(self) -> Sequence[Recorder]:
        """Who is to be told of events."""
        return [self._recorder]

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return *tiers*, and a scratch backend for each; ``memory://`` is this process's and stays, and so may others.

        Args:
            by_url: another process is to open them, by their URLs.
        """
        from aiockpt.backends.local import LocalBackend
        from aiockpt.prove import records
        from aiockpt.prove.scratch import ScratchBackend, scratch_of
        from aiockpt.storage.open import open_backend

        urls = self._urls
        self._recorder.check()
        self._recorder.write(records.Begun, rank=self._rank, world_size=self._world_size, urls=list(map(redact, urls)))
        moved: list[Tier] = []
        backends: list[Backend] = []
        for tier, url in zip(tiers, urls, strict=True):
            folder = str(scratch_of(Path(self._recorder.job.place), url))
            job = self._recorder.job
            if url in job.as_is or (url.startswith("memory:") and not job.inline):
                backends.append(open_backend(tier.url, world=world))
            elif by_url:
                tier = msgspec.structs.replace(tier, url=folder)
                backends.append(LocalBackend(folder, world=world))
            else:
                backends.append(ScratchBackend(LocalBackend(folder, world=world), url, self._recorder))
            moved.append(tier)
        return moved, backends

    def asked(self, request: LoadRequest) -> LoadRequest:
        """Return what is to be loaded: in a control its step is found, and nothing of the state is filled."""
        self._recorder.check()
        self._training.learn_names(request.state)
        if not self._recorder.job.withhold:
            return request
        return msgspec.structs.replace(request, state={}, only=None, rename=None, strict=False)

    def watch_load(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None]:
        """Return what completes a load on the thread of its waiter, and looks at what came of it."""

        def finish() -> LoadResult | None:
            result = None if filled is None else filled.apply()
            whole = request.only is None and request.rename is None
            self._loaded(request.state, result, whole=whole)
            return result

        return finish

    def _loaded(self, state: State, result: LoadResult | None, *, whole: bool) -> None:
        from aiockpt.prove import records
        from aiockpt.prove.digests import look_at

        step = None if result is None else result.step
        fits = whole and (result is None or not (result.missing or result.differences))
        self._recorder.loaded(step)
        view = look_at(state, self._rank, spread=self._recorder.job.spread)
        withheld = self._recorder.job.withhold
        self._recorder.write(records.Loaded, url=self._url, step=step, fits=fits, withheld=withheld, state=view)

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Hear that the script has come to *step*, and is about to save it or not."""
        from aiockpt.prove import records
        from aiockpt.prove.digests import look_at, text_of

        self._recorder.check()
        self._training.learn_names(state)
        view = look_at(state, self._rank, spread=self._recorder.job.spread)
        told = {name: text_of(value) for name, value in (metrics or {}).items()}
        self._recorder.write(records.Labelled, url=self._url, step=step, saved=saved, state=view, metrics=told)
        self._recorder.reach(step, saving=saved)

    def saved(self, step: int) -> None:
        """Hear that ``save(step)`` has returned."""
        self._recorder.saved(step)

    def closing(self) -> None:
        """Hear that the checkpointer is being closed."""
        from aiockpt.prove import records

        if not self._closed and not self._recorder.dead:
            self._closed = True
            weights, slots = self._training.end()
            self._recorder.write(records.Ended, weights=weights, slots=slots)
