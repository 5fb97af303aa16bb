"""Which tensors hold values that are NaN or infinite? Looked at beside the hash, while their bytes are in the cache.

Guarantees:

- What is told is what was written: the bytes in the slabs, and not the tensors that have gone on since.
- On worker threads, and without a lock: each run of a file is looked at as its own, and once more where it is written once
  more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter

import msgspec

from aiockpt.format.finite import count_not_finite, may_be_not_finite
from aiockpt.format.manifest import TensorEntry


class FloatSpan(msgspec.Struct, frozen=True, gc=False):
    """Bytes [start, end) of a data file are numbers of the tensor *name*, of a dtype that has values that are not finite."""

    start: int
    end: int
    dtype: str
    name: str


def find_spans(tensors: Mapping[str, TensorEntry], file_count: int) -> list[list[FloatSpan]]:
    """Return what is to be looked at in each of the files that hold *tensors*, in the order of the bytes."""
    spans: dict[int, list[FloatSpan]] = defaultdict(list)
    for name, entry in tensors.items():
        if may_be_not_finite(entry.dtype):
            for piece in entry.pieces:
                if piece.end > piece.start:
                    spans[piece.file].append(FloatSpan(piece.start, piece.end, entry.dtype, name))
    return [sorted(spans[file], key=attrgetter("start")) for file in range(file_count)]


class FileScreen:
    """Looks for values that are not finite in one data file, run by run."""

    def __init__(self, spans: Sequence[FloatSpan]) -> None:
        self._spans = spans
        self._ends = [span.end for span in spans]
        self._found: dict[int, Counter[str]] = {}

    def look_at(self, offset: int, run: memoryview) -> None:
        """Look at the bytes of the file from *offset* on; whole elements, as every run of whole pages is. Any thread."""
        found: Counter[str] = Counter()
        end = offset + run.nbytes
        for span in self._spans[bisect_right(self._ends, offset) :]:
            if span.start >= end:
                break
            first, last = max(span.start, offset), min(span.end, end)
            found[span.name] += count_not_finite(span.dtype, run[first - offset : last - offset])
        self._found[offset] = found

    def not_finite(self) -> dict[str, int]:
        """Return how many numbers of each tensor are not finite, of those that have some."""
        total = sum(self._found.values(), Counter[str]())
        return {name: count for name, count in sorted(total.items()) if count}
