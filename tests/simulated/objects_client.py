"""The backend for `simulated_objects`, with every kind of failure of a request to an object store.

Guarantees:

- It keeps the contract of `aiockpt.storage.backend`, and does not retry: troubles become the errors that a backend for a
  real store raises for them.
- The same troubles and the same calls give the same requests: a run is repeated by its seed.
- A crashed client makes no more requests; every verb raises `ClientCrashedError`, which is never caught.
- As with S3, a wrong bit is detected in sent data, and in an object that was put in one request and is read whole; in a
  range only the reader's own checksums detect it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from aiockpt.backends.ranges import Buffers, RangeReader
from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StorageTransferError,
    UsageError,
)
from aiockpt.storage.backend import Listing, Progress, Seen, Space, Stat, Traits, UnfinishedUpload, check_key
from tests.simulated.object_troubles import NoTroubles, Trouble, Troubles
from tests.simulated.objects_wire import ClientCrashedError, Wire, broken
from tests.simulated.simulated_objects import ObjectStore, StoredObject, tag

__all__ = ["ClientCrashedError", "ObjectUpload", "ObjectsBackend"]

_OF_BODIES = frozenset({"partial_body", "wrong_body"})
"""Troubles of a response body: the request itself succeeds."""
_SENT = 3
"""Pieces of a response body, about."""


class ObjectsBackend:
    """A client of *store*.

    Args:
        store: may be shared with other clients.
        troubles: the failures of its requests.
        timeout_s: how long it waits for an answer.
        latency_s: called for each request; returns the seconds until it arrives.
    """

    def __init__(
        self,
        store: ObjectStore,
        troubles: Troubles | None = None,
        *,
        timeout_s: float = 20.0,
        latency_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.store = store
        self._wire = Wire(troubles or NoTroubles(), timeout_s, latency_s)
        self._creating: set[str] = set()

    @property
    def url(self) -> str:
        return "objects://simulated"

    @property
    def traits(self) -> Traits:
        return Traits(scope="shared", durable=True)

    async def put(self, key: str, data: bytes) -> None:
        await self._wire.ask("PUT", check_key(key), lambda: self.store.put(key, data))

    async def put_new(self, key: str, data: bytes) -> None:
        await self._wire.ask("PUT-NEW", check_key(key), lambda: self.store.put(key, data, only_new=True))

    async def get(self, key: str, max_bytes: int) -> bytes:
        trouble = self._wire.next_trouble("GET", check_key(key))
        found = await self._wire.act(None if trouble in _OF_BODIES else trouble, key, lambda: self.store.get(key))
        body = bytearray(found.body[:max_bytes])
        _damage(trouble, memoryview(body))
        _check_cut(trouble, key)
        if len(body) == len(found.body) and "-" not in found.etag and tag(bytes(body)) != found.etag:
            raise StorageTransferError(f"reading {key!r}: the body does not match the announced tag", key=key)
        return bytes(body)

    async def open(self, key: str) -> RangeReader:
        found = await self._wire.ask("HEAD", check_key(key), lambda: self.store.get(key))
        return RangeReader(key, len(found.body), partial(self._fill, key))

    async def _fill(self, key: str, offset: int, buffers: Buffers, seen: Seen | None) -> None:
        wanted = buffers.left_bytes
        trouble = self._wire.next_trouble("GET", key)
        in_the_middle = trouble in ("reset", "partial_body")
        on_the_way = None if in_the_middle or trouble in _OF_BODIES else trouble
        found = await self._wire.act(on_the_way, key, lambda: self.store.get(key))
        body = bytearray(found.body[offset : offset + wanted])
        _damage(trouble, memoryview(body))
        _arrive(body[: wanted // 2] if in_the_middle else body, buffers.views, seen)
        if trouble == "reset":
            raise broken(key)
        _check_cut(trouble, key)

    async def create(self, key: str, size: int) -> ObjectUpload:
        if size < 0:
            raise UsageError(f"{key!r}: a file of {size} bytes cannot be created")
        if check_key(key) in self._creating:
            raise ObjectExistsError(f"creating {key!r}: it is being written", key=key)
        self._creating.add(key)
        try:
            await self._check_free(key)
            upload_id = await self._wire.ask("START", key, lambda: self.store.start_upload(key)) if size else None
        except BaseException:
            self._creating.discard(key)
            raise
        return ObjectUpload(self.store, self._wire, key, size, upload_id, self._creating)

    async def _check_free(self, key: str) -> None:
        try:
            await self._wire.ask("HEAD", key, lambda: self.store.get(key))
        except ObjectNotFoundError:
            return
        raise ObjectExistsError(f"creating {key!r}: an object of that key exists already", key=key)

    async def stat(self, key: str) -> Stat:
        return _stat(key, await self._wire.ask("HEAD", check_key(key), lambda: self.store.get(key)))

    async def list(self, prefix: str) -> Listing:
        start = f"{check_key(prefix)}/" if prefix else ""
        objects: list[Stat] = []
        folders: list[str] = []
        after = ""
        while True:
            page = await self._wire.ask("LIST", prefix, lambda after=after: self.store.list(start, after))  # type: ignore[misc]
            objects += [_stat(key, found) for key, found in page.objects]
            folders += [found.rstrip("/") for found in page.prefixes]
            after = page.next_after
            if not after:
                return Listing(tuple(objects), tuple(sorted(folders)))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        for key in keys:
            await self._wire.ask("DELETE", key, lambda key=key: self.store.delete(key))  # type: ignore[misc]

    async def leftover_uploads(self, prefix: str = "") -> tuple[UnfinishedUpload, ...]:
        start = f"{check_key(prefix)}/" if prefix else ""
        found = await self._wire.ask("LIST-UPLOADS", prefix, lambda: self.store.list_uploads(start))
        return tuple(UnfinishedUpload(*one) for one in found)

    async def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        for upload in uploads:
            with suppress(ObjectNotFoundError):
                await self._wire.ask("ABORT", upload.key, lambda one=upload: self.store.abort_upload(one.upload_id))  # type: ignore[misc]

    async def space(self) -> Space:
        return Space(None, None)

    async def close(self) -> None:
        """Do nothing: the objects stay in the store."""

    def __repr__(self) -> str:
        return f"<ObjectsBackend {self.store!r}, {self._wire.request_count} requests>"


class ObjectUpload:
    """A data file sent in parts; see `aiockpt.storage.backend.Upload`."""

    def __init__(
        self, store: ObjectStore, wire: Wire, key: str, size: int, upload_id: str | None, creating: set[str]
    ) -> None:
        self._store = store
        self._wire = wire
        self._key = key
        self._progress = Progress(key, size)
        self._upload_id = upload_id
        self._creating = creating
        self._parts: dict[int, tuple[int, str]] = {}

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._progress.check_open()
        size = self._progress.check_block(offset, runs)
        trouble = self._wire.next_trouble("PART", self._key) if size else None
        sent = runs[: len(runs) // 2] if trouble == "reset" else runs
        if seen is not None:
            for run in sent:
                seen(run)
        if self._upload_id is None or not size:
            return
        upload_id, body = self._upload_id, b"".join(run.cast("B") for run in runs)
        self._drop_if(trouble)
        etag = await self._wire.act(trouble, self._key, lambda: self._store.put_part(upload_id, offset, body))
        self._parts[offset] = (size, etag)

    async def finish(self) -> None:
        self._progress.check_open()
        self._progress.written_bytes = sum(size for size, _ in self._parts.values())
        self._progress.check_whole()
        if self._upload_id is None:
            await self._wire.ask("PUT-NEW", self._key, lambda: self._store.put(self._key, b"", only_new=True))
        else:
            upload_id = self._upload_id
            parts = [(number, etag) for number, (_, etag) in sorted(self._parts.items())]
            trouble = self._wire.next_trouble("COMPLETE", self._key)
            self._drop_if(trouble)
            await self._wire.act(trouble, self._key, lambda: self._store.complete_upload(upload_id, parts))
        self._close()

    async def abort(self) -> None:
        if self._progress.over:
            return
        self._close()
        if self._upload_id is not None:
            upload_id = self._upload_id
            try:
                await self._wire.ask("ABORT", self._key, lambda: self._store.abort_upload(upload_id))
            except StorageError:
                return  # left behind, invisible, until old uploads are collected

    def _drop_if(self, trouble: Trouble | None) -> None:
        if trouble == "no_such_upload" and self._upload_id is not None and self._upload_id in self._store.uploads:
            self._store.abort_upload(self._upload_id)

    def _close(self) -> None:
        self._progress.over = True
        self._creating.discard(self._key)


def _damage(trouble: Trouble | None, body: memoryview) -> None:
    """Flip a bit of a body, where that is the trouble."""
    if trouble == "wrong_body" and len(body):
        body[len(body) // 2] ^= 0x10


def _check_cut(trouble: Trouble | None, key: str) -> None:
    if trouble == "partial_body":
        raise StorageTransferError(f"reading {key!r}: fewer bytes arrived than were announced", key=key)


def _arrive(body: bytearray, into: Sequence[memoryview], seen: Seen | None) -> None:
    """Copy a body to its place, piece by piece, as it arrives."""
    piece = max(1, len(body) // _SENT)
    at = 0
    for view in into:
        target = view.cast("B")
        done = 0
        while done < target.nbytes and at < len(body):
            size = min(piece, target.nbytes - done, len(body) - at)
            target[done : done + size] = body[at : at + size]
            if seen is not None:
                seen(target[done : done + size])
            done += size
            at += size


def _stat(key: str, found: StoredObject) -> Stat:
    return Stat(key, len(found.body), found.modified_ns)
