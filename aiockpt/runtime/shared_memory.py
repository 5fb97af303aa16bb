"""Memory that a trainer and its writer process share: pieces of one file without a name, in huge pages where they can be.

Guarantees:

- The file is gone when no process has it open or mapped, however its users end.
- A piece lies at an address at which the system can map huge pages. It gets them at once where the system gives them to
  shared memory (``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is "advise"), and else by `SharedMemory.make_huge`,
  which Linux 6.1 does whatever is set there. Without them a copy into the piece takes up to twice as long.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from threading import Lock

from aiockpt.errors import ClosedError, UsageError
from aiockpt.runtime.host_memory import Pages, advise, fault_in

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; the mmap module does not define it
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap  # that of Python has no argument for the address
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class SharedMemory:
    """Memory that another process can map.

    Attributes:
        fd: of the file; not inherited by programs that this one starts, unless it is passed on.

    Raises:
        UsageError: the kernel or a sandbox refuses such memory.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("aiockpt-slabs")
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
            raise UsageError(
                f"worker='process' needs memory that two processes share, and memfd_create is refused here"
                f" ({error.strerror}, by a sandbox or the kernel): use worker='thread', or allow that call"
            ) from error
        self._growing = Lock()
        self._closed = False

    def map(self, number: int, size_bytes: int) -> Pages:
        """Return piece *number* of equal pieces of *size_bytes*, a multiple of the page size."""
        with self._growing:
            if self._closed:  # the descriptor may be another file's by now
                raise ClosedError("the shared memory is closed")
            end = (number + 1) * size_bytes
            # Under the lock, or the smaller of two ends, set last, would cut off the other piece.
            if os.fstat(self.fd).st_size < end:
                os.ftruncate(self.fd, end)
            memory = map_shared(self.fd, number, size_bytes)
        fault_in(memory)
        return memory

    def make_huge(self, address: int, size_bytes: int) -> None:
        """Move the piece at *address* into huge pages if possible, for all that map it. Takes milliseconds, without the GIL.

        A thread that uses it meanwhile waits, or the piece stays as it is.
        """
        advise(address, size_bytes, _MADV_COLLAPSE)  # a wish, as every other advice

    def close(self) -> None:
        with self._growing:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


def map_shared(fd: int, number: int, size_bytes: int) -> Pages:
    """Return the piece that another process made with `SharedMemory.map`; its pages are mapped when they are touched."""
    unit = HUGE_BYTES if size_bytes % HUGE_BYTES == 0 else mmap.PAGESIZE
    # mmap aligns to pages only: reserve one unit more, map inside it at a multiple of the unit, release the ends.
    # MAP_FIXED replaces our own reservation, so no other thread can be given these addresses in between.
    reserved = _map(None, size_bytes + unit, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    start = -(-reserved // unit) * unit
    end, reserved_end = start + size_bytes, reserved + size_bytes + unit
    try:
        _map(start, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, number * size_bytes)
    except OSError:
        _munmap(reserved, size_bytes + unit)
        raise
    for low, high in ((reserved, start), (end, reserved_end)):
        if low < high:
            _munmap(low, high - low)
    pages = (ctypes.c_ubyte * size_bytes).from_address(start)
    weakref.finalize(pages, _munmap, start, size_bytes).atexit = False  # threads may use it until the very end
    return pages


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _mmap(address, size_bytes, protection, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{size_bytes:,} bytes of shared memory cannot be mapped: {os.strerror(error)}")
    return int(mapped)
