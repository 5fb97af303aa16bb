"""The probe of a proof at the calls of one ``Checkpointer``: the state at each, and the result of each load.

During a proof the checkpointer saves to a scratch place; the run's own place is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import xxhash

from aiockpt.backends.local import LocalBackend
from aiockpt.engine.alone import CallProbe
from aiockpt.engine.load import Filled, LoadRequest
from aiockpt.format.names import parse_step
from aiockpt.futures import LoadResult
from aiockpt.options import Tier
from aiockpt.prove import records
from aiockpt.prove.digests import text_of, view_of
from aiockpt.prove.recorder import Recorder
from aiockpt.prove.training import Training
from aiockpt.redaction import redact
from aiockpt.runtime.world import Ranks, World
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend, Traits
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.storage.open import open_backend

# The scratch place: a folder behind a backend that imitates the place that the script named; the run's own checkpoints are
# neither read nor changed. Each change is reported to the recorder, which may end the process there.


def url_of(where: str | os.PathLike[str] | Backend) -> str:
    """Return the name of a place that a script named; nothing is opened."""
    return parse_address(where).url if isinstance(where, str | os.PathLike) else where.url


def scratch_of(place: Path, url: str) -> Path:
    """Return the folder below *place* that stands for *url*."""
    return place / xxhash.xxh3_64(url.encode()).hexdigest()


class ScratchBackend(Forwarding):
    """*inner*, called *url*, whose changes are reported to the *recorder* before they are made."""

    def __init__(self, inner: Backend, url: str, recorder: Recorder) -> None:
        super().__init__(inner)
        self._url = redact(url)
        self._recorder = recorder

    @property
    def url(self) -> str:
        return self._url

    @property
    def traits(self) -> Traits:
        return msgspec.structs.replace(self.inner.traits, durable=True)

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*; a change is reported to the recorder first, with the step that it is for."""
        if call.verb in _CHANGES:
            step = None if call.verb == "delete" else parse_step(call.key.partition("/")[0])
            await self._recorder.storage_call(step, anyio.sleep)
        return await call()

    def __repr__(self) -> str:
        return f"<ScratchBackend {self._url!r} in {self.inner!r}>"


_CHANGES = frozenset({"put", "put_new", "create", "delete", "upload.write", "upload.finish"})
"""The calls that change what a killed process leaves behind."""


State = Mapping[str, Any]


class WatchedCalls(CallProbe):
    """Records the calls of one checkpointer, and replaces its places by scratch places."""

    def __init__(self, recorder: Recorder, training: Training, ranks: Ranks, urls: Sequence[str]) -> None:
        self._recorder, self._training = recorder, training
        self.observers = [recorder]
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._urls = list(urls)
        self._url = redact(urls[0])
        self._closed = False

    def open_places(self, tiers: Sequence[Tier], world: World, *, by_url: bool) -> tuple[list[Tier], list[Backend]]:
        """Return *tiers*, and a scratch backend for each; ``memory://`` (of this process alone) and ``as_is`` places stay.

        Args:
            by_url: another process will open them, by their URLs.
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
        """Return the request to load; in a control it finds its step and fills no part of the state."""
        self._recorder.check()
        self._training.learn_names(request.state)
        if not self._recorder.job.withhold:
            return request
        return msgspec.structs.replace(request, state={}, only=None, rename=None, strict=False)

    def wrap_apply(self, request: LoadRequest, filled: Filled | None) -> Callable[[], LoadResult | None]:
        """Return a function that completes a load on its waiter's thread, and records the result."""

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
        view = view_of(state, self._rank, spread=self._recorder.job.spread)
        withheld = self._recorder.job.withhold
        self._recorder.write(records.LoadDone, url=self._url, step=step, fits=fits, withheld=withheld, state=view)

    def reached(self, step: int, state: State, metrics: Mapping[str, Any] | None, *, saved: bool) -> None:
        """Called when the script has reached *step*; *saved* says whether it saves it."""
        self._recorder.check()
        self._training.learn_names(state)
        view = view_of(state, self._rank, spread=self._recorder.job.spread)
        texts = {name: text_of(value) for name, value in (metrics or {}).items()}
        self._recorder.write(records.Labelled, url=self._url, step=step, saved=saved, state=view, metrics=texts)
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
