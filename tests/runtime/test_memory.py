"""Memory that bytes wait in: on pages, there already, with or without a kernel that knows how."""

from __future__ import annotations

import ctypes
import mmap
import resource

import pytest

from aiockpt.runtime import memory

SIZE_BYTES = 3 * mmap.PAGESIZE + 5


def faults_of_touching(pages: mmap.mmap) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(memory.address_of(pages), 1, len(pages))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("kernel_knows", [True, False])
def test_the_memory_is_zero_starts_on_a_page_and_is_there_already(
    monkeypatch: pytest.MonkeyPatch, kernel_knows: bool
) -> None:
    if not kernel_knows:
        monkeypatch.setattr(memory, "_madvise", lambda *_: -1)
    pages = memory.map_pages(64 << 20)
    assert pages[:SIZE_BYTES] == bytes(SIZE_BYTES)
    assert memory.address_of(pages) % mmap.PAGESIZE == 0
    assert faults_of_touching(pages) < 100  # of 16,384 pages; the interpreter may touch some of its own


def test_memory_that_is_not_there_would_be_noticed() -> None:
    assert faults_of_touching(mmap.mmap(-1, 64 << 20)) > 1000
