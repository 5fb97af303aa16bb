"""Reading of HDFS files into the buffers of a load: one stream for each read, packet by packet, on a thread.

Guarantees:

- hdfs-native checks the CRC of every packet, so damage on a DataNode's disk or on the way is an error or another replica.
- ``seen`` gets each buffer as soon as it is full, or 1 MiB of it is new: while it is in the CPU's cache.
- A read holds its thread until it is done, also when it is cancelled: no buffer is written after `read` has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hdfs_native import FileReader

from aiockpt.backends.buffers import check_range
from aiockpt.backends.hdfs_client import hdfs_errors
from aiockpt.errors import StorageError, UsageError
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen

_SHOWN_BYTES = 1 << 20


class HdfsReader:
    """One object, opened; see `aiockpt.storage.backend.Reader`."""

    def __init__(self, reader: FileReader, key: str, limiter: Limiter) -> None:
        self._reader = reader
        self._key = key
        self._limiter = limiter
        self._size = len(reader)
        self._closed = False

    @property
    def size(self) -> int:
        return self._size

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        if self._closed:
            raise UsageError(f"{self._key!r} was closed; open it again")
        wanted = sum(view.nbytes for view in into)
        check_range(self._key, offset, wanted, self._size)
        if wanted:
            await run_blocking(self._limiter, self._fill, offset, wanted, into, seen)

    async def close(self) -> None:
        """Accept no more reads; the library keeps nothing open between them."""
        self._closed = True

    def _fill(self, offset: int, wanted: int, into: Sequence[memoryview], seen: Seen | None) -> None:
        packets = self._packets(offset, wanted)
        packet = memoryview(b"")
        for view in into:
            target = view.cast("B") if view.nbytes else memoryview(b"")
            filled = shown = 0
            while filled < target.nbytes:
                if not packet.nbytes:
                    packet = next(packets)
                taken = min(packet.nbytes, target.nbytes - filled)
                target[filled : filled + taken] = packet[:taken]
                packet = packet[taken:]
                filled += taken
                if seen is not None and (filled == target.nbytes or filled - shown >= _SHOWN_BYTES):
                    seen(target[shown:filled])
                    shown = filled

    def _packets(self, offset: int, wanted: int) -> Iterator[memoryview]:
        """Yield what the DataNodes send; their errors become ours."""
        with hdfs_errors("reading", self._key):
            stream = self._reader.read_range_stream(offset, wanted)
        while True:
            with hdfs_errors("reading", self._key):
                packet = next(stream, None)
            if packet is None:
                raise StorageError(
                    f"{self._key!r}: the DataNodes sent fewer bytes than it has; read it again",
                    key=self._key,
                    retryable=True,
                )
            yield memoryview(packet)
