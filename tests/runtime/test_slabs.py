"""The pool is bounded, fair, and gets every slab back."""

import mmap
import threading

import pytest

from aiockpt.errors import ClosedError, StorageTimeoutError
from aiockpt.runtime.host_memory import PrivateMemory
from aiockpt.runtime.slabs import SlabPool
from tests.watch import until

KIB = 1024


def test_slabs_are_page_aligned_and_as_large_as_asked_for() -> None:
    pool = SlabPool(64 * KIB, 256 * KIB)
    slab = pool.acquire(1)
    assert slab.address % 4096 == 0
    assert len(slab.memory) == 64 * KIB
    slab.memory[:4] = b"abcd"
    pool.release(slab)


def test_the_pool_never_exceeds_its_ceiling_and_says_what_it_waited_for() -> None:
    pool = SlabPool(4 * KIB, 10 * KIB)
    pool.fit(100, available_bytes=lambda: 1 << 30)  # a given ceiling stays
    held = [pool.acquire(1), pool.acquire(1)]
    with pytest.raises(StorageTimeoutError, match="pool_bytes"):
        pool.acquire(0.01)
    assert pool.statistics().allocated_bytes == 8 * KIB
    for slab in reversed(held):
        pool.release(slab)
    seen = pool.statistics()
    assert (seen.used_slabs, seen.peak_used_slabs, seen.waiting) == (0, 2, 0)


def test_memory_is_reused_rather_than_allocated() -> None:
    pool = SlabPool(4 * KIB, 40 * KIB)
    first = pool.acquire(1)
    pool.release(first)
    assert pool.acquire(1) is first


def test_warming_up_allocates_up_to_the_ceiling() -> None:
    pool = SlabPool(4 * KIB, None)
    pool.fit(8, available_bytes=lambda: 80 * KIB)
    pool.warm_up(8)
    assert pool.statistics().allocated_bytes == 20 * KIB


def test_a_pool_without_a_ceiling_grows_with_the_state_and_never_shrinks() -> None:
    pool = SlabPool(4 * KIB, None)
    for slabs, ceiling in ((2, 2), (6, 6), (1, 6), (1000, 25)):
        pool.fit(slabs, available_bytes=lambda: 400 * KIB)
        assert pool.statistics().ceiling_bytes == ceiling * 4 * KIB


def test_a_waiter_is_served_when_the_ceiling_rises() -> None:
    pool = SlabPool(4 * KIB, None)
    pool.acquire(1)
    waiter = threading.Thread(target=pool.acquire, args=(30,))
    waiter.start()
    until(lambda: pool.statistics().waiting == 1, "the waiter")
    pool.fit(2, available_bytes=lambda: 400 * KIB)
    waiter.join(250)
    assert not waiter.is_alive()
    assert pool.statistics().used_slabs == 2


def test_closing_wakes_whoever_waits() -> None:
    pool = SlabPool(4 * KIB, 4 * KIB)
    pool.acquire(1)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            pool.acquire(10)
        except ClosedError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    pool.close()
    waiter.join(250)
    assert len(failures) == 1


def test_a_failed_allocation_leaves_the_counts_right() -> None:
    class Scarce(PrivateMemory):
        failures = 1

        def map(self, number: int, size_bytes: int) -> mmap.mmap:
            if self.failures:
                self.failures -= 1
                raise MemoryError
            return super().map(number, size_bytes)

    pool = SlabPool(4 * KIB, 4 * KIB, Scarce())
    with pytest.raises(MemoryError):
        pool.acquire(1)
    assert pool.statistics().used_slabs == 0
    pool.release(pool.acquire(1))


def test_each_new_slab_is_settled_once_wherever_it_was_made() -> None:
    class Noting(PrivateMemory):
        def __init__(self) -> None:
            self.huge: list[int] = []

        def make_huge(self, address: int, size_bytes: int) -> None:
            assert size_bytes == 4 * KIB
            self.huge.append(address)

    memory = Noting()
    pool = SlabPool(4 * KIB, 12 * KIB, memory)
    pool.warm_up(1)
    slabs = [pool.acquire(1), pool.acquire(1)]
    seen = [pool.is_huge]
    for _ in range(2):
        pool.make_huge()
        seen.append(pool.is_huge)
        assert sorted(memory.huge) == sorted(slab.address for slab in slabs)
    assert seen == [False, True, True]
