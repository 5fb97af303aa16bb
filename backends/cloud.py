"""The backend for Google Cloud Storage and Azure, on obstore, whose Rust client supports all object stores.

Guarantees, besides those of the contract:

- ``put_new`` is a conditional create. gs:// and az:// honour the condition by their own documentation; any other store
  must prove it once, before the first object is created (docs/format.md#commit-on-object-stores).
- ``create`` claims its key by creating a small object, which the data replace at once when the upload is finished: one of
  several creators wins, and a crash leaves a small object that no receipt names.
- The client retries no call except the parts of an upload: obstore accepts a stream, which cannot be sent again from
  outside.

Deviations: ``delete`` removes keys in batches, and within a batch in any order. An upload holds the parts in flight
(`PARTS` of 16 MiB) besides the caller's memory: obstore keeps references, and does not report when it drops them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, from_url

from aiockpt.backends.in_order import InOrderUpload, copy_runs, lost_stream
from aiockpt.backends.ranges import Buffers, RangeReader
from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    UsageError,
    archived,
)
from aiockpt.redaction import redact_error
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import World
from aiockpt.storage.address import hide_secrets
from aiockpt.storage.backend import (
    PROOF,
    PROOF_KEY,
    Listing,
    Seen,
    Space,
    Stat,
    Traits,
    check_key,
    check_keys,
    check_prefix,
    check_size,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

logger = logging.getLogger("aiockpt")

PARTS = 4
_PART_BYTES = 16 << 20
_PART_STEP_BYTES = 8 << 20
_MOST_PARTS = 10_000
_BLOCK_WRITES = 1  # the parts of one stream are sent at once by the client; more writers would only wait in line
_BLOCK_READS = 4
_PIECE_BYTES = 16 << 20
_INLINE_BYTES = 1 << 16  # a thread hop costs more than copying and hashing this
_COPIES = 4
_DELETE_BATCH = 256  # what Azure accepts in one request
_NO_RETRY: RetryConfig = {"max_retries": 0}
_PART_RETRY: RetryConfig = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
_CLIENT: ClientConfig = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "5min"}
_EPOCH = datetime.fromtimestamp(0, UTC)


class CloudBackend:
    """Objects below a prefix of a bucket or container.

    Args:
        url: ``gs://bucket/prefix`` or ``az://container/prefix``; also any other URL of obstore, for example ``s3://``.
            Credentials, account and endpoint are found as the provider's own tools find them: in the environment
            (``GOOGLE_…``, ``AZURE_STORAGE_…``), in files, or from the machine's identity.
        world: the seam to the random source, which names probes and marks claims.
        client_options: HTTP options of obstore (`obstore.store.ClientConfig`), for example
            ``{"allow_http": True}``; they are added to ours: 10 s to connect, 60 s for the next byte, 5 min in all.
        unsafe_commit: also use a store that cannot create exclusively. Two writers of one step may both believe that
            they committed it, and the later one wins.
        store: an obstore store to use instead of opening *url*; its retries and options are yours then.
    """

    def __init__(
        self,
        url: str,
        *,
        world: World | None = None,
        client_options: ClientConfig | None = None,
        unsafe_commit: bool = False,
        store: ObjectStore | None = None,
    ) -> None:
        self.url = hide_secrets(url.rstrip("/"))
        self._world = world or World()
        self._store = store or _open_store(url, client_options, _NO_RETRY)
        self._uploading = store or _open_store(url, client_options, _PART_RETRY)
        self._proving = anyio.Lock()
        self._unsafe_commit = unsafe_commit
        self._exclusive: bool | None = True if isinstance(self._store, AzureStore | GCSStore) else None
        self._claim_mark = self._world.token(16).hex().encode()
        self._unanswered: set[str] = set()
        self._copies = Limiter("cloud copies", _COPIES)

    @property
    def traits(self) -> Traits:
        return Traits(scope="shared", durable=True, block_writes=_BLOCK_WRITES, block_reads=_BLOCK_READS)

    async def put(self, key: str, data: bytes) -> None:
        with cloud_errors("writing", check_key(key)):
            await obstore.put_async(self._store, key, data, use_multipart=False)

    async def put_new(self, key: str, data: bytes) -> None:
        with cloud_errors("creating", check_key(key)):
            if await self._proven():
                await obstore.put_async(self._store, key, data, mode="create")
            else:
                await self._create_unsafely(key, data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        with cloud_errors("reading", check_key(key)):
            found = await obstore.get_async(self._store, key)
            if found.meta["size"] <= max_bytes:
                return bytes(await found.bytes_async())
            if not max_bytes:
                return b""
            return bytes(await obstore.get_range_async(self._store, key, start=0, end=max_bytes))

    async def open(self, key: str) -> RangeReader:
        return open_reader(self._store, key, (await self.stat(key)).size, self._copies)

    async def create(self, key: str, size: int) -> InOrderUpload:
        with cloud_errors("creating", check_size(key, size)):
            if await self._proven():
                await self._claim(key)
            else:
                await self._create_unsafely(key, self._claim_mark)
        stream = CloudStream(self._store, self._uploading, key, size, self._copies)
        return InOrderUpload(key, size, stream, self._copies)

    async def stat(self, key: str) -> Stat:
        with cloud_errors("looking for", check_key(key)):
            return _stat(await obstore.head_async(self._store, key), key)

    async def list(self, prefix: str) -> Listing:
        with cloud_errors("listing", check_prefix(prefix)):
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        objects = sorted((_stat(meta, meta["path"]) for meta in found["objects"]), key=lambda stat: stat.key)
        return Listing(tuple(objects), tuple(sorted(found["common_prefixes"])))

    async def delete(self, keys: Sequence[str]) -> None:
        unique = list(dict.fromkeys(check_keys(keys)))
        for start in range(0, len(unique), _DELETE_BATCH):
            await self._delete_batch(unique[start : start + _DELETE_BATCH])

    async def space(self) -> Space:
        return Space(None, None)

    async def close(self) -> None:
        """Does nothing: connections belong to the client, which drops them with this object."""

    def __repr__(self) -> str:
        proven = {None: "untried", True: "yes", False: "no"}[self._exclusive]
        return f"<CloudBackend {self.url!r} exclusive create={proven}>"

    async def _delete_batch(self, keys: Sequence[str]) -> None:
        with cloud_errors("deleting", keys[0]):
            try:
                await obstore.delete_async(self._store, keys)
            except FileNotFoundError:  # some stores report it; which other keys were removed by then is unknown
                for key in keys:
                    with suppress(FileNotFoundError):
                        await obstore.delete_async(self._store, key)

    async def _claim(self, key: str) -> None:
        """Create the object that claims *key*; when cancelled, wait for the answer and remove the claim."""
        claiming = asyncio.ensure_future(obstore.put_async(self._store, key, self._claim_mark, mode="create"))
        try:
            await asyncio.wait([claiming])
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True), suppress(StorageError), cloud_errors("creating", key):
                await claiming
                await self._delete_batch([key])
            raise
        try:
            claiming.result()
        except AlreadyExistsError:
            if key not in self._unanswered or await self.get(key, len(self._claim_mark) + 1) != self._claim_mark:
                raise
        except BaseError:
            self._unanswered.add(key)  # the claim may have succeeded, which the next attempt detects
            raise
        self._unanswered.discard(key)

    async def _proven(self) -> bool:
        """Return whether the store creates exclusively; test it once unless its kind is known to.

        Raises:
            StorageError: it does not, and *unsafe_commit* is False.
        """
        async with self._proving:
            if self._exclusive is None:
                self._exclusive = await self._prove()
                if not self._exclusive and self._unsafe_commit:
                    warnings.warn(
                        f"{self.url} cannot create an object exclusively: of two writers of one step both may believe"
                        " that they committed it (unsafe_commit=True)",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        if not self._exclusive and not self._unsafe_commit:
            raise StorageError(
                f"{self.url} cannot create an object exclusively, so a commit on it has no one winner; use another"
                " store, or pass aiockpt.backends.cloud.CloudBackend(url, unsafe_commit=True) where only one job ever saves"
            )
        return self._exclusive

    async def _prove(self) -> bool:
        """Create one object twice, and leave it; return whether a create was refused because the object exists."""
        try:
            for _ in range(2):
                await obstore.put_async(self._store, PROOF_KEY, PROOF, mode="create")
        except NotImplementedError:
            return False
        except (AlreadyExistsError, PreconditionError):
            return True
        return False

    async def _create_unsafely(self, key: str, data: bytes) -> None:
        try:
            await self.stat(key)
        except ObjectNotFoundError:
            await self.put(key, data)
        else:
            raise ObjectExistsError(f"creating {key!r}: an object of that key exists already", key=key)


def open_reader(store: ObjectStore, key: str, size: int, limiter: Limiter) -> RangeReader:
    """Return a reader of the object *key* of *size* bytes."""

    async def fetch(offset: int, count: int) -> memoryview:
        with cloud_errors("reading", key):
            piece = memoryview(await obstore.get_range_async(store, key, start=offset, length=count))
        if piece.nbytes != count:
            raise StorageTransferError(
                f"{key!r}: {piece.nbytes} of {count} bytes came from offset {offset}; read it again", key=key
            )
        return piece

    async def fill(offset: int, buffers: Buffers, seen: Seen | None) -> None:
        while buffers.left_bytes:
            piece = await fetch(offset, min(_PIECE_BYTES, buffers.left_bytes))
            if piece.nbytes < _INLINE_BYTES:
                buffers.fill(piece, seen)
            else:
                await run_blocking(limiter, buffers.fill, piece, seen)
            offset += piece.nbytes

    return RangeReader(key, size, fill)


class CloudStream:
    """The bytes of one data file on their way into an object; see `aiockpt.backends.in_order.ByteSink`.

    Until `finish` the key holds the small object that claimed it; `abort` removes the parts that were sent, and the claim.

    Args:
        store: removes the claim when the upload is aborted.
        uploading: the same place, through a client that sends a failed part again.
        key: the claimed key.
        size: bytes that will be sent.
        limiter: for the threads that copy and hash.
    """

    def __init__(self, store: ObjectStore, uploading: ObjectStore, key: str, size: int, limiter: Limiter) -> None:
        self._store = store
        self._key = key
        self._limiter = limiter
        self._memory = PartMemory()
        self._writer = obstore.open_writer_async(uploading, key, buffer_size=part_bytes(size), max_concurrency=PARTS)

    async def send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        for run in runs:  # one at a time, so that only as much is copied as can be sent
            part = await run_blocking(self._limiter, copy_runs, [run], self._memory.lend(run.nbytes), seen)
            with lost_stream(), cloud_errors("writing", self._key):
                await self._writer.write(part)

    async def finish(self) -> None:
        with lost_stream(), cloud_errors("finishing", self._key):
            await self._writer.close()

    async def abort(self) -> None:
        error = StorageError(f"{self._key!r} was aborted", key=self._key)
        # The writer has no call to abort: it removes its parts where its block is left with an error.
        await self._try("its parts", self._writer.__aexit__(type(error), error, None))
        await self._try("its claim", self._release())

    async def _try(self, what: str, removing: Awaitable[object]) -> None:
        try:
            with cloud_errors("aborting", self._key):
                await removing
        except StorageError as error:
            logger.info("%s: %s are left to the store's own clean-up: %s", self._key, what, error)

    async def _release(self) -> None:
        with suppress(FileNotFoundError):
            await obstore.delete_async(self._store, self._key)


class PartMemory:
    """Memory for the parts in flight, reused once the client has released it.

    The client keeps a reference to its input and does not report when it drops it; but a view that is still referenced
    cannot be released. (A copy into new memory instead costs twice the processor time: pages are faulted in.)
    """

    def __init__(self) -> None:
        self._lent: list[tuple[memoryview, memoryview]] = []

    def lend(self, size_bytes: int) -> memoryview:
        """Return memory of *size_bytes* without any other reference to it."""
        memory = self._take_back(size_bytes) or np.empty(size_bytes, np.uint8).data
        view = memory[:size_bytes]
        self._lent.append((memory, view))
        return view

    def _take_back(self, size_bytes: int) -> memoryview | None:
        for index, (memory, view) in enumerate(self._lent):
            if memory.nbytes < size_bytes:
                continue
            with suppress(BufferError):
                view.release()
                del self._lent[index]
                return memory
        return None


def part_bytes(size: int) -> int:
    """Return the part size for a file of *size* bytes: a multiple of 8 MiB that makes few enough parts for any store."""
    return max(_PART_BYTES, -(-size // _MOST_PARTS // _PART_STEP_BYTES) * _PART_STEP_BYTES)


def _open_store(url: str, client_options: ClientConfig | None, retry: RetryConfig) -> ObjectStore:
    options: Any = {**_CLIENT, **(client_options or {})}
    try:
        return from_url(url, client_options=options, retry_config=retry)
    except Exception as error:  # noqa: BLE001  Rust errors of any kind
        reason = str(error).partition(chr(10))[0]
        raise UsageError(f"{url!r} cannot be opened: {reason}") from redact_error(error)


def _stat(meta: ObjectMeta, key: str) -> Stat:
    since = meta["last_modified"] - _EPOCH
    return Stat(key, meta["size"], (since // timedelta(microseconds=1)) * 1000)


# Errors of obstore as ours, classified by the HTTP status or the transport error inside them.
#
# obstore has a class for each condition that object stores agree on; the rest is one class whose text ends in the fields
# of the Rust error. Those fields are parsed here, and tests/backends/test_cloud_errors.py causes each of them by a real
# response, so that a release with other words turns a test red.


_STATUS = re.compile(r"\bstatus: (\d{3}),")
_KIND = re.compile(r"\bHttpError \{\s*kind: (\w+)")
_ARCHIVED = re.compile(r"\b(InvalidObjectState|BlobArchived)\b")
_DEBUG = "\n\nDebug source:"
_THROTTLED = {429, 503, 509, 529}
_TIMED_OUT = {408, 504}
_FULL = {413, 507}
_CUT_SHORT = {"Interrupted", "Decode"}


@contextmanager
def cloud_errors(doing: str, key: str) -> Iterator[None]:
    """Convert an error of obstore, raised while *doing* something to *key*, to ours."""
    try:
        yield
    except StorageError:
        raise
    except (BaseError, OSError, NotImplementedError) as error:
        raise from_obstore(error, doing, key) from redact_error(error)


def from_obstore(error: Exception, doing: str, key: str) -> StorageError:
    """Return ours for an *error* of obstore; raise it ``from error``."""
    text = str(error)
    message = f"{doing} {key!r}: {text.partition(_DEBUG)[0]}"
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(message, key=key)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return ObjectExistsError(message, key=key)
    if _ARCHIVED.search(text):
        return archived(message, key)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return StorageAccessError(f"{message}. Check the credentials and their rights.", key=key)
    if (status := _STATUS.search(text)) is not None:
        return _from_status(int(status[1]), message, key)
    return _from_kind(found[1] if (found := _KIND.search(text)) else None, message, key)


def _from_status(status: int, message: str, key: str) -> StorageError:
    if status in _THROTTLED:
        return StorageThrottledError(message, key=key)
    if status in _TIMED_OUT:
        return StorageTimeoutError(message, key=key)
    if status in _FULL:
        return StorageFullError(message, key=key)
    return StorageError(message, key=key, retryable=status >= 500)


def _from_kind(kind: str | None, message: str, key: str) -> StorageError:
    """Classify a failure without an answer; *kind* is the HTTP client's name for it, None when it was not HTTP."""
    if kind == "Timeout":
        return StorageTimeoutError(message, key=key)
    if kind in _CUT_SHORT:
        return StorageTransferError(message, key=key)
    return StorageError(message, key=key, retryable=kind is not None)
