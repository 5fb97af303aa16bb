"""The open descriptors of one file, and the calls that use them.

Guarantees:

- A descriptor is closed once, and never while a worker thread uses it: its number could already be another file's.
- Every descriptor is closed, also when closing one of them fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aiockpt.backends.local_optional import OptionalCalls
from aiockpt.errors import StorageError, UsageError
from aiockpt.runtime.world import Files

PAGE_BYTES = 4096
"""O_DIRECT needs offsets, lengths and addresses to be a multiple of it; enough for every disk we know."""


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
