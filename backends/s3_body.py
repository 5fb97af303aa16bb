"""Request bodies that are sent without a copy, and the checksum by which the store verifies them.

A part is sent from the caller's memory in slices. Its checksum goes ahead in a header (CRC64NVME through awscrt: 39 GB/s;
CRC32 through zlib where that is missing), so neither signing nor a trailer makes the client read the body twice. A store
that knows no such header is found out by its refusal (`Checks`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter
from botocore.exceptions import ClientError

from aiockpt.backends.s3_errors import says_damaged, says_unknown
from aiockpt.backends.s3_wire import send
from aiockpt.errors import UsageError

try:
    from awscrt import checksums as crt  # type: ignore[import-untyped,unused-ignore]
except ImportError:  # optional: it is a compiled package
    crt = None

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
Checksum = Literal["crc64nvme", "crc32"]


class Summing(msgspec.Struct, frozen=True):
    """A checksum that S3 knows.

    Attributes:
        name: as S3's parameters spell it.
        size: bytes of a value.
        add: called with the next bytes and the value so far; without the GIL.
        combine: joins the values of two neighbours; None where that cannot be done.
    """

    name: str
    size: int
    add: Callable[[memoryview, int], int]
    combine: Callable[[int, int, int], int] | None

    def of(self, views: Sequence[memoryview]) -> int:
        """Return the checksum of *views*, one after the other."""
        value = 0
        for view in views:
            value = self.add(view, value)
        return value

    def field(self, value: int) -> dict[str, Any]:
        """Return the parameter that states *value*."""
        return {f"Checksum{self.name}": base64.b64encode(value.to_bytes(self.size, "big")).decode()}

    def of_all(self, values: Sequence[tuple[int, int]]) -> int | None:
        """Return the checksum of neighbours from the (value, bytes) of each; None where that cannot be done."""
        if self.combine is None:
            return None
        whole = 0
        for value, size in values:
            whole = self.combine(whole, value, size)
        return whole


def find_summing(wanted: Checksum | Literal["auto"] | None) -> Summing | None:
    """Return the checksum to use; "auto" is the fastest that is installed, None is none."""
    if wanted is None:
        return None
    if wanted == "crc32" or (crt is None and wanted == "auto"):
        return Summing("CRC32", 4, zlib.crc32, crt.combine_crc32 if crt is not None else None)
    if crt is None:
        raise UsageError("checksum='crc64nvme' needs the package awscrt: pip install awscrt, or leave checksum='auto'")
    add: Any = crt.crc64nvme  # accepts any buffer, and is declared to accept bytes
    return Summing("CRC64NVME", 8, add, crt.combine_crc64nvme)


class Checks:
    """The checksum that is sent with each write, until the store turns out not to support it.

    Args:
        where: the bucket and the endpoint, for the log.

    Attributes:
        summing: None from then on. The data keep checksums of their own.
    """

    def __init__(self, summing: Summing | None, where: Callable[[], str]) -> None:
        self.summing = summing
        self._where = where

    async def send(
        self, fields: Mapping[str, Any], call: Callable[[Mapping[str, Any]], Awaitable[T]], *, proving: bool = False
    ) -> T:
        """Make *call* with *fields*, which state a checksum; where it is refused, once more without.

        Args:
            proving: the body is tiny, so that damage to it on the way twice is none.
        """
        for last_try in (not proving, True):
            try:
                return await call(fields)
            except ClientError as error:
                damaged = proving and says_damaged(error)
                if not fields or not (damaged or says_unknown(error)):
                    raise
                refusal = error
            if last_try or not damaged:
                break
        result = await call({})
        if self.summing is not None:
            self.summing = None
            logger.warning(
                "%s: the store knows no checksum of S3's (%s); what is written goes there without. The data keep our own",
                *(self._where(), refusal.response.get("Error", {}).get("Code", "")),
            )
        return result


class Body(aiohttp.Payload):
    """Memory as a request body: aiohttp sends it, botocore measures it and rewinds it for a redirect.

    It has ``read`` because awscrt refuses to sign for a body without it. A connection that the body is not sent through to
    its end is cut: merely closed it would wait, with its buffers, for a store that accepts no more.

    Args:
        views: one after the other; they must not change until the answer is there.
        moved: called before each slice.
    """

    _autoclose = True  # there is nothing to close

    def __init__(self, views: Sequence[memoryview], moved: Callable[[], object]) -> None:
        super().__init__(views)
        self._views = views
        self._moved = moved
        self._size = sum(len(view) for view in views)

    def __len__(self) -> int:
        return self._size or 0

    def read(self, *_: object) -> bytes:
        """Raise: only the connection may read the body."""
        raise AssertionError("the body of a part was read to be signed or summed; the client is configured not to")

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Raise, as `read`."""
        raise AssertionError("the body of a part is no text")

    def seek(self, position: int) -> None:
        """Does nothing: every sending begins at the start."""
        assert position == 0

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send it, slice by slice."""
        assert isinstance(writer, StreamWriter)
        transport = writer.transport  # it is gone from there once closed
        try:
            await send(writer, self._views, self._moved)
        except BaseException as error:
            if isinstance(error, ConnectionError):
                for _ in range(3):  # turns of the loop: an answer that came before the connection broke is read
                    await asyncio.sleep(0)
            if transport is not None:
                transport.abort()
            raise
