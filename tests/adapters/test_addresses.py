"""Is it known which tensors lie in the memory of others, to the byte?"""

from __future__ import annotations

import torch

from aiockpt.adapters.addresses import TensorMemory

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


def test_the_gaps_of_a_strided_tensor_are_anybodys() -> None:
    memory = TensorMemory([FLAT[::2]])
    assert FLAT[::2] in memory
    assert FLAT[2:4] not in memory
    assert memory.touches(FLAT[1::2])
    assert not memory.touches(FLAT[11:])


def test_around_a_tensor_is_all_of_its_storage() -> None:
    assert TensorMemory([FLAT[2:4]], around=True).touches(FLAT[10:])
    assert not TensorMemory([FLAT[2:4]], around=True).touches(torch.zeros(3))
