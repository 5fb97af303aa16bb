"""Reading of a file at the disk's own speed: cached bytes from the page cache, uncached ones with O_DIRECT.

Guarantees:

- Bytes land in the caller's buffers, and each run is passed to `seen` once, in order, while the processor has it cached.
- The bytes passed to `seen` are those in the buffers: through a bounce buffer both are hashed and copied from one memory.

Measured (2 cores, ext4): `preadv` of 1 GiB of cached bytes in pieces of 4 MiB and hashing them takes 55–70 ms on two
threads, 45–60 without the hashes; smaller pieces cost the engine more in waits for the GIL than they save. Uncached,
parallel buffered readers reach 1.1 GB/s, O_DIRECT 3.4. Hence the probe: RWF_NOWAIT reports whether the first page is
cached; it reads one page only, because a failed probe starts a read-ahead of all it covers. After a miss the next probe
is delayed: where four ranks read a file in runs of 1 MiB, a probe for each run started the kernel's read-ahead (8 MiB
here), and 1 GiB took 1.7 s and twice the processor instead of 0.8 s.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence

import anyio

from aiockpt.backends.local_tree import PAGE_BYTES, Tree
from aiockpt.backends.ranges import Buffers, check_range, copy_bytes, ends_early
from aiockpt.errors import StorageError
from aiockpt.runtime.host_memory import map_pages
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Seen

STALE_PAUSES_S = (0.0, 0.1, 0.4, 1.6)
"""The waits before a file whose handle went stale (the NFS server was replaced) is opened anew."""
PIECE_BYTES = 4 << 20
BOUNCE_BYTES = 8 << 20
# Bytes read with O_DIRECT before the next probe: where one run is not cached, its neighbours rarely are.
BELIEVED_BYTES = 64 << 20


class BouncePool:
    """Page-aligned memory for reads with O_DIRECT: a block for each read under way, freed with the readers."""

    def __init__(self) -> None:
        self.readers = 0
        self.lent_bytes = 0
        self._free: deque[memoryview] = deque()

    def borrow(self) -> memoryview:
        """Return a block of BOUNCE_BYTES. Any thread."""
        self.lent_bytes += BOUNCE_BYTES
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(map_pages(BOUNCE_BYTES))

    def give_back(self, block: memoryview) -> None:
        """Return *block* to the pool for the next borrower. Any thread."""
        self.lent_bytes -= BOUNCE_BYTES
        self._free.append(block)

    def release_when_idle(self) -> None:
        """Release the memory to the system when no reader is open."""
        if not self.readers:
            self._free.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes held, lent or free."""
        return self.lent_bytes + len(self._free) * BOUNCE_BYTES


class LocalReader:
    """One object opened for ranged reads; see `aiockpt.storage.backend.Reader`."""

    def __init__(
        self,
        tree: Tree,
        limiter: Limiter,
        bounces: BouncePool,
        key: str,
        count_read: Callable[[int, int], None],
    ) -> None:
        self._tree = tree
        self._limiter = limiter
        self._bounces = bounces
        self._key = key
        self._count_read = count_read
        self._handle = tree.handle(key)
        self._fd = -1
        self._direct_fd: int | None = None
        self._identity = (0, 0)
        self.size = 0
        self._unasked_bytes = 0
        bounces.readers += 1

    def begin(self) -> None:
        """Open the object. Blocking; raises as `Tree.stat_file`; call `close` then."""
        self._fd, found = self._tree.open_file(self._handle)
        self.size = found.st_size
        self._identity = (found.st_dev, found.st_ino)

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        buffers = Buffers(into)
        check_range(self._key, offset, buffers.left_bytes, self.size, damaged=True)
        end, filled = offset + buffers.left_bytes, (0, 0)
        with self._handle.use(), self._tree.errors("reading", self._key):
            for pause_s in (*STALE_PAUSES_S, None):
                try:
                    start, moves_bytes = end - buffers.left_bytes, buffers.left_bytes
                    filled = await run_blocking(
                        self._limiter, self._fill, start, buffers, seen, moves_bytes=moves_bytes
                    )
                    break
                except OSError as error:
                    if error.errno != errno.ESTALE or pause_s is None:
                        raise
                # The bytes shown stay valid: only the rest is read from the file that is opened anew.
                await anyio.sleep(pause_s)
                await run_blocking(self._limiter, self._open_anew)
        self._count_read(*filled)

    def _open_anew(self) -> None:
        """Replace the stale descriptor; where the new one is stale too, the next read fails.

        Raises:
            StorageError: another file has the name now.
        """
        try:
            fd, found = self._tree.open_file(self._handle)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return
        if (found.st_dev, found.st_ino, found.st_size) != (*self._identity, self.size):
            raise self._replaced()
        # The stale descriptor stays open until `close`: other reads of this file may be using it.
        self._fd, self._direct_fd = fd, None

    def _replaced(self) -> StorageError:
        return StorageError(f"{self._key!r} was replaced while it was read; read it again", key=self._key)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True), self._tree.errors("closing", self._key):
            if not await self._handle.retire():
                return
            self._bounces.readers -= 1
            self._bounces.release_when_idle()
            await run_blocking(self._limiter, self._handle.close)

    def _fill(self, offset: int, buffers: Buffers, seen: Seen | None) -> tuple[int, int]:
        """Fill *buffers*; return how many bytes were read through the page cache, and how many with O_DIRECT."""
        wanted = buffers.left_bytes
        if not self._tree.optional.has("O_DIRECT") or self._is_cached(offset, buffers):
            self._fill_buffered(offset, buffers, seen)
        cached = wanted - buffers.left_bytes
        if buffers.left_bytes:
            self._fill_direct(offset + cached, buffers, seen)
        uncached = wanted - cached - buffers.left_bytes
        if buffers.left_bytes:  # the file system refuses O_DIRECT after all
            self._fill_buffered(offset + cached + uncached, buffers, seen)
        return wanted - uncached, uncached

    def _is_cached(self, offset: int, buffers: Buffers) -> bool:
        """Return whether the first page is in the page cache, or cannot be probed; a miss holds for the next reads."""
        probe = buffers.peek(PAGE_BYTES)
        if not probe or not self._tree.optional.has("preadv2"):
            return True
        # Several threads count here without a lock: a lost count only moves the next probe.
        if self._unasked_bytes > 0:
            self._unasked_bytes -= buffers.left_bytes
            return False
        if self._preadv(probe, offset) > 0:
            return True
        self._unasked_bytes = BELIEVED_BYTES - buffers.left_bytes
        return False

    def _fill_buffered(self, offset: int, buffers: Buffers, seen: Seen | None) -> None:
        """Read through the page cache until *buffers* are full or, where that can be probed, a page is not cached."""
        while buffers.left_bytes:
            count = self._preadv(buffers.peek(PIECE_BYTES), offset)
            if count < 0:
                return
            if count == 0:
                raise ends_early(self._key, offset, damaged=True)
            for run in buffers.take(count):
                if seen is not None:
                    seen(run)
            offset += count

    def _preadv(self, into: Sequence[memoryview], offset: int) -> int:
        """Read cached bytes only, or any bytes where O_DIRECT cannot be used; return -1 for "not cached"."""
        optional = self._tree.optional
        flags = os.RWF_NOWAIT if optional.has("O_DIRECT") and optional.has("preadv2") else 0
        try:
            return self._tree.files.preadv(self._fd, into, offset, flags)
        except OSError as error:
            if not flags:
                raise
            if error.errno == errno.EAGAIN:
                return -1
            if not optional.lacks("preadv2", error):
                raise
            return self._tree.files.preadv(self._fd, into, offset)

    def _fill_direct(self, offset: int, buffers: Buffers, seen: Seen | None) -> None:
        """Read with O_DIRECT, through aligned memory; stop early where the file system cannot."""
        fd = self._open_direct()
        if fd is None:
            return
        bounce = self._bounces.borrow()
        try:
            while buffers.left_bytes:
                skipped = offset % PAGE_BYTES
                length = min(BOUNCE_BYTES, _round_up(skipped + buffers.left_bytes))
                count = self._tree.files.preadv(fd, [bounce[:length]], offset - skipped) - skipped
                if count <= 0:
                    raise ends_early(self._key, offset, damaged=True)
                count = min(count, buffers.left_bytes)
                _show_and_copy(bounce[skipped : skipped + count], buffers, seen)
                offset += count
        except OSError as error:
            if not self._tree.optional.lacks_direct(error, self._key):
                raise
        finally:
            self._bounces.give_back(bounce)

    def _open_direct(self) -> int | None:
        """Return an O_DIRECT descriptor of the very file that is open already; None where that cannot be done."""
        # Two reads may open it at once: the handle has both descriptors, and closes them with the others.
        if self._direct_fd is None:
            fd = self._handle.open_direct(self._tree.path(self._key), os.O_RDONLY | os.O_NONBLOCK)
            if fd is None:
                return None
            found = self._tree.files.fstat(fd)
            if (found.st_dev, found.st_ino) != self._identity:
                raise self._replaced()
            self._direct_fd = fd
        return self._direct_fd


def _show_and_copy(data: memoryview, buffers: Buffers, seen: Seen | None) -> None:
    for start in range(0, data.nbytes, PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        if seen is not None:
            seen(piece)
        done = 0
        for run in buffers.take(piece.nbytes):
            copy_bytes(run, piece[done : done + run.nbytes])
            done += run.nbytes


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
