"""boto3 with s3transfer, as its documentation shows: ``upload_fileobj``, ``download_fileobj``."""

from __future__ import annotations

import io
from typing import Any

import boto3  # type: ignore[import-untyped,unused-ignore]
from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped,unused-ignore]

from benchmarks.clients import Threaded


class Memory(io.RawIOBase):
    """The caller's memory as a file with random-access writes, for a download in ranges."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def write(self, data: Any, /) -> int:
        self._view[self._position : self._position + len(data)] = data
        self._position += len(data)
        return len(data)


class Boto3(Threaded):
    """Transfers in its own threads; small objects in as many of ours."""

    def connect(self) -> None:
        self._client: Any = boto3.client("s3", endpoint_url=self.place.endpoint_url)
        self._config = TransferConfig(
            multipart_threshold=self.place.part_bytes,
            multipart_chunksize=self.place.part_bytes,
            max_concurrency=self.place.in_flight,
        )

    def do_put(self, key: str, data: bytes) -> None:
        body = io.BytesIO(data)
        self._client.upload_fileobj(body, self.place.bucket, self.place.path(key), Config=self._config)

    def do_get(self, key: str, into: memoryview) -> None:
        self._client.download_fileobj(self.place.bucket, self.place.path(key), Memory(into), Config=self._config)

    def do_put_small(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.place.bucket, Key=self.place.path(key), Body=data)

    def do_get_small(self, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=self.place.bucket, Key=self.place.path(key))["Body"].read()
        return data

    async def close(self) -> None:
        await super().close()
        self._client.close()
