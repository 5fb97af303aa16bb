"""The order of axes in memory, beside what torch does with it."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.state.layout import axes_in_memory, fits_order, strides_in_order
from tests.example_counts import examples

SHAPES = st.lists(st.sampled_from((1, 1, 2, 3, 5)), max_size=5).map(tuple)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Say by the addresses of the elements whether each has its own, and there is no gap."""
    places = torch.as_strided(torch.arange(10**5), tensor.shape, tensor.stride()).flatten().tolist()
    return sorted(places) == list(range(math.prod(tensor.shape)))


@examples(300)
@given(st.data())
def test_a_dense_tensor_is_made_again_with_its_strides(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    tensor = torch.empty_permuted(shape, data.draw(st.permutations(range(len(shape)))))
    axes = axes_in_memory(tensor.shape, tensor.stride())
    order = range(len(shape)) if axes is None else axes
    assert torch.empty_permuted(shape, tuple(order)).stride() == tensor.stride() == strides_in_order(shape, order)


@examples(300)
@given(st.data())
def test_there_is_an_order_where_all_elements_lie_side_by_side_and_not_in_rows(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from((1, 2, 3)), max_size=3).map(tuple))
    strides = data.draw(st.tuples(*(st.integers(0, 12) for _ in shape)))
    tensor = torch.empty(100).as_strided(shape, strides)
    axes = axes_in_memory(shape, strides)
    assert axes is None or (_is_dense(tensor) and fits_order(shape, strides, axes))
    assert axes is not None or not _is_dense(tensor) or tensor.is_contiguous()
    assert axes is None or torch.empty(shape).stride() != strides
    orders = itertools.permutations(range(len(shape)))
    assert _is_dense(tensor) == any(fits_order(shape, strides, order) for order in orders)


def test_layouts_that_people_know() -> None:
    def of(tensor: torch.Tensor) -> tuple[int, ...] | None:
        return axes_in_memory(tensor.shape, tensor.stride())

    image = torch.zeros(2, 3, 4, 5)
    assert of(torch.zeros(3, 4)) is None
    assert of(torch.zeros(3, 4).t()) == (1, 0)
    assert of(image.contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert of(torch.zeros(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)) == (0, 2, 3, 4, 1)
    assert of(torch.zeros(7, 1)) is None
    assert of(torch.zeros(1, 7).t()) == (1, 0)
    assert of(torch.zeros(8, 3, 1, 1)) is None
    assert of(torch.zeros(8, 3, 1, 1).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert of(torch.zeros(())) is None
    assert of(torch.zeros(3, 1).expand(3, 4)) is None
    assert of(torch.zeros(4, 6)[:, ::2].t()) is None
    assert of(torch.zeros(2, 0, 3).transpose(0, 2)) is None
