"""aiockpt's own backends, through the storage contract: blocks as the engine writes and reads them."""

from __future__ import annotations

from aiockpt.storage.backend import Backend
from aiockpt.stress.moving import read_file, write_file
from benchmarks.contenders.clients import Place

_SMALL_LIMIT_BYTES = 1 << 20


class Aiockpt:
    """The backend of the place's scheme, bare."""

    _backend: Backend

    async def open(self, place: Place) -> None:
        """Make the backend."""
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

    async def put(self, key: str, data: bytes) -> None:
        """Write a data file."""
        await write_file(self._backend, key, memoryview(data))

    async def get(self, key: str, into: memoryview) -> None:
        """Read a data file."""
        await read_file(self._backend, key, into)

    async def put_small(self, key: str, data: bytes) -> None:
        """Write a receipt."""
        await self._backend.put(key, data)

    async def get_small(self, key: str) -> bytes:
        """Read a receipt."""
        return await self._backend.get(key, _SMALL_LIMIT_BYTES)

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.close()


class AiockptRetrying(Aiockpt):
    """The same below `Retrying`, as a URL is opened."""

    async def open(self, place: Place) -> None:
        """Make the backend and wrap it."""
        from aiockpt.storage.retry import Retrying

        await super().open(place)
        self._backend = Retrying(self._backend)
