"""The directories of the local backend, the files in them, and the system calls on both.

Guarantees:

- A folder that `Tree.persist` returned for is durable up to the root: each name on the way was flushed in its parent. So are
  those that were left to a later call (`Tree.defer`) once `Tree.settle` returned.
  (Where folders cannot be flushed at all, `OptionalCalls` reports it, and so does a commit there.)
- No key leads through a symbolic link: each part below the root is checked before it is used.
- An error of the root itself names the root, by its path, and not the first object below it.
- Removing a folder first invalidates all folders known to be durable (`_era`), so a folder that is removed and made again
  while a writer uses it is flushed again. This holds within a process; the removal of *empty* folders by another
  process is detected when their names are missing, and attempts never share folders (docs/format.md#layout).
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple

import anyio

from aiockpt.errors import ObjectNotFoundError, StorageError, UsageError, from_os_error
from aiockpt.runtime.limits import doing as call_name
from aiockpt.runtime.world import Files

# System calls on one file: its descriptors, and the calls that a file system, a sandbox or a kernel may lack.
#
# Guarantees:
#
# - A descriptor is closed once, and never while a worker thread uses it: its number could already be another file's.
# - Every descriptor is closed, also when closing one of them fails.
# - An error means "not supported" if `FALLBACKS` lists it, and only then. Such an error may also mean "not allowed" (a
#   seccomp filter raises EPERM, a user-space file system EACCES): the fallback needs the same rights, so that a missing
#   right is reported there.
# - A missing call is remembered for its place, and logged once. A place whose folders cannot be flushed is reported by a
#   warning; that call is made again each time, because a root may lie on several file systems and the durability of a
#   commit is worth a call.


logger = logging.getLogger("aiockpt")

# O_DIRECT needs offsets, lengths and addresses to be a multiple of it; enough for every disk we know.
PAGE_BYTES = 4096


OptionalCall = Literal["fallocate", "O_DIRECT", "preadv2", "link", "statfs", "fsync of a folder"]
_UNKNOWN = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_REFUSED = _UNKNOWN | {errno.EPERM, errno.EACCES}


class Fallback(NamedTuple):
    """The errors of a call that mean that it is not supported, and the consequence."""

    absent: frozenset[int]
    instead: str
    level: int = logging.INFO


FALLBACKS: Mapping[OptionalCall, Fallback] = {
    "fallocate": Fallback(
        _REFUSED | {errno.EINVAL, errno.ENODEV}, "no space is reserved, and a full disk shows while data are written"
    ),
    "O_DIRECT": Fallback(_REFUSED | {errno.EINVAL}, "data go through the page cache"),
    "preadv2": Fallback(_REFUSED | {errno.EINVAL}, "reads go through the page cache without a probe of its content"),
    "link": Fallback(
        _REFUSED | {errno.EXDEV, errno.EMLINK},
        "records are created in place; a crash can leave a torn one, which readers refuse",
    ),
    "statfs": Fallback(_REFUSED, "the free space is unknown"),
    "fsync of a folder": Fallback(
        _UNKNOWN | {errno.EINVAL, errno.EBADF},
        "steps that are committed here outlive the job and its processes, and a power cut or a crash of the system only"
        " where the file system flushes names by itself (SaveResult.durable is False)",
        logging.WARNING,
    ),
}


class OptionalCalls:
    """The optional calls of one place. Any thread.

    Args:
        place: its name in the log.
        direct: whether files are opened with O_DIRECT: required (True), forbidden (False), or tried (None).

    Attributes:
        direct_works: whether O_DIRECT does; None while it was not tried.
    """

    def __init__(self, place: str, direct: bool | None = None) -> None:
        self._place = place
        self._direct_required = bool(direct)
        self._missing: set[OptionalCall] = {"O_DIRECT"} if direct is False else set()
        self.direct_works: bool | None = False if direct is False else None

    def has(self, call: OptionalCall) -> bool:
        """Return whether the place may support *call*: False once it was found not to."""
        return call not in self._missing

    def lacks(self, call: OptionalCall, error: OSError) -> bool:
        """Return whether *error*, of *call*, means that the place does not support the call; remember it then."""
        fallback = FALLBACKS[call]
        if error.errno not in fallback.absent:
            return False
        if call not in self._missing:
            self._missing.add(call)
            logger.log(fallback.level, "%s: no %s here (%s); %s", self._place, call, error.strerror, fallback.instead)
        return True

    def lacks_direct(self, error: OSError, key: str) -> bool:
        """Return whether *error* refuses O_DIRECT, at open or at a transfer; it is not used again then.

        Raises:
            StorageError: it is required.
        """
        if not self.lacks("O_DIRECT", error):
            return False
        self.direct_works = False
        if self._direct_required:
            raise StorageError(
                f"{key!r}: direct=True was requested, and this file system does not support O_DIRECT; use direct=None",
                key=key,
            ) from error
        return True


class Handle:
    """The descriptors of one file. `use` and `retire` belong to the event loop, the rest to worker threads."""

    def __init__(self, files: Files, optional: OptionalCalls, key: str) -> None:
        self.key = key
        self._files = files
        self._optional = optional
        self._fds: list[int] = []
        self._users = 0
        self._retired = False
        self._unused = anyio.Event()

    def open(self, path: str, flags: int) -> int:
        """Open *path*, without following a link, and keep the descriptor until `close`."""
        fd = self._files.open(path, flags | os.O_NOFOLLOW, 0o666)  # the umask decides, as for any program
        self._fds.append(fd)
        return fd

    def open_direct(self, path: str, flags: int) -> int | None:
        """Open *path* once more with O_DIRECT; return None where that is forbidden or cannot be done.

        Raises:
            StorageError: it is required and the file system cannot.
        """
        if not self._optional.has("O_DIRECT"):
            return None
        try:
            fd = self.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if not self._optional.lacks_direct(error, self.key):
                raise
            return None
        self._optional.direct_works = True
        return fd

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the descriptors open inside the block.

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
                # Taken out first: Linux frees the number even where close fails, and another file may have it by then.
                self._files.close(self._fds.pop())
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def write_all(files: Files, fd: int, data: memoryview, offset: int) -> None:
    """Write all of *data* at *offset*, with as many short writes as needed. Blocking."""
    done = 0
    while done < data.nbytes:
        done += check_wrote(files.pwrite(fd, data[done:], offset + done), data.nbytes - done, offset + done)


def check_wrote(count: int, wanted: int, offset: int) -> int:
    """Return *count*, the bytes that a write accepted; raise for none: without an error we would loop for ever."""
    if count <= 0:
        raise OSError(errno.EIO, f"the file system accepted none of {wanted} bytes at offset {offset}")
    return count


# Names of files that are not objects yet. A crash may leave them; they are never listed and go with their folder.
LEFTOVER_PREFIX = ".tmp-"

# Not empty (two names for it), a mount point, a missing right, or a file of that name.
_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EACCES, errno.EPERM, errno.ENOTDIR}
_ADVICE = {
    errno.EACCES: "give this user the right, or name another folder",
    errno.EPERM: "give this user the right, or name another folder",
    errno.EROFS: "mount it for writing, or name another folder",
}
_UNFLUSHABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.EBADF}


def split_key(key: str) -> tuple[str, str]:
    """Return the folder of *key* ("" is the root) and its last part."""
    folder, _, name = key.rpartition("/")
    return folder, name


class Tree:
    """The directories below *root*, through the calls of *files*, some of which its file system may not support.

    Blocking; for worker threads; raises ``OSError`` and `StorageError`.
    """

    def __init__(self, files: Files, root: str, direct: bool | None = None) -> None:
        self.root = root
        self.files = files
        self.optional = OptionalCalls(root, direct)
        self._era = object()
        self._made: dict[str, object] = {}  # folder -> the era in which it was made, or found
        self._durable: dict[str, object] = {}  # folder -> the era in which its name was flushed
        self._deferred: dict[str, object] = {}  # folder -> a token of the last name in it that is to be flushed
        self._ancestors_flushed = False
        self._device: int | None = None

    def handle(self, key: str) -> Handle:
        """Return a handle of the file *key*, with no descriptor yet."""
        return Handle(self.files, self.optional, key)

    @contextmanager
    def errors(self, doing: str, key: str) -> Iterator[None]:
        """Convert the ``OSError`` of a call, raised while *doing* something to *key*, to ours; name a call that hangs."""
        token = call_name.set(f"{self.root}: {doing} {key!r}")
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self._as_ours(error, doing, key) from error
        finally:
            call_name.reset(token)

    def _as_ours(self, error: OSError, doing: str, key: str) -> StorageError:
        if (advice := _ADVICE.get(error.errno or 0)) is not None:
            error = OSError(error.errno, f"{error.strerror}; {advice}")
        return from_os_error(error, f"{self.root}: {doing}", key) if key else from_os_error(error, doing, self.root)

    def path(self, key: str) -> str:
        """Return the absolute path of *key*; "" is the root."""
        return os.path.join(self.root, key) if key else self.root

    def refuse_links(self, folder: str) -> None:
        """Check that every part of *folder* is a directory and no link.

        Raises:
            StorageError: a part is a symbolic link.
            FileNotFoundError: a part does not exist.
            NotADirectoryError: a part is something else.
        """
        for ancestor in _chain(folder):
            mode = self.files.lstat(self.path(ancestor)).st_mode
            if stat.S_ISLNK(mode):
                raise _link_error(ancestor)
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path(ancestor))

    def stat_file(self, key: str) -> os.stat_result:
        """Describe the object *key*.

        Raises:
            StorageError: it is, or lies behind, a symbolic link.
            ObjectNotFoundError: something other than a file has that name; ``damaged`` is True.
            FileNotFoundError: nothing has that name.
        """
        path = self.path(key)
        try:
            self.refuse_links(split_key(key)[0])
            found = self.files.lstat(path)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "no object of that name", path) from error
        _check_regular(key, found.st_mode)
        return found

    def open_file(self, handle: Handle) -> tuple[int, os.stat_result]:
        """Open the object of *handle* for reading; return its descriptor and what it is. Raises as `stat_file`."""
        # O_NOFOLLOW covers only the last part of the path, and opening a device may already have an effect.
        self.stat_file(handle.key)
        # O_NONBLOCK: a pipe put there this moment cannot hang us
        fd = handle.open(self.path(handle.key), os.O_RDONLY | os.O_NONBLOCK)
        found = self.files.fstat(fd)
        _check_regular(handle.key, found.st_mode)
        return fd, found

    def make(self, folder: str) -> None:
        """Create *folder* and what is missing above it. Its name is as durable as the root's once `persist` returned."""
        era = self._era
        if self._durable.get("") is not era:
            self._ensure_root()
            self._durable[""] = era
        if missing := [ancestor for ancestor in _chain(folder) if self._made.get(ancestor) is not era]:
            self.check_mounted()
        for ancestor in missing:
            self._make(self.path(ancestor))
            self._made[ancestor] = era
        # After mkdir, which suppresses that a link or a file has the name.
        self.refuse_links(folder)

    def persist(self, folder: str) -> None:
        """Make the names in *folder* durable, and those of the folders on the way to it that are not known to be.

        That follows the writing of what is in them: on a journal they share one commit then.
        """
        # Read before the flush: a folder that is removed meanwhile, and made again, belongs to a later era.
        era = self._era
        self.flush(folder)
        self._flush_ways([folder], era)

    def defer(self, folder: str) -> None:
        """Leave a new name in *folder* to the next `settle` beside it; flush it now where no folder is above."""
        if "/" in folder:
            self._deferred[folder] = object()
        else:
            self.persist(folder)

    def settle(self, folder: str) -> None:
        """Make the names durable that were deferred in folders beside *folder*, or below it, and those on the way to them.

        Several files of an attempt, and its folders, share one flush of each folder then.

        Raises:
            StorageError: such a folder was removed, with its files.
        """
        era = self._era
        due = {one: token for one, token in list(self._deferred.items()) if _is_in(folder, split_key(one)[0])}
        for one in due:
            try:
                self.flush(one)
            except FileNotFoundError as error:
                self._deferred.pop(one, None)
                raise StorageError(
                    f"{one!r} was removed while files were written there: save again", key=one
                ) from error
        if due:
            self._flush_ways([*due, folder], era)
        for one, token in due.items():
            # Not before the flush: another thread that needs the same names must not find them settled. And not where one
            # more name was deferred meanwhile.
            if self._deferred.get(one) is token:
                del self._deferred[one]

    def _flush_ways(self, folders: Sequence[str], era: object) -> None:
        """Flush the names of *folders*, and of those above them, that are not known to be durable."""
        # Also when another process made one: it may not have flushed it yet.
        new = dict.fromkeys(ancestor for folder in folders for ancestor in self._unflushed(folder))
        for above in dict.fromkeys(split_key(ancestor)[0] for ancestor in new):
            self.flush(above)
        self._durable.update(dict.fromkeys(new, era))

    def _unflushed(self, folder: str) -> list[str]:
        return [ancestor for ancestor in _chain(folder) if self._durable.get(ancestor) is not self._era]

    def check_root(self) -> None:
        """Check that the root is a directory, or can become one: whatever there is on the way to it is a directory.

        Raises:
            StorageError: something else is in its place; it is named.
        """
        if not self._is_there():
            self._check_way()

    def _is_there(self) -> bool:
        # With a slash at its end: a directory, or a link to one.
        return self._lookup(os.path.join(self.root, "")) is not None

    def _check_way(self) -> None:
        path, mode, _ = self._lowest_there()
        if stat.S_ISDIR(mode):
            return
        what = "a file"
        if stat.S_ISLNK(mode):
            try:
                # `Files` has no `stat` that follows a link; a listing does, and tells a folder from the rest.
                self.files.listdir(path)
            except FileNotFoundError:
                what = "a link to nothing"
            except NotADirectoryError:
                what = "a link to a file"
            else:
                return
        where = self.root if path == self.root else f"{self.root}: {path}"
        raise StorageError(
            f"{where} is {what}, and checkpoints are kept in a folder; name another one, or move it away. From a file of "
            f"torch.save() `aiockpt convert {path} RUN --step N` makes a step in a folder RUN, to load or to fork from"
        )

    def check_mounted(self) -> None:
        """Check that the root lies on the file system that it had when this object first wrote there.

        A volume that is unmounted in mid-run leaves an empty folder, and what is written there is hidden when it comes
        back. A volume that was mounted anew may have another device: it is known by a folder that was made here.

        Raises:
            StorageError: it lies on another one.
        """
        if self._device is not None:
            found = self._lookup(os.path.join(self.root, ""))
            if found is None or found.st_dev != self._device:
                self._check_moved(found)

    def _check_moved(self, found: os.stat_result | None) -> None:
        """Accept another device than before, where it has what was made here."""
        path = self.root if found is not None else self._lowest_there()[0]
        device = self.files.lstat(path).st_dev if found is None else found.st_dev
        if device == self._device:
            return
        if found is None or all(self._lookup(self.path(made)) is None for made in self._durable if made):
            raise StorageError(
                f"{self.root}: its file system is not mounted any more: {path} is on another device than when this"
                " program first wrote here, and nothing of its own is there. Mount it again; if the change was meant,"
                " restart the program"
            )
        self._device = device

    def space(self) -> os.statvfs_result:
        """Return the space of the file system that the root is on, or will be."""
        self.check_root()
        return self.files.statvfs(self.root if self._is_there() else self._lowest_there()[0])

    def invalidate(self) -> None:
        """Invalidate all folders known to be durable: one of them was, or is about to be, removed."""
        self._era = object()

    def flush(self, folder: str) -> None:
        """Make the names in *folder* durable."""
        self._flush_path(self.path(folder))

    def prune(self, folder: str) -> None:
        """Remove *folder* and those above it while they hold no object; make that durable. The root stays.

        Leftovers of crashed writers go too. A live writer whose temporary file is removed so makes a new one.
        """
        removed = False
        while folder and self._remove_if_empty(folder):
            removed = True
            folder = split_key(folder)[0]
        if removed:
            with suppress(FileNotFoundError):
                self.flush(folder)

    def _remove_if_empty(self, folder: str) -> bool:
        path = self.path(folder)
        try:
            names = self.files.listdir(path)
            if not all(name.startswith(LEFTOVER_PREFIX) for name in names):
                return False
            self.invalidate()  # before the removal: see the module
            for name in names:
                self.files.unlink(os.path.join(path, name))
            self.files.rmdir(path)
            self._deferred.pop(folder, None)
        except FileNotFoundError:
            return True  # another process was faster; those above may be empty now
        except OSError as error:
            if error.errno in _STAYS:
                return False
            raise
        return True

    def _ensure_root(self) -> None:
        """Create the root and what is missing above it; flush the names on the way to it."""
        self.check_root()
        self.check_mounted()
        path, _, missing = self._lowest_there()
        for made in reversed(missing):
            try:
                self._make(made)
            except FileNotFoundError as error:
                if self._lookup(os.path.dirname(made)) is None:
                    raise  # removed under us
                # The parent is there: /proc and its like refuse every new folder with ENOENT, and a retry cannot help.
                raise StorageError(f"{self.root}: this folder cannot be made; name another one") from error
            self._flush_path(os.path.dirname(made))
        if not self._ancestors_flushed:
            self._flush_ancestors(path)
            self._ancestors_flushed = True
        if self._device is None and (found := self._lookup(os.path.join(self.root, ""))) is not None:
            self._device = found.st_dev

    def _lowest_there(self) -> tuple[str, int, list[str]]:
        """Return the path nearest to the root, itself included, that is there; its mode; and those below it that are not.

        Raises:
            StorageError: nothing is there, not even "/": the file system answers wrongly.
        """
        missing: list[str] = []
        path = self.root
        while (found := self._lookup(path)) is None:
            if path == os.path.dirname(path):
                raise StorageError(
                    f"{self.root}: the file system reports that not even {path!r} is there; check its mount"
                )
            missing.append(path)
            path = os.path.dirname(path)
        return path, found.st_mode, missing

    def _flush_ancestors(self, path: str) -> None:
        """Flush the names above *path*, which others made, perhaps just now, as far as we may and on its file system.

        Where the user may not open or flush a parent there is nothing to be done, and nothing that the user made.
        """
        device = self.files.lstat(path).st_dev
        while (parent := os.path.dirname(path)) != path and self.files.lstat(parent).st_dev == device:
            try:
                self._flush_path(parent)
            except OSError as error:
                if error.errno not in _UNFLUSHABLE:
                    raise
            path = parent

    def _lookup(self, path: str) -> os.stat_result | None:
        try:
            return self.files.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _make(self, path: str) -> None:
        with suppress(FileExistsError):
            self.files.mkdir(path)

    def _flush_path(self, path: str) -> None:
        fd = self.files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.files.fsync(fd)
        except OSError as error:
            # Of an open folder: a failed flush, and neither a removal nor a handle to be opened anew. It is not tried again:
            # the names may be marked clean by then, and would be lost in a power cut after a flush that succeeds.
            if error.errno in (errno.ENOENT, errno.ESTALE):
                raise OSError(errno.EIO, f"flushing {path!r} failed ({error.strerror})") from None
            if not self.optional.lacks("fsync of a folder", error):
                raise
        finally:
            self.files.close(fd)


def _link_error(key: str) -> StorageError:
    message = f"{key!r} is a symbolic link and links are not followed; put the object itself there"
    return StorageError(message, key=key, damaged=True)


def _is_in(folder: str, above: str) -> bool:
    return f"{folder}/".startswith(f"{above}/")


def _chain(folder: str) -> list[str]:
    """Return the folders from below the root down to *folder*."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _check_regular(key: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise _link_error(key)
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "no regular file"
        message = f"{key!r} is {what}, where a file should be: move it away"
        raise ObjectNotFoundError(message, key=key, damaged=True)
