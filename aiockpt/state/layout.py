"""The order of a tensor's axes in memory, which a manifest records for tensors that are not row-major.

A transposed matrix and a ``channels_last`` image have the same elements as their row-major copies, but a kernel walks them
in another order, and sums rounded in another order differ. So a load that makes a tensor lays it out as it was saved.

The order of the axes suffices, because only *dense* layouts can be made again: each element in memory of its own, and no
gaps. The strides of such a tensor follow from its shape and the order. They have more information only about gaps (a
column of a larger matrix) and elements that share memory (``expand()``), both of which are facts of another, larger memory
that a load does not make. The order is also meaningful for every part of a tensor, whatever its sizes: ranks that hold
parts can agree on it, and ranks that load other parts can use it.
"""

from __future__ import annotations

from collections.abc import Sequence


def axes_in_memory(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes of a dense tensor as they lie in memory, slowest first; None where they are in order.

    None also where the tensor has gaps, shares memory among its elements, or has no elements. The stride of an axis of one
    element decides its place: a matrix of one column that is the transpose of a row differs from one that was made as a
    column, and a product reads the two differently.
    """
    if 0 in sizes:
        return None
    axes = tuple(sorted(range(len(sizes)), key=lambda axis: (-strides[axis], sizes[axis] == 1)))
    return axes if axes != tuple(range(len(sizes))) and fits_order(sizes, strides, axes) else None


def fits_order(sizes: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> bool:
    """Return whether a tensor is dense with its *axes* in this order, slowest first.

    Axes of one element fit any order, so a tensor may fit several.
    """
    elements = 1
    for axis in reversed(axes):
        if sizes[axis] > 1 and strides[axis] != elements:
            return False
        elements *= sizes[axis]
    return True


def strides_in_order(sizes: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor with its *axes* in this order, slowest first."""
    strides = [1] * len(sizes)
    elements = 1
    for axis in reversed(axes):
        strides[axis] = elements
        elements *= max(sizes[axis], 1)
    return tuple(strides)
