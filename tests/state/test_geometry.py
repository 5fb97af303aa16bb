"""Boxes, which mean the same elements as numpy's slices."""

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.state.geometry import Box, boxes_follow, chunk_runs, copy_runs, flat_range_boxes, runs_to_boxes

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    return st.tuples(*spans).map(
        lambda found: Box(tuple(low for low, _ in found), tuple(high - low for low, high in found))
    )


two_boxes = shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape)))


def part(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return array[tuple(slice(low, high) for low, high in zip(box.offsets, box.end, strict=True))]


@given(two_boxes)
def test_an_intersection_holds_exactly_the_elements_that_both_boxes_have(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, one, other = case
    numbers = np.arange(prod(shape)).reshape(shape)
    common = set(part(numbers, one).ravel()) & set(part(numbers, other).ravel())
    found = one.intersect(other)
    assert (set() if found is None else set(part(numbers, found).ravel())) == common
    assert (found is None) == (not common)
    assert one.contains(other) == (set(part(numbers, other).ravel()) <= set(part(numbers, one).ravel()))


@given(two_boxes)
def test_runs_copy_every_shared_element_to_its_place_once(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, stored, wanted = case
    numbers = np.arange(prod(shape)).reshape(shape)
    source = part(numbers, stored).ravel()
    target = np.full(wanted.volume, -1)
    for start, to, count in copy_runs(stored, wanted):
        assert (target[to : to + count] == -1).all()
        target[to : to + count] = source[start : start + count]
    shared = np.isin(part(numbers, wanted).ravel(), source)
    assert (target == np.where(shared, part(numbers, wanted).ravel(), -1)).all()


@given(two_boxes)
def test_no_two_runs_could_have_been_one(case: tuple[tuple[int, ...], Box, Box]) -> None:
    _, stored, wanted = case
    runs = list(copy_runs(stored, wanted))
    for (start, to, count), (next_start, next_to, _) in pairwise(runs):
        assert (start + count, to + count) != (next_start, next_to)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), *[st.integers(0, prod(shape))] * 2)))
def test_a_flat_range_is_a_few_boxes_that_follow_one_another(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case[0], *sorted(case[1:])
    boxes = flat_range_boxes(shape, start, end)
    numbers = np.arange(prod(shape)).reshape(shape)
    elements = [element for box in boxes for element in part(numbers, box).ravel()]
    assert elements == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside a tensor"):
        flat_range_boxes((2, 3), 0, 7)


def test_a_tensor_without_axes_is_one_element() -> None:
    box = Box.whole(())
    assert (box.ndim, box.volume, box.end) == (0, 1, ())
    assert list(copy_runs(box, box)) == [(0, 0, 1)]


def test_the_same_whole_box_is_one_run_however_large() -> None:
    box = Box.whole((1 << 40, 3, 5))
    assert list(copy_runs(box, box)) == [(0, 0, 15 << 40)]


def indices(runs: list[tuple[int, int]]) -> list[int]:
    return [first + place for first, size in runs for place in range(size)]


def chunks(numbers: list[int], count: int) -> list[list[int]]:
    """What torch.chunk says, filled up with empty chunks."""
    step = max(1, -(-len(numbers) // count))
    return [numbers[index * step : (index + 1) * step] for index in range(count)]


cuts = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3)
"""(how many chunks, in how many pieces first), one after the other."""


@given(st.integers(0, 40), cuts, st.data())
def test_a_chunk_is_that_of_torch_in_each_piece_and_ranks_share_nothing(
    size: int, cuts: list[tuple[int, int]], data: st.DataObject
) -> None:
    runs, numbers = ([(0, size)] if size else []), list(range(size))
    for count, pieces in cuts:
        expected = [
            [number for piece in chunks(numbers, pieces) for number in chunks(piece, count)[index]]
            for index in range(count)
        ]
        found = [chunk_runs(runs, count, index, pieces) for index in range(count)]
        assert list(map(indices, found)) == expected
        assert sorted(number for some in expected for number in some) == sorted(numbers)
        index = data.draw(st.integers(0, count - 1))
        runs, numbers = found[index], expected[index]


def test_runs_that_touch_are_one() -> None:
    assert chunk_runs([(0, 12)], 1, 0, 3) == [(0, 12)]
    assert chunk_runs([(0, 12)], 2, 0, 3) == [(0, 2), (4, 2), (8, 2)]


axis_runs = st.lists(st.booleans(), max_size=5).map(
    lambda held: [(index, 1) for index, kept in enumerate(held) if kept]
)
joined_runs = axis_runs.map(lambda runs: chunk_runs(runs, 1, 0))


@given(st.lists(joined_runs, max_size=3))
def test_boxes_of_runs_have_the_elements_with_these_indices_once(axes: list[list[tuple[int, int]]]) -> None:
    numbers = np.arange(5 ** len(axes)).reshape((5,) * len(axes))
    own = numbers[np.ix_(*map(indices, axes))] if axes else numbers
    boxes = runs_to_boxes(axes)
    for box, place in boxes:
        assert (part(numbers, box) == part(own, place)).all()
    in_boxes = [element for box, _ in boxes for element in part(numbers, box).ravel()]
    assert sorted(in_boxes) == sorted(own.ravel())
    assert not boxes_follow(axes) or in_boxes == list(own.ravel())


def test_boxes_follow_one_another_unless_an_axis_in_front_is_stepped_through() -> None:
    assert boxes_follow([[(0, 3), (5, 2)], [(0, 4)]])
    assert boxes_follow([[(3, 1)], [(0, 2), (4, 2)]])
    assert boxes_follow([[(0, 1), (3, 1)], [(0, 2), (4, 2)]])
    assert not boxes_follow([[(0, 2)], [(0, 2), (4, 2)]])
