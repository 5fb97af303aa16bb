"""One multipart upload: start, parts in any order, complete, abort.

Guarantees:

- A part is sent from the caller's memory, with its checksum ahead of it, and cancelled when nothing moves for a while.
- ``complete`` creates the key only where it is absent, states a checksum over all of it where those of the parts can be
  combined, and is a success when its answer was lost after its effect.
- ``abort``, and a ``begin`` that failed, leave no upload behind, unless the store cannot be reached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import msgspec

from aiockpt.backends.s3_body import Body, Checks
from aiockpt.backends.s3_client import Bucket
from aiockpt.backends.s3_create import WRITE_ID, Creator
from aiockpt.errors import StorageError
from aiockpt.runtime.limits import Limiter

_IN_PARTS = "in parts"
"""Among the parameters of a checksum: each part states its own; no parameter of S3."""


class SentPart(msgspec.Struct, frozen=True):
    """A part that the store has: its name there, its checksum (0 without one), and its bytes."""

    etag: str
    sum: int
    size: int


class Multipart:
    """One multipart upload to *key*; parts are counted from 0.

    Args:
        sending: limits parts under way.
    """

    def __init__(self, bucket: Bucket, creator: Creator, key: str, checks: Checks, sending: Limiter) -> None:
        self._bucket = bucket
        self._creator = creator
        self._key = key
        self._checks = checks
        self._sending = sending
        self._write_id = creator.new_write_id()
        self._upload_id = ""
        self._sent: dict[int, SentPart] = {}

    @property
    def sent(self) -> dict[int, SentPart]:
        """The parts that the store has, by number."""
        return self._sent

    def sum(self, views: Sequence[memoryview]) -> int:
        """Return the checksum of a part, for `send`. Any thread."""
        return 0 if (summing := self._checks.summing) is None else summing.of(views)

    async def begin(self) -> None:
        """Start the upload."""
        summing = self._checks.summing
        checked = {} if summing is None else {"ChecksumAlgorithm": summing.name, "ChecksumType": "FULL_OBJECT"}
        client = await self._bucket.client()
        where, metadata = self._bucket.address(self._key), {WRITE_ID: self._write_id}
        try:
            with self._bucket.errors("creating", self._key):
                answer = await self._checks.send(
                    checked, lambda check: client.create_multipart_upload(**where, Metadata=metadata, **check)
                )
        except BaseException as error:
            if not isinstance(error, StorageError) or error.retryable:  # it may have been started
                with anyio.CancelScope(shield=True), suppress(StorageError):
                    await abort_uploads(self._bucket, self._key)
            raise
        self._upload_id = answer["UploadId"]

    async def send(self, part: int, views: Sequence[memoryview], checksum: int) -> None:
        """Send one part; *views* must not change until this returns."""
        client = await self._bucket.client()
        async with self._sending:
            with self._bucket.sending(f"writing part {part + 1} of", self._key) as moved:
                address = {**self._bucket.address(self._key), "UploadId": self._upload_id, "PartNumber": part + 1}
                answer = await self._checks.send(
                    self._check(checksum),
                    lambda check: client.upload_part(**address, **check, Body=Body(views, moved) if views else b""),
                )
                self._sent[part] = SentPart(answer["ETag"], checksum, sum(len(view) for view in views))

    async def complete(self) -> None:
        """Create the key from the parts sent, in their order."""
        try:
            await self._complete()
        except StorageError as error:
            if not await self._creator.was_ours(self._key, self._write_id, error):
                raise

    async def abort(self) -> None:
        """Remove the upload. Never raises a StorageError."""
        if self._upload_id:
            with anyio.CancelScope(shield=True), suppress(StorageError):
                await abort_uploads(self._bucket, self._key, self._upload_id)

    async def _complete(self) -> None:
        numbers = sorted(self._sent)
        client = await self._bucket.client()
        condition = self._creator.condition

        def complete(check: Mapping[str, Any]) -> Awaitable[Any]:
            parts = [
                {
                    "PartNumber": number + 1,
                    "ETag": self._sent[number].etag,
                    **(self._check(self._sent[number].sum) if check else {}),
                }
                for number in numbers
            ]
            whole = {name: value for name, value in check.items() if name != _IN_PARTS}
            return client.complete_multipart_upload(  # type: ignore[no-any-return,unused-ignore]
                **self._bucket.address(self._key),
                **whole,
                **condition,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )

        with self._bucket.errors("finishing", self._key):
            await self._checks.send(self._check_all([self._sent[number] for number in numbers]), complete)

    def _check(self, value: int) -> dict[str, str]:
        return {} if (summing := self._checks.summing) is None else summing.field(value)

    def _check_all(self, parts: Sequence[SentPart]) -> dict[str, str]:
        """Return the parameters that state the checksum of all parts, where it can be had, and that the parts have one."""
        if (summing := self._checks.summing) is None:
            return {}
        value = summing.of_all([(part.sum, part.size) for part in parts])
        return (
            {_IN_PARTS: ""} if value is None else {_IN_PARTS: "", "ChecksumType": "FULL_OBJECT", **self._check(value)}
        )


async def abort_uploads(bucket: Bucket, key: str, upload_id: str = "") -> None:
    """Remove the multipart upload *upload_id* of *key*; all uploads of exactly that key when it is ""."""
    client = await bucket.client()
    with bucket.errors("aborting the upload of", key):
        ids = [upload_id] if upload_id else []
        if not ids:
            answer = await client.list_multipart_uploads(Bucket=bucket.name, Prefix=bucket.path(key))
            ids = [found["UploadId"] for found in answer.get("Uploads", ()) if found["Key"] == bucket.path(key)]
        for one in ids:
            await client.abort_multipart_upload(**bucket.address(key), UploadId=one)
