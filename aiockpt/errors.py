"""The exceptions, grouped by what a handler will do about them.

    CheckpointError
    ├── UsageError(ValueError)                       fix the call
    │   ├── UnsupportedStateError(TypeError)           a leaf that cannot be saved, named by its path
    │   ├── StateMismatchError                         the checkpoint does not fit the state, all differences named
    │   ├── StepExistsError(FileExistsError)           the step is committed already and on_exists="raise"
    │   ├── ClosedError(RuntimeError)                  the checkpointer was closed by us
    │   ├── ForkedProcessError(RuntimeError)           used in a child that inherited it through fork
    │   └── BlockingCallError(RuntimeError)            a blocking wait where it would stop an event loop
    ├── StepNotFoundError(FileNotFoundError)         there is no such step
    ├── CorruptionError                              the bytes are not those that were saved
    │   ├── ManifestError                              a manifest or receipt that cannot be trusted
    │   │   └── NewerFormatError                         it is whole, but a newer aiockpt wrote it
    │   └── NoValidCheckpointError                     steps exist and none is valid
    ├── CommitError                                  the save did not become visible
    │   ├── CommitConflictError                        another attempt committed this generation first
    │   ├── CommitTimeoutError(TimeoutError)           outcome unknown: the next read of the storage decides
    │   └── ReplicasDifferError                        ranks have different values of a tensor that should be equal on all
    ├── RankError                                    the ranks of the job did not act together; raised on all of them
    │   ├── RankFailedError                            another rank failed
    │   ├── RankTimeoutError(TimeoutError)             some ranks sent nothing before the deadline
    │   └── RanksDisagreeError                         their calls differ in step, state or world size
    ├── SaveCancelledError                           .cancel() was called
    ├── SaveSkippedError                             a save, or its copy to a tier, was skipped by policy or abandoned
    │   └── BadStepError                               the step is bad, and the run is set back (rewind=)
    ├── RewindExhaustedError                         a step is bad, and the run is not set back (again)
    ├── TornSnapshotError                            the state changed while it was copied; nothing was published
    ├── WriterLostError                              the writer process has died; the storage holds what it wrote
    ├── BackgroundSaveError                          an earlier save failed; carries it and the new future
    └── StorageError(OSError)                        the storage failed; `retryable`: the same call may succeed later;
        │                                            `damaged`: this one object is bad, others may be intact
        ├── ObjectNotFoundError(FileNotFoundError)
        ├── ObjectExistsError(FileExistsError)
        ├── StorageFullError                           no space or quota left
        ├── StorageAccessError(PermissionError)        credentials missing, wrong, expired, or without this right
        ├── StorageTimeoutError(TimeoutError)          no answer before the deadline
        ├── StorageThrottledError                      the storage asks for fewer calls
        └── StorageTransferError                       bytes were damaged or truncated in transit, not in storage

Every message names the thing and the next action. No message holds tensor data or credentials.
Exception groups stay inside the engine: callers never need ``except*``.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, Protocol

from aiockpt.redaction import redact


class CheckpointError(Exception):
    """Anything that aiockpt raises on purpose. Its message and its notes hold no credentials."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(each) if isinstance(each, str) else each for each in args))

    def add_note(self, note: str, /) -> None:
        """Add *note*, redacted: its text may come from a library."""
        super().add_note(redact(note))

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by a call of the class: some have other arguments than their message. Errors go to other processes.
        return _restore, (type(self), self.args, vars(self))


def _restore(kind: type[CheckpointError], args: tuple[object, ...], values: dict[str, Any]) -> CheckpointError:
    # The first base has another `__new__` than a kind of OSError needs, which leaves out *args* besides.
    error: CheckpointError = (OSError if issubclass(kind, OSError) else kind).__new__(kind, *args)
    error.args = args
    vars(error).update(values)
    return error


class UsageError(CheckpointError, ValueError):
    """The call is invalid as it was made."""


class UnsupportedStateError(UsageError, TypeError):
    """A leaf of the state cannot be written without pickle; raised before a byte is written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class StateMismatchError(UsageError):
    """The checkpoint and the state given to ``load`` do not fit each other.

    Attributes:
        problems: one sentence for each difference, in order of name.
    """

    SHOWN = 20

    def __init__(self, where: str, problems: Sequence[str], advice: str) -> None:
        shown = [f"  - {problem}" for problem in problems[: self.SHOWN]]
        if len(problems) > self.SHOWN:
            shown.append(f"  … and {len(problems) - self.SHOWN} more")
        super().__init__("\n".join([f"{where} does not fit the state:", *shown, advice]))
        self.problems = tuple(problems)


class StepExistsError(UsageError, FileExistsError):
    """The step is already committed and ``on_exists="raise"`` was asked for."""


class ClosedError(UsageError, RuntimeError):
    """The checkpointer was closed; make a new one."""


class ForkedProcessError(UsageError, RuntimeError):
    """A forked child used its parent's checkpointer, whose threads exist in the parent only."""


class BlockingCallError(UsageError, RuntimeError):
    """A blocking wait was asked for on a thread that runs an event loop."""


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """No committed checkpoint of that step exists."""


class CorruptionError(CheckpointError):
    """Bytes in storage are not the bytes that were saved.

    Attributes:
        key: the object, relative to the checkpoint root.
        offset: first byte of the bad block, or None when the whole object is meant.
        tensors: names of the tensors that have bytes in the bad block.
    """

    def __init__(self, message: str, *, key: str = "", offset: int | None = None, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.offset = offset
        self.tensors = tuple(tensors)


class ManifestError(CorruptionError):
    """A manifest or receipt is damaged, hostile, or from a version that this one cannot read."""


class NewerFormatError(ManifestError):
    """A manifest or receipt is intact but needs a newer aiockpt. This is no damage: the step is not skipped."""


class NoValidCheckpointError(CorruptionError):
    """Steps exist under the root, but no valid one; a run must not start from scratch by mistake.

    Attributes:
        skipped: (step id, reason) for each step that was tried, newest first.
    """

    def __init__(self, url: str, skipped: Sequence[tuple[str, str]]) -> None:
        reasons = "\n".join(f"  - {step_id}: {reason}" for step_id, reason in skipped)
        super().__init__(
            f"{url} holds {len(skipped)} step(s) and none is valid:\n{reasons}\n"
            "Run `aiockpt verify` on it, or start in an empty root to begin from nothing.",
            key=url,
        )
        self.skipped = tuple(skipped)


class CommitError(CheckpointError):
    """The data were written but the checkpoint did not become visible."""


class CommitConflictError(CommitError):
    """Another attempt committed this generation of the step first; the winner is untouched."""


class CommitTimeoutError(CommitError, TimeoutError):
    """The commit did not finish before its deadline. Its outcome is unknown: check the storage.

    Attributes:
        missing_ranks: the ranks whose receipts were missing.
    """

    def __init__(self, message: str, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class ReplicasDifferError(CommitError):
    """Ranks have different values of tensors that should be equal on all of them; raised on every rank.

    Attributes:
        tensors: their names.
        ranks: those that differ from the lowest rank that has them.
    """

    def __init__(self, message: str, tensors: Sequence[str] = (), ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)
        self.ranks = tuple(ranks)


class RankError(CheckpointError):
    """The ranks of one job did not act together. No checkpoint became visible; earlier steps are untouched.

    Attributes:
        ranks: those that the message names.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankFailedError(RankError):
    """Another rank failed, so all ranks abandoned this operation; the message holds its error.

    Attributes:
        seen_here: whether this rank itself detected that the others are gone; False: another rank reported it.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), *, seen_here: bool = False) -> None:
        super().__init__(message, ranks)
        self.seen_here = seen_here


class RankTimeoutError(RankError, TimeoutError):
    """Some ranks sent nothing before the deadline: they are dead, stuck, or never made this call."""


class RanksDisagreeError(RankError):
    """Ranks made different calls: another step, another order, or tensors that do not fit together."""


class SaveCancelledError(CheckpointError):
    """The save was cancelled by ``.cancel()`` before it was committed; nothing became visible."""


class SaveSkippedError(CheckpointError):
    """The save was not started (``when_full="skip"``, or no tier accepts the step), or a tier skipped or abandoned it."""


class BadStepError(SaveSkippedError):
    """The step is bad on this rank or another one (`aiockpt.Rewind`): it is not saved, and the run is set back."""


class RewindExhaustedError(CheckpointError):
    """A step is bad, and the run is not set back: it was too often, there is no good step before, or the run is over.

    No bad step was saved: the newest good step is what a resume takes.

    Attributes:
        step: the bad one.
        reason: why it is bad, in words.
    """

    def __init__(self, message: str, step: int = -1, reason: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.reason = redact(reason)


class TornSnapshotError(CheckpointError):
    """The state changed, or moved in memory, while it was copied; nothing was published. *tensors*: names of these."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class WriterLostError(CheckpointError):
    """The process of ``worker="process"`` ended before the save did. Whether the step is committed is unknown: check the
    storage. The next save starts another process."""


class FailedSave(Protocol):
    """The step and the error of a failed `aiockpt.futures.SaveFuture`."""

    step: int

    def exception(self, timeout: float | None = None) -> BaseException | None: ...
    def result(self, timeout: float | None = None) -> object: ...


class BackgroundSaveError(CheckpointError):
    """An earlier save failed in the background.

    Attributes:
        failures: the failed futures, oldest first; each ``.exception()`` has its own traceback.
        future: the `aiockpt.futures.SaveFuture` that this very call started, or None (``close``); it is not affected.
    """

    def __init__(self, failures: Sequence[FailedSave], future: Any) -> None:
        lines = [f"  - step {failed.step}: {failed.exception()!r}" for failed in failures]
        tail = "" if future is None else f"\nThe save of step {future.step} was started all the same (see .future)."
        super().__init__("an earlier save failed in the background:\n" + "\n".join(lines) + tail)
        self.failures = tuple(failures)
        self.future = future


class StorageError(CheckpointError, OSError):
    """A call of the storage failed.

    Attributes:
        key: the object, relative to the backend's root.
        retryable: whether the same call may succeed a moment later.
        damaged: whether this one object is bad (its device cannot read it, a link or a pipe is in its place), so that it
            may be skipped. Any other failure may be transient, and does not show that the object is bad.
        lasting: whether access stays refused until rights are granted or the object is restored from an archive.
    """

    retryable = False
    damaged = False
    lasting = False

    def __init__(
        self, message: str, *, key: str = "", retryable: bool | None = None, damaged: bool | None = None
    ) -> None:
        super().__init__(message)
        self.key = key
        if retryable is not None:
            self.retryable = retryable
        if damaged is not None:
            self.damaged = damaged


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No object has that key."""


class ObjectExistsError(StorageError, FileExistsError):
    """The object was to be created exclusively, and its key exists already."""


class StorageFullError(StorageError):
    """No space or quota is left."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage did not answer before the deadline."""

    retryable = True


class StorageThrottledError(StorageError):
    """The storage throttles calls (429, 503 SlowDown)."""

    retryable = True


class StorageTransferError(StorageError):
    """Bytes were damaged or truncated in transit; those in storage may be intact."""

    retryable = True


class StorageAccessError(StorageError, PermissionError):
    """The storage refused: credentials are missing, wrong or expired, or do not grant this right."""

    lasting = True


def archived(message: str, key: str) -> StorageError:
    """Return the error for an object in an archive storage class, which must be restored before it can be read."""
    error = StorageError(
        f"{message}. It is archived: restore it first, and have the lifecycle rule leave steps that are still needed.",
        key=key,
    )
    error.lasting = True
    return error


def say_briefly(error: BaseException) -> str:
    """Return the type of *error* and the first two lines of its message, as one line: some messages name every tensor."""
    lines = [line.strip().removeprefix("- ").rstrip(".") for line in str(error).splitlines()]
    more = " …" if len(lines) > 2 else ""
    return f"{type(error).__name__}: {' '.join(lines[:2])}{more}"


def kind_in_words(value: object) -> str:
    """Return the type of *value* in words: ``a list``, ``an int``, ``a torch.device``; never its contents."""
    if value is None:
        return "None"
    cls = value if isinstance(value, type) else type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    if cls is value:
        return f"the class {name}"
    if callable(value) and cls.__module__ == "builtins":
        return "a function"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


_RETRYABLE = {
    errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ENOBUFS, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
}  # fmt: skip
_DAMAGED = {
    errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EILSEQ,
    errno.EREMOTEIO,
}  # fmt: skip
"""A sector that cannot be read (past the page cache: ENODATA, EILSEQ), a file system with corrupt metadata
(EUCLEAN, EBADMSG), or something else in the object's place."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


def is_damage(error: OSError) -> bool:
    """Return whether *error*, of a system call, means that the one object is bad."""
    return error.errno in _DAMAGED


def from_os_error(error: OSError, doing: str, key: str) -> StorageError:
    """Return the `StorageError` for an ``OSError`` that *doing* something to *key* raised; raise it ``from error``."""
    message = f"{doing} {key!r}: {error.strerror or error}"
    if error.errno in _FULL:
        return StorageFullError(f"{message}. Free space or lower retention, then save again.", key=key)
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(message, key=key)
    if isinstance(error, FileExistsError):
        return ObjectExistsError(message, key=key)
    if isinstance(error, PermissionError):
        return StorageAccessError(message, key=key)
    if isinstance(error, TimeoutError):
        return StorageTimeoutError(message, key=key)
    return StorageError(message, key=key, retryable=error.errno in _RETRYABLE, damaged=is_damage(error))
