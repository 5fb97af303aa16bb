"""Every request of a save to an object store goes wrong, in every way: the step is whole or absent, and told truly."""

from typing import Any

import pytest

from aiockpt.errors import CheckpointError, CommitConflictError, ObjectExistsError
from aiockpt.storage.retry import Retrying, RetryPolicy
from tests.inline_process import Process, states_equal, tiny_state
from tests.simulated.object_troubles import (
    EVERYWHERE,
    LASTING,
    TRANSIENT,
    Planned,
    PlannedTroubles,
    Request,
    Trouble,
    Troubles,
    applies_to,
)
from tests.simulated.objects_client import ClientCrashedError, ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedClock, SimulatedWorld, simulated_world
from tests.simulated.virtual_time import run_virtually

ONCE = sorted(TRANSIENT)


class Store:
    """An object store, and jobs that work on it one after the other."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.objects = ObjectStore(self.clock)
        self.seeds = iter(range(1000))

    def process(self, troubles: Troubles | None = None, policy: RetryPolicy | None = None) -> Process:
        drawn = simulated_world(next(self.seeds))
        world = SimulatedWorld(drawn.files, self.clock, drawn.token)
        return Process(Retrying(ObjectsBackend(self.objects, troubles), policy, world=world), world)

    def save(
        self, step: int, value: float, troubles: Troubles | None = None, policy: RetryPolicy | None = None
    ) -> BaseException | None:
        """Save a tiny state; return how that failed."""

        async def main() -> BaseException | None:
            process = self.process(troubles, policy)
            try:
                failure = (await process.save(step, tiny_state(value))).exception()
            except ClientCrashedError as crash:
                return crash
            assert process.used_slabs == 0 or isinstance(failure, ClientCrashedError)
            return failure

        return run_virtually(main, self.clock)

    def load(self, troubles: Troubles | None = None, step: int | None = None) -> float | None:
        """Load the newest step, or the given one; return its value, after a look at every tensor."""
        state: dict[str, Any] = tiny_state(-1)
        if run_virtually(lambda: self.process(troubles).load(state, step), self.clock) is None:
            return None
        assert states_equal(state, tiny_state(state["value"])), "loaded values that were never saved"
        return float(state["value"])

    @property
    def manifests(self) -> list[str]:
        return [key for key in self.objects.objects if "/MANIFEST-" in key]


def store_with(*values: float) -> Store:
    store = Store()
    for step, value in enumerate(values, 1):
        assert store.save(step, value) is None
    return store


class Counting:
    """Meets nothing, and remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def next_trouble(self, request: Request) -> None:
        self.requests.append(request)


def requests_of_a_save() -> list[Request]:
    counting = Counting()
    assert store_with(1).save(2, 2, counting) is None
    return counting.requests


@pytest.mark.parametrize("trouble", ONCE)
def test_what_passes_is_not_noticed_at_whichever_request_of_a_save_it_comes(trouble: Trouble) -> None:
    tried = 0
    for request in requests_of_a_save():
        if applies_to(trouble, request.verb):
            store = store_with(1)
            troubles = PlannedTroubles([Planned(trouble=trouble, at=request.number)])
            failure = store.save(2, 2, troubles)
            assert troubles.met == [(trouble, request)]
            assert failure is None, f"at {request}: {failure!r}"
            assert len(store.manifests) == 2, f"at {request}: {store.manifests}"
            assert store.load() == 2.0
            assert store.load(step=1) == 1.0
            tried += 1
    assert tried


@pytest.mark.parametrize("trouble", [*ONCE, *sorted(LASTING)])
def test_what_lasts_fails_the_save_with_our_error_in_time_or_does_not_matter(trouble: Trouble) -> None:
    policy = RetryPolicy(attempts=4, deadline_s=60)
    outcomes = set()
    for verb in sorted(EVERYWHERE):
        store = store_with(1)
        began_ns = store.clock.now_ns
        failure = store.save(2, 2, PlannedTroubles([Planned(trouble=trouble, verb=verb, times=10**9)]), policy)
        assert failure is None or isinstance(failure, CheckpointError), repr(failure)
        assert not isinstance(failure, CommitConflictError | ObjectExistsError), f"{verb}: with nobody: {failure!r}"
        assert (store.clock.now_ns - began_ns) / 1e9 < 600, f"{verb}: it took for ever"
        assert store.load() == 2.0 if failure is None else store.load() in (1.0, 2.0)
        assert store.load(step=1) == 1.0
        assert len(store.manifests) <= 2
        assert store.save(3, 3) is None
        assert store.load() == 3.0
        outcomes.add(failure is None)
    assert len(outcomes) == 2 or trouble in ("resent", "partial_body")  # no old step that cannot be read fails a save


@pytest.mark.parametrize("crash", ["crash", "crash_after_effect"])
def test_a_client_that_crashes_at_any_request_leaves_the_old_step_or_the_whole_new_one(crash: Trouble) -> None:
    found = set()
    for request in requests_of_a_save():
        store = store_with(1)
        failure = store.save(2, 2, PlannedTroubles([Planned(trouble=crash, at=request.number)]))
        assert isinstance(failure, ClientCrashedError) or store.load() == 2.0
        value = store.load()
        found.add(value)
        assert value in (1.0, 2.0)
        assert store.load(step=1) == 1.0
        assert store.save(3, 3) is None
        assert store.load() == 3.0
    assert found == {1.0, 2.0}


@pytest.mark.parametrize("trouble", ONCE)
def test_what_passes_is_not_noticed_at_whichever_request_of_a_load_it_comes(trouble: Trouble) -> None:
    store = store_with(1, 2)
    counting = Counting()
    assert store.load(counting) == 2.0
    for request in counting.requests:
        if applies_to(trouble, request.verb):
            assert store.load(PlannedTroubles([Planned(trouble=trouble, at=request.number)])) == 2.0, f"at {request}"
