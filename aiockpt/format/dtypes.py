"""The table of element types: their codes, their widths, and their names in torch and safetensors.

Guarantees:

- Every dtype of torch 2.13 that a dense tensor can have is here; its elements are whole bytes (packed types such as
  ``float4_e2m1fn_x2`` count as their bytes). Quantised dtypes are refused: they carry scales outside the tensor.
- A dtype that is newer than this table is stored as its bytes. Its code has their number and the name in torch, as
  ``X2.float16_new``, and remains valid where a later table adds another code: `same` compares them.
- A code, once released, keeps its meaning: checkpoints name their dtypes by it.
- *native* means that every safetensors of today writes and reads it under that code; the others become U8 entries.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from aiockpt.errors import UsageError


class DType(msgspec.Struct, frozen=True):
    """One row: the code in manifests, bytes an element, torch's attribute name, whether safetensors has it."""

    code: str
    itemsize: int
    torch_name: str
    native: bool = False


_TABLE = (
    DType("BOOL", 1, "bool", native=True),
    DType("U8", 1, "uint8", native=True),
    DType("I8", 1, "int8", native=True),
    DType("U16", 2, "uint16", native=True),
    DType("I16", 2, "int16", native=True),
    DType("U32", 4, "uint32", native=True),
    DType("I32", 4, "int32", native=True),
    DType("U64", 8, "uint64", native=True),
    DType("I64", 8, "int64", native=True),
    DType("F16", 2, "float16", native=True),
    DType("BF16", 2, "bfloat16", native=True),
    DType("F32", 4, "float32", native=True),
    DType("F64", 8, "float64", native=True),
    DType("C32", 4, "complex32"),
    DType("C64", 8, "complex64", native=True),
    DType("C128", 16, "complex128"),
    DType("F8_E4M3", 1, "float8_e4m3fn", native=True),
    DType("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", native=True),
    DType("F8_E5M2", 1, "float8_e5m2", native=True),
    DType("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", native=True),
    # safetensors has F8_E8M0 and F4, but its torch loader (0.8) opens neither.
    DType("F8_E8M0", 1, "float8_e8m0fnu"),
    DType("F4_E2M1_X2", 1, "float4_e2m1fn_x2"),
    DType("BITS8", 1, "bits8"),
    DType("BITS16", 2, "bits16"),
    DType("BITS1X8", 1, "bits1x8"),
    DType("BITS2X4", 1, "bits2x4"),
    DType("BITS4X2", 1, "bits4x2"),
    *(DType(f"U{bits}", 1, f"uint{bits}") for bits in range(1, 8)),
    *(DType(f"I{bits}", 1, f"int{bits}") for bits in range(1, 8)),
)
_BY_CODE = {row.code: row for row in _TABLE}
_BY_TORCH_NAME = {row.torch_name: row for row in _TABLE}

_UNLISTED = re.compile(r"X(1|2|4|8|16)\.([a-z][a-z0-9_]{0,62})")

CODES = frozenset(_BY_CODE)
ITEMSIZES = {row.code: row.itemsize for row in _TABLE}
"""Bytes an element, by code of the table."""
TORCH_NAMES = {row.code: row.torch_name for row in _TABLE}
"""The attribute of ``torch``, by code; an older torch lacks some."""


def itemsize(code: str) -> int:
    """Return the bytes of one element."""
    return _row(code).itemsize


def itemsize_if_known(code: str) -> int | None:
    """Return the bytes of one element; None where *code* is not valid."""
    row = _BY_CODE.get(code) or _unlisted(code)
    return None if row is None else row.itemsize


def same(code: str, other: str) -> bool:
    """Return whether two codes stand for the same dtype."""
    return code == other or torch_name(code) == torch_name(other)


def is_native(code: str) -> bool:
    """Return whether a safetensors entry can have this dtype itself, instead of U8."""
    return _row(code).native


def torch_name(code: str) -> str:
    """Return the attribute of ``torch`` that is this dtype."""
    return _row(code).torch_name


def from_torch_name(name: str, itemsize: int) -> str:
    """Return the code of a torch dtype, given as ``"torch.bfloat16"`` or ``"bfloat16"``, with elements of *itemsize* bytes.

    Raises:
        UsageError: no dense tensor of whole bytes has this dtype (quantised ones).
    """
    own = name.removeprefix("torch.")
    code = row.code if (row := _BY_TORCH_NAME.get(own)) else f"X{itemsize}.{own}"
    if "qint" in own or "quint" in own or itemsize_if_known(code) is None:
        raise UsageError(
            f"dtype {name} cannot be stored: save its integer representation (`int_repr()`) and its scales instead"
        )
    return code


def _row(code: str) -> DType:
    row = _BY_CODE.get(code) or _unlisted(code)
    if row is None:
        raise UsageError(f"{code!r} is not a dtype code of aiockpt/1: one of {', '.join(sorted(CODES))}")
    return row


@lru_cache(maxsize=64)
def _unlisted(code: str) -> DType | None:
    """Return the row of a dtype that is stored as its bytes; None where *code* is none, or contradicts the table."""
    match = _UNLISTED.fullmatch(code)
    if match is None:
        return None
    row = DType(code, int(match[1]), match[2])
    listed = _BY_TORCH_NAME.get(row.torch_name)
    return row if listed is None or listed.itemsize == row.itemsize else None
