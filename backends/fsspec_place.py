"""The operations of a backend on a file system of fsspec: one blocking function each, for worker threads.

fsspec's file systems agree on names more than on behaviour, so nothing is assumed here:

- an object is checked before it is removed (some remove folders with all contents), or opened;
- listings are requested anew (some are cached);
- an exclusive create that fails for any reason counts as a conflict when the key is there afterwards (SFTP knows no
  error of that kind).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Protocol

from aiockpt.errors import CheckpointError, ObjectNotFoundError, StorageError, UsageError, from_os_error
from aiockpt.redaction import redact_error
from aiockpt.storage.backend import Listing, Stat, check_key

_ATTEMPTS = 16  # how often a folder may be removed under a writer before it gives up
_MODIFIED = ("mtime", "LastModified", "last_modified", "modified", "updated", "timeModified", "created")
_NS = 1_000_000_000


class FsspecFile(Protocol):
    """The part of an open file of fsspec that is used."""

    def read(self, size: int, /) -> bytes: ...
    def write(self, data: memoryview | bytes, /) -> object: ...
    def seek(self, offset: int, /) -> object: ...
    def close(self) -> object: ...


class FileSystem(Protocol):
    """The part of fsspec's ``AbstractFileSystem`` that is used."""

    def open(self, path: str, mode: str, /, **options: Any) -> FsspecFile: ...
    def pipe_file(self, path: str, value: bytes, /, **options: Any) -> object: ...
    def info(self, path: str, /) -> Mapping[str, Any]: ...
    def ls(self, path: str, /, detail: bool) -> Sequence[Mapping[str, Any]]: ...
    def exists(self, path: str, /) -> bool: ...
    def makedirs(self, path: str, /, exist_ok: bool) -> object: ...
    def rm_file(self, path: str, /) -> object: ...
    def invalidate_cache(self) -> object: ...


# Creates a file with some bytes, or raises ``FileExistsError``.
Create = Callable[[FileSystem, str, bytes], None]


@contextmanager
def fsspec_errors(doing: str, key: str) -> Iterator[None]:
    """Convert any error of a file system, raised while *doing* something to *key*, to ours."""
    try:
        yield
    except CheckpointError:
        raise
    except ConnectionError as error:
        raise StorageError(f"{doing} {key!r}: {error!r}", key=key, retryable=True) from redact_error(error)
    except OSError as error:
        raise from_os_error(error, doing, key) from redact_error(error)
    except Exception as error:  # noqa: BLE001  each client library has its own
        raise StorageError(f"{doing} {key!r}: {error!r}", key=key) from redact_error(error)


def create_by_open(fs: FileSystem, path: str, data: bytes) -> None:
    """Create a file by opening it with mode "xb"."""
    try:
        file = fs.open(path, "xb")
    except Exception:
        _raise_if_taken(fs, path)
        raise
    try:
        file.write(data)
    finally:
        file.close()


def create_by_pipe(fs: FileSystem, path: str, data: bytes) -> None:
    """Create a file by piping to it with mode "create", which the object stores among the file systems support."""
    try:
        fs.pipe_file(path, data, mode="create")
    except Exception:
        _raise_if_taken(fs, path)
        raise


def create_unsafely(fs: FileSystem, path: str, data: bytes) -> None:
    """Create a file after a check that it does not exist, which is not atomic."""
    _raise_if_taken(fs, path)
    fs.pipe_file(path, data)


def _raise_if_taken(fs: FileSystem, path: str) -> None:
    fs.invalidate_cache()
    if fs.exists(path):
        raise FileExistsError("an object of that key exists already")


class FsspecPlace:
    """The files below *root* in a file system. Blocking; raises what the file system raises.

    Args:
        remove_folder: removes an empty folder, given its path.
    """

    def __init__(self, fs: FileSystem, root: str, remove_folder: Callable[[str], object]) -> None:
        self.fs = fs
        self._remove_folder = remove_folder
        self._root = root.rstrip("/")
        self._made: set[str] = set()

    def path(self, key: str) -> str:
        """Return the path of *key*; "" is the root."""
        return f"{self._root}/{key}" if key else self._root or "/"

    def put(self, key: str, data: bytes) -> None:
        self._in_folder(key, lambda: self.fs.pipe_file(self.path(key), data))

    def put_new(self, key: str, data: bytes, create: Create) -> None:
        self._in_folder(key, lambda: create(self.fs, self.path(key), data))

    def get(self, key: str, max_bytes: int) -> bytes:
        self.info(key)
        file = self.open(key)
        try:
            return bytes(file.read(max_bytes))
        finally:
            file.close()

    def open(self, key: str) -> FsspecFile:
        """Open an object for reading, without a read-ahead of the file system's own."""
        return self.fs.open(self.path(key), "rb", cache_type="none")

    def info(self, key: str) -> Mapping[str, Any]:
        """Return the file system's description of the object *key*.

        Raises:
            FileNotFoundError: there is none, or it is a folder.
        """
        found = self._lookup(key)
        if found is None or found["type"] != "file":
            raise FileNotFoundError(f"no object of that key in {self._root}")
        return found

    def stat(self, key: str) -> Stat:
        return _stat(key, self.info(key))

    def list(self, prefix: str) -> Listing:
        objects: list[Stat] = []
        folders: list[str] = []
        for found in self._entries(prefix):
            name = posixpath.basename(found["name"].rstrip("/"))
            key = f"{prefix}/{name}" if prefix else name
            with suppress(UsageError):  # no key of ours
                check_key(key)
                if found["type"] == "file":
                    objects.append(_stat(key, found))
                elif found["type"] == "directory":
                    folders.append(key)
        return Listing(tuple(sorted(objects, key=lambda stat: stat.key)), tuple(sorted(folders)))

    def delete(self, keys: Sequence[str]) -> None:
        emptied: dict[str, None] = {}
        for key in keys:
            with fsspec_errors("deleting", key), suppress(FileNotFoundError):
                self.info(key)
                self.fs.rm_file(self.path(key))
            emptied[key.rpartition("/")[0]] = None
        for folder in emptied:
            with fsspec_errors("removing the folder", folder):
                self._prune(folder)

    def _in_folder(self, key: str, work: Callable[[], object]) -> None:
        """Run *work* in the folder of *key*; once more when the empty folder is removed under it."""
        folder = key.rpartition("/")[0]
        for _ in range(_ATTEMPTS):
            try:
                if folder not in self._made:
                    self.fs.makedirs(self.path(folder), exist_ok=True)
                    self._made.add(folder)
                work()
            except FileNotFoundError:
                self._made.clear()
            else:
                return
        raise StorageError(
            f"{key!r}: its folder was gone {_ATTEMPTS} times while it was written; stop the program that cleans up there",
            key=key,
            retryable=True,
        )

    def _lookup(self, key: str) -> Mapping[str, Any] | None:
        """Return the description of *key*; None when nothing is there, for example below a file."""
        self.fs.invalidate_cache()
        try:
            return self.fs.info(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _entries(self, folder: str) -> Sequence[Mapping[str, Any]]:
        """Return the entries of *folder*; none when it is no folder."""
        found = self._lookup(folder)
        if found is None or found["type"] != "directory":
            return ()
        path = self.path(folder).rstrip("/")
        with suppress(FileNotFoundError, NotADirectoryError):
            return [entry for entry in self.fs.ls(path or "/", detail=True) if entry["name"].rstrip("/") != path]
        return ()

    def _prune(self, folder: str) -> None:
        """Remove *folder* and those above it while they are empty, where folders exist by themselves."""
        while folder and not self._entries(folder):
            self._made.clear()
            try:
                with fsspec_errors("removing", folder):
                    self._remove_folder(self.path(folder))
            except ObjectNotFoundError:
                pass
            except StorageError:
                return  # it was filled meanwhile
            folder = folder.rpartition("/")[0]


def _stat(key: str, found: Mapping[str, Any]) -> Stat:
    return Stat(key, int(found["size"]), modified_ns(found))


def modified_ns(found: Mapping[str, Any]) -> int:
    """Return the time of a file's last write, whatever its name and type in the file system; 0 where it has none."""
    for name in _MODIFIED:
        said = found.get(name)
        if isinstance(said, str):
            said = datetime.fromisoformat(said)
        if isinstance(said, datetime):
            said = (said if said.tzinfo else said.replace(tzinfo=UTC)).timestamp()
        if isinstance(said, int | float):
            return int(said * _NS)
    return 0
