"""The bits that are NaN or infinite: by torch, value by value, and by `aiockpt.format.finite`, from raw bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format.dtypes import CODES, itemsize, torch_name
from aiockpt.format.finite import count_not_finite, may_be_not_finite

FLOATS = sorted(code for code in CODES if may_be_not_finite(code))


def said_by_torch(code: str, raw: bytes) -> int:
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, torch_name(code)))
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    return int((~torch.isfinite(values.to(torch.float64))).sum())


def test_all_types_of_torch_with_such_values_are_known() -> None:
    for code in CODES:
        dtype = getattr(torch, torch_name(code), None)
        if dtype is not None and code != "F4_E2M1_X2":  # it has neither NaN nor inf
            assert may_be_not_finite(code) == (dtype.is_floating_point or dtype.is_complex), code


@pytest.mark.parametrize("code", [code for code in FLOATS if itemsize(code) <= 2])
def test_every_number_of_one_or_two_bytes(code: str) -> None:
    width = itemsize(code)
    for raw in (number.to_bytes(width, "little") for number in range(256**width)):
        assert count_not_finite(code, raw) == int(raw in bad_numbers(code)), raw


_bad: dict[str, set[bytes]] = {}


def bad_numbers(code: str) -> set[bytes]:
    """Return the bits of all numbers of *code* that are not finite, as torch has it."""
    if code not in _bad:
        width = itemsize(code)
        raw = b"".join(number.to_bytes(width, "little") for number in range(256**width))
        values = torch.frombuffer(bytearray(raw), dtype=getattr(torch, torch_name(code))).to(torch.float64)
        bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        _bad[code] = {int(number).to_bytes(width, "little") for number in bad}
    return _bad[code]


@pytest.mark.parametrize("code", FLOATS)
@given(data=st.data())
def test_random_bits_and_the_numbers_next_to_infinity(code: str, data: st.DataObject) -> None:
    width = itemsize(code) // (2 if code.startswith("C") else 1)
    real = {2: torch.float16, 4: torch.float32, 8: torch.float64}.get(width)
    edges: list[bytes] = [b"\0" * width, b"\xff" * width, b"\x80" + b"\0" * (width - 1)]
    if real is not None:
        infinite = torch.tensor([float("inf")], dtype=real).view(torch.uint8).numpy().tobytes()
        number = int.from_bytes(infinite, "little")
        edges += [
            ((number + step) | sign << (8 * width - 1)).to_bytes(width, "little")
            for step in (-1, 0, 1)
            for sign in (0, 1)
        ]
    one = st.sampled_from(edges) | st.binary(min_size=width, max_size=width)
    per_element = itemsize(code) // width
    count = data.draw(st.integers(0, 20)) * per_element
    raw = b"".join(data.draw(st.lists(one, min_size=count, max_size=count)))
    assert count_not_finite(code, raw) == (said_by_torch(code, raw) if raw else 0)
    shifted = memoryview(b"?" + raw)[1:]  # memory at an odd address
    assert count_not_finite(code, shifted) == (said_by_torch(code, raw) if raw else 0)
