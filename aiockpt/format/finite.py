"""The count of values that are NaN or infinite in raw bytes, by comparing their bits as integers.

Guarantees:

- Exact for every dtype: no sum that may overflow, no conversion.
- Memory in which all is finite is read twice, by one thread that has released the GIL, and nothing is allocated.

In the formats of IEEE 754 a number is not finite when its exponent has all bits set. Without the sign bit such numbers are
the greatest of all as signed integers, with the sign bit as unsigned integers: so two maxima suffice.
"""

from __future__ import annotations

import msgspec
import numpy as np


class _Bits(msgspec.Struct, frozen=True):
    """The bits of numbers of *width* bytes that are not finite: at or above *least*, sign aside; or exactly *only*."""

    width: int
    least: int = 0
    only: int | None = None


_F16, _F32, _F64 = _Bits(2, 0x7C00), _Bits(4, 0x7F80_0000), _Bits(8, 0x7FF0_0000_0000_0000)
_NEGATIVE_ZERO = _Bits(1, only=0x80)
_BITS = {
    "F16": _F16,
    "BF16": _Bits(2, 0x7F80),
    "F32": _F32,
    "F64": _F64,
    "C32": _F16,
    "C64": _F32,
    "C128": _F64,
    "F8_E4M3": _Bits(1, 0x7F),
    "F8_E5M2": _Bits(1, 0x7C),
    "F8_E4M3FNUZ": _NEGATIVE_ZERO,
    "F8_E5M2FNUZ": _NEGATIVE_ZERO,
    "F8_E8M0": _Bits(1, only=0xFF),
}
"""By dtype code (`aiockpt.format.dtypes`); the other ones have no such values."""


def may_be_not_finite(code: str) -> bool:
    """Return whether there are values of the dtype *code* that are NaN or infinite."""
    return code in _BITS


def count_not_finite(code: str, memory: bytes | bytearray | memoryview) -> int:
    """Return how many numbers in *memory* are NaN or infinite; of a complex value, each part is one.

    Args:
        code: of their dtype, for which `may_be_not_finite`.
        memory: whole elements, at whatever address.
    """
    bits = _BITS[code]
    numbers = np.frombuffer(memory, f"<u{bits.width}")
    if bits.only is not None:
        return int(np.count_nonzero(numbers == bits.only))
    sign = 1 << (8 * bits.width - 1)
    if not numbers.size or (numbers.max() < sign | bits.least and numbers.view(f"<i{bits.width}").max() < bits.least):
        return 0
    return int(np.count_nonzero((numbers & numbers.dtype.type(sign - 1)) >= bits.least))
