"""Differences of two tensors, and of two steps."""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.storage.backend import Backend
from aiockpt.testing.recording import RecordingBackend
from aiockpt.tools.cli import diff
from aiockpt.tools.cli.diff import LeafChange, Progress, diff_steps, measure_difference
from tests.cli.small_checkpoints import data_file, flip, make_state
from tests.small_run import small_checkpointer

EVERY_DTYPE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def unwatched(_: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda _: None)


def compare(place: Path | Backend, one: int, two: int, progress: Progress = unwatched) -> dict[str, LeafChange]:
    compared = partial(diff_steps, one=one, two=two, progress=progress)
    with aiockpt.Checkpointer(place) as ckpt:
        changes = ckpt.run_on_destination("comparison", compared).result(30)
    return {change.name: change for change in changes}


def differing(changes: dict[str, LeafChange]) -> dict[str, str]:
    return {name: change.detail for name, change in changes.items() if change.kind != "same"}


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_a_difference_is_measured_in_every_dtype(dtype: torch.dtype) -> None:
    left = torch.tensor([0, 1, 1, 1]).to(dtype)
    right = torch.tensor([0, 1, 1, 0]).to(dtype)
    found = measure_difference(left, right)
    assert (found.elements, found.changed, found.largest, found.mean) == (4, 1, 1.0, 0.25)
    assert found.relative == pytest.approx((1 / 3) ** 0.5)
    assert found.not_finite == 0


def test_numbers_too_large_for_their_squares_are_compared_all_the_same() -> None:
    left, right = torch.full((3,), 1e200, dtype=torch.float64), torch.full((3,), 3e200, dtype=torch.float64)
    found = measure_difference(left, right)
    assert found.largest == 2e200
    assert found.mean == pytest.approx(2e200)
    assert found.relative is None
    apart = measure_difference(-left * 1e108, left * 1e108)  # further from each other than a number can say
    assert (apart.changed, apart.largest) == (3, float("inf"))


def test_a_difference_does_not_depend_on_the_chunks_it_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(7, 11), torch.randn(7, 11)
    whole = measure_difference(left, right)
    monkeypatch.setattr(diff, "CHUNK_ELEMENTS", 5)
    parts = measure_difference(left, right)
    assert (parts.changed, parts.largest) == (whole.changed, whole.largest)
    assert parts.mean == pytest.approx(whole.mean)
    assert parts.relative == pytest.approx(whole.relative)


def test_what_is_not_a_number_is_counted_and_takes_no_part_in_the_mean() -> None:
    left = torch.tensor([1.0, 1.0, 1.0, torch.inf])
    right = torch.tensor([3.0, torch.nan, torch.inf, 1.0])
    found = measure_difference(left, right)
    assert (found.changed, found.not_finite, found.largest, found.mean, found.relative) == (4, 2, 2.0, 2.0, 2.0)
    lost = measure_difference(torch.zeros(2), torch.full((2,), torch.nan))
    assert (lost.largest, lost.mean, lost.relative) == (None, None, None)


def test_elements_that_torch_cannot_compute_with_are_compared_by_their_bits() -> None:
    left = torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    right = torch.tensor([1, 2, 9], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found = measure_difference(left, right)
    assert (found.changed, found.largest, found.not_finite) == (1, None, 0)


def test_a_step_is_equal_to_itself(made: Path) -> None:
    assert differing(compare(made, 100, 100)) == {}


def test_every_leaf_that_changed_is_named_and_no_other(made: Path) -> None:
    found = compare(made, 100, 200)
    assert differing(found) == {
        "tied": "",
        "layers.2.weight": "",
        "layers.10.weight": "",
        "lr": "10.0 → 20.0",
    }
    assert found["tied"].difference == diff.TensorDifference(1200, 1200, 100.0, 100.0, 1.0, 0)
    assert found["also tied"].kind == "same"
    assert found["own.seed"].what == "value"


def test_what_came_went_or_changed_its_shape_is_told_without_reading_it(made: Path, tmp_path: Path) -> None:
    state = make_state(100)
    state["new"] = torch.ones(2, 3)
    state["fixed"] = torch.arange(7)
    state["another name"] = state["tied"]
    state["extra"] = [1.5]
    state["own"] = aiockpt.per_rank({"seed": 6})
    del state["also tied"], state["layers"]["2"], state["name"]
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, make_state(100)).result()
        ckpt.save(2, state, user="me").result()
    found = compare(tmp_path / "run", 1, 2)
    assert differing(found) == {
        "new": "F32 2×3",
        "fixed": "I64 6 → I64 7",
        "another name": "= tied",
        "also tied": "= tied",
        "layers.2.weight": "F32 40×30",
        "layers.2.bias": "F32 3",
        "name": "'a run'",
        "extra": "[1.5]",
        "own.seed": "5 → 6",
        "user": "'me'",
    }
    assert found["new"].kind == found["extra"].kind == "added"
    assert found["layers.2.bias"].kind == found["name"].kind == "removed"


def test_a_damaged_block_is_not_taken_for_a_change(root: Path) -> None:
    flip(data_file(root, 200), -1)
    with pytest.raises(aiockpt.CorruptionError):
        compare(root, 100, 200)


def test_a_lease_guards_the_step_while_it_is_read_and_is_gone_afterwards(root: Path) -> None:
    leases: list[Path] = []

    def watch(_: int) -> AbstractContextManager[Callable[[int], object]]:
        leases.extend(root.glob("step-*/lease-*"))
        return unwatched(0)

    compare(root, 100, 200, progress=watch)
    assert {lease.parent.name for lease in leases} == {"step-00000100", "step-00000200"}
    assert list(root.glob("step-*/lease-*")) == []


def test_a_place_that_may_only_be_read_is_read_without_a_lease(root: Path) -> None:
    class ReadOnly(RecordingBackend):
        async def put(self, key: str, data: bytes) -> None:
            raise aiockpt.StorageError("read-only file system")

    backend = ReadOnly(LocalBackend(root))
    assert compare(backend, 100, 200)["tied"].kind == "changed"
    assert "delete" not in {operation.verb for operation in backend.operations}


HIDDEN: dict[str, tuple[Any, Any]] = {
    "digits that are not printed": (np.array([0.1], ">f8"), np.array([0.1 + 1e-12], ">f8")),
    "the middle of a long array": (np.array(["a"] * 2001), np.array(["a"] * 1000 + ["b"] + ["a"] * 1000)),
    "zeros at the end of a long list": ([0] * 1500, [0] * 1501),
    "the sign of NaN": (float("nan"), -float("nan")),
    "the factory of a dict": (defaultdict(list), defaultdict(int)),
    "the order of an OrderedDict": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "an empty dict": ({"a": 1, "b": {}}, {"a": 1}),
    "the type of a long array": (array("b", [1] * 70_000), array("B", [1] * 70_000)),
    "an array in place of a tensor": (np.arange(3), torch.arange(3)),
    "a value of each rank": (aiockpt.per_rank(1), 1),
    "a part of a list": ([[1, np.array(["a"] * 2001)]], [[1, np.array(["a"] * 1000 + ["b"] + ["a"] * 1000)]]),
    "keys that print alike": ({1.5: 1, "1.5": 2}, {1.5: 3, "1.5": 2}),
    "a key that is no name": ({True: 1, 2**70: 2}, {True: 3, 2**70: 2}),
}


@pytest.mark.parametrize(("before", "after"), HIDDEN.values(), ids=HIDDEN)
def test_values_that_differ_are_told_even_where_they_are_shown_alike(before: Any, after: Any, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        for step, value in enumerate((before, after, before)):
            ckpt.save(step, {"x": value, "same": 1}).result()
    assert len(differing(compare(tmp_path / "run", 0, 1))) == 1
    assert differing(compare(tmp_path / "run", 0, 2)) == {}
