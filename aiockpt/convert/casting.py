"""Casting of tensors to another dtype: floating point is rounded, other dtypes stay.

Guarantee: no finite element becomes infinite; an error names the tensor instead.

Floats of 8 bits stay unchanged: their scales are separate tensors, and rounding one without the other makes no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from aiockpt.adapters.tensors import byte_view, dtype_code
from aiockpt.errors import UsageError
from aiockpt.format.finite import count_not_finite

_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CASTABLE = frozenset(_FLOATS.values())


def parse_dtype(name: str | torch.dtype | None) -> str | None:
    """Return the code of the dtype to round floating point to; None leaves all unchanged.

    Raises:
        UsageError: weights cannot be rounded to it.
    """
    if name is None:
        return None
    code = _FLOATS.get(str(name).removeprefix("torch."))
    if code is None:
        raise UsageError(f"dtype {name}: weights can be rounded to {', '.join(_FLOATS)}; give one of these")
    return code


def cast_code(code: str, wanted: str | None) -> str:
    """Return the dtype that *code* becomes where *wanted* is requested."""
    return wanted if wanted is not None and code in _CASTABLE else code


class Cast(msgspec.Struct, frozen=True):
    """Stored elements of the tensor *name*, and the memory for the cast ones; both flat."""

    name: str
    stored: torch.Tensor
    into: torch.Tensor


RUN_ELEMENTS = 1 << 15
"""Elements that are cast in one call: torch shares so few among no threads. Its threads wait for each other in a loop that
takes a processor; beside a training on all of them a cast took ten times its time."""


def _not_finite(tensor: torch.Tensor) -> int:
    return count_not_finite(dtype_code(tensor.dtype), byte_view(tensor))


def cast_all(casts: Sequence[Cast]) -> None:
    """Round each to the nearest elements of its new dtype. Runs on a worker thread.

    Raises:
        UsageError: an element is too large for it.
    """
    for cast in casts:
        for at in range(0, cast.into.numel(), RUN_ELEMENTS):
            cast.into[at : at + RUN_ELEMENTS].copy_(cast.stored[at : at + RUN_ELEMENTS])
        count = _not_finite(cast.into)
        if count and count > _not_finite(cast.stored):
            dtype = str(cast.into.dtype).removeprefix("torch.")
            raise UsageError(
                f"{cast.name} has elements that {dtype} cannot hold: they would become infinite; give another dtype, such "
                "as bfloat16 or float32"
            )
