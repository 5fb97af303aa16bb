"""Calls that are made again exactly when that may help, which only the event log shows."""

import errno
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import pytest
import torch

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import (
    CheckpointError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    UsageError,
)
from aiockpt.events import StorageRetried
from aiockpt.storage.backend import Backend, Upload
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.storage.retry import Retrying, RetryPolicy
from aiockpt.storage.transfer import cut_views
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.fails import fails
from tests.inline_process import Process, tiny_state
from tests.simulated.object_troubles import TRANSIENT, DrawnTroubles, Planned, PlannedTroubles, Trouble
from tests.simulated.objects_client import ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedWorld, simulated_world
from tests.simulated.virtual_time import run_virtually
from tests.watch import Watch

T = TypeVar("T")
DATA = bytes(range(256)) * 40


class Place:
    """A store, a client whose requests meet *plan*, and a retrying wrapper, in a world where time leaps."""

    def __init__(self, *plan: Planned, policy: RetryPolicy | None = None, seed: int = 0) -> None:
        self.world: SimulatedWorld = simulated_world(seed)
        self.store = ObjectStore(self.world.clock)
        self.troubles = PlannedTroubles(plan)
        self.events: list[StorageRetried] = []
        self.client = RecordingBackend(ObjectsBackend(self.store, self.troubles))
        self.backend = Retrying(self.client, policy, world=self.world, on_retry=self.events.append)

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return run_virtually(main, self.world.clock)

    @property
    def calls(self) -> list[str]:
        """The verbs that the client was asked for."""
        return [done.verb for done in self.client.operations]


class Failing(MemoryBackend):
    """Says *error* to ``stat``, as often as it is asked."""

    def __init__(self, error: StorageError) -> None:
        super().__init__()
        self.error = error
        self.asked = 0

    async def stat(self, key: str) -> Any:
        self.asked += 1
        raise self.error


class BusyError(StorageThrottledError):
    """Asks to be left alone for a while, as some places do."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("busy")
        self.retry_after_s = retry_after_s


def failing(error: StorageError, policy: RetryPolicy | None = None) -> tuple[Failing, Retrying, SimulatedWorld]:
    world = simulated_world()
    inner = Failing(error)
    return inner, Retrying(inner, policy, world=world), world


# Which errors, how often, how long


def test_what_fails_for_a_moment_is_tried_again_and_told() -> None:
    place = Place(Planned(trouble="internal_error", verb="PUT", times=2))
    place.run(lambda: place.backend.put("a", b"data"))
    assert place.store.objects["a"].body == b"data"
    assert [(event.verb, event.key, event.attempt) for event in place.events] == [("put", "a", 2), ("put", "a", 3)]
    assert all("500 InternalError" in event.error for event in place.events)
    seen = place.backend.statistics()
    assert (seen.calls, seen.attempts, seen.retries, seen.gave_up) == (1, 3, 2, 0)
    assert seen.failures == {"transient": 2}
    assert seen.breaker == "closed"


@pytest.mark.parametrize(
    "error",
    [
        ObjectNotFoundError("gone"),
        ObjectNotFoundError("gone", retryable=True),
        ObjectExistsError("taken", retryable=True),
        StorageFullError("full", retryable=True),
        StorageAccessError("denied"),
        StorageError("permanent"),
        StorageThrottledError("for good", retryable=False),
    ],
    ids=repr,
)
def test_what_would_fail_again_is_not_tried_again(error: StorageError) -> None:
    inner, backend, world = failing(error)
    with pytest.raises(type(error)) as caught:
        run_virtually(lambda: backend.stat("a"), world.clock)
    assert caught.value is error
    assert inner.asked == 1


@pytest.mark.parametrize(
    "error",
    [
        StorageTimeoutError("slow"),
        StorageThrottledError("busy"),
        StorageTransferError("cut"),
        StorageError("odd", retryable=True),
    ],
    ids=repr,
)
def test_after_the_last_attempt_the_error_itself_is_raised(error: StorageError) -> None:
    inner, backend, world = failing(error, RetryPolicy(attempts=5))
    with pytest.raises(type(error)) as caught:
        run_virtually(lambda: backend.stat("a"), world.clock)
    assert caught.value is error
    assert inner.asked == 5
    assert error.__notes__ == ["stat 'a': given up after 5 attempts"]
    assert backend.statistics().gave_up == 1


def test_a_mistake_of_the_caller_is_not_tried_again() -> None:
    place = Place()
    with pytest.raises(UsageError):
        place.run(lambda: place.backend.put("../a", b""))
    assert place.calls == ["put"]


def test_expired_credentials_have_one_more_attempt() -> None:
    place = Place(Planned(trouble="expired", verb="PUT"))
    place.run(lambda: place.backend.put("a", b"data"))
    assert place.calls == ["put", "put"]
    place = Place(Planned(trouble="expired", verb="PUT", times=9))
    with pytest.raises(StorageAccessError):
        place.run(lambda: place.backend.put("a", b"data"))
    assert place.calls == ["put", "put"]


def test_waits_double_up_to_a_limit_and_are_longer_where_the_place_is_busy() -> None:
    policy = RetryPolicy(first_wait_s=1, longest_wait_s=10, throttled_first_wait_s=4, throttled_longest_wait_s=60)
    odd, busy = StorageError("odd", retryable=True), StorageThrottledError("busy")
    assert [policy.wait_s(odd, attempt, 1.0) for attempt in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert [policy.wait_s(busy, attempt, 1.0) for attempt in range(1, 7)] == [4, 8, 16, 32, 60, 60]
    assert policy.wait_s(odd, 10_000, 1.0) == 10
    assert policy.wait_s(odd, 3, 0.25) == 1
    assert policy.wait_s(odd, 3, 0.0) == 0


def test_waits_are_drawn_anew_for_each_rank_and_attempt() -> None:
    waits = set()
    for seed in range(3):
        place = Place(Planned(trouble="internal_error", times=5), seed=seed)
        place.run(lambda place=place: place.backend.put("a", b""))  # type: ignore[misc]
        waits |= {event.wait_s for event in place.events}
    assert len(waits) == 15
    assert max(waits) < 1.6


# Deadlines


@pytest.mark.parametrize(("asks_s", "policy"), [(77.0, RetryPolicy(attempts=3)), (40.0, RetryPolicy(deadline_s=100))])
def test_the_time_that_a_place_asks_for_is_waited_within_the_deadline(asks_s: float, policy: RetryPolicy) -> None:
    inner, backend, world = failing(BusyError(asks_s), policy)
    began_ns = world.clock.now_ns
    with pytest.raises(BusyError):
        run_virtually(lambda: backend.stat("a"), world.clock)
    assert inner.asked == 3
    waited_s = (world.clock.now_ns - began_ns) / 1e9
    assert waited_s == pytest.approx(2 * asks_s, abs=0.01), "there is no use in waiting longer"


def test_a_call_that_hangs_is_cut_and_says_that_its_outcome_is_unknown() -> None:
    place = Place(Planned(trouble="hang", verb="PUT"), policy=RetryPolicy(deadline_s=50))
    began_ns = place.world.clock.now_ns
    with pytest.raises(StorageTimeoutError, match=r"put 'a'.*within 50 s.*unknown"):
        place.run(lambda: place.backend.put("a", b""))
    assert (place.world.clock.now_ns - began_ns) / 1e9 == pytest.approx(50, abs=0.01)
    assert place.backend.statistics().longest_call_s == pytest.approx(50, abs=0.01)


def test_a_call_that_moves_bytes_has_longer() -> None:
    policy = RetryPolicy(deadline_s=50, slowest_bytes_per_s=100)
    place = Place(Planned(trouble="hang", verb="PART"), policy=policy)

    async def main() -> None:
        upload = await place.backend.create("a", len(DATA))
        await upload.write(0, [memoryview(DATA)])

    with pytest.raises(StorageTimeoutError, match=r"within 152\.4 s"):
        place.run(main)


def test_a_limit_and_an_announced_size_are_no_bytes_that_take_time() -> None:
    place = Place(policy=RetryPolicy(deadline_s=10, slowest_bytes_per_s=1))
    place.client.inner = FaultyBackend(MemoryBackend(), [Fault(do="hang", times=None)])
    began_ns = place.world.clock.now_ns
    for call in (lambda: place.backend.get("a", 1000), lambda: place.backend.create("a", 1000)):
        with pytest.raises(StorageTimeoutError, match="within 10 s"):
            place.run(call)
    assert (place.world.clock.now_ns - began_ns) / 1e9 == pytest.approx(20, abs=0.01)


def test_a_secret_that_a_library_quotes_stays_in_no_error() -> None:
    error = StorageThrottledError("busy")
    error.__cause__ = ValueError("GET https://user:hunter2@place/a?X-Amz-Signature=0123abcd")
    _, backend, world = failing(error, RetryPolicy(attempts=2))
    with pytest.raises(StorageThrottledError) as caught:
        run_virtually(lambda: backend.stat("a"), world.clock)
    assert "GET https://" in str(caught.value.__cause__)
    assert "hunter2" not in str(caught.value.__cause__)
    assert "0123abcd" not in str(caught.value.__cause__)


def test_a_cancelled_call_waits_no_longer_and_asks_no_more() -> None:
    inner, backend, world = failing(StorageThrottledError("busy"), RetryPolicy(throttled_first_wait_s=1e6))

    async def main() -> None:
        with anyio.move_on_after(0.001):
            await backend.stat("a")

    began_ns = world.clock.now_ns
    run_virtually(main, world.clock)
    assert inner.asked == 1
    assert world.clock.now_ns - began_ns < 2_000_000


def test_calls_at_once_have_courses_of_their_own() -> None:
    place = Place(*(Planned(trouble="internal_error", match=f"{n}", times=n) for n in range(8)))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(place.backend.put, f"{n}", b"%d" % n)

    place.run(main)
    assert {key: found.body for key, found in place.store.objects.items()} == {f"{n}": b"%d" % n for n in range(8)}
    assert sorted(event.attempt for event in place.events if event.key == "7") == [2, 3, 4, 5, 6, 7, 8]


# Small objects


@pytest.mark.parametrize("trouble", ["answer_lost", "timeout_after_effect", "internal_error_after_effect"])
def test_a_create_whose_answer_was_lost_is_no_conflict(trouble: Trouble) -> None:
    place = Place(Planned(trouble=trouble, verb="PUT-NEW"))
    place.run(lambda: place.backend.put_new("a", b"ours"))
    assert place.calls == ["put_new", "put_new", "get"]
    assert place.store.objects["a"].body == b"ours"


@pytest.mark.parametrize("theirs", [b"theirs", b"ours, and more", b"our"])
def test_a_create_that_failed_and_then_finds_other_bytes_is_a_conflict(theirs: bytes) -> None:
    place = Place(Planned(trouble="timeout", verb="PUT-NEW"))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overtake)
            await fails(place.backend.put_new("a", b"ours"), ObjectExistsError)

    async def overtake() -> None:
        await anyio.sleep(1)
        place.store.put("a", theirs)

    place.run(main)
    assert place.store.objects["a"].body == theirs


def test_a_conflict_at_the_first_attempt_is_one_also_with_equal_bytes() -> None:
    place = Place()
    place.store.put("a", b"equal")
    with pytest.raises(ObjectExistsError):
        place.run(lambda: place.backend.put_new("a", b"equal"))


def test_an_object_that_came_and_went_is_created() -> None:
    place = Place(Planned(trouble="answer_lost", verb="PUT-NEW"))
    reading = place.client.get

    async def get(key: str, max_bytes: int) -> bytes:
        place.store.delete(key)
        return await reading(key, max_bytes)

    place.client.get = get  # type: ignore[method-assign]
    place.run(lambda: place.backend.put_new("a", b"ours"))
    assert place.store.objects["a"].body == b"ours"


@pytest.mark.parametrize("trouble", ["partial_body", "wrong_body", "reset", "timeout"])
def test_a_small_object_that_came_damaged_is_got_again(trouble: Trouble) -> None:
    place = Place(Planned(trouble=trouble, verb="GET"))
    place.store.put("a", DATA)
    assert place.run(lambda: place.backend.get("a", 1 << 20)) == DATA
    assert place.calls == ["get", "get"]


@pytest.mark.parametrize("seed", range(5))
def test_every_small_verb_is_tried_again(seed: int) -> None:
    world = simulated_world(seed)
    store = ObjectStore(world.clock, page_keys=2)
    client = ObjectsBackend(
        store, DrawnTroubles(seed, fraction=0.5, kinds=TRANSIENT - {"expired", "resent", "wrong_body"})
    )
    backend = Retrying(client, RetryPolicy(attempts=100, deadline_s=1e6), world=world)

    async def main() -> None:
        for name in "abcde":
            await backend.put_new(f"f/{name}", b"")
        assert [stat.key for stat in (await backend.list("f")).objects] == [f"f/{name}" for name in "abcde"]
        assert (await backend.stat("f/a")).size == 0
        await backend.delete([f"f/{name}" for name in "abcde"])
        assert (await backend.space()).free_bytes is None
        await fails(backend.open("f/a"), ObjectNotFoundError)

    run_virtually(main, world.clock)
    assert not store.objects
    assert backend.statistics().retries


# Data files


def runs_of(data: bytes, count: int) -> list[memoryview]:
    size = len(data) // count
    return [memoryview(data)[start : start + size] for start in range(0, len(data), size)]


async def written(backend: Backend) -> Upload:
    file = await backend.create("a", len(DATA))
    await file.write(0, [memoryview(DATA)])
    return file


async def upload(backend: Backend) -> None:
    await (await written(backend)).finish()


@pytest.mark.parametrize(
    "plan",
    [
        ["reset"],
        ["reset", "reset", "timeout_after_effect"],
        ["answer_lost"],
        ["wrong_body", "reset"],
        ["slow_down", "internal_error"],
    ],
    ids=str,
)
def test_a_block_sent_again_is_shown_once(plan: list[Trouble]) -> None:
    place = Place(*(Planned(trouble=trouble, verb="PART", at=at) for at, trouble in enumerate(plan, 1)))
    runs = runs_of(DATA, 4)
    shown: list[bytes] = []

    async def main() -> None:
        file = await place.backend.create("a", len(DATA))
        await file.write(0, runs, lambda run: shown.append(bytes(run)))
        await file.finish()

    place.run(main)
    assert shown == [bytes(run) for run in runs]
    assert place.store.objects["a"].body == DATA
    assert place.calls.count("upload.write") == len(plan) + 1


def test_a_read_that_broke_off_goes_on_where_it_did() -> None:
    place = Place(Planned(trouble="reset", verb="GET", times=2))
    shown = bytearray()
    memories = [bytearray(100), bytearray(0), bytearray(5000), bytearray(len(DATA) - 5107)]

    async def main() -> None:
        await upload(place.backend)
        reader = await place.backend.open("a")
        await reader.read(7, [memoryview(memory) for memory in memories], shown.extend)

    place.run(main)
    assert bytes(shown) == b"".join(memories) == DATA[7:]
    reads = [(done.offset, done.size) for done in place.client.operations if done.verb == "reader.read"]
    size = len(DATA) - 7
    half = size // 2
    quarter = (size - half) // 2
    assert reads == [(7, size), (7 + half, size - half), (7 + half + quarter, size - half - quarter)]


def test_a_read_whose_answer_is_cut_short_goes_on_and_what_was_shown_is_not_written_again() -> None:
    place = Place(Planned(trouble="partial_body", verb="GET"))
    shown = bytearray()
    memory = bytearray(len(DATA))

    async def main() -> None:
        await upload(place.backend)
        reader = await place.backend.open("a")
        assert reader.size == len(DATA)
        await reader.read(0, [memoryview(memory)], shown.extend)
        await reader.close()

    place.run(main)
    assert bytes(shown) == bytes(memory) == DATA
    reads = [(done.offset, done.size) for done in place.client.operations if done.verb == "reader.read"]
    assert reads == [(0, len(DATA)), (len(DATA) // 2, len(DATA) - len(DATA) // 2)]


HEADER = 4096
"""Bytes of the data files' headers, which are read by themselves."""


class WrongAgain(Forwarding):
    """A reader's first answer breaks off after half, with *error*; each later one is wrong in its first byte of all."""

    def __init__(self, inner: Backend, error: StorageError) -> None:
        super().__init__(inner)
        self.error = error
        self.answered: set[tuple[str, int]] = set()

    async def forward(self, call: BackendCall) -> Any:
        if call.verb != "reader.read" or call.offset < HEADER or call.size < 100:
            return await call()
        offset, into, seen = call.arguments
        if (call.key, offset) not in self.answered:
            self.answered.add((call.key, offset))
            await call(offset, cut_views(into, 0, call.size // 2), seen)
            raise self.error
        await call(offset, into)
        into[0][0] ^= 0xFF
        for view in into:
            seen(view)
        return None


@pytest.mark.parametrize("error", [StorageTransferError("cut short"), StorageError("reset", retryable=True)], ids=repr)
def test_weights_that_came_wrong_after_an_answer_that_was_cut_short_are_not_loaded(error: StorageError) -> None:
    world = simulated_world()
    backend = WrongAgain(MemoryBackend(), error)
    state = {"weight": torch.arange(4096, dtype=torch.float32)}

    async def main() -> None:
        process = Process(Retrying(backend, world=world), world)
        await process.save(1, state)
        into = {"weight": torch.zeros(4096)}
        with suppress(CheckpointError):  # damaged answers are told; only silence is wrong
            await process.load(into, 1)
            assert torch.equal(into["weight"], state["weight"])

    run_virtually(main, world.clock)
    assert backend.answered


@pytest.mark.parametrize("retried", [True, False])
def test_an_answer_that_is_short_and_no_error_is_gone_on_with_or_refused(retried: bool) -> None:
    world = simulated_world()
    state = {"weight": torch.arange(4096, dtype=torch.float32)}

    class Short(Forwarding):
        async def forward(self, call: BackendCall) -> Any:
            if call.verb == "reader.read" and call.offset >= HEADER and call.size > 100:
                offset, into, seen = call.arguments
                return await call(offset, cut_views(into, 0, call.size // 2), seen)
            return await call()

    async def main() -> None:
        backend: Backend = Short(MemoryBackend())
        process = Process(Retrying(backend, world=world) if retried else backend, world)
        await process.save(1, state)
        into = {"weight": torch.zeros(4096)}
        if retried:
            await process.load(into, 1)
            assert torch.equal(into["weight"], state["weight"])
        else:
            await fails(process.load(into, 1), StorageTransferError, "bytes were requested")

    run_virtually(main, world.clock)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_every_byte_is_right_and_shown_once_and_in_order(seed: int) -> None:
    world = simulated_world(seed)
    troubles = DrawnTroubles(seed, fraction=0.5, kinds=TRANSIENT - {"expired", "wrong_body"})
    client = ObjectsBackend(ObjectStore(world.clock), troubles)
    backend = Retrying(client, RetryPolicy(attempts=100, deadline_s=1e6), world=world)
    sent, came = [bytearray(), bytearray()], bytearray()
    memories = [memoryview(bytearray(size)) for size in (1, 4096, 0, 3000, len(DATA) - 7097)]

    async def main() -> None:
        file = await backend.create("a", len(DATA))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(file.write, 4096, runs_of(DATA[4096:], 4), sent[1].extend)
            tasks.start_soon(file.write, 0, runs_of(DATA[:4096], 2), sent[0].extend)
        await file.finish()
        reader = await backend.open("a")
        await reader.read(0, memories, came.extend)

    run_virtually(main, world.clock)
    assert sent == [DATA[:4096], DATA[4096:]]
    assert bytes(came) == b"".join(memories) == DATA


def test_what_goes_wrong_in_seen_is_not_tried_again() -> None:
    place = Place()

    def refuse(run: memoryview) -> None:
        raise ArithmeticError("bad")

    async def main() -> None:
        await upload(place.backend)
        reader = await place.backend.open("a")
        with pytest.raises(ArithmeticError):
            await reader.read(0, [memoryview(bytearray(9))], refuse)

    place.run(main)
    assert place.calls.count("reader.read") == 1


def test_a_data_file_whose_create_may_have_taken_effect_is_never_claimed() -> None:
    faulty = FaultyBackend(MemoryBackend(), [Fault(do="lose_answer", verb="create", error=errno.ETIMEDOUT)])
    world = simulated_world()
    backend = Retrying(faulty, world=world)
    with pytest.raises(StorageError, match="answer was lost") as caught:
        run_virtually(lambda: backend.create("a", 4), world.clock)
    assert not isinstance(caught.value, ObjectExistsError)
    with pytest.raises(ObjectExistsError):
        run_virtually(lambda: backend.create("a", 4), world.clock)


def test_an_upload_whose_beginning_was_lost_leaves_nothing_visible() -> None:
    place = Place(Planned(trouble="answer_lost", verb="START"))
    place.run(lambda: upload(place.backend))
    assert place.store.objects["a"].body == DATA
    assert len(place.store.uploads) == 1, "the lost one, for whoever collects old uploads"


@pytest.mark.parametrize(
    "trouble", ["answer_lost", "timeout_after_effect", "internal_error_after_effect", "error_body_after_effect"]
)
def test_a_finish_whose_answer_was_lost_is_a_success(trouble: Trouble) -> None:
    place = Place(Planned(trouble=trouble, verb="COMPLETE"))

    async def main() -> None:
        file = await written(place.backend)
        await file.finish()
        await file.abort()
        for call in (file.finish(), file.write(0, [memoryview(DATA)])):
            await fails(call, UsageError)

    place.run(main)
    assert place.store.objects["a"].body == DATA
    assert "stat" in place.calls
    assert "upload.abort" not in place.calls, "that might remove what is whole"


@pytest.mark.parametrize("there", [None, b"another, of another size"])
def test_a_finish_that_failed_and_is_not_there_is_an_error(there: bytes | None) -> None:
    place = Place(
        Planned(trouble="error_body", verb="COMPLETE"), Planned(trouble="no_such_upload", verb="COMPLETE", at=2)
    )

    async def main() -> None:
        file = await written(place.backend)
        if there is not None:
            place.store.put("a", there)
        await fails(file.finish(), ObjectNotFoundError)

    place.run(main)


def test_a_conflict_at_the_first_finish_is_one() -> None:
    place = Place()

    async def main() -> None:
        file = await written(place.backend)
        place.store.put("a", bytes(len(DATA)))
        await fails(file.finish(), ObjectExistsError)

    place.run(main)


def test_a_failed_flush_is_never_tried_again() -> None:
    faulty = FaultyBackend(MemoryBackend(), [Fault(do="fail", verb="upload.finish", error=errno.EIO)])
    world = simulated_world()
    backend = Retrying(faulty, world=world)
    with pytest.raises(StorageError):
        run_virtually(lambda: upload(backend), world.clock)
    assert faulty.schedule.fired == ["fail upload.finish a"]
    assert backend.statistics().retries == 0


# The breaker

DOWN = RetryPolicy(attempts=2, failures_to_open=3, open_s=30)


def down(place: Place, calls: int) -> None:
    """Ask for what is not answered, *calls* times."""

    async def main() -> None:
        for _ in range(calls):
            await fails(place.backend.stat("a"), StorageError, "500")

    place.run(main)


def test_a_place_that_is_down_is_left_alone_for_a_while_and_then_asked_once() -> None:
    place = Place(Planned(trouble="internal_error", times=7), policy=DOWN)
    down(place, 3)
    assert place.backend.statistics().breaker == "open"
    assert len(place.calls) == 6

    async def main() -> None:
        for _ in range(10):
            with pytest.raises(StorageError, match=r"not be contacted for another 30 s .*: 3 calls .* gave up, .*500"):
                await place.backend.put("b", b"")
        assert len(place.calls) == 6
        await anyio.sleep(30)
        assert place.backend.statistics().breaker == "half-open"
        with pytest.raises(StorageError, match="500"):
            await place.backend.stat("a")  # the probe: one attempt, and another while it is open
        assert len(place.calls) == 7
        await fails(place.backend.stat("a"), StorageError, "not be contacted")
        await anyio.sleep(30)
        await fails(place.backend.stat("a"), ObjectNotFoundError)  # an answer
        assert place.backend.statistics().breaker == "closed"
        await place.backend.put("b", b"")

    place.run(main)


def test_what_is_held_is_released_also_where_a_place_is_down() -> None:
    world = simulated_world()
    recording = RecordingBackend(FaultyBackend(MemoryBackend(), [Fault(do="fail", verb="stat", error=errno.EAGAIN)]))
    backend = Retrying(recording, RetryPolicy(attempts=1, failures_to_open=1), world=world)

    async def main() -> None:
        await backend.put("a", DATA)
        reader, upload = await backend.open("a"), await backend.create("b", 1)
        await fails(backend.stat("a"))
        assert backend.statistics().breaker == "open"
        await upload.abort()
        await reader.close()
        await backend.close()

    run_virtually(main, world.clock)
    assert [done.verb for done in recording.operations][-3:] == ["upload.abort", "reader.close", "close"]


def test_an_answer_in_between_keeps_it_closed() -> None:
    place = Place(
        Planned(trouble="internal_error", times=4), Planned(trouble="internal_error", at=6, times=4), policy=DOWN
    )
    down(place, 2)

    async def answered() -> None:
        await fails(place.backend.stat("a"), ObjectNotFoundError)

    place.run(answered)
    down(place, 2)
    assert place.backend.statistics().breaker == "closed"


def test_while_a_probe_is_under_way_no_other_call_is_made_and_a_cancelled_probe_decides_nothing() -> None:
    place = Place(Planned(trouble="internal_error", times=6), Planned(trouble="hang", at=7), policy=DOWN)
    down(place, 3)

    async def main() -> None:
        await anyio.sleep(31)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(place.backend.put, "b", b"")
            await anyio.sleep(1)
            assert place.backend.statistics().breaker == "half-open"
            await fails(place.backend.stat("a"), StorageError, "not be contacted")
            tasks.cancel_scope.cancel()
        await place.backend.put("b", b"")
        assert place.backend.statistics().breaker == "closed"

    place.run(main)


@pytest.mark.parametrize(
    "error", [StorageTransferError("damaged"), StorageAccessError("denied"), StorageFullError("full")]
)
def test_a_place_that_refuses_is_not_down(error: StorageError) -> None:
    _, backend, world = failing(error, DOWN)

    async def main() -> None:
        for _ in range(20):
            with pytest.raises(type(error)):
                await backend.stat("a")

    run_virtually(main, world.clock)
    assert backend.statistics().breaker == "closed"


# The engine


def test_observers_of_a_checkpointer_hear_of_retries() -> None:
    place = Place(Planned(trouble="slow_down", verb="PART"))
    watch = Watch()

    async def main() -> None:
        job = Process(place.backend, place.world, (watch,))
        (await job.save(1, tiny_state(1))).result()

    place.run(main)
    (retried,) = watch.of(StorageRetried)
    assert (retried.verb, retried.attempt) == ("upload.write", 2)
    assert place.events == [retried]


def test_a_listener_that_raises_harms_no_call(caplog: pytest.LogCaptureFixture) -> None:
    place = Place(Planned(trouble="internal_error", times=2))

    def raise_it(event: StorageRetried) -> None:
        raise ArithmeticError("mine")

    place.backend.add_listener(raise_it)
    place.run(lambda: place.backend.put("a", b""))
    assert len(place.events) == 2
    assert "mine" in caplog.text


def test_calls_that_fail_together_are_one_line_in_a_second_and_an_event_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiockpt")
    place = Place(Planned(trouble="internal_error", verb="PUT", times=200))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(place.backend.put, f"k{number}", b"")

    with pytest.raises(ExceptionGroup):
        place.run(main)
    lines = [line for line in caplog.messages if "tried again" in line]
    seconds = (place.events[-1].at_ns - place.events[0].at_ns) / 1e9
    assert len(place.events) > 40
    assert 2 <= len(lines) <= seconds + 1
    assert all(line.startswith(place.backend.url) for line in lines)
    unsaid = [int(found[1]) for line in lines if (found := re.search(r"\((\d+) more failed", line))]
    assert unsaid
    assert len(lines) + sum(unsaid) <= len(place.events)


@pytest.mark.parametrize("name", ["attempts", "deadline_s", "slowest_bytes_per_s", "failures_to_open"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_policy_without_an_attempt_or_a_deadline_is_refused(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=name):
        RetryPolicy(**{name: value})
