"""Exclusive creation of keys: by conditional writes, and a write id to recognise our own when the answer is lost.

Guarantees (docs/format.md#commit-on-object-stores):

- Of any number of callers, in any processes, one creates the key: ``If-None-Match: *`` decides.
- An answer that was lost after its effect, or a request that HTTP sent twice, never turns our own success into a
  conflict: the write id in an object's metadata identifies its writer.
- A store that ignores the condition is detected before the first byte of a run is sent, and refused: one key at the root,
  ``.aiockpt``, is created under that condition, and never deleted. The refusal of another create is the proof.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from aiockpt.backends.s3_body import Body, Checks
from aiockpt.backends.s3_client import Bucket
from aiockpt.backends.s3_errors import says_denied, says_no_upload
from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageThrottledError,
    UsageError,
)
from aiockpt.storage.backend import PROOF, PROOF_KEY

WRITE_ID = "aiockpt-write-id"
_ONLY_NEW: dict[str, Any] = {"IfNoneMatch": "*"}
_REPLACEMENTS = 8


class Creator:
    """Creates keys of one bucket exclusively.

    Args:
        unsafe_commit: proceed, with a warning, where the store ignores the condition. Two writers may then both conclude
            that they created a key, if they do so within one round trip.
        token: random bytes.
    """

    def __init__(self, bucket: Bucket, checks: Checks, *, unsafe_commit: bool, token: Callable[[int], bytes]) -> None:
        self._bucket = bucket
        self._checks = checks
        self._unsafe_commit = unsafe_commit
        self._token = token
        self._proving = anyio.Lock()
        self._conditional: bool | None = None
        self._replaces_conditionally = False

    @property
    def conditional(self) -> bool | None:
        """Whether the store honours the condition; None before the first check."""
        return self._conditional

    @property
    def condition(self) -> dict[str, Any]:
        """The parameter that makes a write exclusive, unless the store is known to ignore it."""
        return {} if self._conditional is False else _ONLY_NEW

    def new_write_id(self) -> str:
        return self._token(16).hex()

    async def put_new(self, key: str, data: bytes) -> None:
        """Create *key*; see `aiockpt.storage.backend.Backend.put_new`."""
        await self.resolve_outcome()
        write_id = self.new_write_id()
        if not self._conditional and await self.owner(key) is not None:
            raise ObjectExistsError(f"creating {key!r}: it is there already, in {self._bucket.where}", key=key)
        try:
            await self.put(key, data, Metadata={WRITE_ID: write_id}, **self.condition)
        except StorageError as error:
            if not await self.was_ours(key, write_id, error):
                raise
        if not self._conditional and await self.owner(key) != write_id:
            raise ObjectExistsError(f"creating {key!r}: another writer created it at the same time", key=key)

    async def replace(self, key: str, data: bytes) -> None:
        """Write *key*, and replace any object there; on condition of its ETag where a bucket policy requires one."""
        refused: StorageAccessError | None = None
        if not self._replaces_conditionally:
            try:
                return await self.put(key, data)
            except StorageAccessError as error:
                if not says_denied(error.__cause__):
                    raise
                refused = error
        for _ in range(_REPLACEMENTS):
            try:
                await self.put(key, data, **await self._condition_now(key))
            except (ObjectExistsError, ObjectNotFoundError):
                continue  # another writer was between
            except StorageError as error:
                raise error if refused is None else refused from error
            self._replaces_conditionally = True
            return None
        raise StorageError(f"writing {key!r}: another writer replaced it during each attempt", key=key, retryable=True)

    async def _condition_now(self, key: str) -> dict[str, Any]:
        try:
            return {"IfMatch": (await self._bucket.head("looking for", key))["ETag"]}
        except ObjectNotFoundError:
            return _ONLY_NEW

    async def put(self, key: str, data: bytes, *, proving: bool = False, **more: Any) -> None:
        """Write a small object, with its checksum."""
        summing, view = self._checks.summing, memoryview(data)
        requests = await self._bucket.requests()
        with self._bucket.sending("writing", key) as moved:

            async def put(check: Mapping[str, Any]) -> None:
                body = Body([view], moved) if data else b""
                await requests.put(self._bucket.name, self._bucket.path(key), body, {**check, **more})

            await self._checks.send({} if summing is None else summing.field(summing.of([view])), put, proving=proving)

    async def was_ours(self, key: str, write_id: str, error: StorageError) -> bool:
        """Return whether the write that failed with *error* took effect nevertheless.

        That is possible only after a conflict, a lost answer, or for an upload that no longer exists.

        Raises:
            ObjectExistsError: the object is another writer's.
            StorageError: *error* is not retryable, but the second check failed, and may succeed later.
        """
        taken = isinstance(error, ObjectExistsError)
        finished = says_no_upload(error.__cause__)
        if isinstance(error, StorageThrottledError) or not (taken or finished or error.retryable):
            return False
        try:
            owner = await self.owner(key)
        except StorageError as unseen:
            if error.retryable or not unseen.retryable:
                return False
            raise StorageError(
                f"{error}; the writer of {key!r} cannot be determined: {unseen}", key=key, retryable=True
            ) from error
        if owner not in (None, write_id) and not taken:
            raise ObjectExistsError(f"{error}; another writer has created it", key=key) from error
        return owner == write_id

    async def owner(self, key: str) -> str | None:
        """Return the write id of the object at *key*; "" where it has none, None where there is no object."""
        try:
            found = await self._bucket.head("looking for", key)
        except ObjectNotFoundError:
            return None
        return str(found["Metadata"].get(WRITE_ID, ""))

    async def resolve_outcome(self) -> None:
        """Check once, before anything relies on it, whether the store honours the condition.

        Raises:
            UsageError: it does not, and ``unsafe_commit`` is False.
        """
        async with self._proving:
            if self._conditional is None:
                self._conditional = await self._prove()
                if not self._conditional and self._unsafe_commit:
                    warnings.warn(
                        f"{self._bucket.where} ignores If-None-Match: two jobs that save one step at once may both"
                        " believe that they committed it (unsafe_commit=True)",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        if not self._conditional and not self._unsafe_commit:
            raise UsageError(
                f"{self._bucket.where} ignores If-None-Match, so two jobs could commit one step at once. Use a store"
                " with conditional writes, or pass aiockpt.backends.s3.S3Backend(url, unsafe_commit=True) where only one job"
                " ever saves."
            )

    async def _prove(self) -> bool:
        """Create the key that proves it, and leave it; return whether this create, or a second one, was refused."""
        try:
            for _ in range(2):
                await self.put(PROOF_KEY, PROOF, proving=True, **_ONLY_NEW)
        except ObjectExistsError:
            return True
        return False
