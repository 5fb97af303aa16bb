"""Whether boxes tile a shape, against counting every element."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.tiling import are_tiled
from tests.example_counts import examples

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""A box as (offsets, sizes)."""

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def as_arrays(shape: tuple[int, ...], boxes: list[Extent], rank: int) -> tuple[list[int], Any, Any]:
    """Return a shape and its boxes with *rank* dimensions."""
    more = rank - len(shape)
    lows = np.array([(*low, *(0,) * more) for low, _ in boxes], np.int64).reshape(len(boxes), rank)
    extents = np.array([(*sizes, *(1,) * more) for _, sizes in boxes], np.int64).reshape(len(boxes), rank)
    return [*shape, *(1,) * more], lows, extents


OTHERS: list[tuple[tuple[int, ...], list[Extent], bool]] = [
    ((2, 2), [((0, 0), (1, 1)), ((0, 1), (2, 1)), ((1, 0), (1, 1))], True),
    ((3,), [((2,), (1,)), ((0,), (2,))], True),
    ((3,), [((1,), (2,))], False),
    ((), [], False),
    ((4, 8), [((0, 0), (4, 8)), ((0, 4), (4, 4))], False),
    ((0, 1), [], True),
]


def tiles(shape: tuple[int, ...], boxes: list[Extent]) -> bool:
    """Return whether *boxes* tile *shape*, asked alone and among others whose answers are known."""
    shape_there, lows, extents = as_arrays(shape, boxes, len(shape))
    alone = are_tiled(np.array([shape_there], np.int64), np.array([len(boxes)]), lows, extents)
    rank = max(len(shape), 2)
    every = [*OTHERS[:3], (shape, boxes, bool(alone[0])), *OTHERS[3:]]
    shapes, low, size = zip(*(as_arrays(one, some, rank) for one, some, _ in every), strict=True)
    counts = np.array([len(some) for _, some, _ in every])
    together = are_tiled(np.array(shapes, np.int64), counts, np.concatenate(low), np.concatenate(size))
    assert together.tolist() == [answer for *_, answer in every]
    return bool(alone[0])


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Extent]]:
    """Cut a box again and again in two; some of the results may be empty."""
    shape = draw(SHAPES)
    boxes: list[Extent] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[axis]))
        for start, size in ((0, cut), (cut, sizes[axis] - cut)):
            moved = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
            boxes.append((moved, (*sizes[:axis], size, *sizes[axis + 1 :])))
    return shape, draw(st.permutations(boxes))


@st.composite
def any_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Extent]]:
    shape = draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
        boxes.append((offsets, sizes))
    return shape, boxes


def _is_tiled(shape: tuple[int, ...], boxes: list[Extent]) -> bool:
    covered = np.zeros(shape, dtype=np.int64)
    for offsets, sizes in boxes:
        covered[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    return bool((covered == 1).all())


@given(tilings())
def test_a_tiling_is_accepted(case: tuple[tuple[int, ...], list[Extent]]) -> None:
    assert tiles(*case)


@examples(300)
@given(any_boxes())
def test_boxes_are_accepted_only_when_each_element_is_covered_once(case: tuple[tuple[int, ...], list[Extent]]) -> None:
    assert tiles(*case) == _is_tiled(*case)


@given(tilings(), st.data())
def test_a_tiling_with_one_box_moved_is_refused(
    case: tuple[tuple[int, ...], list[Extent]], data: st.DataObject
) -> None:
    shape, boxes = case
    number = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[number]
    moved = tuple(data.draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes, strict=True))
    changed = [*boxes[:number], (moved, sizes), *boxes[number + 1 :]]
    assert tiles(shape, changed) == _is_tiled(shape, changed)
    assert moved == offsets or 0 in sizes or not tiles(shape, changed)


def test_a_tensor_without_elements_needs_no_boxes_and_minds_none() -> None:
    assert tiles((0, 5), [])
    assert tiles((0, 5), [((0, 0), (0, 3))])
    assert not tiles((2, 5), [])
    assert not tiles((), [])
    assert not tiles((), [((), ()), ((), ())])


def test_hostile_boxes_in_many_dimensions_cost_no_more_than_their_number() -> None:
    rank, count = 32, 2000
    boxes = [(tuple((i * (axis + 3)) % 97 for axis in range(rank)), (2,) * rank) for i in range(count)]
    assert not tiles((2**47,) * rank, boxes)
