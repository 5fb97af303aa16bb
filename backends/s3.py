"""The ``s3://`` backend, on aiobotocore, for S3 and compatible stores.

Guarantees, besides those of the contract:

- Data files are multipart uploads straight from the caller's memory (`s3_upload`) and ranged GETs straight into it; nothing
  is staged on a local disk.
- Only ``put`` overwrites a key: data files, receipts and manifests are created exclusively (`s3_create`).
- Missing features of a store (checksums, batches of deletes without Content-MD5 or at all), and a policy that requires
  conditional writes, are detected by the first refusal, worked around, and remembered.
- Nothing else is retried here; ``retryable`` of an error is whether a retry could succeed (`aiockpt.storage.retry`).

``list`` shows no multipart upload under way: see ``leftover_uploads``. ``delete`` keeps no order within a batch of keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal

import msgspec
from botocore.exceptions import ClientError

from aiockpt.backends.ranges import Buffers, RangeReader
from aiockpt.backends.s3_body import Checks, Checksum, find_summing
from aiockpt.backends.s3_client import Addressing, Bucket, Settings, split_url
from aiockpt.backends.s3_create import Creator
from aiockpt.backends.s3_errors import says_empty, says_no_upload, says_unknown
from aiockpt.backends.s3_upload import Multipart, S3Upload, abort_uploads
from aiockpt.backends.s3_wire import receive
from aiockpt.errors import ObjectExistsError, StorageError, StorageTransferError, UsageError
from aiockpt.events import LimiterStatistics
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import World
from aiockpt.storage.backend import (
    Listing,
    Seen,
    Space,
    Stat,
    Traits,
    UnfinishedUpload,
    check_key,
    check_keys,
    check_prefix,
    check_size,
)

logger = logging.getLogger("aiockpt")

PART_BYTES = 16 << 20
_PART_UNIT_BYTES = 8 << 20
_DELETES_AT_ONCE = 1000
_LIST_MEMBERS = {"Name", "IsTruncated", "KeyCount", "Contents", "CommonPrefixes"}
"""Of a list of objects; compatible stores leave out some of them."""
_INLINE_BYTES = 1 << 20  # a hop to a thread costs about as much as hashing this


class S3Statistics(msgspec.Struct, frozen=True):
    """An S3 backend at one instant: whether conditional writes work (None: not known yet), and its limiters' counts."""

    conditional: bool | None
    limiters: tuple[LimiterStatistics, ...]


class S3Backend:
    """Objects in one bucket, below the prefix of *url*.

    Endpoint, region, profile and addressing left None are found as by the AWS tools: ``AWS_ENDPOINT_URL``,
    ``AWS_REGION``, ``AWS_PROFILE``, ``~/.aws/config``, …; so are the credentials, always.

    Args:
        url: ``s3://bucket/prefix``.
        endpoint_url: of a store that is not AWS.
        region: of the bucket.
        profile: of the AWS configuration files.
        addressing: "path" (``host/bucket``), "virtual" (``bucket.host``), or "auto".
        part_bytes: of one part of a multipart upload, a multiple of 8 MiB, and so of one request. 16 MiB is what the
            engine writes at once, and enough to hide a round trip. Files of more than 10,000 parts get larger ones.
        concurrency: parts, and reads, under way at once. One connection to AWS gives 50–100 MB/s: raise it where the
            network is faster than eight of these.
        checksum: with which the store checks received bytes: CRC64NVME or CRC32; "auto" is the first where awscrt is
            installed; None sends none. A store that knows neither is detected, and is sent none.
        connect_timeout_s, stall_s: seconds for a connection, and without a byte moving, before a call is cancelled.
        unsafe_commit: also use a store without conditional writes, with a warning.
        world: the seam to random bytes.

    Raises:
        UsageError: the URL names no bucket, or an option cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        addressing: Addressing | None = None,
        part_bytes: int = PART_BYTES,
        concurrency: int = 8,
        checksum: Checksum | Literal["auto"] | None = "auto",
        connect_timeout_s: float = 10.0,
        stall_s: float = 60.0,
        unsafe_commit: bool = False,
        world: World | None = None,
    ) -> None:
        if part_bytes < _PART_UNIT_BYTES or part_bytes % _PART_UNIT_BYTES:
            raise UsageError(f"part_bytes={part_bytes}: give a multiple of {_PART_UNIT_BYTES}")
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency}: give at least 1")
        name, prefix = split_url(url)
        settings = Settings(
            endpoint_url=endpoint_url,
            region=region,
            profile=profile,
            addressing=addressing,
            connect_timeout_s=connect_timeout_s,
            stall_s=stall_s,
        )
        self._bucket = Bucket(name, prefix, settings)
        self._part_bytes = part_bytes
        self._concurrency = concurrency
        self._checks = Checks(find_summing(checksum), lambda: self._bucket.where)
        token = (world or World()).token
        self._creator = Creator(self._bucket, self._checks, unsafe_commit=unsafe_commit, token=token)
        self._sending = Limiter("s3 parts", concurrency)
        self._hashing = Limiter("s3 checksums", 4)
        self._creating: set[str] = set()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket.name}" + (f"/{self._bucket.prefix}" if self._bucket.prefix else "")

    @property
    def traits(self) -> Traits:
        return Traits(
            scope="shared",
            durable=True,
            block_writes=self._concurrency,
            block_reads=self._concurrency,
            read_buffer_bytes=0,
        )

    async def put(self, key: str, data: bytes) -> None:
        await self._creator.replace(check_key(key), data)

    async def put_new(self, key: str, data: bytes) -> None:
        await self._creator.put_new(check_key(key), data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        if not max_bytes:
            await self.stat(key)
            return b""
        requests = await self._bucket.requests()
        span = {"Range": f"bytes=0-{max_bytes - 1}"}
        with self._bucket.errors("reading", check_key(key)):
            try:
                return (await requests.get(self._bucket.name, self._bucket.path(key), span))[:max_bytes]
            except ClientError as error:
                if says_empty(error):
                    return b""
                raise

    async def open(self, key: str) -> RangeReader:
        found = await self._head(key)
        return open_reader(self._bucket, key, found["ContentLength"], found["ETag"], self._hashing)

    async def create(self, key: str, size: int) -> S3Upload:
        # An upload under way is invisible until it is completed, so the store would not refuse a second one.
        if check_size(key, size) in self._creating:
            raise ObjectExistsError(f"creating {key!r}: it is being created by this process already", key=key)
        self._creating.add(key)
        try:
            await self._creator.resolve_outcome()
            # The condition of the completion decides; asked here, a taken key is refused before its bytes are sent.
            if await self._creator.owner(key) is not None:
                raise ObjectExistsError(f"creating {key!r}: it is there already, in {self._bucket.where}", key=key)
            multipart = Multipart(self._bucket, self._creator, key, self._checks, self._sending)
            await multipart.begin()
        except BaseException:
            self._creating.discard(key)
            raise
        return S3Upload(multipart, key, size, self._part_bytes, self._hashing, self._creating.discard)

    async def stat(self, key: str) -> Stat:
        found = await self._head(key)
        return Stat(key, found["ContentLength"], _whole_seconds_ns(found["LastModified"]))

    async def list(self, prefix: str) -> Listing:
        start = self._bucket.path(check_prefix(prefix))
        start += "/" if start else ""
        objects: list[Stat] = []
        folders: set[str] = set()
        client = await self._bucket.client()
        pages = client.get_paginator("list_objects_v2")
        with self._bucket.errors("listing", prefix):
            async for page in pages.paginate(Bucket=self._bucket.name, Prefix=start, Delimiter="/"):
                self._check_list(page, prefix)
                objects.extend(
                    Stat(key, found["Size"], _whole_seconds_ns(found["LastModified"]))
                    for found in page.get("Contents", ())
                    if (key := self._key_of(found["Key"])) is not None
                )
                below = [self._key_of(found["Prefix"].removesuffix("/")) for found in page.get("CommonPrefixes", ())]
                folders.update(folder for folder in below if folder is not None)
        return Listing(tuple(sorted(objects, key=lambda stat: stat.key)), tuple(sorted(folders)))

    async def delete(self, keys: Sequence[str]) -> None:
        keys = check_keys(keys)
        for start in range(0, len(keys), _DELETES_AT_ONCE):
            await self._delete(keys[start : start + _DELETES_AT_ONCE])

    async def space(self) -> Space:
        return Space(None, None)

    async def close(self) -> None:
        await self._bucket.close()

    async def leftover_uploads(self, prefix: str = "") -> tuple[UnfinishedUpload, ...]:
        """Return the multipart uploads below the folder *prefix* that were neither finished nor aborted, by key.

        Those of saves under way are among them: decide by ``started_ns`` and a date of the same clock.
        """
        start = self._bucket.path(check_prefix(prefix))
        start += "/" if start else ""
        client = await self._bucket.client()
        pages = client.get_paginator("list_multipart_uploads")
        found: list[UnfinishedUpload] = []
        with self._bucket.errors("listing the uploads below", prefix):
            async for page in pages.paginate(Bucket=self._bucket.name, Prefix=start):
                found.extend(
                    UnfinishedUpload(key, upload["UploadId"], _whole_seconds_ns(upload["Initiated"]))
                    for upload in page.get("Uploads", ())
                    if (key := self._key_of(upload["Key"])) is not None
                )
        return tuple(sorted(found, key=lambda upload: (upload.key, upload.started_ns)))

    async def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        """Remove multipart uploads; those that no longer exist are skipped."""
        for upload in uploads:
            try:
                await abort_uploads(self._bucket, upload.key, upload.upload_id)
            except StorageError as error:
                if not says_no_upload(error.__cause__):
                    raise

    def statistics(self) -> S3Statistics:
        """Return the counts of this instant."""
        return S3Statistics(self._creator.conditional, (self._sending.statistics(), self._hashing.statistics()))

    def _check_list(self, page: Mapping[str, Any], prefix: str) -> None:
        """Refuse an answer that is no list, or a part of one: it would count as a place without steps."""
        said = None if _LIST_MEMBERS & page.keys() else "the answer is no list of objects"
        if page.get("IsTruncated") and not page.get("NextContinuationToken"):
            said = "the answer is a part of a list, without the token for the rest"
        if said is not None:
            raise StorageError(
                f"listing {prefix!r} in {self._bucket.where}: {said}. This answers, but is not S3 (a login page, a"
                " console, a proxy?): check AWS_ENDPOINT_URL, its port and its path",
                key=prefix,
            )

    async def _head(self, key: str) -> Any:
        return await self._bucket.head("looking for", check_key(key))

    def _key_of(self, path: str) -> str | None:
        """Return our key for *path*; None when it is no object of ours: folder markers and impossible names."""
        with suppress(UsageError):
            return check_key(self._bucket.key(path))
        return None

    async def _delete(self, keys: Sequence[str]) -> None:
        client = await self._bucket.client()
        paths = [self._bucket.path(key) for key in keys]
        with self._bucket.errors("deleting", keys[0]):
            while len(paths) > 1 and self._bucket.batches != "none":
                tried = self._bucket.batches
                try:
                    answer = await client.delete_objects(
                        Bucket=self._bucket.name, Delete={"Objects": [{"Key": path} for path in paths], "Quiet": True}
                    )
                except ClientError as error:
                    if not says_unknown(error):
                        raise
                    # Deletes at the same time meet the same refusal: only the first of them takes the next step.
                    if self._bucket.batches == tried:
                        self._bucket.batches = "with MD5" if tried == "plain" else "none"
                        logger.info(
                            "%s: %s; batches of deletes from now on: %s",
                            self._bucket.where,
                            error,
                            self._bucket.batches,
                        )
                    continue
                for failed in answer.get("Errors", ()):
                    self._raise_undeleted(failed)
                return
            for path in paths:  # a single delete needs no checksum over a list, either
                await client.delete_object(Bucket=self._bucket.name, Key=path)

    def _raise_undeleted(self, failed: dict[str, str]) -> None:
        """Raise the error of one key of a batch, unless it was absent."""
        code = failed.get("Code", "InternalError")
        if code != "NoSuchKey":
            raise ClientError(
                {"Error": {"Code": code, "Message": f"{failed.get('Key')}: {failed.get('Message')}"}}, "DeleteObjects"
            )

    def __repr__(self) -> str:
        return f"<S3Backend {self._bucket.where} prefix={self._bucket.prefix!r} {self._sending!r}>"


def _whole_seconds_ns(date: datetime) -> int:
    """Return *date* in ns, truncated to seconds: a HEAD has whole seconds only, and both must be equal."""
    return int(date.timestamp()) * 1_000_000_000


def open_reader(bucket: Bucket, key: str, size: int, etag: str, hashing: Limiter) -> RangeReader:
    """Return a reader of the object *key* as it was when it was opened: each GET requires its *etag*.

    An answer that is cut short, or is not the requested range, is a `StorageTransferError`; no byte of it was passed to
    *seen* by then, so that the read can be repeated. *seen* is called in one hop, as each hop costs training a wait for
    the GIL.
    """

    async def fill(offset: int, buffers: Buffers, seen: Seen | None) -> None:
        # Before the read, which takes them from *buffers*.
        views = buffers.views
        await _get_range(bucket, key, size, etag, offset, buffers)
        if seen is None:
            return
        if buffers.size_bytes < _INLINE_BYTES:
            _show_all(views, seen)
        else:
            await run_blocking(hashing, _show_all, views, seen)

    return RangeReader(key, size, fill)


def _show_all(views: Sequence[memoryview], seen: Seen) -> None:
    for view in views:
        seen(view)


async def _get_range(bucket: Bucket, key: str, size: int, etag: str, offset: int, buffers: Buffers) -> None:
    wanted = buffers.size_bytes
    span = f"{offset}-{offset + wanted - 1}"
    client = await bucket.client()
    try:
        with bucket.sending("reading", key) as moved:
            answer = await client.get_object(**bucket.address(key), Range=f"bytes={span}", IfMatch=etag)
            async with answer["Body"] as body:
                said = answer.get("ContentRange", "")
                is_all = not said and wanted == size  # a store that ignores the header sends the whole object
                if not is_all and said.removeprefix("bytes ").partition("/")[0] != span:
                    raise StorageTransferError(
                        f"{key!r}: asked for bytes {offset}..{offset + wanted - 1}, the answer says"
                        f" {said or 'everything'!r}",
                        key=key,
                    )
                came_bytes = await receive(body.raw_stream, buffers, moved)
    except ObjectExistsError as error:  # the condition that we sent has failed
        raise StorageError(f"{key!r} was replaced while it was read; open it again", key=key) from error
    if came_bytes != wanted:
        raise StorageTransferError(f"{key!r}: {came_bytes} bytes came and {wanted} were asked for", key=key)
