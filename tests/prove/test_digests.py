"""Digests by bits, dtype, shape and order, and by nothing else; that of many parts is that of the whole."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.prove.compare import row_of
from aiockpt.prove.digests import box_sums, digest, digest_value, sum_of_rows, text_of, view_of
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard

BASE = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        BASE.t().contiguous().t(),
        torch.cat([BASE, BASE])[:3],
        torch.stack([BASE, -BASE], -1)[..., 0],
        nn.Parameter(BASE.clone()),
        -torch._neg_view(BASE.clone()).resolve_neg(),  # pyright: ignore[reportPrivateImportUsage]
    ],
)
def test_strides_and_classes_make_no_difference(other: torch.Tensor) -> None:
    assert digest(other) == digest(BASE)


@pytest.mark.parametrize(
    "other",
    [
        BASE.reshape(4, 3),
        BASE.reshape(-1),
        BASE.to(torch.float64),
        BASE.to(torch.int32),
        BASE.view(torch.int32),
        BASE.flip(0),
        torch.where(BASE == 0, -0.0, BASE),
        BASE + torch.eye(3, 4) * 1e-7,
    ],
)
def test_anything_else_does(other: torch.Tensor) -> None:
    assert digest(other) != digest(BASE)


def test_nan_is_itself_by_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    other = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert digest(nan) == digest(nan.clone())
    assert digest(nan) != digest(other)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0, 5),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(2, 2, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.empty(2, device="meta"),
    ],
    ids=str,
)
def test_every_kind_of_tensor_has_one(tensor: torch.Tensor) -> None:
    assert digest(tensor) == digest(tensor.clone())
    assert len(digest(tensor)) == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
def test_the_sum_over_boxes_does_not_depend_on_how_a_tensor_is_cut(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 4).to(dtype)

    def total(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> int:
        found = 0
        for offsets, sizes in boxes:
            data = whole[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]]
            shard = TensorShard("w", "F32", (6, 4), (Box(offsets, sizes),), data)
            found += sum(int(digest, 16) for _, digest in box_sums(shard))
        return found % (1 << 64)

    expected = total(((0, 0), (6, 4)))
    assert total(((0, 0), (3, 4)), ((3, 0), (3, 4))) == expected
    assert total(((0, 0), (6, 1)), ((0, 1), (2, 3)), ((2, 1), (4, 3))) == expected
    whole = whole.flip(0)
    assert total(((0, 0), (6, 4))) != expected


def test_the_sum_over_rows_does_not_depend_on_their_order() -> None:
    assert sum_of_rows(BASE) == sum_of_rows(BASE.flip(0)) == sum_of_rows(BASE[:1]) + sum_of_rows(BASE[1:])
    assert sum_of_rows(BASE) != sum_of_rows(BASE.flip(1))
    assert sum_of_rows(torch.tensor(1.0)) == sum_of_rows(torch.empty(0, 3)) == sum_of_rows(torch.empty(3, 0)) == 0


def test_a_state_is_seen_leaf_by_leaf_with_what_each_belongs_to() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "rng": aiockpt.RNG(),
        "ema": {"w": torch.ones(2)},
        "epoch": 3,
        "config": {"lr": 0.1, "names": ["a", "b"]},
    }
    view = view_of(state, 0)
    assert view.parts == {
        "model": "module", "optimizer": "optimizer", "scheduler": "stateful", "rng": "per rank", "ema.w": "tensor",
        "epoch": "value", "config.lr": "value", "config.names": "value",
    }  # fmt: skip
    assert view.leaves["epoch"] == "3"
    assert view.leaves["config.lr"] == "0.1"
    assert view.leaves["optimizer.groups[0].lr"] == "0.001"
    assert view.leaves["scheduler.step_size"] == "3"
    assert view.leaves["model.weight"] == digest(model.weight)
    assert view.leaves["optimizer.state.model.weight.exp_avg"] == digest(optimizer.state[model.weight]["exp_avg"])
    assert {row_of(leaf, view.parts) for leaf in view.leaves} == {
        "model", "optimizer step", "optimizer exp_avg", "optimizer exp_avg_sq", "optimizer settings", "scheduler",
        "rng torch", "rng python", "rng numpy", "ema", "epoch", "config",
    }  # fmt: skip
    assert set(view.random) == {"torch", "python", "numpy"}


def test_keys_with_dots_and_tensors_of_several_boxes_are_rows_of_their_own() -> None:
    boxes = aiockpt.Shards((4,), {(0,): torch.ones(1), (2,): torch.ones(2)})
    state = {
        "a.b": {"x": 1},
        "a.b.c": 2,
        "a#1": 3,
        "spread": {"w.": boxes},
        "of.all": nn.Linear(1, 1),
        "losses": [1, 2],
    }
    view = view_of(state, 0)
    assert any(name.startswith("spread.w\\.#") for name in view.leaves)
    assert {row_of(leaf, view.parts) for leaf in view.leaves} == {
        "a\\.b", "a\\.b\\.c", "a#1", "spread", "of\\.all", "losses",
    }  # fmt: skip
    assert row_of("c\\.d.e", {}) == "c\\.d"


def test_values_are_told_as_text_and_long_ones_by_a_digest() -> None:
    assert text_of(0.1) == text_of(torch.tensor(0.1, dtype=torch.float64)) == "0.1"
    assert text_of(np.float32(0.5)) == repr(np.float32(0.5))
    assert len(text_of("x" * 100)) == 32
    assert text_of(torch.ones(3)) == digest(torch.ones(3))


def of_many(kind: str, changed: float) -> object:
    """Return a value of some thousand elements, one of which is *changed* by a little."""
    array = np.arange(5000.0)
    array[2500] += changed
    matrix = torch.eye(1500, dtype=torch.float64)
    matrix[700, 700] += changed
    make: dict[str, Callable[[], object]] = {
        "array": lambda: array,
        "array in a dict": lambda: {"a": [array]},
        "tensor beside a number": lambda: {"t": torch.ones(2), "n": changed},
        "tensor in a tuple": lambda: (torch.tensor([0.9 + changed], dtype=torch.float64),),
        "coo": matrix.to_sparse,
        "csr": matrix.to_sparse_csr,
        "csc": matrix.to_sparse_csc,
    }
    return make[kind]()


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize(
    "kind", ["array", "array in a dict", "tensor beside a number", "tensor in a tuple", "coo", "csr", "csc"]
)
def test_every_element_counts(kind: str) -> None:
    one, again, other = of_many(kind, 0.0), of_many(kind, 0.0), of_many(kind, 1e-9)
    assert text_of(one) == text_of(again) != text_of(other)
    assert digest_value(one) == digest_value(again) != digest_value(other)
