"""The neutral language: it says what a plan depends on."""

import msgspec
import pytest

from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard, digest_structure


def shard(name: str = "w", dtype: str = "BF16", shape: tuple[int, ...] = (2, 3)) -> TensorShard:
    return TensorShard(name, dtype, shape, (Box.whole(shape),), None)


def test_bytes_are_those_of_the_boxes_that_this_rank_holds() -> None:
    assert shard().nbytes == 12
    rows = (Box((0, 0), (1, 3)), Box((3, 0), (2, 3)))
    assert TensorShard("w", "F32", (5, 3), rows, None).nbytes == 36
    assert shard(shape=()).nbytes == 2
    assert shard(shape=(0, 7)).nbytes == 0


def test_the_data_do_not_change_the_structure() -> None:
    assert digest_structure([shard()], {}) == digest_structure([msgspec.structs.replace(shard(), data="other")], {})


@pytest.mark.parametrize(
    ("tensors", "alias"),
    [
        ([shard("v")], {}),
        ([shard(dtype="F16")], {}),
        ([shard(shape=(3, 2))], {}),
        ([msgspec.structs.replace(shard(), boxes=(Box((1, 0), (1, 3)),))], {}),
        ([shard(), shard("v")], {}),
        ([shard()], {"tied": "w"}),
    ],
)
def test_whatever_a_plan_depends_on_changes_the_structure(tensors: list[TensorShard], alias: dict[str, str]) -> None:
    assert digest_structure(tensors, alias) != digest_structure([shard()], {})


def test_order_is_part_of_the_structure() -> None:
    assert digest_structure([shard("a"), shard("b")], {}) != digest_structure([shard("b"), shard("a")], {})
