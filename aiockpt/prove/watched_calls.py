"""The probe of a proof at the calls of one ``Checkpointer``: the state at each, and the result of each load.

The checkpointer saves to a scratch place meanwhile, so that the run's own is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aiockpt.backends.local import LocalBackend
from aiockpt.engine.load import Filled, LoadRequest
from aiockpt.futures import LoadResult
from aiockpt.options import Tier
from aiockpt.prove import records
from aiockpt.prove.digests import look_at, text_of
from aiockpt.prove.recorder import Recorder
from aiockpt.prove.scratch import ScratchBackend, scratch_of
from aiockpt.prove.training import Training
from aiockpt.redaction import redact
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

State = Mapping[str, Any]


class WatchedCalls:
    """Records the calls of one checkpointer, and replaces its places by scratch places."""

    def __init__(self, recorder: Recorder, training: Training, ranks: Ranks, urls: Sequence[str]) -> None:
        self._recorder, self._training = recorder, training
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._urls = list(urls)
        self._url = redact(urls[0])
        self._closed = False

    @property
    def observers(self) -> Sequence[Recorder]:
        """The observers of events."""
        return [self._recorder]

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return *tiers*, and a scratch backend for each; ``memory://`` is this process's and stays, and so may others.

        Args:
            by_url: another process is to open them, by their URLs.
        """
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
        """Return what completes a load on the thread of its waiter, and records its result."""

        def finish() -> LoadResult | None:
            result = None if filled is None else filled.apply()
            whole = request.only is None and request.rename is None
            self._loaded(request.state, result, whole=whole)
            return result

        return finish

    def _loaded(self, state: State, result: LoadResult | None, *, whole: bool) -> None:
        step = None if result is None else result.step
        fits = whole and (result is None or not (result.missing or result.differences))
        self._recorder.loaded(step)
        view = look_at(state, self._rank, spread=self._recorder.job.spread)
        withheld = self._recorder.job.withhold
        self._recorder.write(records.Loaded, url=self._url, step=step, fits=fits, withheld=withheld, state=view)

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Called when the script has come to *step*, and is about to save it or not."""
        self._recorder.check()
        self._training.learn_names(state)
        view = look_at(state, self._rank, spread=self._recorder.job.spread)
        told = {name: text_of(value) for name, value in (metrics or {}).items()}
        self._recorder.write(records.Labelled, url=self._url, step=step, saved=saved, state=view, metrics=told)
        self._recorder.reach(step, saving=saved)

    def saved(self, step: int) -> None:
        """Called when ``save(step)`` has returned."""
        self._recorder.saved(step)

    def closing(self) -> None:
        """Called when the checkpointer is being closed."""
        if not self._closed and not self._recorder.dead:
            self._closed = True
            weights, slots = self._training.end()
            self._recorder.write(records.Ended, weights=weights, slots=slots)
