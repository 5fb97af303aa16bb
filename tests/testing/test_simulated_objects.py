"""Is the simulated object store one: does it keep the contract, and does it do what its troubles say?"""

from __future__ import annotations

import pytest

from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying, RetryPolicy
from aiockpt.testing.backend_suite import BackendSuite
from aiockpt.testing.object_troubles import TRANSIENT, DrawnTroubles, Trouble
from aiockpt.testing.objects_client import ObjectsBackend
from aiockpt.testing.simulated_objects import ObjectStore
from aiockpt.testing.simulation import SimulatedClock

AT_ONCE = RetryPolicy(first_wait_s=0, longest_wait_s=0, throttled_first_wait_s=0, throttled_longest_wait_s=0)
UNSEEN: frozenset[Trouble] = TRANSIENT - {"wrong_body", "resent", "expired"}
"""What `Retrying` alone makes good. A wrong bit in a range shows in the reader's checksums only; a conditional put that was
sent again below the client shows in who reads back; credentials that expire twice in a call are not refreshed."""


class TestSimulatedObjects(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return ObjectsBackend(ObjectStore(SimulatedClock(), page_keys=3))


class TestRetryingWithoutTroubles(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return Retrying(ObjectsBackend(ObjectStore(SimulatedClock())))


@pytest.mark.parametrize("seed", range(3))
class TestRetryingInTrouble(BackendSuite):
    """Every third request fails in some way that passes; who uses the wrapped backend sees nothing of it."""

    @pytest.fixture
    def backend(self, seed: int) -> Backend:
        troubles = DrawnTroubles(seed, fraction=0.3, kinds=UNSEEN)
        return Retrying(ObjectsBackend(ObjectStore(SimulatedClock()), troubles, timeout_s=0), AT_ONCE)
