"""The backend for checkpoints that need not survive this process: a dictionary behind the contract of every backend.

Guarantees:

- Backends of one name share one store, for as long as this process lives, from any event loop; without a name each
  backend has a store of its own.
- ``put_new`` has one winner, also among threads. A reader keeps the object that it opened, whatever happens to its key.
- Copies of 1 MiB and more run on worker threads, so the event loop stays free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from aiockpt.backends.buffers import check_range
from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageFullError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import Clock, World
from aiockpt.storage.backend import Listing, Seen, Space, Stat, Traits, check_key

_INLINE_BYTES = 1 << 20  # a thread hop costs about as much as copying this
_COPIES = 4


class _Object(msgspec.Struct, eq=False):
    data: bytes | bytearray
    modified_ns: int


_STORES: dict[str, dict[str, _Object]] = {}


class MemoryBackend:
    """Objects in the memory of this process.

    Args:
        name: backends of one name share their objects; "" shares with none.
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

    async def open(self, key: str) -> MemoryReader:
        return MemoryReader(key, self._find(key).data, self._copies)

    async def create(self, key: str, size: int) -> MemoryUpload:
        if size < 0:
            raise UsageError(f"{key!r}: a file of {size} bytes cannot be created")
        try:
            upload = MemoryUpload(self._objects, check_key(key), size, self._clock, self._copies)
        except MemoryError as error:
            raise StorageFullError(f"{key!r}: there is no memory for its {size} bytes; free some", key=key) from error
        self._insert(key, upload.held)
        return upload

    async def stat(self, key: str) -> Stat:
        found = self._find(key)
        return Stat(key, len(found.data), found.modified_ns)

    async def list(self, prefix: str) -> Listing:
        start = f"{check_key(prefix)}/" if prefix else ""
        objects: list[Stat] = []
        folders: set[str] = set()
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
        for key in keys:
            check_key(key)
        for key in keys:
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
        self._key = key
        self._clock = clock
        self._limiter = limiter
        self._written_bytes = 0
        self._over = False

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        self._check_open()
        size = sum(run.nbytes for run in runs)
        if offset < 0 or offset + size > len(self._memory):
            raise UsageError(f"{self._key!r}: bytes {offset}..{offset + size} are not within its {len(self._memory)}")
        await _run(self._limiter, size, lambda: self._write_all(offset, runs, seen))
        self._written_bytes += size

    def _write_all(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        for run in runs:
            _copy(memoryview(self._memory)[offset : offset + run.nbytes], run.cast("B"), seen)
            offset += run.nbytes

    async def finish(self) -> None:
        self._check_open()
        if self._written_bytes != len(self._memory):
            raise UsageError(
                f"{self._key!r}: {self._written_bytes} of {len(self._memory)} bytes were written before finish()"
            )
        self._over = True
        self.held.modified_ns = self._clock.time_ns()

    async def abort(self) -> None:
        if not self._over:
            self._over = True
            if self._objects.get(self._key) is self.held:
                del self._objects[self._key]

    def _check_open(self) -> None:
        if self._over:
            raise UsageError(f"{self._key!r} was finished or aborted; create it again")


class MemoryReader:
    """An object in memory; see `aiockpt.storage.backend.Reader`."""

    def __init__(self, key: str, data: bytes | bytearray, limiter: Limiter) -> None:
        self._key = key
        self._data = memoryview(data).toreadonly()
        self._limiter = limiter
        self._closed = False

    @property
    def size(self) -> int:
        return len(self._data)

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        if self._closed:
            raise UsageError(f"{self._key!r} was closed; open it again")
        wanted = sum(view.nbytes for view in into)
        check_range(self._key, offset, wanted, self.size)
        await _run(self._limiter, wanted, lambda: self._fill(offset, into, seen))

    async def close(self) -> None:
        self._closed = True

    def _fill(self, offset: int, into: Sequence[memoryview], seen: Seen | None) -> None:
        for view in into:
            if not view.nbytes:
                continue
            _copy(view.cast("B"), self._data[offset : offset + view.nbytes])
            if seen is not None:
                seen(view.cast("B"))
            offset += view.nbytes


async def _run(limiter: Limiter, size_bytes: int, work: Callable[[], None]) -> None:
    """Run *work*, which moves *size_bytes*, where it blocks nothing else."""
    if size_bytes < _INLINE_BYTES:
        work()
    else:
        await run_blocking(limiter, work)


def _copy(target: memoryview, source: memoryview, seen: Seen | None = None) -> None:
    if seen is not None:
        seen(source)
    if target.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # without the GIL
