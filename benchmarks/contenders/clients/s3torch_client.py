"""s3torchconnector (the AWS CRT under PyTorch): ``S3Checkpoint``'s writer and reader, as ``torch.save`` would use them."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from benchmarks.contenders.clients import Place

_connector: Any = import_module("s3torchconnector")  # in no extra of ours: it is only measured


class S3Torch:
    """Its own threads move the bytes; it chooses itself how many parts are under way."""

    async def open(self, place: Place) -> None:
        """Make its client."""
        self._place = place
        self._checkpoint = _connector.S3Checkpoint(
            region=os.environ.get("AWS_REGION", "us-east-1"),
            endpoint=place.endpoint_url or os.environ.get("AWS_ENDPOINT_URL"),
            s3client_config=_connector.S3ClientConfig(
                part_size=place.part_bytes, force_path_style=bool(place.endpoint_url)
            ),
        )
        self._threads = ThreadPoolExecutor(place.in_flight)

    async def put(self, key: str, data: bytes) -> None:
        """Write one stream."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._put, key, data)

    async def get(self, key: str, into: memoryview) -> None:
        """Read one stream."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._get, key, into)

    async def put_small(self, key: str, data: bytes) -> None:
        """Write one stream."""
        await self.put(key, data)

    async def get_small(self, key: str) -> bytes:
        """Read one stream."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, key)

    async def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _url(self, key: str) -> str:
        return f"s3://{self._place.bucket}/{self._place.path(key)}"

    def _put(self, key: str, data: bytes) -> None:
        with self._checkpoint.writer(self._url(key)) as writer:
            writer.write(data)

    def _get(self, key: str, into: memoryview) -> None:
        reader = self._checkpoint.reader(self._url(key))
        filled = 0
        while filled < into.nbytes and (count := reader.readinto(into[filled:])):
            filled += count

    def _read(self, key: str) -> bytes:
        data: bytes = self._checkpoint.reader(self._url(key)).read()
        return data
