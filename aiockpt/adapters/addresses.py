"""Memory overlap of tensors, by address: this also finds overlaps between otherwise unrelated tensors.

A shard may begin anywhere in a tensor (a slice of a flat parameter). Memory between the first and the last byte of a dense
tensor is part of it; the gaps of a strided tensor may belong to other tensors.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable
from itertools import accumulate
from typing import Any

import torch

from aiockpt.adapters.tensor_kinds import local_tensors
from aiockpt.adapters.tensors import bytes_of

SAMPLE_BYTES = 16


class TensorMemory:
    """The memory of some tensors. Valid while they live and do not move.

    Args:
        around: include the rest of their storages: torch counts the changes of all views of a storage together.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, around: bool = False) -> None:
        pieces = [bytes_of(local) for tensor in tensors for local in local_tensors(tensor)]
        self._dense = _Spans(span_of(piece) for piece in pieces if _is_dense(piece))
        self._any = _Spans(map(_storage_span if around else span_of, pieces))
        self._strided = {_place(piece) for piece in pieces if not _is_dense(piece)}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether all of *tensor* is in one of them."""
        return self._dense.hold(*span_of(tensor)) or _place(tensor) in self._strided

    def touches(self, tensor: torch.Tensor) -> bool:
        """Return whether some of *tensor* may be in one of them, or *around* one."""
        return self._any.overlap(*span_of(tensor))


class _Spans:
    """Ranges of addresses; that of an empty tensor is empty."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(spans)
        self._starts = [start for start, _ in ordered]
        # Running maxima: of the spans that begin before an address, the one that reaches furthest may not be the last.
        self._ends = list(accumulate((end for _, end in ordered), max))

    def hold(self, start: int, end: int) -> bool:
        """Return whether all of [*start*, *end*) is in one of them."""
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and end <= self._ends[place]

    def overlap(self, start: int, end: int) -> bool:
        """Return whether any of [*start*, *end*) is in one of them."""
        place = bisect_left(self._starts, end) - 1
        return place >= 0 and start < end and start < self._ends[place]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def middle_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a sample of a tensor on the host: in the middle, for a table's first rows are often zero."""
    size_bytes, offset = tensor.element_size(), 0
    if tensor.is_contiguous():
        offset = tensor.numel() // 2 * size_bytes
        size_bytes = min(SAMPLE_BYTES, tensor.nbytes - offset)
    return (ctypes.c_char * size_bytes).from_address(tensor.data_ptr() + offset)


def _storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor's storage, and the address after its last."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + (storage.nbytes() if tensor.numel() else 0)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills all memory between its ends, in any order of its axes."""
    if tensor.is_contiguous():
        return True
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != elements:
                return False
            elements *= size
    return True


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
