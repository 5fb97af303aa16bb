"""Groups of ranks: every rank in exactly one, none of them large, and none at all where nobody needs them."""

from math import isqrt

from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.validate import MAX_WORLD
from aiockpt.planning.groups import GATHER_ABOVE, MIN_GROUP, group_of, groups_of


@given(st.integers(1, GATHER_ABOVE))
def test_a_small_world_has_no_groups(world_size: int) -> None:
    assert groups_of(world_size) == []
    assert group_of(world_size - 1, world_size) is None


@given(st.integers(GATHER_ABOVE + 1, MAX_WORLD))
def test_groups_part_a_large_world(world_size: int) -> None:
    groups = groups_of(world_size)
    assert [rank for group in groups for rank in group] == list(range(world_size))
    assert all(group_of(group[0], world_size) == group_of(group[-1], world_size) == group for group in groups)


@given(st.integers(GATHER_ABOVE + 1, MAX_WORLD))
def test_neither_groups_nor_their_number_grow_faster_than_the_root(world_size: int) -> None:
    groups = groups_of(world_size)
    assert max(map(len, groups)) <= max(MIN_GROUP, 2 * isqrt(world_size))
    assert len(groups) <= isqrt(world_size) + 1
