"""System calls on one file: its descriptors, and the calls that a file system, a sandbox or a kernel may lack.

Guarantees:

- A descriptor is closed once, and never while a worker thread uses it: its number could already be another file's.
- Every descriptor is closed, also when closing one of them fails.
- An error means "not here" where `FALLBACKS` says so, and nowhere else. What means "not here" also means "not allowed" (a
  seccomp filter raises EPERM, a user-space file system EACCES): what is done instead needs the same rights, so that a
  right which is missing shows there.
- What a place lacks is remembered for that place, and logged once. A place whose folders cannot be flushed is reported by a
  warning; that call is made again each time, because a root may lie on several file systems and the durability of a commit
  is worth a call.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import anyio

from aiockpt.errors import StorageError, UsageError
from aiockpt.runtime.world import Files

logger = logging.getLogger("aiockpt")

# O_DIRECT needs offsets, lengths and addresses to be a multiple of it; enough for every disk we know.
PAGE_BYTES = 4096


OptionalCall = Literal["fallocate", "O_DIRECT", "preadv2", "link", "statfs", "fsync of a folder"]
_UNKNOWN = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_REFUSED = _UNKNOWN | {errno.EPERM, errno.EACCES}


class Fallback(NamedTuple):
    """The errors of a call that mean that it is not here, and what follows."""

    absent: frozenset[int]
    instead: str
    level: int = logging.INFO


FALLBACKS: Mapping[OptionalCall, Fallback] = {
    "fallocate": Fallback(
        _REFUSED | {errno.EINVAL, errno.ENODEV}, "no space is reserved, and a full disk shows while data are written"
    ),
    "O_DIRECT": Fallback(_REFUSED | {errno.EINVAL}, "data pass the page cache"),
    "preadv2": Fallback(_REFUSED | {errno.EINVAL}, "reads go through the page cache without asking what it holds"),
    "link": Fallback(
        _REFUSED | {errno.EXDEV, errno.EMLINK},
        "records are created in place; a crash can leave a torn one, which readers refuse",
    ),
    "statfs": Fallback(_REFUSED, "how much is free is not known"),
    "fsync of a folder": Fallback(
        _UNKNOWN | {errno.EINVAL, errno.EBADF},
        "steps that are committed here outlive the job and its processes, and a power cut or a crash of the system only"
        " where the file system writes names down by itself (SaveResult.durable is False)",
        logging.WARNING,
    ),
}


class OptionalCalls:
    """The optional calls of one place. Any thread.

    Args:
        place: its name in the log.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._missing: set[OptionalCall] = set()

    def lacks(self, call: OptionalCall, error: OSError) -> bool:
        """Return whether *error*, of *call*, means that the place has no such call; remember it then."""
        fallback = FALLBACKS[call]
        if error.errno not in fallback.absent:
            return False
        if call not in self._missing:
            self._missing.add(call)
            logger.log(fallback.level, "%s: no %s here (%s); %s", self._place, call, error.strerror, fallback.instead)
        return True

    def has(self, call: OptionalCall) -> bool:
        """Return False once the place was found to lack *call*."""
        return call not in self._missing


class Handle:
    """The descriptors of one file. `use` and `retire` belong to the event loop, the rest to worker threads."""

    def __init__(self, files: Files, key: str) -> None:
        self.key = key
        self._files = files
        self._fds: list[int] = []
        self._users = 0
        self._retired = False
        self._unused = anyio.Event()

    def open(self, path: str, flags: int) -> int:
        """Open *path*, without following a link, and keep the descriptor until `close`."""
        fd = self._files.open(path, flags | os.O_NOFOLLOW, 0o666)  # the umask decides, as for any program
        self._fds.append(fd)
        return fd

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the descriptors open for the length of the block.

        Raises:
            UsageError: they are closed already.
        """
        if self._retired:
            raise UsageError(f"{self.key!r} was closed, finished or aborted; open or create it again")
        self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        if self._retired and not self._users:
            self._unused.set()

    async def retire(self) -> bool:
        """Refuse further use and wait until the last one is over; a wait that is cancelled has no effect.

        Returns:
            True for the first caller, which must call `close`; False for later ones.
        """
        if self._retired:
            return False
        self._retired = True
        try:
            if self._users:
                await self._unused.wait()
        except BaseException:
            self._retired = False
            raise
        return True

    def close(self) -> None:
        """Close all descriptors, then raise the first error of them, if any."""
        errors = []
        while self._fds:
            try:
                self._files.close(self._fds.pop())
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def write_all(files: Files, fd: int, data: memoryview, offset: int) -> None:
    """Write *data* at *offset*, however short the single writes are. Blocking."""
    done = 0
    while done < data.nbytes:
        done += check_wrote(files.pwrite(fd, data[done:], offset + done), data.nbytes - done, offset + done)


def check_wrote(count: int, wanted: int, offset: int) -> int:
    """Return *count*, of the bytes that a write took: a file system that took none, without an error, would hang us."""
    if count <= 0:
        raise OSError(errno.EIO, f"the file system took none of {wanted} bytes at offset {offset}")
    return count


class DirectMode:
    """Whether files are opened with O_DIRECT: required (True), forbidden (False), or tried (None) and remembered."""

    def __init__(self, wanted: bool | None, optional: OptionalCalls) -> None:
        self._wanted = wanted
        self._optional = optional
        self.works: bool | None = False if wanted is False else None

    def open(self, handle: Handle, path: str, flags: int) -> int | None:
        """Open *path* once more past the page cache; return None where that is forbidden or cannot be done.

        Raises:
            StorageError: it is required and the file system cannot.
        """
        if self.works is False:
            return None
        try:
            fd = handle.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if not self.refused(error, handle.key):
                raise
            return None
        self.works = True
        return fd

    def refused(self, error: OSError, key: str) -> bool:
        """Return whether *error* refuses O_DIRECT, at open or at a transfer; it is not used again then.

        Raises:
            StorageError: it is required.
        """
        if not self._optional.lacks("O_DIRECT", error):
            return False
        self.works = False
        if self._wanted:
            raise StorageError(
                f"{key!r}: direct=True was asked for and this file system cannot do O_DIRECT; leave direct=None",
                key=key,
            ) from error
        return True
