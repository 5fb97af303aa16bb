"""The backend for the host's shared memory: checkpoints survive the death of the trainer, at the speed of memory.

Guarantees, besides those of the contract:

- Objects survive the process that wrote them, also its SIGKILL, until the host restarts: ``durable`` is False.
  (Where systemd's RemoveIPC is on, they are also removed when a person's last login session ends; jobs of a scheduler
  and of system users are not affected.)
- Everything lies below one folder of the user with mode 0700. A folder of that name that belongs to another user, is
  a link, or is open to others is refused, by readers too: /dev/shm is open to all, and its names can be squatted on.
- ``create`` refuses a file that does not fit into the free memory: else the kernel would kill training.

It is the local backend without flushes and O_DIRECT, which are useless here, and with folders that only the user can
access.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Any, cast

import msgspec

from aiockpt.backends.local import LocalBackend
from aiockpt.errors import StorageAccessError, StorageError, StorageFullError, from_os_error
from aiockpt.runtime.host_memory import available_bytes
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import Files, World
from aiockpt.storage.backend import Space, Traits, check_key
from aiockpt.storage.forwarding import BackendCall, Forwarding

SHARED_MEMORY = "/dev/shm"


class ShmBackend(Forwarding):
    """Objects in the shared memory of this host, kept for this user under *name*.

    Args:
        name: backends of one name share their objects, in all processes of the user; relative, parts joined by ``/``.
        world: the seam to the operating system.
        mount: where the host's shared memory is mounted; a directory that others may write to needs its sticky bit.
    """

    def __init__(self, name: str, *, world: World | None = None, mount: str = SHARED_MEMORY) -> None:
        world = world or World()
        self._name = check_key(name.strip("/")) if name.strip("/") else "default"
        self._files = cast("Files", ShmFiles(world.files))
        self._mount = mount
        self._home = os.path.join(mount, f"aiockpt-{os.geteuid()}")
        in_memory = World(files=self._files, clock=world.clock, token=world.token)
        super().__init__(LocalBackend(os.path.join(self._home, self._name), world=in_memory, direct=False))
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
        return Space(min(mounted.free_bytes, available_bytes()), mounted.total_bytes, mounted.free_files)

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

    (The seam's ``mkdir`` has no mode, so that one call goes to the operating system itself.)
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def mkdir(self, path: str, /) -> None:
        """Create a folder of the user alone."""
        os.mkdir(path, 0o700)

    def fdatasync(self, fd: int, /) -> None:
        """Does nothing: memory has nothing to flush to."""

    fsync = fdatasync
