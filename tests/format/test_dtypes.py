"""The dtype table against torch and safetensors themselves."""

from __future__ import annotations

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
    code = dtypes.from_torch_name(str(dtype))
    assert getattr(torch, dtypes.torch_name(code)) is dtype
    assert dtypes.itemsize(code) == dtype.itemsize == dtypes.ITEMSIZES[code]
    assert dtypes.from_torch_name(str(dtype).removeprefix("torch.")) == code


def test_the_table_has_no_row_beyond_torch() -> None:
    assert {dtypes.torch_name(code) for code in dtypes.CODES} == {
        str(dtype).removeprefix("torch.") for dtype in TORCH_DTYPES if dtype not in QUANTISED
    }


@pytest.mark.parametrize("dtype", sorted(QUANTISED, key=str), ids=str)
def test_a_quantised_dtype_is_refused_with_a_way_out(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="int_repr"):
        dtypes.from_torch_name(str(dtype))


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


def test_unknown_dtypes_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="float3"):
        dtypes.from_torch_name("torch.float3")
    with pytest.raises(UsageError, match="F3"):
        dtypes.itemsize("F3")
