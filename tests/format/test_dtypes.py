"""The dtype table against torch and safetensors themselves."""

import json

import pytest
import safetensors.torch
import torch

from aiockpt.errors import UsageError
from aiockpt.format import dtypes

TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTISED = {torch.qint8, torch.qint32, torch.quint8, torch.quint2x4, torch.quint4x2}


@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_DTYPES if dtype not in QUANTISED], ids=str)
def test_every_dtype_of_torch_has_a_code_of_the_same_width(dtype: torch.dtype) -> None:
    code = dtypes.from_torch_name(str(dtype), dtype.itemsize)
    assert getattr(torch, dtypes.torch_name(code)) is dtype
    assert dtypes.itemsize(code) == dtype.itemsize == dtypes.itemsize_if_known(code)
    assert dtypes.from_torch_name(str(dtype).removeprefix("torch."), dtype.itemsize) == code


def test_the_table_has_no_row_beyond_torch() -> None:
    assert {dtypes.torch_name(code) for code in dtypes.CODES} <= {
        str(dtype).removeprefix("torch.") for dtype in TORCH_DTYPES if dtype not in QUANTISED
    }


@pytest.mark.parametrize("dtype", sorted(QUANTISED, key=str), ids=str)
def test_a_quantised_dtype_is_refused_with_a_way_out(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="int_repr"):
        dtypes.from_torch_name(str(dtype), dtype.itemsize)


@pytest.mark.parametrize("code", sorted(dtypes.CODES))
def test_native_means_that_safetensors_opens_it_as_the_same_dtype(code: str) -> None:
    size = 2 * dtypes.itemsize(code)
    header = json.dumps({"x": {"dtype": code, "shape": [2], "data_offsets": [0, size]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(size)
    try:
        found = safetensors.torch.load(data)["x"].dtype
    except (safetensors.SafetensorError, KeyError):
        found = None
    assert dtypes.is_native(code) == (found is not None)
    assert found in (None, getattr(torch, dtypes.torch_name(code)))


def test_a_dtype_that_is_not_in_the_table_has_a_code_that_says_its_width_and_its_name() -> None:
    code = dtypes.from_torch_name("torch.float3", 1)
    assert (code, dtypes.itemsize(code), dtypes.torch_name(code), dtypes.is_native(code)) == (
        "X1.float3",
        1,
        "float3",
        False,
    )
    assert not dtypes.same(code, "U8")


def test_a_dtype_that_has_come_into_the_table_keeps_its_old_code_too() -> None:
    assert dtypes.itemsize("X2.bfloat16") == 2
    assert dtypes.same("X2.bfloat16", "BF16")


@pytest.mark.parametrize(
    "code", ["F3", "X3.float3", "X2.float32", "X1.", "X1.Float", "X1.a.b", "x1.float3", "X1.float3\n"]
)
def test_what_is_no_code_is_refused_by_name(code: str) -> None:
    assert dtypes.itemsize_if_known(code) is None
    with pytest.raises(UsageError, match="is not a dtype code"):
        dtypes.itemsize(code)
