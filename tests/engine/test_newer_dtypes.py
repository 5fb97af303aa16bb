"""Dtypes of a torch that is newer than the table: each is carried as its bytes, and announced to older readers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.adapters import tensors
from aiockpt.format import dtypes, manifest
from aiockpt.format.manifest import decode_manifest
from tests.adapters.test_tensors import random_bits

NEWER = [
    torch.float4_e2m1fn_x2,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.bits8,
    torch.bits16,
    torch.float32,
    torch.float64,
    torch.complex128,
]


def take_out_of_the_table(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> str:
    """Make *dtype* one that this version does not know; return the code that it had."""
    code = dtypes.from_torch_name(str(dtype), dtype.itemsize)
    patch.delitem(dtypes._BY_CODE, code)
    patch.delitem(dtypes._BY_TORCH_NAME, str(dtype).removeprefix("torch."))
    patch.setattr(dtypes, "CODES", dtypes.CODES - {code})
    patch.setattr(manifest, "CODES", dtypes.CODES)
    patch.delitem(tensors._CODES, dtype)
    patch.setattr(tensors, "_COPIED", tensors._COPIED - {dtype})
    return code


def state_of(dtype: torch.dtype, *, is_empty: bool) -> dict[str, Any]:
    state = {"plain": random_bits(dtype, 6, 4), "strided": random_bits(dtype, 4, 6).t(), "number": random_bits(dtype)}
    if is_empty:
        for tensor in state.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
    return {**state, "other": [torch.ones(3)]}


def bytes_in(state: dict[str, Any]) -> list[list[int]]:
    return [list(state[name].untyped_storage()) for name in ("plain", "strided", "number")]


@pytest.mark.parametrize("dtype", NEWER, ids=str)
def test_it_is_known_again_by_a_later_version(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = state_of(dtype, is_empty=False)
    with pytest.MonkeyPatch.context() as patch:
        take_out_of_the_table(dtype, patch)
        with aiockpt.Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, saved).result()
            found = state_of(dtype, is_empty=True)
            ckpt.load(found).result()
            read = ckpt.read(1, "plain").result()
        assert bytes_in(found) == bytes_in(saved)
        assert (read.dtype, list(read.untyped_storage())) == (dtype, bytes_in(saved)[0])
    later = state_of(dtype, is_empty=True)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load(later).result()
        ckpt.save(2, later).result()
    assert bytes_in(later) == bytes_in(saved)
    first, second = (
        decode_manifest((tmp_path / f"step-{number:08}" / "MANIFEST-1.json").read_bytes()) for number in (1, 2)
    )
    name = str(dtype).removeprefix("torch.")
    assert (first.requires, first.tensors["plain"].dtype) == (("dtypes",), f"X{dtype.itemsize}.{name}")
    known = dtypes.from_torch_name(name, dtype.itemsize)
    assert (second.requires, second.tensors["plain"].dtype) == ((), known)


def test_a_tensor_of_another_dtype_is_not_filled_from_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        take_out_of_the_table(torch.bits16, patch)
        with aiockpt.Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"w": random_bits(torch.bits16, 4)}).result()
            with pytest.raises(aiockpt.StateMismatchError, match=r"torch.int16 in the state, torch.bits16 in the"):
                ckpt.load({"w": torch.zeros(4, dtype=torch.int16)}).result()


def test_an_older_version_says_that_it_is_older(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.zeros(4)}).result()
        take_out_of_the_table(torch.float32, patch)
        ckpt.save(2, {"w": torch.ones(4)}).result()
        patch.setattr(manifest, "KNOWN_REQUIRES", frozenset({"parts"}))
        with aiockpt.Checkpointer(tmp_path) as old, pytest.raises(aiockpt.CheckpointError, match="requires 'dtypes'"):
            old.load({"w": torch.zeros(4)}).result()


def test_a_torch_that_lacks_it_says_so() -> None:
    for code in ("X2.float16_new", "X2.nn", "X2.float"):
        with pytest.raises(aiockpt.UsageError, match=r"this torch has no torch\."):
            tensors.torch_dtype(code)


def test_it_is_announced_in_parts_and_copies(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.scale = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    state = {"model": model, "other": torch.zeros(4, dtype=torch.float64)}
    with pytest.MonkeyPatch.context() as patch, aiockpt.Checkpointer(tmp_path) as ckpt:
        take_out_of_the_table(torch.float64, patch)
        ckpt.save(1, state).result()
        ckpt.save(2, state, only=["model.weight", "model.bias"]).result()
        ckpt.prune(aiockpt.Retention(last=2, optimizer=1)).result()
    found = [
        decode_manifest(path.read_bytes()) for number in (1, 2) for path in (tmp_path / f"step-{number:08}").glob("M*")
    ]
    assert [(one.step, one.requires) for one in found] == [(1, ("dtypes",)), (2, ("dtypes",))]
