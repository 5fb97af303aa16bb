"""s3torchconnector (the AWS CRT under PyTorch): ``S3Checkpoint``'s writer and reader, as ``torch.save`` would use them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from benchmarks.clients import Threaded

_connector: Any = import_module("s3torchconnector")  # in no extra of ours: it is only measured


class S3Torch(Threaded):
    """Its own threads move the bytes; it chooses the number of concurrent parts itself."""

    def connect(self) -> None:
        config = _connector.S3ClientConfig(
            part_size=self.place.part_bytes, force_path_style=bool(self.place.endpoint_url)
        )
        self._checkpoint = _connector.S3Checkpoint(
            region=os.environ.get("AWS_REGION", "us-east-1"),
            endpoint=self.place.endpoint_url or os.environ.get("AWS_ENDPOINT_URL"),
            s3client_config=config,
        )

    def _url(self, key: str) -> str:
        return f"s3://{self.place.bucket}/{self.place.path(key)}"

    def do_put(self, key: str, data: bytes) -> None:
        with self._checkpoint.writer(self._url(key)) as writer:
            writer.write(data)

    def do_get(self, key: str, into: memoryview) -> None:
        reader = self._checkpoint.reader(self._url(key))
        filled = 0
        while filled < into.nbytes and (count := reader.readinto(into[filled:])):
            filled += count

    def do_get_small(self, key: str) -> bytes:
        data: bytes = self._checkpoint.reader(self._url(key)).read()
        return data
