"""A backend and a file system that record every call made on the storage, in order.

Guarantees:

- A call is recorded when it has returned or raised, so the order of the log is one in which the calls took effect.
- The log holds copies: a later change of the caller's buffer does not change it.
- Wrapping changes nothing else: the conformance suite passes on a wrapped backend.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Backend
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles


class Operation(msgspec.Struct, frozen=True):
    """One call of a backend verb.

    Attributes:
        verb: the method: "put", "get", …, and "upload.write", "upload.finish", "reader.read", ….
        key: the object; for ``delete`` the keys joined by a space, for ``list`` the prefix.
        offset: bytes, for ranged verbs.
        size: bytes passed, or announced.
        error: the name of the exception's class, "" for success.
    """

    verb: str
    key: str
    offset: int = 0
    size: int = 0
    error: str = ""


class RecordingBackend(Forwarding):
    """*inner*, with every call in `operations`, oldest first."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*, and record it when it has returned or raised."""
        error = ""
        try:
            return await call()
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.operations.append(Operation(call.verb, call.key, call.offset, call.size, error))

    def __repr__(self) -> str:
        return f"<RecordingBackend of {self.inner!r}, {len(self.operations)} operations>"


FLUSHES = frozenset({"fsync", "fdatasync"})


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the file-system seam that opens, closes, changes or flushes something.

    Attributes:
        verb: the method of `Files`.
        path: the file or folder; for a descriptor, the path it was opened by.
        fd: the descriptor, -1 for calls by path.
        flags: of ``open``.
        offset: bytes, of ``pwrite`` and ``fallocate``.
        size: bytes, of ``fallocate``.
        data: the bytes that ``pwrite`` wrote.
        target: the second path of ``link`` and ``rename``.
        error: the errno of a failure, 0 for success.
    """

    verb: str
    path: str
    fd: int = -1
    flags: int = 0
    offset: int = 0
    size: int = 0
    data: bytes = b""
    target: str = ""
    error: int = 0

    @property
    def is_flush(self) -> bool:
        return self.verb in FLUSHES

    @property
    def changes(self) -> bool:
        """Whether the call changed the state after a power cut."""
        opens = self.verb == "open" and not self.flags & os.O_CREAT
        return not self.error and self.verb != "close" and not opens

    def __str__(self) -> str:
        return f"{self.verb} {self.path}" + (f" → {self.target}" if self.target else "")


_READ_CALLS = frozenset({"preadv", "fadvise", "fstat", "lstat", "listdir", "statvfs", "utime"})


class RecordingFiles(ForwardingFiles):
    """*inner*, with every call that does more than read in `calls`, oldest first. Any thread."""

    def __init__(self, inner: Files) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    def forward(self, call: FilesCall) -> Any:
        """Make *call*, and unless it only reads, record it after it has returned or raised."""
        if call.verb in _READ_CALLS:
            return call()
        sent: Any = b""
        facts: dict[str, Any] = {"verb": call.verb, "path": call.path}
        match call.verb, call.arguments:
            case "open", (_, flags, _):
                facts["flags"] = flags
            case "pwrite", (fd, sent, offset):
                facts |= {"fd": fd, "offset": offset}
            case "fallocate", (fd, offset, size):
                facts |= {"fd": fd, "offset": offset, "size": size}
            case "link" | "rename", (_, target):
                facts["target"] = target
            case _, (int() as fd,):
                facts["fd"] = fd
        try:
            answer = call()
        except OSError as error:
            self.calls.append(Call(**facts, error=error.errno or -1))
            raise
        if call.verb == "open":
            facts["fd"] = answer
        if call.verb == "pwrite":
            facts["data"] = bytes(sent[:answer])
        self.calls.append(Call(**facts))
        return answer
