"""Templates whose tensors share a part of their memory are filled rightly, or refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiockpt.adapters.addresses import TensorMemory
from aiockpt.adapters.differences import separate
from aiockpt.adapters.tensors import has_memory_of_its_own
from aiockpt.errors import StateMismatchError
from aiockpt.state.shards import TensorShard
from tests.adapters.conftest import resume

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
def test_other_values_are_a_mismatch_and_stay(kind: str) -> None:
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


def test_what_overlaps_is_read_on_its_device() -> None:
    base = torch.zeros(12)
    shards = [TensorShard(name, "F32", (8,), (), view) for name, view in (("a", base[:8]), ("b", base[4:]))]
    with torch.device("meta"):
        apart, _ = separate(shards, "step 1")
    assert [shard.data.device.type for shard in apart] == ["cpu", "cpu"]
    assert all(shard.data.untyped_storage().data_ptr() != base.data_ptr() for shard in apart)


WITHIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda base: base[:3, None].expand(3, 4),
    "expanded twice": lambda base: base[:1, None, None].expand(2, 3, 2),
    "sliding windows": lambda base: base.unfold(0, 4, 1),
    "across itself": lambda base: base.as_strided((4, 3), (2, 1)),
    "columns first": lambda base: base.as_strided((3, 4), (1, 2)),
    "three axes": lambda base: base.as_strided((2, 2, 2), (3, 4, 1)),
    "a part of another": lambda base: base.as_strided((2, 3), (1, 1)),
}
"""Tensors whose own elements share memory."""


@pytest.mark.parametrize("kind", WITHIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_tensor_that_shares_memory_comes_back(kind: str, dtype: torch.dtype) -> None:
    source, base = torch.arange(12.0).to(dtype), torch.zeros(12, dtype=dtype)
    found = WITHIN[kind](base)
    result = resume({"a": WITHIN[kind](source)}, {"a": found})
    assert result.differences == ()
    assert torch.equal(found, WITHIN[kind](source))


@pytest.mark.parametrize("kind", WITHIN)
def test_a_tensor_whose_elements_share_memory_takes_no_other_values(kind: str) -> None:
    base = torch.zeros(12)
    found = WITHIN[kind](base)
    with pytest.raises(StateMismatchError, match=r"(?s)a: its elements share memory, .*partly overwritten"):
        resume({"a": torch.arange(1.0, found.numel() + 1).view(found.shape)}, {"a": found})
    assert base.tolist() == [0] * 12


def test_a_module_with_an_expanded_buffer_comes_back() -> None:
    def module(value: float) -> torch.nn.Module:
        made = torch.nn.Linear(1, 1)
        made.register_buffer("mask", torch.full((1, 4), value).expand(3, 4))
        return made

    found = module(0.0)
    resume({"m": module(2.0)}, {"m": found})
    assert torch.equal(found.get_buffer("mask"), torch.full((3, 4), 2.0))


def test_whether_elements_share_memory_is_told_from_strides() -> None:
    """It says no only where it is so, and yes for every view that slices, transposes and steps make of a tensor."""
    dice = random.Random(0)
    base = torch.arange(5000)
    for _ in range(3000):
        shape = [dice.randrange(1, 5) for _ in range(dice.randrange(4))]
        view = base.as_strided(shape, [dice.randrange(25) for _ in shape])
        if has_memory_of_its_own(view):
            assert len(set(view.reshape(-1).tolist())) == view.numel(), view.stride()
        real = torch.arange(64).view(4, 4, 4).permute(dice.sample(range(3), 3))
        assert has_memory_of_its_own(real[:: dice.randrange(1, 4), dice.randrange(4) :, :: dice.randrange(1, 4)])


# Which tensors lie in the memory of others, to the byte.

FLAT = torch.arange(12.0)


def test_what_begins_where_another_ends_does_not_touch_it() -> None:
    memory = TensorMemory([FLAT[2:6]])
    assert not memory.touches(FLAT[:2])
    assert memory.touches(FLAT[:3])
    assert memory.touches(FLAT[5:])
    assert not memory.touches(FLAT[6:])
    assert not memory.touches(FLAT[3:3])


def test_a_matrix_ends_with_its_last_element() -> None:
    memory = TensorMemory([FLAT[:6].view(2, 3)])
    assert memory.touches(FLAT[5:])
    assert not memory.touches(FLAT[6:])


def test_what_is_in_another_is_so_with_all_of_it() -> None:
    memory = TensorMemory([FLAT[2:6], FLAT[8:10]])
    assert FLAT[2:6] in memory
    assert FLAT[3:5] in memory
    assert FLAT[1:3] not in memory
    assert FLAT[5:7] not in memory
    assert FLAT[6:8] not in memory


def test_the_gaps_of_a_strided_tensor_are_not_its_own() -> None:
    memory = TensorMemory([FLAT[::2]])
    assert FLAT[::2] in memory
    assert FLAT[2:4] not in memory
    assert memory.touches(FLAT[1::2])
    assert not memory.touches(FLAT[11:])


def test_around_a_tensor_is_all_of_its_storage() -> None:
    assert TensorMemory([FLAT[2:4]], around=True).touches(FLAT[10:])
    assert not TensorMemory([FLAT[2:4]], around=True).touches(torch.zeros(3))
