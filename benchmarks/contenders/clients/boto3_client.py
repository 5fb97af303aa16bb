"""boto3 with s3transfer, as its documentation shows: ``upload_fileobj``, ``download_fileobj``."""

from __future__ import annotations

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3  # type: ignore[import-untyped,unused-ignore]
from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped,unused-ignore]

from benchmarks.contenders.clients import Place


class Memory(io.RawIOBase):
    """The caller's memory as a file that can be written anywhere, as a download in ranges does."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def writable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to *offset*."""
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def tell(self) -> int:
        """Say where it is."""
        return self._position

    def write(self, data: Any, /) -> int:
        """Copy *data* in."""
        self._view[self._position : self._position + len(data)] = data
        self._position += len(data)
        return len(data)


class Boto3:
    """Transfers in its own threads; small objects in as many of ours."""

    _client: Any

    async def open(self, place: Place) -> None:
        """Make the client."""
        self._place = place
        self._client = boto3.client("s3", endpoint_url=place.endpoint_url)
        self._config = TransferConfig(
            multipart_threshold=place.part_bytes,
            multipart_chunksize=place.part_bytes,
            max_concurrency=place.in_flight,
        )
        self._threads = ThreadPoolExecutor(place.in_flight)

    async def put(self, key: str, data: bytes) -> None:
        """Upload by the transfer manager."""
        await asyncio.to_thread(
            self._client.upload_fileobj,
            io.BytesIO(data),
            self._place.bucket,
            self._place.path(key),
            Config=self._config,
        )

    async def get(self, key: str, into: memoryview) -> None:
        """Download by the transfer manager."""
        await asyncio.to_thread(
            self._client.download_fileobj,
            self._place.bucket,
            self._place.path(key),
            Memory(into),
            Config=self._config,
        )

    async def put_small(self, key: str, data: bytes) -> None:
        """Put one object."""
        await asyncio.get_running_loop().run_in_executor(
            self._threads,
            lambda: self._client.put_object(Bucket=self._place.bucket, Key=self._place.path(key), Body=data),
        )

    async def get_small(self, key: str) -> bytes:
        """Get one object."""

        def fetch() -> bytes:
            data: bytes = self._client.get_object(Bucket=self._place.bucket, Key=self._place.path(key))["Body"].read()
            return data

        return await asyncio.get_running_loop().run_in_executor(self._threads, fetch)

    async def close(self) -> None:
        """Close the client and its threads."""
        self._threads.shutdown()
        self._client.close()
