"""Where in several buffers do some bytes lie? Buffers as one run of bytes, without a copy. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cut_views(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return the bytes [start, end) of *views*, as if these lay one after the other."""
    cut = []
    for view in views:
        low, high = max(start, 0), min(end, view.nbytes)
        if low < high:
            cut.append(view if (low, high) == (0, view.nbytes) else view.cast("B")[low:high])
        start -= view.nbytes
        end -= view.nbytes
    return cut
