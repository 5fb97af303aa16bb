"""The backend contract: the verbs that a place for bytes must have, and their guarantees.

A backend is anything that has these verbs; it inherits nothing. It is *accepted* when the shipped conformance suite
(`aiockpt.testing.backend_suite`) passes on it, plain and wrapped. Operations composed of the verbs are free functions
in `storage/`, so that wrappers (retry, faults, recording, throttling, tiers) cannot be bypassed.

Guarantees every backend gives:

- **Keys** are relative ``str`` with ``/`` between non-empty parts (`check_key`). No verb follows a symbolic link.
- **Durable on return**: when ``put``, ``put_new``, ``Upload.finish`` and ``delete`` return, their effect and the name
  survive the death of the process, of the operating system and a power cut, where ``traits.durable`` says so. The *name*
  of a data file may become durable later: before the next object is seen that a ``put`` or ``put_new`` of this backend
  makes beside it (in the folder above the file's own, or below that). Nothing counts on a file before such a record.
- **Absent or whole**: an object made by ``put`` or ``put_new`` is never seen in part. A data file (``create``) may be
  seen in part until ``finish``; it counts only once a receipt names its size and checksums.
- **Errors** are ours (`aiockpt.errors`), raised ``from`` the library's own.
- Verbs are called on one event loop; several may run at once. A cancelled verb leaves no thread behind that still
  holds the caller's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, cast
from urllib.parse import quote, unquote

import msgspec

from aiockpt.errors import UsageError

Scope = Literal["shared", "hosts", "node", "process"]
Seen = Callable[[memoryview], object]
"""Called with each run of bytes as it arrives, in file order, on the thread that moves it (checksums, while cached)."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a backend that callers may rely on.

    Attributes:
        scope: where an object is visible: on every host, on every host of the job while its processes live, on this host,
            or in this process.
        durable: whether objects outlive this process and a power cut.
        flushes_names: False where the place was found unable to flush a folder: then objects outlive the process, but a
            power cut only by luck.
        alignment: bytes; ``Upload.write`` is fastest when offset, length and address are multiples of it.
        block_writes: the best number of concurrent ``Upload.write`` calls.
        block_reads: the same for ``Reader.read``.
        read_buffer_bytes: the most memory that one read takes beside what it fills; None: as much as it fills.
    """

    scope: Scope
    durable: bool
    flushes_names: bool = True
    alignment: int = 1
    block_writes: int = 4
    block_reads: int = 4
    read_buffer_bytes: int | None = None

    @property
    def survives_power_cuts(self) -> bool:
        """Whether committed objects survive power cuts, as far as is known."""
        return self.durable and self.flushes_names


class Stat(msgspec.Struct, frozen=True):
    """One object: its key, its size in bytes, and when the *storage's* clock says it was last written (ns)."""

    key: str
    size: int
    modified_ns: int


class Listing(msgspec.Struct, frozen=True):
    """One level below a prefix.

    Attributes:
        objects: sorted by key.
        folders: keys without a trailing slash, sorted.
        others: keys of things that are neither, and that no verb but ``delete`` accepts: links, pipes, devices, and what
            the file system cannot describe. Most places have none.
    """

    objects: tuple[Stat, ...]
    folders: tuple[str, ...]
    others: tuple[str, ...] = ()


class UnfinishedUpload(msgspec.Struct, frozen=True):
    """A data file that was begun and neither finished nor aborted: its key, the store's id of it, and when it began (ns).

    An object store keeps its parts, which cost as objects do, and no listing of objects shows it.
    """

    key: str
    upload_id: str
    started_ns: int


class Space(msgspec.Struct, frozen=True):
    """Bytes free and in all, and how many more files and folders can be made; None where the place does not report it."""

    free_bytes: int | None
    total_bytes: int | None
    free_files: int | None = None


class Upload(Protocol):
    """A data file being written in blocks, in any order and several at once."""

    async def write(self, offset: int, runs: Sequence[memoryview], seen: Seen | None = None) -> None:
        """Write *runs*, one after the other, from *offset*; pass each to *seen* first, in order, on the writing thread.

        Ranges are disjoint. *runs* must not change until this returns. (One hop to a thread for many runs, their checksums
        and their writes: each hop costs training a wait for the GIL.)
        """

    async def finish(self) -> None:
        """Make the data durable; the name at the latest before the next record beside the file, which the module defines.

        Every byte of the announced size has been written.

        Raises:
            StorageError: a flush failed. The data are lost then: never retried on the same file.
        """

    async def abort(self) -> None:
        """Abort: release all resources, remove what can be removed. Idempotent; never raises a StorageError."""


class Reader(Protocol):
    """An object opened for ranged reads; ``size`` is its size in bytes by the storage."""

    @property
    def size(self) -> int: ...

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        """Fill the buffers of *into*, one after the other, from *offset*; pass every byte to *seen*, in order.

        Raises:
            StorageError: the object ends before the buffers are full, or cannot be read.
        """

    async def close(self) -> None:
        """Release all resources. Idempotent."""


class Backend(Protocol):
    """A place for bytes. See the module for the guarantees."""

    @property
    def url(self) -> str:
        """The name of the place, without credentials: it is logged, reported and shown (`aiockpt.redaction.redact`)."""
        ...

    @property
    def traits(self) -> Traits: ...

    async def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object, atomically."""

    async def put_new(self, key: str, data: bytes) -> None:
        """Create a small object; exactly one of any number of racing callers succeeds.

        Raises:
            ObjectExistsError: the key is taken.
        """

    async def get(self, key: str, max_bytes: int) -> bytes:
        """Return a small object whole, or its first *max_bytes* bytes when it is longer.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    async def open(self, key: str) -> Reader:
        """Open an object for ranged reads.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    async def create(self, key: str, size: int) -> Upload:
        """Start a data file of exactly *size* bytes under a free key.

        Raises:
            ObjectExistsError: the key is taken.
            StorageFullError: the place already knows that *size* bytes do not fit.
        """
        ...

    async def stat(self, key: str) -> Stat:
        """Describe one object.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    async def list(self, prefix: str) -> Listing:
        """List one level below the folder *prefix* ("" is the root). A folder that does not exist is empty."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, in order, and folders that became empty. Absent ones are fine."""

    async def space(self) -> Space:
        """Return the free and total space."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""


class KeepsUploads(Protocol):
    """Further verbs of an object store: list the uploads under way or left by dead writers, and abort them.

    A backend whose unfinished files are ordinary files, which ``list`` shows, has neither verb.
    """

    async def leftover_uploads(self, prefix: str = "") -> tuple[UnfinishedUpload, ...]:
        """Return the unfinished uploads below the folder *prefix*, by key; those of saves under way are among them."""
        ...

    async def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        """Remove uploads; those that no longer exist are skipped."""
        ...


class WorksWhenFull(Protocol):
    """Further verbs of a file system, which work also when it is full: names and dates take no space."""

    async def move(self, key: str, to: str, *, new: bool) -> None:
        """Rename the object *key* to *to*, durably, and replace an object there; if *new*, only where that is free.

        Raises:
            ObjectExistsError: *new*, and *to* is not free.
            ObjectNotFoundError: there is no *key*.
        """

    async def now_ns(self) -> int:
        """Return the time by the clock that dates objects."""
        ...

    async def folder_ns(self, key: str) -> int:
        """Return when a name in the folder *key* was last made, by that clock; works also if it cannot be listed."""
        ...

    async def sync(self) -> None:
        """Make `Backend.space` count deleted bytes as free, which a file system may do at its next commit only (btrfs)."""


class PutsUnflushed(Protocol):
    """A further verb of a file system, where each flush takes milliseconds: for what need not survive a power cut."""

    async def put_unflushed(self, key: str, data: bytes, *, new: bool) -> None:
        """Do as ``put`` does, or with *new* as ``put_new``, with an effect that a power cut may undo.

        A *new* object, which must not be replaced, is absent or whole after it; another one may be torn.
        """


class GetsMany(Protocol):
    """A further verb of a place where a hop to a thread costs more than a small read."""

    async def get_many(self, keys: Sequence[str], max_bytes: int) -> tuple[bytes | None, ...]:
        """Return each object as ``get`` does, all in one hop; None for one that is not there."""
        ...


def keeps_uploads(backend: Backend) -> KeepsUploads | None:
    """Return *backend* with the verbs for unfinished uploads; None where it has none."""
    return cast("KeepsUploads", backend) if callable(getattr(backend, "leftover_uploads", None)) else None


def works_when_full(backend: Backend) -> WorksWhenFull | None:
    """Return *backend* with the verbs that rename and date objects; None where it, or what it wraps, has none."""
    inner = getattr(backend, "inner", None)
    has_all = all(callable(getattr(backend, verb, None)) for verb in ("move", "now_ns", "folder_ns", "sync"))
    if not has_all or (inner is not None and works_when_full(inner) is None):
        return None
    return cast("WorksWhenFull", backend)


PROOF_KEY = ".aiockpt"
PROOF = b"aiockpt created this object to prove that a key here is created once only. It stays, and is asked again.\n"
"""At the root of a run in an object store: creating it, or being refused, proves that conditions are obeyed."""

MAX_KEY_BYTES = 1024


def file_url(path: str) -> str:
    """Return the URL of an absolute *path* of this machine."""
    return "file://" + quote(path)


def local_path(url: str) -> Path | None:
    """Return the path on this machine that a backend's *url* names; None where it is not a file system's."""
    return Path(unquote(url.removeprefix("file://"))) if url.startswith("file://") else None


def check_key(key: str, *, portable: bool = True) -> str:
    """Return *key* when it is a relative path that stays below any root.

    Args:
        portable: refuse ``a:`` at its beginning, a drive on other systems; it is fine in front of a root that a user named.

    Raises:
        UsageError: it is empty or too long, or has an empty, ``.`` or ``..`` part, a backslash, a control character,
            or a drive letter.
    """
    parts = key.split("/")
    bad = (
        not key
        or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES
        or any(part in ("", ".", "..") for part in parts)
        or any(character == "\\" or not character.isprintable() for character in key)
        or (portable and key[1:2] == ":")
    )
    if bad:
        raise UsageError(f"{key!r} is not a storage key: use relative parts joined by '/', without '..' or backslashes")
    return key


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(check_key(key) for key in keys)


def check_prefix(prefix: str) -> str:
    """Return *prefix*, which is "" or checked by `check_key`."""
    return check_key(prefix) if prefix else ""


def check_size(key: str, size: int) -> str:
    """Return *key*, checked by `check_key`, of a data file of *size* bytes; raise UsageError for a negative size."""
    if size < 0:
        raise UsageError(f"{key!r}: a file of {size} bytes cannot be created")
    return check_key(key)


class Progress:
    """The progress of the data file *key* of *size* bytes: the bytes written, and whether it accepts more.

    Attributes:
        over: it was finished or aborted.
    """

    def __init__(self, key: str, size: int) -> None:
        self.key = key
        self.size = size
        self.written_bytes = 0
        self.over = False

    def check_open(self) -> None:
        """Raise UsageError once the upload is over."""
        if self.over:
            raise UsageError(f"{self.key!r} was finished or aborted; create it again")

    def check_block(self, offset: int, runs: Sequence[memoryview]) -> int:
        """Return the bytes of *runs*; raise UsageError unless they lie within the file from *offset*."""
        size = sum(run.nbytes for run in runs)
        if offset < 0 or offset + size > self.size:
            raise UsageError(f"{self.key!r}: bytes {offset}..{offset + size} are not within its {self.size}")
        return size

    def check_whole(self) -> None:
        """Raise UsageError unless every byte of the file was written."""
        if self.written_bytes != self.size:
            raise self.incomplete(self.written_bytes)

    def incomplete(self, written_bytes: int) -> UsageError:
        """Return the error for an upload that is finished too early."""
        return UsageError(f"{self.key!r}: {written_bytes} of {self.size} bytes were written before finish()")
