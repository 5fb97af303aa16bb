"""Where a run under `aiockpt prove` saves: a scratch folder, behind a backend that looks like the place the script named.

So the run's own checkpoints are neither read nor touched. Each call that changes something is told to the recorder, which
may end the process there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import anyio
import msgspec
import xxhash

from aiockpt.format.names import parse_step
from aiockpt.prove.recorder import Recorder
from aiockpt.redaction import redact
from aiockpt.storage.backend import Backend, Listing, Reader, Seen, Space, Stat, Traits, Upload

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def url_of(where: str | os.PathLike[str] | Backend) -> str:
    """Return what the place that a script named is called; nothing is opened."""
    if not isinstance(where, str | os.PathLike):
        return where.url
    text = os.fspath(where)
    return text if _SCHEME.match(text) else "file://" + quote(os.path.abspath(text))


def scratch_of(place: Path, url: str) -> Path:
    """Return the folder below *place* that stands for *url*."""
    return place / xxhash.xxh3_64(url.encode()).hexdigest()


class ScratchBackend:
    """*inner*, called *url*, whose changes the *recorder* hears of before they are made."""

    def __init__(self, inner: Backend, url: str, recorder: Recorder) -> None:
        self._inner = inner
        self._url = redact(url)
        self._recorder = recorder

    @property
    def url(self) -> str:
        return self._url

    @property
    def traits(self) -> Traits:
        return msgspec.structs.replace(self._inner.traits, durable=True)

    async def _changing(self, key: str) -> None:
        await self._recorder.storage_call(parse_step(key.partition("/")[0]), anyio.sleep)

    async def put(self, key: str, data: bytes) -> None:
        await self._changing(key)
        await self._inner.put(key, data)

    async def put_new(self, key: str, data: bytes) -> None:
        await self._changing(key)
        await self._inner.put_new(key, data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        return await self._inner.get(key, max_bytes)

    async def open(self, key: str) -> Reader:
        return await self._inner.open(key)

    async def create(self, key: str, size: int) -> Upload:
        await self._changing(key)
        return _ScratchUpload(await self._inner.create(key, size), key, self)

    async def stat(self, key: str) -> Stat:
        return await self._inner.stat(key)

    async def list(self, prefix: str) -> Listing:
        return await self._inner.list(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._recorder.storage_call(None, anyio.sleep)
        await self._inner.delete(keys)

    async def space(self) -> Space:
        return await self._inner.space()

    async def close(self) -> None:
        await self._inner.close()

    def __repr__(self) -> str:
        return f"<ScratchBackend {self._url!r} in {self._inner!r}>"


class _ScratchUpload:
    """A data file whose writes the recorder hears of."""

    def __init__(self, inner: Upload, key: str, backend: ScratchBackend) -> None:
        self._inner = inner
        self._key = key
        self._backend = backend

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        await self._backend._changing(self._key)
        await self._inner.write(offset, runs, seen)

    async def finish(self) -> None:
        await self._backend._changing(self._key)
        await self._inner.finish()

    async def abort(self) -> None:
        await self._inner.abort()
