"""aiockpt's own backends, through the storage contract: blocks as the engine writes and reads them."""

from __future__ import annotations

from aiockpt.storage.backend import Backend
from benchmarks.clients import Place
from benchmarks.clients.moving import read_file, write_file

_SMALL_LIMIT_BYTES = 1 << 20


class Aiockpt:
    """The backend of the place's scheme: bare, or *retrying* as when a URL is opened."""

    _backend: Backend

    def __init__(self, *, retrying: bool = False) -> None:
        self._retrying = retrying

    async def open(self, place: Place) -> None:
        if place.url.startswith("hdfs:"):
            from aiockpt.backends.hdfs import HdfsBackend

            self._backend = HdfsBackend(place.url)
        else:
            from aiockpt.backends.s3 import S3Backend

            self._backend = S3Backend(
                place.url,
                endpoint_url=place.endpoint_url,
                part_bytes=place.part_bytes,
                concurrency=place.in_flight,
                addressing="path" if place.endpoint_url else None,
            )
        if self._retrying:
            from aiockpt.storage.retry import Retrying

            self._backend = Retrying(self._backend)

    async def put(self, key: str, data: bytes) -> None:
        await write_file(self._backend, key, memoryview(data))

    async def get(self, key: str, into: memoryview) -> None:
        await read_file(self._backend, key, into)

    async def put_small(self, key: str, data: bytes) -> None:
        await self._backend.put(key, data)

    async def get_small(self, key: str) -> bytes:
        return await self._backend.get(key, _SMALL_LIMIT_BYTES)

    async def close(self) -> None:
        await self._backend.close()
