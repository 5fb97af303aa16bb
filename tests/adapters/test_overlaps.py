"""Are templates whose tensors share a part of their memory filled rightly, or refused?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt.adapters.overlaps import separate
from aiockpt.errors import StateMismatchError
from aiockpt.state.shards import TensorShard
from tests.adapters.test_nested_states import resume

Views = Callable[[torch.Tensor], dict[str, Any]]
OVERLAPS: dict[str, Views] = {
    "across each other": lambda base: {"a": base[:8], "b": base[4:]},
    "one in the other": lambda base: {"a": base, "b": base[2:4], "c": {"d": base[3:5]}},
    "transposed": lambda base: {"a": base.view(3, 4), "b": base.view(3, 4).t()},
    "other bytes": lambda base: {"a": base, "b": base.view(torch.int32)},
    "in lists": lambda base: {"a": [base[:8]], "b": {1: base[4:]}},
    "strided": lambda base: {"a": base[::2], "b": base[::3]},
    "columns": lambda base: {"a": base.view(3, 4)[:, :2], "b": base.view(3, 4)[:, 2:]},
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_what_was_saved_so_comes_back(kind: str) -> None:
    source, base = torch.arange(12.0), torch.zeros(12)
    source[5] = torch.nan
    saved, found = OVERLAPS[kind](source), OVERLAPS[kind](base)
    result = resume(saved, found)
    assert result.differences == ()
    for key in ("a", "b"):
        one, other = _first(found[key]), _first(saved[key])
        assert one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()
        assert one.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _first(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


@pytest.mark.parametrize("kind", [kind for kind in OVERLAPS if kind != "columns"])
def test_what_was_saved_with_other_values_is_a_mismatch_that_leaves_them_as_they_were(kind: str) -> None:
    base = torch.zeros(12)
    apart = OVERLAPS[kind](torch.arange(12.0))
    apart["a"] = [apart["a"][0] + 1] if isinstance(apart["a"], list) else apart["a"] + 1
    with pytest.raises(StateMismatchError, match=r"(?s)shares a part of its memory with .*partly overwritten"):
        resume(apart, OVERLAPS[kind](base))
    assert base.tolist() == [0] * 12


def test_what_lies_side_by_side_is_filled_where_it_is() -> None:
    base = torch.zeros(12)
    resume({"a": torch.ones(6), "b": torch.full((6,), 2.0)}, {"a": base[:6], "b": base[6:]})
    assert base.tolist() == [1] * 6 + [2] * 6


def test_inference_tensors_that_overlap_are_filled() -> None:
    source = torch.arange(6.0)
    with torch.inference_mode():
        base = torch.zeros(6)
        found = {"a": base[:4], "b": base[2:]}
    resume({"a": source[:4], "b": source[2:]}, found)
    assert base.tolist() == source.tolist()


def test_what_overlaps_is_read_on_its_own_device_whatever_the_default_is() -> None:
    base = torch.zeros(12)
    shards = [TensorShard(name, "F32", (8,), (), view) for name, view in (("a", base[:8]), ("b", base[4:]))]
    with torch.device("meta"):
        apart, _ = separate(shards, "step 1")
    assert [shard.data.device.type for shard in apart] == ["cpu", "cpu"]
    assert all(shard.data.untyped_storage().data_ptr() != base.data_ptr() for shard in apart)
