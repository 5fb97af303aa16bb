"""The backend for checkpoints that need not survive this process: a dictionary with the contract of every backend.

Guarantees:

- Backends of one name share one store, for as long as this process lives, from any event loop; without a name each
  backend has a store of its own.
- ``put_new`` has one winner, also among threads. A reader keeps the object that it opened, even if its key is deleted.
- Copies of 1 MiB and more run on worker threads, so the event loop stays free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from aiockpt.backends.ranges import Buffers, RangeReader, copy_bytes
from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageFullError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import Clock, World
from aiockpt.storage.backend import (
    Listing,
    Progress,
    Seen,
    Space,
    Stat,
    Traits,
    check_key,
    check_keys,
    check_prefix,
    check_size,
)

_INLINE_BYTES = 1 << 20  # a thread hop costs about as much as copying this
_COPIES = 4


class _Object(msgspec.Struct, eq=False):
    data: bytes | bytearray
    modified_ns: int


_STORES: dict[str, dict[str, _Object]] = {}


class MemoryBackend:
    """Objects in the memory of this process.

    Args:
        name: backends of one name share their objects; "" shares with no other.
        world: the seam to the clock, which dates the objects.
    """

    def __init__(self, name: str = "", *, world: World | None = None) -> None:
        self._name = name
        self._clock = (world or World()).clock
        self._objects: dict[str, _Object] = _STORES.setdefault(name, {}) if name else {}
        self._copies = Limiter("memory copies", _COPIES)

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def traits(self) -> Traits:
        return Traits(scope="process", durable=False, block_writes=_COPIES, block_reads=_COPIES, read_buffer_bytes=0)

    async def put(self, key: str, data: bytes) -> None:
        self._objects[check_key(key)] = self._object(data)

    async def put_new(self, key: str, data: bytes) -> None:
        self._insert(key, self._object(data))

    async def get(self, key: str, max_bytes: int) -> bytes:
        return bytes(memoryview(self._find(key).data)[:max_bytes])

    async def open(self, key: str) -> RangeReader:
        data = memoryview(self._find(key).data).toreadonly()

        async def fill(offset: int, buffers: Buffers, seen: Seen | None) -> None:
            part = data[offset : offset + buffers.left_bytes]
            await _run(self._copies, part.nbytes, lambda: buffers.fill(part, seen))

        return RangeReader(key, data.nbytes, fill)

    async def create(self, key: str, size: int) -> MemoryUpload:
        try:
            upload = MemoryUpload(self._objects, check_size(key, size), size, self._clock, self._copies)
        except MemoryError as error:
            raise StorageFullError(f"{key!r}: there is no memory for its {size} bytes; free some", key=key) from error
        self._insert(key, upload.held)
        return upload

    async def stat(self, key: str) -> Stat:
        found = self._find(key)
        return Stat(key, len(found.data), found.modified_ns)

    async def list(self, prefix: str) -> Listing:
        start = f"{check_prefix(prefix)}/" if prefix else ""
        objects: list[Stat] = []
        folders: set[str] = set()
        # Copying a dict is one step of the interpreter; iterating it fails when another thread adds a key meanwhile.
        for key, found in sorted(self._objects.copy().items()):
            if not key.startswith(start):
                continue
            name, slash, _ = key[len(start) :].partition("/")
            if slash:
                folders.add(start + name)
            else:
                objects.append(Stat(key, len(found.data), found.modified_ns))
        return Listing(tuple(objects), tuple(sorted(folders)))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in check_keys(keys):
            self._objects.pop(key, None)

    async def space(self) -> Space:
        return Space(None, None)

    async def close(self) -> None:
        """Does nothing: the objects stay for the next backend of this name."""

    def _object(self, data: bytes) -> _Object:
        return _Object(bytes(data), self._clock.time_ns())

    def _insert(self, key: str, new: _Object) -> None:
        if self._objects.setdefault(check_key(key), new) is not new:  # one step, also between threads
            raise ObjectExistsError(f"creating {key!r}: an object of that key exists already", key=key)

    def _find(self, key: str) -> _Object:
        found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectNotFoundError(f"looking for {key!r}: no object of that key in {self.url}", key=key)
        return found

    def __repr__(self) -> str:
        held_bytes = sum(len(found.data) for found in self._objects.copy().values())
        return f"<MemoryBackend {self.url!r} {len(self._objects)} objects, {held_bytes} bytes>"


class MemoryUpload:
    """A data file in memory; see `aiockpt.storage.backend.Upload`."""

    def __init__(self, objects: dict[str, _Object], key: str, size: int, clock: Clock, limiter: Limiter) -> None:
        self._memory = bytearray(size)
        self.held = _Object(self._memory, clock.time_ns())
        self._objects = objects
        self._clock = clock
        self._limiter = limiter
        self._progress = Progress(key, size)

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._progress.check_open()
        size = self._progress.check_block(offset, runs)
        await _run(self._limiter, size, lambda: self._write_all(offset, runs, seen))
        self._progress.written_bytes += size

    def _write_all(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        for run in runs:
            if seen is not None:
                seen(run)
            if run.nbytes:
                copy_bytes(memoryview(self._memory)[offset : offset + run.nbytes], run.cast("B"))
            offset += run.nbytes

    async def finish(self) -> None:
        self._progress.check_open()
        self._progress.check_whole()
        self._progress.over = True
        self.held.modified_ns = self._clock.time_ns()

    async def abort(self) -> None:
        if not self._progress.over:
            self._progress.over = True
            if self._objects.get(self._progress.key) is self.held:
                del self._objects[self._progress.key]


async def _run(limiter: Limiter, size_bytes: int, work: Callable[[], None]) -> None:
    """Run *work*, which moves *size_bytes*: inline if that is short, else on a thread."""
    if size_bytes < _INLINE_BYTES:
        work()
    else:
        await run_blocking(limiter, work)
