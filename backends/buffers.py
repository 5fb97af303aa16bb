"""The caller's buffers as the target of bytes from a client library: copied once, passed to `seen` where they land."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiockpt.errors import StorageError, UsageError
from aiockpt.storage.backend import Seen


class Buffers:
    """The caller's buffers as one row of bytes, filled from the front."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in reversed(into) if view.nbytes]
        self.left_bytes = sum(view.nbytes for view in self._views)

    def fill(self, data: memoryview, seen: Seen | None) -> None:
        """Copy *data*, which fits, and pass each run to *seen* where it arrived. Blocking; large runs without the GIL."""
        done = 0
        while done < data.nbytes:
            view = self._views.pop()
            count = min(view.nbytes, data.nbytes - done)
            np.copyto(np.frombuffer(view[:count], np.uint8), np.frombuffer(data[done : done + count], np.uint8))
            if seen is not None:
                seen(view[:count])
            if count < view.nbytes:
                self._views.append(view[count:])
            done += count
        self.left_bytes -= done


def check_range(key: str, offset: int, wanted_bytes: int, size_bytes: int) -> None:
    """Check that *wanted_bytes* from *offset* lie within the object *key* of *size_bytes*.

    Raises:
        UsageError: *offset* is negative.
        StorageError: the object ends before.
    """
    if offset < 0:
        raise UsageError(f"{key!r}: there is no byte {offset}")
    if offset + wanted_bytes > size_bytes:
        raise ends_early(key, size_bytes)


def ends_early(key: str, size_bytes: int) -> StorageError:
    """Return the error that the object *key* ends after *size_bytes*, before the buffers are full."""
    return StorageError(f"{key!r} ends at byte {size_bytes}, and more was asked for: it is truncated", key=key)
