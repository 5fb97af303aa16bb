"""aiobotocore with its defaults: signed payloads, its checksums, ``bytes`` as bodies, ``read()`` of responses."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from aiobotocore.session import get_session

from benchmarks.clients import Place, each_part


class Aiobotocore:
    """Multipart uploads and ranged reads by its client."""

    _client: Any  # its types come from a package of stubs

    async def open(self, place: Place) -> None:
        """Make the client, with as many connections as parts are under way (its default of ten is more than eight)."""
        self._place = place
        self._held = AsyncExitStack()
        self._client = await self._held.enter_async_context(
            get_session().create_client("s3", endpoint_url=place.endpoint_url)
        )

    async def put(self, key: str, data: bytes) -> None:
        address = {"Bucket": self._place.bucket, "Key": self._place.path(key)}
        upload = (await self._client.create_multipart_upload(**address))["UploadId"]
        tags: dict[int, str] = {}

        async def send(number: int, start: int, end: int) -> None:
            answer = await self._client.upload_part(
                **address, UploadId=upload, PartNumber=number + 1, Body=data[start:end]
            )
            tags[number] = answer["ETag"]

        await each_part(self._place, len(data), send)
        parts = [{"PartNumber": number + 1, "ETag": tags[number]} for number in sorted(tags)]
        await self._client.complete_multipart_upload(**address, UploadId=upload, MultipartUpload={"Parts": parts})

    async def get(self, key: str, into: memoryview) -> None:
        async def fetch(_: int, start: int, end: int) -> None:
            answer = await self._client.get_object(
                Bucket=self._place.bucket, Key=self._place.path(key), Range=f"bytes={start}-{end - 1}"
            )
            async with answer["Body"] as body:
                into[start:end] = await body.read()

        await each_part(self._place, into.nbytes, fetch)

    async def put_small(self, key: str, data: bytes) -> None:
        await self._client.put_object(Bucket=self._place.bucket, Key=self._place.path(key), Body=data)

    async def get_small(self, key: str) -> bytes:
        answer = await self._client.get_object(Bucket=self._place.bucket, Key=self._place.path(key))
        async with answer["Body"] as body:
            data: bytes = await body.read()
        return data

    async def close(self) -> None:
        await self._held.aclose()
