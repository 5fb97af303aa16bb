"""The scratch place of a run under `aiockpt prove`: a folder behind a backend that looks like the place the script named.

So the run's own checkpoints are neither read nor touched. Each call that changes something is reported to the recorder,
which may end the process there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import msgspec
import xxhash

from aiockpt.format.names import parse_step
from aiockpt.prove.recorder import Recorder
from aiockpt.redaction import redact
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend, Traits
from aiockpt.storage.forwarding import BackendCall, Forwarding


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
"""The calls after which a killed process leaves something else behind than before."""
