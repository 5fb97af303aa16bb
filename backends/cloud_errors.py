"""Errors of obstore as ours, classified by the HTTP status or the transport error inside them.

obstore has a class for each condition that object stores agree on; the rest is one class whose text ends in the fields
of the Rust error. Those fields are what is read here, and tests/backends/test_cloud_errors.py makes each of them by a
real response, so that a release that words them differently turns a test red.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from aiockpt.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    archived,
)
from aiockpt.redaction import redact_error

_STATUS = re.compile(r"\bstatus: (\d{3}),")
_KIND = re.compile(r"\bHttpError \{\s*kind: (\w+)")
_ARCHIVED = re.compile(r"\b(InvalidObjectState|BlobArchived)\b")
_DEBUG = "\n\nDebug source:"
_THROTTLED = {429, 503}
_TIMED_OUT = {408, 504}
_FULL = {413, 507}
_CUT_SHORT = {"Interrupted", "Decode"}


@contextmanager
def cloud_errors(doing: str, key: str) -> Iterator[None]:
    """Turn an error of obstore into ours, raised while *doing* something to *key*."""
    try:
        yield
    except StorageError:
        raise
    except (BaseError, OSError, NotImplementedError) as error:
        raise from_obstore(error, doing, key) from redact_error(error)


def from_obstore(error: Exception, doing: str, key: str) -> StorageError:
    """Return ours for an *error* of obstore; raise it ``from error``."""
    text = str(error)
    message = f"{doing} {key!r}: {text.partition(_DEBUG)[0]}"
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(message, key=key)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return ObjectExistsError(message, key=key)
    if _ARCHIVED.search(text):
        return archived(message, key)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return StorageAccessError(f"{message}. Check the credentials and their rights.", key=key)
    if (status := _STATUS.search(text)) is not None:
        return _from_status(int(status[1]), message, key)
    return _from_kind(found[1] if (found := _KIND.search(text)) else None, message, key)


def _from_status(status: int, message: str, key: str) -> StorageError:
    if status in _THROTTLED:
        return StorageThrottledError(message, key=key)
    if status in _TIMED_OUT:
        return StorageTimeoutError(message, key=key)
    if status in _FULL:
        return StorageFullError(message, key=key)
    return StorageError(message, key=key, retryable=status >= 500)


def _from_kind(kind: str | None, message: str, key: str) -> StorageError:
    """Classify what went wrong without an answer; *kind* is how the HTTP client calls it, None when it was not HTTP."""
    if kind == "Timeout":
        return StorageTimeoutError(message, key=key)
    if kind in _CUT_SHORT:
        return StorageTransferError(message, key=key)
    return StorageError(message, key=key, retryable=kind is not None)
