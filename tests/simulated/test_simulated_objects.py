"""The simulated object store keeps the contract, and does what its troubles say."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiockpt.errors import (
    ObjectExistsError,
    StorageAccessError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
)
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying, RetryPolicy
from aiockpt.testing.backend_suite import BackendSuite
from tests.simulated.object_troubles import TRANSIENT, DrawnTroubles, Planned, PlannedTroubles, Request, Trouble
from tests.simulated.objects_client import ClientCrashedError, ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore, StoreError
from tests.simulated.simulation import SimulatedClock
from tests.simulated.virtual_time import run_virtually

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


# The store


def refused(status: int, call: Callable[[], object]) -> bool:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value.status == status


def test_nothing_of_an_upload_is_visible_before_it_is_completed() -> None:
    store = ObjectStore(SimulatedClock())
    number = store.start_upload("a")
    tags = {at: store.put_part(number, at, b"%d" % at * 2) for at in (7, 1, 4)}
    tags[4] = store.put_part(number, 4, b"4")
    assert refused(404, lambda: store.get("a"))
    assert store.list("").objects == ()
    assert store.uploads == {number: "a"}
    store.complete_upload(number, sorted(tags.items()))
    assert store.get("a").body == b"11477"
    assert not store.uploads
    assert refused(404, lambda: store.put_part(number, 9, b""))
    assert refused(404, lambda: store.complete_upload(number, sorted(tags.items())))


def test_parts_that_are_not_there_or_out_of_order_make_no_object() -> None:
    store = ObjectStore(SimulatedClock())
    number = store.start_upload("a")
    one, two = store.put_part(number, 1, b"1"), store.put_part(number, 2, b"2")
    for parts in ([], [(1, one), (3, two)], [(1, two)], [(2, two), (1, one)], [(1, one), (1, one)]):
        assert refused(400, lambda parts=parts: store.complete_upload(number, parts))  # type: ignore[misc]
    assert not store.objects


def test_of_two_uploads_of_one_key_the_first_to_be_completed_wins() -> None:
    store = ObjectStore(SimulatedClock())
    first, second = store.start_upload("a"), store.start_upload("a")
    parts = {number: [(1, store.put_part(number, 1, number.encode()))] for number in (first, second)}
    store.complete_upload(second, parts[second])
    assert refused(412, lambda: store.complete_upload(first, parts[first]))
    assert store.get("a").body == second.encode()
    store.abort_upload(first)
    assert not store.uploads


@pytest.mark.parametrize("page_keys", [1, 2, 3, 100])
def test_pages_hold_every_name_once_and_in_order(page_keys: int) -> None:
    store = ObjectStore(SimulatedClock(), page_keys=page_keys)
    for key in ("f/a", "f/b/1", "f/b/2", "f/b0", "f/c", "f/d/1", "g"):
        store.put(key, b"")
    shown: list[str] = []
    after = ""
    while True:
        page = store.list("f/", after)
        assert len(page.objects) + len(page.prefixes) <= page_keys
        shown += sorted([key for key, _ in page.objects] + list(page.prefixes))
        after = page.next_after
        if not after:
            break
    assert shown == ["f/a", "f/b/", "f/b0", "f/c", "f/d/"]


def test_objects_are_dated_by_the_stores_clock() -> None:
    clock = SimulatedClock()
    store = ObjectStore(clock)
    store.put("a", b"")
    clock.advance(5)
    store.put("b", b"")
    assert store.get("b").modified_ns - store.get("a").modified_ns == 5 * 10**9


# Troubles


def outcome(
    trouble: Trouble, verb: str, call: Callable[[Backend], Coroutine[Any, Any, object]]
) -> tuple[object, set[str]]:
    """Return what a call ends with whose first request of *verb* meets *trouble*, and the keys in the store then."""
    clock = SimulatedClock()
    store = ObjectStore(clock)
    store.put("there", b"data")
    backend = ObjectsBackend(store, PlannedTroubles([Planned(trouble=trouble, verb=verb)]))

    async def main() -> object:
        try:
            return await call(backend)
        except (StorageError, ClientCrashedError) as error:
            return error

    return run_virtually(main, clock), set(store.objects)


@pytest.mark.parametrize(
    ("trouble", "kind", "retryable", "effect"),
    [
        ("internal_error", StorageError, True, False),
        ("internal_error_after_effect", StorageError, True, True),
        ("slow_down", StorageThrottledError, True, False),
        ("too_many_requests", StorageThrottledError, True, False),
        ("expired", StorageAccessError, True, False),
        ("denied", StorageAccessError, False, False),
        ("reset", StorageError, True, False),
        ("answer_lost", StorageError, True, True),
        ("timeout", StorageTimeoutError, True, False),
        ("timeout_after_effect", StorageTimeoutError, True, True),
        ("wrong_body", StorageTransferError, True, False),
        ("other_writer", StorageError, True, False),
        ("resent", ObjectExistsError, False, True),
    ],
)
def test_each_trouble_of_a_create_is_an_error_that_says_what_to_do(
    trouble: Trouble, kind: type[StorageError], retryable: bool, effect: bool
) -> None:
    error, keys = outcome(trouble, "PUT-NEW", lambda backend: backend.put_new("a", b"data"))
    assert type(error) is kind
    assert error.retryable is retryable
    assert ("a" in keys) is effect


def test_a_client_that_crashed_makes_no_request_any_more() -> None:
    async def go_on(backend: Backend) -> None:
        with pytest.raises(ClientCrashedError):
            await backend.put("a", b"")
        await backend.put("b", b"")

    for trouble, keys in (("crash", {"there"}), ("crash_after_effect", {"there", "a"})):
        error, found = outcome(trouble, "PUT", go_on)  # type: ignore[arg-type]
        assert isinstance(error, ClientCrashedError)
        assert found == keys


def test_the_same_seed_draws_the_same_troubles() -> None:
    requests = [Request("GET", "a", number) for number in range(200)]
    drawn = [DrawnTroubles(seed, fraction=0.5) for seed in (1, 1, 2)]
    met = [[troubles.next_trouble(request) for request in requests] for troubles in drawn]
    assert met[0] == met[1] != met[2]
    assert 50 < len(drawn[0].met) < 150
    assert "error_body" not in met[0], "a GET has none"
