"""Request bodies that are sent without a copy, and the checksum by which the store verifies them.

A part is sent from the caller's memory in slices. Its checksum is sent first, in a header (CRC64NVME through awscrt: 39
GB/s; CRC32 through zlib where that is missing), so neither signing nor a trailer makes the client read the body twice. A
store that does not know the header is detected by its refusal (`Checks`).
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
        combine: joins the values of two consecutive parts; None where that cannot be done.
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
        """Return the checksum of consecutive parts from the (value, bytes) of each; None where that cannot be done."""
        if self.combine is None:
            return None
        whole = 0
        for value, size in values:
            whole = self.combine(whole, value, size)
        return whole


def find_summing(wanted: Checksum | Literal["auto"] | None) -> Summing | None:
    """Return the checksum to use; "auto" selects the fastest that is installed, None no checksum."""
    if wanted is None:
        return None
    if wanted == "crc32" or (crt is None and wanted == "auto"):
        return Summing("CRC32", 4, zlib.crc32, crt.combine_crc32 if crt is not None else None)
    if crt is None:
        raise UsageError("checksum='crc64nvme' needs the package awscrt: pip install awscrt, or leave checksum='auto'")
    add: Any = crt.crc64nvme  # accepts any buffer, but is declared to accept only bytes
    return Summing("CRC64NVME", 8, add, crt.combine_crc64nvme)


class Checks:
    """The checksum that is sent with each write, until the store proves not to support it.

    Args:
        where: the bucket and the endpoint, for the log.

    Attributes:
        summing: the checksum; None from then on. The data still have checksums of their own.
    """

    def __init__(self, summing: Summing | None, where: Callable[[], str]) -> None:
        self.summing = summing
        self._where = where

    async def send(
        self, fields: Mapping[str, Any], call: Callable[[Mapping[str, Any]], Awaitable[T]], *, proving: bool = False
    ) -> T:
        """Make *call* with *fields*, which state a checksum; where that is refused, once more without.

        Args:
            proving: the body is tiny, so that two mismatches in a row mean an unsupported checksum, not damage in transit.
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
        # Only after the call has worked without a checksum: the refusal may have had another cause.
        if self.summing is not None:
            self.summing = None
            logger.warning(
                "%s: the store supports no checksum of S3's (%s); objects are sent without one. The data keep our own",
                *(self._where(), refusal.response.get("Error", {}).get("Code", "")),
            )
        return result


class Body(aiohttp.Payload):
    """Memory as a request body: aiohttp sends it, botocore measures it and rewinds it for a redirect.

    It has ``read`` because awscrt refuses to sign for a body without it. A connection over which the body was not sent to
    its end is aborted: merely closed it would wait, with its buffers, for a store that accepts no more.

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
        """Send the body, slice by slice."""
        assert isinstance(writer, StreamWriter)
        transport = writer.transport  # it is gone from there once closed
        try:
            await send(writer, self._views, self._moved)
        except BaseException as error:
            if isinstance(error, ConnectionError):
                for _ in range(3):  # cycles of the loop: an answer from before the connection broke is read
                    await asyncio.sleep(0)
            if transport is not None:
                transport.abort()
            raise
