"""The local backend: bytes on a POSIX file system, kept so that *committed* survives a power cut.

Guarantees, besides those of the contract:

- A key is absent or whole: small objects are written to a temporary file in their folder, flushed, then linked or
  renamed to their key. Where hard links are missing (some network and FAT file systems), ``put_new`` creates the key
  itself exclusively: still one winner, but it is seen while it is written, and a crash may leave it torn; its digest shows
  that (docs/format.md#commit-on-posix).
- When a call returns, its names are durable too, up to the root and above it where we may flush; those of data files are
  when the next object beside them can be seen (`Tree.settle`): each folder of an attempt is flushed once for all of its
  files. Where no folder can be flushed, ``traits.flushes_names`` is False from the first write on
  (`aiockpt.backends.local_tree`).
- A call with a stale handle, or in a folder that another client made and this one does not see yet, is repeated after
  waits: a network file system may answer from a cache of some seconds.
- ``delete`` is durable key by key: after a crash the removed keys are a prefix of the given ones.

Also for callers: ``delete`` accepts the key of an empty folder, or of an absent object in one, and removes the folders
that hold no object; so a collector can clear what a crash left before the first object.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio
import msgspec
import numpy as np

from aiockpt.backends.local_mounts import explain_bucket, is_in_user_space
from aiockpt.backends.local_reader import BOUNCE_BYTES, BouncePool, LocalReader
from aiockpt.backends.local_tree import (
    LEFTOVER_PREFIX,
    PAGE_BYTES,
    Tree,
    check_wrote,
    split_key,
    write_all,
)
from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageError, UsageError, is_damage
from aiockpt.events import LimiterStatistics
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.world import OsFiles, World
from aiockpt.storage.backend import (
    Listing,
    Progress,
    Seen,
    Space,
    Stat,
    Traits,
    check_key,
    check_keys,
    check_prefix,
    check_size,
    file_url,
)

# Writing of a data file at the disk's own speed: blocks bypass the page cache, unaligned ends go through it.
#
# Guarantees:
#
# - The file is created exclusively, its space is reserved before the first byte where the file system can do that, and it is
#   removed by `abort`.
# - No page is written both ways: a whole aligned page goes through the O_DIRECT descriptor, every other byte through the
#   buffered one.
# - `finish` flushes the data once, on the buffered descriptor. That is open from before the first byte, so it reports
#   every write-back error of the file by either descriptor (Linux keeps an error cursor for each), and it flushes the
#   device's cache for both. A failed flush fails the upload and is never retried: the pages are marked clean by then.


class LocalUpload:
    """One data file of *size* bytes under *key*; see `aiockpt.storage.backend.Upload`."""

    def __init__(self, tree: Tree, limiter: Limiter, key: str, size: int) -> None:
        self._files = tree.files
        self._tree = tree
        self._limiter = limiter
        self._key = key
        self._progress = Progress(key, size)
        self._path = tree.path(key)
        self._handle = tree.handle(key)
        self._created = False
        self._buffered_fd = -1
        self._direct_fd: int | None = None

    def begin(self) -> None:
        """Create the file and reserve its space. Blocking.

        Raises:
            OSError, StorageError: it exists, or does not fit; call `abort` then.
        """
        if not self._created:  # a later call failed, and is retried
            self._buffered_fd = self._handle.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._created = True
        # A second descriptor, and not one for both: O_CREAT|O_DIRECT leaves a file behind where it fails with EINVAL.
        self._direct_fd = self._handle.open_direct(self._path, os.O_WRONLY)
        self._reserve()

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        size = self._progress.check_block(offset, runs)
        with self._handle.use(), self._tree.errors(f"writing {size:,} bytes of", self._key):
            await run_blocking(self._limiter, self._write_runs, offset, runs, seen, moves_bytes=size)
        self._progress.written_bytes += size

    async def finish(self) -> None:
        self._progress.check_whole()
        if not await self._handle.retire():
            raise UsageError(f"{self._key!r} was finished or aborted before")
        try:
            with self._tree.errors("flushing", self._key):
                await run_blocking(self._limiter, self._flush_and_close, moves_bytes=self._progress.size)
        except BaseException:
            await self._discard()
            raise

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            if await self._handle.retire():
                await self._discard()

    async def _discard(self) -> None:
        """Close and remove, also when cancelled. A write-back error here concerns bytes that are not needed."""
        with anyio.CancelScope(shield=True), suppress(StorageError), self._tree.errors("removing", self._key):
            await run_blocking(self._limiter, self._close_and_remove)

    def _reserve(self) -> None:
        # fallocate refuses a size of 0 with EINVAL, which would count as a file system without it.
        if not self._progress.size or not self._tree.optional.has("fallocate"):
            return
        try:
            self._files.fallocate(self._buffered_fd, 0, self._progress.size)
        except OSError as error:
            if not self._tree.optional.lacks("fallocate", error):
                raise

    def _write_runs(self, offset: int, runs: Sequence[memoryview], seen: Seen | None) -> None:
        """Write *runs* one after the other: pages bypass the page cache as far as that works, the rest goes through it."""
        for run in runs:
            if seen is not None:
                seen(run)
            data = run.cast("B")
            pages = self._direct_range(offset, data)
            done = pages.start
            write_all(self._files, self._buffered_fd, data[:done], offset)
            # A short write may end inside a page, where O_DIRECT fails with EINVAL. That would count as a file system
            # without it, so the page cache takes the rest of the run.
            while self._direct_fd is not None and done in pages and (done - pages.start) % PAGE_BYTES == 0:
                rest = data[done : pages.stop]
                try:
                    written = self._files.pwrite(self._direct_fd, rest, offset + done)
                    done += check_wrote(written, rest.nbytes, offset + done)
                except OSError as error:
                    if not self._tree.optional.lacks_direct(error, self._key):
                        raise
                    break
            write_all(self._files, self._buffered_fd, data[done:], offset + done)
            offset += data.nbytes

    def _direct_range(self, offset: int, data: memoryview) -> range:
        """Return which bytes of *data* can bypass the page cache: whole pages at page-aligned addresses."""
        start = -offset % PAGE_BYTES
        stop = (offset + data.nbytes) // PAGE_BYTES * PAGE_BYTES - offset
        if self._direct_fd is None or not self._tree.optional.has("O_DIRECT") or stop <= start:
            return range(0)
        address: int = np.frombuffer(data, np.uint8).ctypes.data
        return range(start, stop) if (address + start) % PAGE_BYTES == 0 else range(0)

    def _flush_and_close(self) -> None:
        # fdatasync flushes the size of the file, too, without which the bytes could not be read back.
        self._files.fdatasync(self._buffered_fd)
        self._handle.close()  # NFS reports late write errors here
        self._tree.defer(split_key(self._key)[0])

    def _close_and_remove(self) -> None:
        with suppress(OSError):
            self._handle.close()
        # A key that was taken leads here, too: its file is another writer's.
        if self._created:
            self._created = False
            self._files.unlink(self._path)


# The backend.

_BLOCK_WRITES = 4  # four O_DIRECT writers reach what the disk can do, more only use threads
_BLOCK_READS = 4
_SMALL_VERBS = 8
_AT_ONCE = 8  # the writer waits after so many removals of its folder
# The cache of a network file system is a minute old at most, and usually a few seconds.
_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
_NAMES = 16  # the most random ones that are tried before the source counts as faulty
_BTRFS_SYNC = 0x9408  # the ioctl BTRFS_IOC_SYNC
# What a rename onto an existing file gives where the file system cannot replace one. Only records whose absence is harmless
# are written over: hints, marks, and decisions that become *collect*.
_NO_REPLACING = {errno.EEXIST, errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LocalStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A local backend at one instant.

    Attributes:
        direct: whether O_DIRECT works here; None before the first data file.
        hard_links: whether ``put_new`` links; None before the first.
        open_readers: readers that were not closed.
        bounce_bytes: aligned memory held for uncached reads.
        cached_read_bytes: read through the page cache so far.
        direct_read_bytes: read with O_DIRECT so far.
        limiters: threads that run and wait, by kind of work.
    """

    direct: bool | None
    hard_links: bool | None
    open_readers: int
    bounce_bytes: int
    cached_read_bytes: int
    direct_read_bytes: int
    limiters: tuple[LimiterStatistics, ...]


class LocalBackend:
    """Objects as files below *root*, which is created when the first one is written.

    Args:
        root: a directory on a file system that all ranks share (or of this host, for one-host jobs).
        world: the seam to the operating system.
        direct: let data files bypass the page cache (O_DIRECT): True, False, or None for "where the file system can".
    """

    def __init__(self, root: str | os.PathLike[str], *, world: World | None = None, direct: bool | None = None) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._world = world or World()
        self._files = self._world.files
        self._tree = Tree(self._files, self._root, direct)
        self._optional = self._tree.optional
        self._hard_links: bool | None = None
        # Simulated files lie on no mount of this machine, so the check for mounted buckets does not apply to them.
        self._may_keep = not isinstance(self._files, OsFiles)
        self._bounces = BouncePool()
        self._cached_read_bytes = 0
        self._direct_read_bytes = 0
        self._small = Limiter("local files", _SMALL_VERBS, may_hang=True)
        self._writes = Limiter("local block writes", _BLOCK_WRITES, may_hang=True)
        self._reads = Limiter("local block reads", _BLOCK_READS, may_hang=True)

    @property
    def url(self) -> str:
        return file_url(self._root)

    @property
    def traits(self) -> Traits:
        direct = self._optional.has("O_DIRECT")
        return Traits(
            scope="shared",
            durable=True,
            flushes_names=self._optional.has("fsync of a folder"),
            alignment=PAGE_BYTES if direct else 1,
            block_writes=_BLOCK_WRITES,
            block_reads=_BLOCK_READS,
            read_buffer_bytes=BOUNCE_BYTES if direct else 0,
        )

    async def put(self, key: str, data: bytes, *, flushed: bool = True) -> None:
        doing = f"writing {len(data):,} bytes to"
        await self._call(doing, check_key(key), self._store, key, data, self._replace, flushed, makes=True)

    async def put_unflushed(self, key: str, data: bytes, *, new: bool) -> None:
        await (self.put_new if new else self.put)(key, data, flushed=False)

    async def put_new(self, key: str, data: bytes, *, flushed: bool = True) -> None:
        stale = anyio.Event()
        doing, write = f"creating ({len(data):,} bytes)", self._publish_new
        try:
            await self._call(
                doing, check_key(key), self._store, key, data, write, flushed, makes=True, on_stale=stale.set
            )
        except ObjectExistsError:
            # After a lost answer the existing object may be from an earlier attempt of ours.
            if not (stale.is_set() and await self._holds(key, data)):
                raise

    async def get(self, key: str, max_bytes: int) -> bytes:
        return await self._call("reading", check_key(key), self._read_whole, key, max_bytes)

    async def get_many(self, keys: Sequence[str], max_bytes: int) -> tuple[bytes | None, ...]:
        return await self._call("reading", ", ".join(keys[:1]), self._read_each, keys, max_bytes)

    async def open(self, key: str) -> LocalReader:
        reader = LocalReader(self._tree, self._reads, self._bounces, check_key(key), self._count_read)
        try:
            await self._call("opening", key, reader.begin)
        except BaseException:
            await reader.close()
            raise
        return reader

    async def create(self, key: str, size: int) -> LocalUpload:
        upload = LocalUpload(self._tree, self._writes, check_size(key, size), size)
        try:
            await self._call(f"creating a file of {size:,} bytes,", key, self._begin_upload, key, upload, makes=True)
        except BaseException:
            await upload.abort()
            raise
        return upload

    async def stat(self, key: str) -> Stat:
        return await self._call("looking for", check_key(key), self._stat, key)

    async def list(self, prefix: str) -> Listing:
        return await self._call("listing", check_prefix(prefix), self._list, prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._call("deleting", ", ".join(keys[:1]), self._delete, check_keys(keys))

    async def move(self, key: str, to: str, *, new: bool) -> None:
        with self._tree.errors(f"renaming {check_key(key)!r} to", check_key(to)):
            # Not `_call`: where a stale handle hides that the move took effect, a second one would find no source.
            await run_blocking(self._small, self._move, key, to, new)

    async def now_ns(self) -> int:
        return await self._call("dating", "", self._date_root)

    async def folder_ns(self, key: str) -> int:
        found = await self._call("looking for", check_key(key), self._files.lstat, self._tree.path(key))
        return found.st_mtime_ns

    async def sync(self) -> None:
        """Make deleted bytes count as free: else btrfs does so at its next commit, xfs a few milliseconds later."""
        if isinstance(self._files, OsFiles):
            await run_blocking(self._small, self._commit_btrfs)
            await anyio.sleep(0.05)

    async def space(self) -> Space:
        return await self._call("asking for the free space of", "", self._space)

    async def close(self) -> None:
        """Release the memory that no reader needs; uploads and readers are closed by their users."""
        self._bounces.release_when_idle()

    def statistics(self) -> LocalStatistics:
        """Return the counts of this instant."""
        return LocalStatistics(
            direct=self._optional.direct_works,
            hard_links=self._hard_links,
            open_readers=self._bounces.readers,
            bounce_bytes=self._bounces.size_bytes,
            cached_read_bytes=self._cached_read_bytes,
            direct_read_bytes=self._direct_read_bytes,
            limiters=tuple(limiter.statistics() for limiter in (self._small, self._writes, self._reads)),
        )

    def __repr__(self) -> str:
        direct = {None: "untried", True: "yes", False: "no"}[self._optional.direct_works]
        return f"<LocalBackend {self._root!r} direct={direct}, {self._bounces.readers} readers open>"

    async def _call(
        self,
        doing: str,
        key: str,
        work: Callable[[*Ts], T],
        *args: *Ts,
        makes: bool = False,
        on_stale: Callable[[], object] = lambda: None,
    ) -> T:
        """Run *work* on a worker thread, *doing* something to *key*; repeat it when a handle went stale.

        Args:
            makes: whether *work* creates *key*: it is then also repeated when its folder is missing: removed, or seen late.
            on_stale: called at each stale handle: *work* may have taken effect.
        """
        with self._tree.errors(doing, key):
            try:
                return await run_blocking(self._small, work, *args)
            except (OSError, StorageError) as error:
                return await self._repeat(error, partial(work, *args), key if makes else "", on_stale)

    async def _repeat(self, failure: Exception, work: Callable[[], T], makes: str, on_stale: Callable[[], object]) -> T:
        """Run *work* again, after the waits of `_WAITS_S`, while it fails for a reason that passes."""
        for wait_s in (*[0.0] * _AT_ONCE, *_WAITS_S, None):
            if _is_stale(failure):
                on_stale()
            # ObjectNotFoundError is a FileNotFoundError, too, and no sign of a missing folder.
            elif not makes or isinstance(failure, StorageError) or not isinstance(failure, FileNotFoundError):
                raise failure
            if wait_s is None:
                break
            # A folder that the tree knows may have been removed by another process; `make` would not make it again.
            self._tree.invalidate()
            if wait_s:
                await anyio.sleep(wait_s)
            try:
                return await run_blocking(self._small, work)
            except (OSError, StorageError) as error:
                failure = error
        if _is_stale(failure):
            raise failure
        raise StorageError(
            f"{self._root}: the folder of {makes!r} was removed {_AT_ONCE + len(_WAITS_S)} times while it was written, or is"
            f" not seen after {sum(_WAITS_S):.0f} s; stop the program that cleans up there, or look at the mount",
            key=makes,
            retryable=True,
        ) from failure

    async def _holds(self, key: str, data: bytes) -> bool:
        try:
            return await self.get(key, len(data) + 1) == data
        except ObjectNotFoundError:
            return False

    # What follows runs on worker threads.

    def _store(self, key: str, data: bytes, publish: Callable[[str, bytes, bool], None], flushed: bool) -> None:
        """Write *data* as *key*; the files that were finished beside it are durable before it can be seen."""
        folder = self._make_folder(key)
        self._tree.settle(folder)
        publish(key, data, flushed)
        if flushed:
            with suppress(FileNotFoundError):  # another process has seen and deleted it already
                self._tree.persist(folder)

    def _make_folder(self, key: str) -> str:
        """Make the folder of *key*, and return it."""
        if not self._may_keep and (why := explain_bucket(self._root)) is not None:
            raise UsageError(why)
        self._may_keep = True
        folder = split_key(key)[0]
        self._tree.make(folder)
        return folder

    def _begin_upload(self, key: str, upload: LocalUpload) -> None:
        self._make_folder(key)
        upload.begin()

    def _replace(self, key: str, data: bytes, flushed: bool) -> None:
        temporary = self._write_temporary(self._tree.path(split_key(key)[0]), data, flushed)
        path = self._tree.path(key)
        try:
            self._rename_over(temporary, path)
        except BaseException:
            self._drop(temporary)
            raise

    def _rename_over(self, temporary: str, path: str) -> None:
        try:
            self._files.rename(temporary, path)
        except OSError as error:
            if error.errno not in _NO_REPLACING:
                raise
            self._files.unlink(path)
            self._files.rename(temporary, path)

    def _publish_new(self, key: str, data: bytes, _: bool) -> None:
        if self._hard_links is not False:
            temporary = self._write_temporary(self._tree.path(split_key(key)[0]), data, True)
            try:
                if self._link(temporary, self._tree.path(key)):
                    return
            finally:
                self._drop(temporary)
        self._write(self._tree.path(key), data, True)

    def _drop(self, temporary: str) -> None:
        with suppress(OSError):  # it stays as a leftover then, which is never listed
            self._files.unlink(temporary)

    def _write_temporary(self, folder: str, data: bytes, flushed: bool) -> str:
        """Write *data* to a new file and return its path; a conflict of its name must not count as an existing key."""
        for _ in range(_NAMES):
            path = os.path.join(folder, LEFTOVER_PREFIX + self._world.token(8).hex())
            with suppress(FileExistsError):
                self._write(path, data, flushed)
                return path
        raise OSError(errno.EIO, f"{_NAMES} random names of temporary files were taken; check the random source")

    def _link(self, temporary: str, path: str) -> bool:
        """Link the file to its final name unless that is taken. Return False where the file system has no hard links."""
        try:
            self._files.link(temporary, path)
        except OSError as error:
            self._hard_links = self._is_linked(temporary, error)
            return self._hard_links
        self._hard_links = True
        return True

    def _is_linked(self, temporary: str, error: OSError) -> bool:
        """Return whether a link was made that failed with *error*; False where there are no hard links."""
        if self._optional.lacks("link", error):
            return False
        if self._files.lstat(temporary).st_nlink != 2:
            raise error
        # Two names: the link is ours; NFS sent it again after its answer was lost.
        return True

    def _write(self, path: str, data: bytes, flushed: bool) -> None:
        """Create *path* exclusively with *data*, and flush it if *flushed*; remove it when that fails."""
        handle = self._tree.handle(path)
        fd = handle.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with closing(handle):
                write_all(self._files, fd, memoryview(data), 0)
                if flushed:
                    self._files.fdatasync(fd)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(path)
            raise

    def _read_whole(self, key: str, max_bytes: int) -> bytes:
        handle = self._tree.handle(key)
        try:
            fd, found = self._tree.open_file(handle)
            data = bytearray(min(found.st_size, max_bytes))
            done = 0
            while done < len(data):
                if (count := self._files.preadv(fd, [memoryview(data)[done:]], done)) == 0:
                    break
                done += count
            return bytes(memoryview(data)[:done])
        finally:
            handle.close()

    def _read_each(self, keys: Sequence[str], max_bytes: int) -> tuple[bytes | None, ...]:
        return tuple(self._read_if_there(key, max_bytes) for key in keys)

    def _read_if_there(self, key: str, max_bytes: int) -> bytes | None:
        with self._tree.errors("reading", check_key(key)):
            try:
                return self._read_whole(key, max_bytes)
            except FileNotFoundError:
                return None

    def _stat(self, key: str) -> Stat:
        found = self._tree.stat_file(key)
        return Stat(key, found.st_size, found.st_mtime_ns)

    def _list(self, prefix: str) -> Listing:
        if not prefix:
            self._tree.check_mounted()
        try:
            self._tree.refuse_links(prefix)
            names = self._files.listdir(self._tree.path(prefix))
        except (FileNotFoundError, NotADirectoryError):
            self._tree.check_root()  # a path below a file is no empty place
            return Listing((), ())
        return self._describe(f"{prefix}/" if prefix else "", names)

    def _describe(self, above: str, names: Sequence[str]) -> Listing:
        objects: list[Stat] = []
        folders: list[str] = []
        others: list[str] = []
        for name in sorted(names):
            key = above + name
            if name.startswith(LEFTOVER_PREFIX):
                continue
            try:
                found = self._files.lstat(self._tree.path(check_key(key)))
            except (UsageError, FileNotFoundError):  # an impossible name, or deleted meanwhile
                continue
            except OSError as error:
                if not is_damage(error):
                    raise
                others.append(key)  # one broken inode must not hide all that lies beside it
                continue
            if stat.S_ISREG(found.st_mode):
                objects.append(Stat(key, found.st_size, found.st_mtime_ns))
            else:
                (folders if stat.S_ISDIR(found.st_mode) else others).append(key)
        return Listing(tuple(objects), tuple(folders), tuple(others))

    def _delete(self, keys: tuple[str, ...]) -> None:
        emptied: dict[str, None] = {}
        for key in keys:
            with self._tree.errors("deleting", key):
                emptied[self._delete_one(key)] = None
        for folder in emptied:
            with self._tree.errors("removing the folder", folder):
                self._tree.prune(folder)

    def _delete_one(self, key: str) -> str:
        """Remove the object *key*, durably, and return the folder that may be empty now."""
        folder = split_key(key)[0]
        try:
            self._tree.refuse_links(folder)
            self._files.unlink(self._tree.path(key))
        except IsADirectoryError:
            return key
        except NotADirectoryError:
            return folder
        except FileNotFoundError:
            pass
        with suppress(FileNotFoundError):
            self._tree.flush(folder)  # also when it was gone: its removal may not be flushed
        return folder

    def _move(self, key: str, to: str, new: bool) -> None:
        folders = split_key(to)[0], split_key(key)[0]
        for folder in folders:
            self._tree.refuse_links(folder)
        if new:
            self._files.link(self._tree.path(key), self._tree.path(to))
            self._tree.flush(folders[0])
            self._files.unlink(self._tree.path(key))
        else:
            self._files.rename(self._tree.path(key), self._tree.path(to))
        for folder in folders:  # the new name first: a power cut leaves both names, never none
            self._tree.flush(folder)
        self._tree.prune(folders[1])

    def _date_root(self) -> int:
        self._files.utime(self._root)
        return self._files.lstat(self._root).st_mtime_ns

    def _commit_btrfs(self) -> None:
        with suppress(OSError):  # ENOTTY on every other file system
            fd = os.open(self._root, os.O_RDONLY)
            try:
                fcntl.ioctl(fd, _BTRFS_SYNC)
            finally:
                os.close(fd)

    def _space(self) -> Space:
        try:
            found = self._tree.space()
        except OSError as error:
            if not self._optional.lacks("statfs", error):
                raise
            return Space(None, None)
        if not found.f_blocks:  # /proc and the like: no size is not "full"
            return Space(None, None)
        # A file system that allocates inodes on demand has no number of them; rclone reports 10⁹, none free.
        counted = found.f_files and (found.f_ffree or not is_in_user_space(self._root))
        free_files = found.f_favail if counted else None
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, free_files)

    def _count_read(self, cached_bytes: int, direct_bytes: int) -> None:
        # On the event loop, unlike what is above: two additions never run at once.
        self._cached_read_bytes += cached_bytes
        self._direct_read_bytes += direct_bytes


def _is_stale(error: BaseException) -> bool:
    """Return whether a name led to a deleted object (ESTALE): a network file system resolves it anew next time."""
    # Work that converts errors itself has the system's own as the cause.
    return errno.ESTALE in (getattr(error, "errno", None), getattr(error.__cause__, "errno", None))
