"""The backend for places that no other backend supports: any file system of fsspec.

Guarantees, and where this last resort is weaker than the contract:

- ``put_new`` has one winner where the file system can create exclusively. That is tested before the first create: several
  threads race for one name, and exactly one must win. Else the place is refused, unless *unsafe_commit* is True. The test
  is no proof; fsspec's methods that are known to check first and then write are not considered.
- ``put`` and ``put_new`` are as atomic as the file system's own. On plain file protocols (SFTP, SMB) a small object may be
  seen in part, by a reader or after a crash; its digest shows it, and it counts as bad (docs/format.md#commit-on-posix).
- ``durable`` means that the server has acknowledged the bytes; fsspec does not report whether it has flushed them.
- Symbolic links are handled by the server.

All calls run on worker threads, also those of asynchronous file systems, which then use fsspec's own loop. fsspec owns its
file systems and keeps them for the next user, so `close` does not close them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import anyio

from aiockpt.backends.fsspec_place import (
    Create,
    FsspecFile,
    FsspecPlace,
    create_by_open,
    create_by_pipe,
    create_unsafely,
    fsspec_errors,
)
from aiockpt.backends.in_order import InOrderUpload, lost_stream
from aiockpt.backends.ranges import Buffers, RangeReader, ends_early
from aiockpt.errors import ObjectNotFoundError, StorageError, StorageTransferError, UsageError
from aiockpt.redaction import hide_options
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.world import World
from aiockpt.storage.address import hide_secrets
from aiockpt.storage.backend import Listing, Seen, Space, Stat, Traits, check_key, check_keys, check_prefix, check_size

logger = logging.getLogger("aiockpt")

fsspec: Any = import_module("fsspec")  # it has no types, and is missing where the extra is not installed

_CALLS = 8
_BLOCK_WRITES = 1  # a file is one stream
_BLOCK_READS = 4
_RACERS = 8
PIECE_BYTES = 16 << 20
_NOT_DURABLE = {"memory", "file", "local"}


_OUR_SCHEMES = {"s3a": "s3", "gcs": "gs"}


def _advice(url: str) -> str:
    """Return advice that avoids the package which fsspec needs for *url*; "" where there is none."""
    scheme, _, rest = url.partition("://")
    if (ours := _OUR_SCHEMES.get(scheme.lower())) is not None:
        return f". Write {ours}://{rest}, which needs no such package"
    if scheme == "hf":
        return (
            f". A repository of the Hub holds weights, and no steps: with that package a run begins from them by "
            f"load(state, fork={url!r}); without it download them, and make a step of them: aiockpt convert FOLDER RUN"
        )
    return ""


class FsspecBackend:
    """Objects below the path of *url*.

    Args:
        url: of any protocol that fsspec knows, for example ``sftp://host/path``; a package that it also needs is named
            when it is missing.
        unsafe_commit: also use a file system that cannot create exclusively. Two writers of one step may both believe
            that they committed it, and the later one wins.
        storage_options: arguments for the file system (credentials, endpoints); see its documentation.
        world: the seam to the random source, which names the probe.

    Raises:
        UsageError: fsspec does not know the protocol, or its package is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        unsafe_commit: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        self._true_url = url.rstrip("/")
        self.url = hide_secrets(self._true_url)
        hide_options(storage_options or {})
        self._protocol = url.partition("://")[0]
        try:
            self._kind = fsspec.get_filesystem_class(self._protocol)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url!r} cannot be opened through fsspec: {error}{_advice(url)}") from error
        self._options = dict(storage_options or {})
        self._unsafe_commit = unsafe_commit
        self._token = (world or World()).token
        # All users of a file of fsspec's memory share one object with one position: one call at a time.
        self._calls = Limiter("fsspec calls", 1 if self._protocol == "memory" else _CALLS)
        self._preparing = anyio.Lock()
        self._found: FsspecPlace | None = None
        self._tried = False
        self._create: Create | None = None

    @property
    def traits(self) -> Traits:
        return Traits(
            scope="process" if self._protocol == "memory" else "shared",
            durable=self._protocol not in _NOT_DURABLE,
            block_writes=_BLOCK_WRITES,
            block_reads=_BLOCK_READS,
        )

    async def put(self, key: str, data: bytes) -> None:
        with fsspec_errors("writing", check_key(key)):
            await run_blocking(self._calls, (await self._place()).put, key, data)

    async def put_new(self, key: str, data: bytes) -> None:
        with fsspec_errors("creating", check_key(key)):
            place, create = await self._place(), await self._exclusive_create()
            await run_blocking(self._calls, place.put_new, key, data, create)

    async def get(self, key: str, max_bytes: int) -> bytes:
        with fsspec_errors("reading", check_key(key)):
            return await run_blocking(self._calls, (await self._place()).get, key, max_bytes)

    async def open(self, key: str) -> RangeReader:
        size = (await self.stat(key)).size
        return open_reader(await self._place(), key, size, self._calls)

    async def create(self, key: str, size: int) -> InOrderUpload:
        with fsspec_errors("creating", check_size(key, size)):
            stream = FsspecStream(await self._place(), key, self._calls)
            create = await self._exclusive_create()
        try:
            await run_blocking(self._calls, stream.begin, create)
        except BaseException:
            await stream.abort()
            raise
        return InOrderUpload(key, size, stream, self._calls)

    async def stat(self, key: str) -> Stat:
        with fsspec_errors("looking for", check_key(key)):
            return await run_blocking(self._calls, (await self._place()).stat, key)

    async def list(self, prefix: str) -> Listing:
        with fsspec_errors("listing", check_prefix(prefix)):
            return await run_blocking(self._calls, (await self._place()).list, prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        keys = check_keys(keys)
        with fsspec_errors("deleting below", self.url):
            await run_blocking(self._calls, (await self._place()).delete, keys)

    async def space(self) -> Space:
        return Space(None, None)

    async def close(self) -> None:
        """Does nothing: file systems belong to fsspec."""

    def __repr__(self) -> str:
        create = "untried" if self._create is None else self._create.__name__
        return f"<FsspecBackend {self.url!r} {create}>"

    async def _place(self) -> FsspecPlace:
        """Return the place; connect to it first."""
        async with self._preparing:
            if self._found is None:
                with fsspec_errors("connecting to", self.url):
                    self._found = await run_blocking(self._calls, self._connect)
            return self._found

    def _connect(self) -> FsspecPlace:
        fs, root = fsspec.core.url_to_fs(self._true_url, **self._options)
        remove_folder = fs.rmdir
        if self._kind.rmdir is fsspec.AbstractFileSystem.rmdir and hasattr(fs, "_rmdir"):
            remove_folder = fsspec.asyn.sync_wrapper(fs._rmdir, obj=fs)  # missing in fsspec's list of methods to wrap
        return FsspecPlace(fs, root, remove_folder)

    async def _exclusive_create(self) -> Create:
        """Return the function that creates files here; test it first, once: luck in a second race would prove nothing.

        Raises:
            StorageError: none creates exclusively, and *unsafe_commit* is False.
        """
        place = await self._place()
        async with self._preparing:
            if not self._tried:
                self._create = await self._find_create(place)
                self._tried = True
        if self._create is None:
            raise StorageError(
                f"{self._not_exclusive}, so a commit on it has no one winner; use another place, or pass"
                " aiockpt.backends.fsspec.FsspecBackend(url, unsafe_commit=True) where only one job ever saves"
            )
        return self._create

    async def _find_create(self, place: FsspecPlace) -> Create | None:
        """Return the function that creates files exclusively, or the unsafe one where that is allowed; else None."""
        ways = [create_by_open]
        if self._kind.pipe_file is not fsspec.AbstractFileSystem.pipe_file:  # that one checks first and then writes
            ways.append(create_by_pipe)
        for way in ways:
            if await self._is_exclusive(place, way):
                return way
        if not self._unsafe_commit:
            return None
        warnings.warn(
            f"{self._not_exclusive}: of two writers of one step both may believe that they committed it"
            " (unsafe_commit=True)",
            RuntimeWarning,
            stacklevel=2,
        )
        return create_unsafely

    @property
    def _not_exclusive(self) -> str:
        return f"{self.url}: this file system of fsspec ({self._kind.__name__}) cannot create a file exclusively"

    async def _is_exclusive(self, place: FsspecPlace, way: Create) -> bool:
        """Let threads race to create one file; return whether exactly one won and its bytes are there.

        Raises:
            StorageError: none won, for a temporary reason.
        """
        probe = f".exclusive-{self._token(8).hex()}"
        won: list[bytes] = []
        interrupted: list[StorageError] = []

        async def race(data: bytes) -> None:
            try:
                with fsspec_errors("probing", probe):
                    await run_blocking(self._calls, place.put_new, probe, data, way)
            except StorageError as error:
                if error.retryable:
                    interrupted.append(error)
            else:
                won.append(data)

        try:
            async with open_tasks() as tasks:
                for racer in range(_RACERS):
                    tasks.start_soon(race, b"%d" % racer)
            if interrupted and not won:
                raise interrupted[0]
            with fsspec_errors("probing", probe):
                return won == [await run_blocking(self._calls, place.get, probe, _RACERS)]
        except ObjectNotFoundError:
            return False
        finally:
            with anyio.CancelScope(shield=True):
                await run_blocking(self._calls, place.delete, (probe,))


class FsspecStream:
    """The bytes of one data file on their way into a file; see `aiockpt.backends.in_order.ByteSink`."""

    def __init__(self, place: FsspecPlace, key: str, limiter: Limiter) -> None:
        self._place = place
        self._key = key
        self._limiter = limiter
        self._claimed = False
        self._file: FsspecFile | None = None

    def begin(self, create: Create) -> None:
        """Claim the key by creating it empty, and open it for writing. Blocking; call `abort` when it raises."""
        with fsspec_errors("creating", self._key):
            self._place.put_new(self._key, b"", create)
            self._claimed = True
            self._file = self._place.fs.open(self._place.path(self._key), "wb")

    async def send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        await run_blocking(self._limiter, self._send, runs, seen)

    async def finish(self) -> None:
        await run_blocking(self._limiter, self._finish)

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await run_blocking(self._limiter, self._abort)
            except StorageError as error:
                logger.info("%s: the incomplete file could not be removed; it is left there: %s", self._key, error)

    def _send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        assert self._file is not None
        for run in runs:
            if seen is not None:
                seen(run)
            with lost_stream(), fsspec_errors("writing", self._key):
                self._file.write(run)

    def _finish(self) -> None:
        assert self._file is not None
        with lost_stream(), fsspec_errors("finishing", self._key):
            self._file.close()

    def _abort(self) -> None:
        if self._file is not None:
            with suppress(Exception):  # it is abandoned
                _discard(self._file)
        if self._claimed:
            self._place.delete([self._key])


class _OpenFiles:
    """The open files of an object that is read: each concurrent read has its own. Fills a `RangeReader`."""

    def __init__(self, place: FsspecPlace, key: str, limiter: Limiter) -> None:
        self._place = place
        self._key = key
        self._limiter = limiter
        self._idle: list[FsspecFile] = []
        self._closed = False

    async def fill(self, offset: int, buffers: Buffers, seen: Seen | None) -> None:
        await run_blocking(self._limiter, self._fill, offset, buffers, seen)

    async def release(self) -> None:
        self._closed = True
        await run_blocking(self._limiter, self._close)

    def _fill(self, offset: int, buffers: Buffers, seen: Seen | None) -> None:
        with fsspec_errors("opening", self._key):
            file = self._idle.pop() if self._idle else self._place.open(self._key)
        try:
            with fsspec_errors("reading", self._key):
                file.seek(offset)
            while buffers.left_bytes:
                wanted = min(buffers.left_bytes, PIECE_BYTES)
                with fsspec_errors("reading", self._key):
                    piece = file.read(wanted)
                if not piece:
                    raise ends_early(self._key, offset)
                if len(piece) > wanted:
                    raise StorageTransferError(f"{self._key!r}: {len(piece)} of {wanted} bytes received", key=self._key)
                buffers.fill(memoryview(piece), seen)
                offset += len(piece)
        finally:
            # `release` closes idle files only: a read that ends after it closes its own.
            self._idle.append(file)
            if self._closed:
                self._close()

    def _close(self) -> None:
        with fsspec_errors("closing", self._key):
            while self._idle:
                self._idle.pop().close()


def open_reader(place: FsspecPlace, key: str, size: int, limiter: Limiter) -> RangeReader:
    """Return a reader of the object *key* of *size* bytes."""
    files = _OpenFiles(place, key, limiter)
    return RangeReader(key, size, files.fill, files.release)


def _discard(file: FsspecFile) -> None:
    """Close *file* without publishing its content, where it supports that."""
    if (discard := getattr(file, "discard", None)) is None:
        file.close()
    else:
        discard()
        file.closed = True  # type: ignore[attr-defined]  # or collecting it would flush it
