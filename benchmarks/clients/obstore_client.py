"""obstore (Rust's object_store): multipart ``put_async``, and ranges that are copied into the caller's memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import obstore
from obstore.store import S3Store

from benchmarks.clients import Place, each_part

if TYPE_CHECKING:
    from obstore.store import S3Config

_PIECE_BYTES = 1 << 20


class Obstore:
    """Its own threads move the bytes.

    Args:
        unsigned: without a SHA-256 of the payload, like our own backend; and without the checksum that ours sends instead.
    """

    def __init__(self, *, unsigned: bool = False) -> None:
        self._unsigned = unsigned

    async def open(self, place: Place) -> None:
        self._place = place
        endpoint = place.endpoint_url or os.environ.get("AWS_ENDPOINT_URL")
        config: S3Config = {"endpoint": endpoint} if endpoint else {}
        self._store = S3Store(
            place.bucket, config=config, unsigned_payload=self._unsigned, client_options={"allow_http": True}
        )

    async def put(self, key: str, data: bytes) -> None:
        await obstore.put_async(
            self._store,
            self._place.path(key),
            data,
            use_multipart=True,
            chunk_size=self._place.part_bytes,
            max_concurrency=self._place.in_flight,
        )

    async def get(self, key: str, into: memoryview) -> None:
        async def fetch(_: int, start: int, end: int) -> None:
            answer = await obstore.get_async(self._store, self._place.path(key), options={"range": (start, end)})
            async for piece in answer.stream(min_chunk_size=_PIECE_BYTES):  # whole ranges at once: half the speed
                into[start : start + len(piece)] = memoryview(piece)
                start += len(piece)

        await each_part(self._place, into.nbytes, fetch)

    async def put_small(self, key: str, data: bytes) -> None:
        await obstore.put_async(self._store, self._place.path(key), data)

    async def get_small(self, key: str) -> bytes:
        answer = await obstore.get_async(self._store, self._place.path(key))
        return bytes(await answer.bytes_async())

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
