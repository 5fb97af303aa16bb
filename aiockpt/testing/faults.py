"""A backend and a file system that fail on schedule, the same way each time.

Guarantees:

- A `Fault` names the calls that it affects and the number of the first; a wrapper without faults changes nothing and
  passes the conformance suite.
- `call_count` counts every call, so a test can run once without faults, then fail at each k up to that count.
- A failed flush loses the bytes, as on Linux: on `SimulatedFiles` they are marked clean and never reach the disk.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import signal
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, runtime_checkable

import anyio
import msgspec

from aiockpt.errors import UsageError, from_os_error
from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Backend
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from aiockpt.testing.recording import FLUSHES

_PAGE_BYTES = 4096

Action = Literal["fail", "lose_answer", "hang", "flip", "short", "kill"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned failure.

    Attributes:
        do: "fail" without effect; "lose_answer": take effect, then fail; "hang" until cancelled (backends only);
            "flip" a bit of the bytes read or written; "short": transfer half of them (files only); "kill" this process
            with SIGKILL before the call.
        verb: pattern of the affected calls: "put*", "upload.write", "fsync".
        match: pattern of keys or paths; a descriptor has the path it was opened by.
        at: the first of these calls that fails, from 1.
        times: how many calls in a row fail; None for all from then on.
        error: the errno, for "fail" and "lose_answer"; backends raise ours for it.
        bit: the bit to flip, counted from the start of the transfer and wrapping around.
    """

    do: Action
    verb: str = "*"
    match: str = "*"
    at: int = 1
    times: int | None = 1
    error: int = errno.EIO
    bit: int = 0


class FaultSchedule:
    """Counts calls and returns the fault that is due. Any thread: a counter's step is one step of the interpreter."""

    def __init__(self, faults: Sequence[Fault], allowed: frozenset[Action]) -> None:
        for fault in faults:
            if fault.do not in allowed:
                raise UsageError(f"{fault.do!r} is not supported here; choose from {', '.join(sorted(allowed))}")
        self._calls = itertools.count(1)
        self._counted = [(fault, itertools.count(1)) for fault in faults]
        self.call_count = 0
        self.fired: list[str] = []

    def due(self, verb: str, name: str) -> Fault | None:
        """Count a call of *verb* on *name* and return the first fault that is due for it."""
        self.call_count = next(self._calls)
        due = None
        for fault, count in self._counted:
            if fnmatchcase(verb, fault.verb) and fnmatchcase(name, fault.match):
                over = next(count) - fault.at
                if due is None and over >= 0 and (fault.times is None or over < fault.times):
                    due = fault
        if due is not None:
            self.fired.append(f"{due.do} {verb} {name}")
            if due.do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return due


def flip_bit(data: memoryview, bit: int) -> None:
    """Flip bit number *bit* of *data*, counted from its start and wrapping around."""
    if data.nbytes:
        byte, place = divmod(bit % (8 * data.nbytes), 8)
        data.cast("B")[byte] ^= 1 << place


def _flipped(data: memoryview, bit: int) -> memoryview:
    copy = memoryview(mmap.mmap(-1, max(1, data.nbytes)))[: data.nbytes]  # page-aligned, as O_DIRECT requires
    copy[:] = data
    flip_bit(copy, bit)
    return copy


def _os_error(fault: Fault, name: str) -> OSError:
    return OSError(fault.error, f"{os.strerror(fault.error)} (injected)", name)


class FaultyBackend(Forwarding):
    """*inner*, failing by *faults*. Verbs of readers and uploads are called "reader.read", "upload.write", ….

    Attributes:
        schedule: what was counted, and what has gone wrong so far (``schedule.fired``).
    """

    ACTIONS: frozenset[Action] = frozenset({"fail", "lose_answer", "hang", "flip", "kill"})

    def __init__(self, inner: Backend, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner)
        self.schedule = FaultSchedule(faults, self.ACTIONS)

    @property
    def call_count(self) -> int:
        return self.schedule.call_count

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*, with the effect of the fault that is due for it."""
        if call.verb == "upload.abort":  # "never raises a StorageError" is part of the contract
            return await call()
        fault = self.schedule.due(call.verb, call.key)
        if fault is None:
            return await call()
        if fault.do == "flip":
            return await _flipping(call, fault.bit)
        if fault.do == "hang":
            await anyio.sleep_forever()
        if fault.do == "lose_answer":
            await call()
        error = _os_error(fault, call.key)
        raise from_os_error(error, call.verb, call.key) from error

    def __repr__(self) -> str:
        return f"<FaultyBackend of {self.inner!r}, {self.call_count} calls, fired: {self.schedule.fired}>"


async def _flipping(call: BackendCall, bit: int) -> Any:
    """Make *call*, with one bit flipped in the bytes that it sends or returns, if any."""
    match call.verb, call.arguments:
        case "put" | "put_new", (key, data):
            return await call(key, bytes(_flipped(memoryview(data), bit)))
        case "get", _:
            return bytes(_flipped(memoryview(await call()), bit))
        case "reader.read", (offset, into, seen):
            await call(offset, into)
            flip_bit(next((view for view in into if view.nbytes), memoryview(b"")), bit)
            for view in into if seen else ():
                seen(view)  # the flipped bytes are hashed, as with a bit that flipped on the disk
            return None
        case "upload.write", (offset, [first, *others] as runs, seen):
            for run in runs if seen else ():
                seen(run)  # flipped on the way to the storage: an observer sees the intended bytes
            return await call(offset, [_flipped(first, bit), *others])
        case _:
            return await call()


@runtime_checkable
class _LosesOnFailedFlush(Protocol):
    def mark_clean(self, fd: int) -> None: ...


class FaultyFiles(ForwardingFiles):
    """*inner*, failing by *faults*. Any thread.

    Attributes:
        schedule: what was counted, and what has gone wrong so far (``schedule.fired``).
    """

    ACTIONS: frozenset[Action] = frozenset({"fail", "lose_answer", "flip", "short", "kill"})

    def __init__(self, inner: Files, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner)
        self.schedule = FaultSchedule(faults, self.ACTIONS)

    @property
    def call_count(self) -> int:
        return self.schedule.call_count

    def forward(self, call: FilesCall) -> Any:
        """Make *call*, with the effect of the fault that is due for it; link and rename are matched by their target."""
        name = call.arguments[1] if call.verb in ("link", "rename") else call.path
        fault = self.schedule.due(call.verb, name)
        if fault is None:
            return call()
        if fault.do in ("flip", "short"):
            return _transfer(call, fault)
        if fault.do == "lose_answer" or call.verb == "close":  # Linux frees the number also when a close fails
            answer = call()
            if call.verb == "open":
                self.inner.close(answer)  # the created file stays, but no descriptor leaks
        elif call.verb in FLUSHES and isinstance(self.inner, _LosesOnFailedFlush):
            self.inner.mark_clean(call.arguments[0])
        raise _os_error(fault, name)


def _transfer(call: FilesCall, fault: Fault) -> Any:
    """Make *call* with half of its bytes, or with a bit flipped; a call that moves no bytes is unchanged."""
    match call.verb, call.arguments, fault.do:
        case "pwrite", (fd, data, offset), "short":
            return call(fd, data[: _half(data.nbytes)], offset)
        case "pwrite", (fd, data, offset), _:
            return call(fd, _flipped(data, fault.bit), offset)
        case "preadv", (fd, [first, *_], offset, flags), "short":
            return call(fd, [first[: _half(first.nbytes)]], offset, flags)
        case "preadv", (_, [first, *_], _, _), _:
            count = call()
            flip_bit(first[:count], fault.bit)
            return count
        case _:
            return call()


def _half(size_bytes: int) -> int:
    """Return about half, in whole pages: a transfer past the page cache is short by pages, never within one."""
    half = size_bytes // 2
    if size_bytes % _PAGE_BYTES == 0:
        half = max(_PAGE_BYTES, half // _PAGE_BYTES * _PAGE_BYTES)
    return min(size_bytes, max(1, half))
