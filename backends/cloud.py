"""The backend for Google Cloud Storage and Azure, on obstore, whose Rust client supports all object stores.

Guarantees, besides those of the contract:

- ``put_new`` is a conditional create (``If-None-Match: *``, ``x-goog-if-generation-match: 0``). gs:// and az:// keep
  it by their own documentation; any other store must prove it once, before the first object is created
  (docs/format.md#commit-on-object-stores).
- ``create`` claims its key by creating a small object; the data replace it when the upload is finished, at once. So
  one of several creators wins here as well, and a crash leaves a small object that no receipt names.
- No call is sent twice by the client, so that retries are made in one place (`aiockpt.storage`). The one exception are
  the parts of an upload: obstore accepts a stream, which cannot be sent again from outside.

Not kept: ``delete`` removes keys in batches, and within a batch in any order.

Memory: besides the caller's, an upload holds the parts in flight (`cloud_upload.PARTS` of 16 MiB), since obstore keeps
references to what it is given and does not report when it releases them.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, from_url

from aiockpt.backends.buffers import Buffers, check_range
from aiockpt.backends.cloud_errors import cloud_errors
from aiockpt.backends.cloud_upload import CloudStream
from aiockpt.backends.in_order import InOrderUpload
from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageError, StorageTransferError, UsageError
from aiockpt.redaction import redact_error
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import World
from aiockpt.storage.address import hide_secrets
from aiockpt.storage.backend import PROOF, PROOF_KEY, Listing, Seen, Space, Stat, Traits, check_key

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

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
        url: ``gs://bucket/prefix`` or ``az://container/prefix``; also what else obstore opens, for example ``s3://``.
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
        self._url = hide_secrets(url.rstrip("/"))
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
    def url(self) -> str:
        return self._url

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

    async def open(self, key: str) -> CloudReader:
        return CloudReader(self._store, key, (await self.stat(key)).size, self._copies)

    async def create(self, key: str, size: int) -> InOrderUpload:
        if size < 0:
            raise UsageError(f"{key!r}: a file of {size} bytes cannot be created")
        with cloud_errors("creating", check_key(key)):
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
        if prefix:
            check_key(prefix)
        with cloud_errors("listing", prefix):
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        objects = sorted((_stat(meta, meta["path"]) for meta in found["objects"]), key=lambda stat: stat.key)
        return Listing(tuple(objects), tuple(sorted(found["common_prefixes"])))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        unique = list(dict.fromkeys(keys))
        for start in range(0, len(unique), _DELETE_BATCH):
            await self._delete_batch(unique[start : start + _DELETE_BATCH])

    async def space(self) -> Space:
        return Space(None, None)

    async def close(self) -> None:
        """Does nothing: connections belong to the client, which drops them with this object."""

    def __repr__(self) -> str:
        proven = {None: "untried", True: "yes", False: "no"}[self._exclusive]
        return f"<CloudBackend {self._url!r} exclusive create={proven}>"

    async def _delete_batch(self, keys: Sequence[str]) -> None:
        with cloud_errors("deleting", keys[0]):
            try:
                await obstore.delete_async(self._store, keys)
            except (
                FileNotFoundError
            ):  # some stores report it; which of the others they had removed by then is not known
                for key in keys:
                    with suppress(FileNotFoundError):
                        await obstore.delete_async(self._store, key)

    async def _claim(self, key: str) -> None:
        """Create the object that claims *key*; when cancelled meanwhile, wait for the answer and remove the claim."""
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
            self._unanswered.add(key)  # it may be ours all the same, which the next try will find
            raise
        self._unanswered.discard(key)

    async def _proven(self) -> bool:
        """Return whether the store creates exclusively; test it where that is not known of its kind.

        Raises:
            StorageError: it does not, and that was not allowed.
        """
        async with self._proving:
            if self._exclusive is None:
                self._exclusive = await self._prove()
                if not self._exclusive and self._unsafe_commit:
                    warnings.warn(
                        f"{self._url} cannot create an object exclusively: of two writers of one step both may believe"
                        " that they committed it (unsafe_commit=True)",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        if not self._exclusive and not self._unsafe_commit:
            raise StorageError(
                f"{self._url} cannot create an object exclusively, so a commit on it has no one winner; use another"
                " store, or give unsafe_commit=True when there is only ever one writer"
            )
        return self._exclusive

    async def _prove(self) -> bool:
        """Create one object twice, for good; return whether that was refused for the right reason."""
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


class CloudReader:
    """An object opened for ranged reads; see `aiockpt.storage.backend.Reader`."""

    def __init__(self, store: ObjectStore, key: str, size: int, limiter: Limiter) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._limiter = limiter
        self._closed = False

    @property
    def size(self) -> int:
        return self._size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        if self._closed:
            raise UsageError(f"{self._key!r} was closed; open it again")
        buffers = Buffers(into)
        check_range(self._key, offset, buffers.left_bytes, self._size)
        while buffers.left_bytes:
            count = min(_PIECE_BYTES, buffers.left_bytes)
            piece = await self._fetch(offset, count)
            if count < _INLINE_BYTES:
                buffers.fill(piece, seen)
            else:
                await run_blocking(self._limiter, buffers.fill, piece, seen)
            offset += count

    async def close(self) -> None:
        self._closed = True

    async def _fetch(self, offset: int, count: int) -> memoryview:
        with cloud_errors("reading", self._key):
            piece = memoryview(await obstore.get_range_async(self._store, self._key, start=offset, length=count))
        if piece.nbytes != count:
            raise StorageTransferError(
                f"{self._key!r}: {piece.nbytes} of {count} bytes came from offset {offset}; read it again",
                key=self._key,
            )
        return piece


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
