"""Pinned memory: pinned once, for as long as it lives; a refusal harms nothing."""

import logging

import pytest
import torch

from aiockpt.runtime.slabs import SlabPool
from tests.simulated.twin_accelerator import TwinAccelerator

KIB = 1024
CUDA0 = torch.device("cuda:0")


@pytest.fixture
def twin() -> TwinAccelerator:
    return TwinAccelerator()


def test_slabs_are_pinned_when_they_are_made_and_those_that_were_there_when_they_are_taken(
    twin: TwinAccelerator,
) -> None:
    pool = SlabPool(4 * KIB, 16 * KIB)
    pool.warm_up(2)
    pool.pin_with(twin.stream(CUDA0))
    assert twin.pinned == {}
    first = pool.acquire(1)
    assert twin.pinned == {first.address: 4 * KIB}
    pool.warm_up(3)
    assert twin.pin_count == 2
    for slab in [pool.acquire(1) for _ in range(3)] + [first]:
        assert slab.address in twin.pinned
        pool.release(slab)
    assert pool.acquire(1).address in twin.pinned
    assert twin.pin_count == 4


def test_a_pool_that_no_device_fills_pins_nothing(twin: TwinAccelerator) -> None:
    pool = SlabPool(4 * KIB, 16 * KIB)
    pool.warm_up(4)
    pool.release(pool.acquire(1))
    pool.close()
    assert twin.pin_count == 0


def test_closing_unpins_what_is_free_and_the_rest_when_it_comes_back(twin: TwinAccelerator) -> None:
    pool = SlabPool(4 * KIB, 8 * KIB)
    pool.pin_with(twin.stream(CUDA0))
    pool.warm_up(2)
    held = pool.acquire(1)
    pool.close()
    assert twin.pinned == {held.address: 4 * KIB}
    pool.release(held)
    assert twin.pinned == {}


def test_a_refusal_is_told_once_and_asked_once(twin: TwinAccelerator, caplog: pytest.LogCaptureFixture) -> None:
    twin.refuses_pins = True
    pool = SlabPool(4 * KIB, 16 * KIB)
    pool.pin_with(twin.stream(CUDA0))
    with caplog.at_level(logging.WARNING, "aiockpt"):
        pool.warm_up(4)
    twin.refuses_pins = False
    pool.release(pool.acquire(1))
    pool.close()
    assert caplog.text.count("cannot be pinned") == 1
    assert twin.pin_count == 0


def test_a_lost_slab_stays_pinned_and_out_of_use(twin: TwinAccelerator) -> None:
    pool = SlabPool(4 * KIB, 8 * KIB)
    pool.pin_with(twin.stream(CUDA0))
    lost = pool.acquire(1)
    pool.lose(lost)
    assert pool.acquire(1) is not lost
    assert pool.is_full
    pool.close()
    assert lost.address in twin.pinned
