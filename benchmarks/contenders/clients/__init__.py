"""Who moves bytes to a server? One small class for each storage client, all behind one contract.

Guarantees:

- Everybody gets the same bytes, parts of the same size, and as many of them under way at once; everything else is the
  library's default, and a contender with other settings says so in its name.
- A large object goes out of memory that is the caller's, and comes into memory that is the caller's: a tensor's.
- A library is imported only in the process that measures it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where objects go, and how.

    Attributes:
        url: ``s3://bucket/prefix`` or ``hdfs://host:port/folder``; keys are below it.
        endpoint_url: of an S3 that is not AWS; None: as the environment says.
        part_bytes: of one part of a large object, and of one ranged read.
        in_flight: parts, and small objects, under way at once.
    """

    url: str
    endpoint_url: str | None = None
    part_bytes: int = 16 << 20
    in_flight: int = 8

    @property
    def bucket(self) -> str:
        """The bucket of an S3 place."""
        return self.url.removeprefix("s3://").partition("/")[0]

    def path(self, key: str) -> str:
        """Return what *key* is called within the bucket."""
        prefix = self.url.removeprefix("s3://").partition("/")[2]
        return f"{prefix}/{key}" if prefix else key


class Client(Protocol):
    """One way to move bytes. Used on one event loop, in a process of its own: open, puts and gets, close."""

    async def open(self, place: Place) -> None:
        """Connect."""

    async def put(self, key: str, data: bytes) -> None:
        """Store a large object, durable by the store's word when this returns."""

    async def get(self, key: str, into: memoryview) -> None:
        """Fill *into* with a large object of just that size."""

    async def put_small(self, key: str, data: bytes) -> None:
        """Store an object of a few KiB. Several are under way at once."""

    async def get_small(self, key: str) -> bytes:
        """Return such an object."""
        ...

    async def close(self) -> None:
        """Release everything."""


S3_CLIENTS = {
    "aiockpt": ("ours", "Aiockpt"),
    "aiockpt, retrying": ("ours", "AiockptRetrying"),
    "aiobotocore": ("aiobotocore_client", "Aiobotocore"),
    "boto3": ("boto3_client", "Boto3"),
    "obstore": ("obstore_client", "Obstore"),
    "obstore, unsigned payload": ("obstore_client", "ObstoreUnsigned"),
    "s3torchconnector": ("s3torch_client", "S3Torch"),
    "floor: http.client": ("http_client", "HttpClient"),
}
HDFS_CLIENTS = {
    "aiockpt": ("ours", "Aiockpt"),
    "aiockpt, retrying": ("ours", "AiockptRetrying"),
    "hdfs-native": ("hdfs_client", "HdfsNative"),
}
"""Name → module below this package and class in it, by what the server speaks."""

OURS = ("aiockpt", "aiockpt, retrying")
FLOOR = "floor: "


def clients_for(url: str) -> dict[str, tuple[str, str]]:
    """Return who can speak to *url*."""
    return HDFS_CLIENTS if url.startswith("hdfs:") else S3_CLIENTS


def make(name: str, place: Place) -> Client:
    """Import what contender *name* needs and return a new one.

    Raises:
        ImportError: its library is not installed.
    """
    module, kind = clients_for(place.url)[name]
    made: Client = getattr(import_module(f"{__name__}.{module}"), kind)()
    return made
