"""hdfs-native with its defaults: one growing stream, and ranged reads on its own threads.

Its last block is flushed before the file is closed; unlike in our own backend, earlier blocks are not.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from hdfs_native import AsyncClient, WriteOptions

from benchmarks.clients import Place, each_part


class HdfsNative:
    """The asynchronous client."""

    async def open(self, place: Place) -> None:
        self._place = place
        url = urlsplit(place.url)
        self._folder = url.path.rstrip("/")
        self._client = AsyncClient(f"hdfs://{url.netloc}")

    async def put(self, key: str, data: bytes) -> None:
        """Write one stream; slices of `bytes`, as a memoryview costs it ten times the processor."""
        writer = await self._client.create(f"{self._folder}/{key}", WriteOptions(overwrite=True))
        for start in range(0, len(data), self._place.part_bytes):
            await writer.write(data[start : start + self._place.part_bytes])
        await writer.hsync()
        await writer.close()

    async def get(self, key: str, into: memoryview) -> None:
        reader = await self._client.read(f"{self._folder}/{key}")

        async def fetch(_: int, start: int, end: int) -> None:
            into[start:end] = await reader.read_range(start, end - start)

        await each_part(self._place, into.nbytes, fetch)

    async def put_small(self, key: str, data: bytes) -> None:
        await self.put(key, data)

    async def get_small(self, key: str) -> bytes:
        return await (await self._client.read(f"{self._folder}/{key}")).readall()

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
