"""The backend for the host's shared memory: checkpoints survive the death of the trainer, at the speed of memory.

Guarantees, besides those of the contract:

- Objects survive the process that wrote them, also its SIGKILL, until the host restarts: ``durable`` is False.
  (Where systemd's RemoveIPC is on, they are also removed when a person's last login session ends; jobs of a scheduler
  and of system users are not affected.)
- Everything lies below one folder of the user with mode 0700. A folder of that name that belongs to another user, is
  a link, or is open to others is refused, by readers too: /dev/shm is open to all, and its names can be squatted on.
- ``create`` refuses a file that does not fit into the free memory: else the kernel would kill training.
- The memory of large files that were removed is written again (`ShmFiles`), and counts as free.

It is the local backend without flushes and O_DIRECT, which are useless here, and with folders that only the user can
access.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from contextlib import suppress
from typing import Any, cast

import msgspec

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.local_tree import LEFTOVER_PREFIX
from aiockpt.errors import StorageAccessError, StorageError, StorageFullError, from_os_error
from aiockpt.runtime.host_memory import available_bytes
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import Files, World
from aiockpt.storage.backend import Space, Traits, check_key
from aiockpt.storage.forwarding import BackendCall, Forwarding

SHARED_MEMORY = "/dev/shm"
LEAST_SPARE_BYTES = 1 << 20
SPARE, TAKEN = f"{LEFTOVER_PREFIX}spare.", f"{LEFTOVER_PREFIX}taken."
"""Beginnings of the names of spares; then come the size, the inode, and the folder of the attempt that it was in."""


class ShmBackend(Forwarding):
    """Objects in the shared memory of this host, kept for this user under *name*.

    Args:
        name: backends of one name share their objects, in all processes of the user; relative, parts joined by ``/``.
        world: the seam to the operating system.
        mount: where the host's shared memory is mounted; a directory that others may write to needs its sticky bit.
        writes: whether files are created beside this object, as they are after its own first `create`: only then is the
            memory of removed ones kept for them.
    """

    def __init__(
        self, name: str, *, world: World | None = None, mount: str = SHARED_MEMORY, writes: bool = False
    ) -> None:
        world = world or World()
        self._name = check_key(name.strip("/")) if name.strip("/") else "default"
        self._mount = mount
        self._home = os.path.join(mount, f"aiockpt-{os.geteuid()}")
        self._files = ShmFiles(world.files, self.path(""), writes)
        in_memory = World(files=cast("Files", self._files), clock=world.clock, token=world.token)
        super().__init__(LocalBackend(self.path(""), world=in_memory, direct=False))
        self._guards = Limiter("shared memory guard", 1)
        self._ours = False

    @property
    def url(self) -> str:
        return f"shm://{self._name}"

    @property
    def traits(self) -> Traits:
        return msgspec.structs.replace(self.inner.traits, scope="node", durable=False)

    def path(self, key: str) -> str:
        """Return where the object *key* lies."""
        return os.path.join(self._home, self._name, key)

    async def forward(self, call: BackendCall) -> Any:
        """Make *call* where the folder belongs to the user alone, and a new file fits."""
        if not self._ours and call.verb not in ("space", "close"):
            await self._guard(call)
        if call.verb == "create":
            await self._check_room(call)
            self._files.sizes[self.path(call.key)] = call.size
        elif call.verb == "close" and self._files.writes:
            await run_blocking(self._guards, self._files.drop_spares)
        return await call()

    async def _guard(self, call: BackendCall) -> None:
        """Check once that the folder belongs to the user alone. In a sticky directory it then stays so."""
        makes = call.verb in ("put", "put_new", "create")
        try:
            self._ours = await run_blocking(self._guards, self._check_home, makes)
        except StorageError:
            raise
        except OSError as error:
            raise from_os_error(error, "looking into the shared memory for", call.key) from error

    async def _check_room(self, call: BackendCall) -> None:
        free_bytes = (await self.space()).free_bytes
        if free_bytes is not None and call.size > free_bytes:
            raise StorageFullError(
                f"{call.key!r}: {call.size} bytes do not fit into the {free_bytes} of shared memory that are free; lower"
                " what is kept here, or give the container more (docker: --shm-size)",
                key=call.key,
            )

    async def space(self) -> Space:
        """Return the free space of the mount, or of the host where that is less: other users may occupy the memory."""
        mounted = await super().space()
        if mounted.free_bytes is None:
            return mounted
        spare_bytes = await run_blocking(self._guards, self._files.spare_bytes)
        free_bytes = min(mounted.free_bytes, available_bytes()) + spare_bytes
        return Space(free_bytes, mounted.total_bytes, mounted.free_files)

    def __repr__(self) -> str:
        return f"<ShmBackend {self.url!r} in {self._home!r}>"

    # What follows runs on a worker thread.

    def _check_home(self, make: bool) -> bool:
        """Return whether the user's folder exists; with *make*, create it first.

        Raises:
            StorageError: this host has no shared memory.
            StorageAccessError: the folder belongs to another user, or others have access to it.
        """
        if make:
            self._make_home()
        try:
            found = self._files.lstat(self._home)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StorageAccessError(
                f"{self._home} is not a private folder of user {os.geteuid()} (owner {found.st_uid}, mode"
                f" {stat.filemode(found.st_mode)}): another user could read or change what is saved; remove it, or"
                " let an administrator do so"
            )
        return True

    def _make_home(self) -> None:
        try:
            with suppress(FileExistsError):
                self._files.mkdir(self._home)
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._mount} does not exist: this host has no shared memory of that kind; use a path on a RAM disk"
            ) from error


class ShmFiles:
    """*files* for shared memory: nothing is flushed, and a new folder is closed to other users.

    A large file below *root* that is removed becomes a *spare*, and the next one of its size is written into its memory:
    new pages cost more than twice what the write does, and freeing them as much again (256 MiB: 100, 40 and 36 ms of
    processor). Guarantees:

    - No file is written over while anybody has it open or mapped: the kernel says so, of all processes. It has no name then
      by which it could be opened.
    - One of several callers gets a spare. A process that is killed at any call leaves a name, which goes with the spares.
    - The spares are those of one attempt, the last that was removed. They go when memory lacks, when who wrote something
      here closes, and when a program that writes nothing removes a step.

    (The seam's ``mkdir`` has no mode, and no ``fcntl``, so that those go to the operating system itself.)

    Attributes:
        sizes: by path, of files that are about to be created.
        writes: whether files are created here.
    """

    def __init__(self, files: Files, root: str, writes: bool) -> None:
        self._files, self._root, self.writes = files, root, writes
        self._has_leases = True
        self.sizes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def mkdir(self, path: str, /) -> None:
        """Create a folder of the user alone."""
        os.mkdir(path, 0o700)

    def fdatasync(self, fd: int, /) -> None:
        """Does nothing: memory has nothing to flush to."""

    fsync = fdatasync

    def fallocate(self, fd: int, offset: int, size: int, /) -> None:
        """Reserve memory; a spare has it."""
        if self._files.fstat(fd).st_size < offset + size:
            self._files.fallocate(fd, offset, size)

    def unlink(self, path: str, /) -> None:
        """Remove a name; a large file that has no other one becomes a spare."""
        found = self._files.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size >= LEAST_SPARE_BYTES:
            if not self.writes:
                self.drop_spares()
            elif found.st_nlink == 1 and self._has_leases:
                attempt = os.path.basename(os.path.dirname(os.path.dirname(path)))
                self.drop_spares(but=attempt)
                self._files.rename(path, os.path.join(self._root, f"{SPARE}{found.st_size}.{found.st_ino}.{attempt}"))
                return
        self._files.unlink(path)

    def open(self, path: str, flags: int, mode: int = 0o644, /) -> int:
        """Open a file; one whose size was announced is created in the memory of a spare where there is one."""
        size = self.sizes.pop(path, 0)
        if size >= LEAST_SPARE_BYTES:
            self.writes = True
            for name in self._spares():
                if name.startswith(f"{SPARE}{size}.") and (fd := self._take(name, path)) is not None:
                    return fd
            found = self._files.statvfs(self._root)
            if size > min(found.f_bavail * found.f_frsize, available_bytes()):
                self.drop_spares()
        return self._files.open(path, flags, mode)

    def _take(self, name: str, path: str) -> int | None:
        """Create *path* in the memory of the spare *name*; return its descriptor, or None where that is used.

        Raises:
            FileExistsError: *path* exists.
        """
        spare = os.path.join(self._root, name.replace(SPARE, TAKEN, 1))
        try:
            self._files.rename(os.path.join(self._root, name), spare)
        except FileNotFoundError:
            return None  # another caller's
        fd = self._files.open(spare, os.O_WRONLY | os.O_NOFOLLOW)
        is_ours = False
        try:
            if self._files.fstat(fd).st_nlink == 1 and self._nobody_reads(fd):
                self._files.utime(spare)  # an attempt is as old as the newest of its files
                self._files.link(spare, path)
                is_ours = True
        finally:
            if not is_ours:
                self._files.close(fd)
            self._files.unlink(spare)
        return fd if is_ours else None

    def _nobody_reads(self, fd: int) -> bool:
        """Return whether *fd* is the only descriptor of its file, and no process has mapped it."""
        try:
            fcntl.fcntl(
                fd, fcntl.F_SETSIG, signal.SIGURG
            )  # nobody can ask for the lease back; if so, the signal is harmless
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            self._has_leases = error.errno == errno.EAGAIN
            return False
        return True

    def spare_bytes(self) -> int:
        return sum(int(name.split(".")[2]) for name in self._spares())

    def drop_spares(self, but: str | None = None) -> None:
        """Free the memory of all spares, except those of an attempt."""
        for name in self._spares():
            if not name.endswith(f".{but}"):
                with suppress(FileNotFoundError):
                    self._files.unlink(os.path.join(self._root, name))

    def _spares(self) -> list[str]:
        try:
            names = self._files.listdir(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in names if name.startswith((SPARE, TAKEN))]
