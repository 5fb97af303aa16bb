"""What are the checksums of a data file? Hashed from the very memory that is written, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import UNSET, UnsetType

from aiockpt.format.checksum import ALGORITHM, SUM_BYTES, block_count, hash_block
from aiockpt.format.manifest import FileEntry
from aiockpt.pipeline.screen import FileScreen
from aiockpt.storage.backend import Seen


class BlockSums:
    """The checksums of one data file, taken while its windows are written: in any order, and several at once.

    Args:
        size: of the file, in bytes.
        block_bytes: bytes under one checksum; the last block may be shorter.
        now_ns: the monotonic time, from any thread.
        screen: looks at each window, too.

    Attributes:
        hash_ns: how long threads have hashed, and looked, in sum.
    """

    def __init__(
        self,
        size: int,
        block_bytes: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
        screen: FileScreen | None = None,
    ) -> None:
        self.hash_ns = 0
        self._screen = screen
        self._now_ns = now_ns
        self._size = size
        self._block_bytes = block_bytes
        self._sums = bytearray(SUM_BYTES * block_count(size, block_bytes))

    def seen_from(self, offset: int) -> Seen:
        """Return what is shown the runs that lie from *offset* on, a multiple of a block: whole blocks but for a file's end.

        It runs on worker threads; the hash releases the GIL.
        """
        place = offset // self._block_bytes * SUM_BYTES

        def seen(run: memoryview) -> None:
            nonlocal place
            begun_ns = self._now_ns()
            found = _hash_blocks(run, self._block_bytes)
            if self._screen is not None:
                self._screen.look_at(place // SUM_BYTES * self._block_bytes, run)
            self.hash_ns += self._now_ns() - begun_ns  # two threads at once may lose one of both, which is no matter
            self._sums[place : place + len(found)] = found
            place += len(found)

        return seen

    def file_entry(self, path: str, rank: int, kind: str | UnsetType = UNSET) -> FileEntry:
        """Return the manifest entry of the file, all of which was seen, as *path* of *rank*."""
        return FileEntry.of(
            path,
            size=self._size,
            rank=rank,
            algo=ALGORITHM,
            block=self._block_bytes,
            sums=bytes(self._sums),
            kind=kind,
            not_finite=UNSET if self._screen is None else self._screen.not_finite(),
        )


def _hash_blocks(memory: memoryview, block_bytes: int) -> bytes:
    """Return the checksums of *memory*'s blocks, 8 bytes each, one after the other; the last block may be shorter."""
    return b"".join(hash_block(memory[start : start + block_bytes]) for start in range(0, len(memory), block_bytes))
