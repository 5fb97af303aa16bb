"""What the conformance suite cannot ask of a cloud store: conditions, lost answers, parts, and who tries again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("obstore", reason="the extra aiockpt[cloud] is not installed")

from obstore import Bytes
from obstore.store import MemoryStore

from aiockpt.backends import cloud
from aiockpt.backends.cloud import PARTS, CloudBackend, PartMemory, part_bytes
from aiockpt.errors import (
    ObjectExistsError,
    StorageError,
    StorageThrottledError,
)
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite, patterned
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.fails import fails
from tests.servers.naive_s3 import BUCKET, NaiveS3, Request, run_naive_s3

MIB = 1 << 20


def open_naive(server: NaiveS3, monkeypatch: pytest.MonkeyPatch, **options: Any) -> CloudBackend:
    """Open *server* as a user would: by URL, with the environment saying where it is."""
    for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "key"), ("REGION", "here")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT", server.endpoint)
    return CloudBackend(f"s3://{BUCKET}/run", client_options={"allow_http": True}, **options)


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[NaiveS3]:
    """A store that creates exclusively, unless the test is marked otherwise."""
    async with run_naive_s3(conditional=getattr(request, "param", True)) as server:
        yield server


@pytest.fixture
def backend(server: NaiveS3, monkeypatch: pytest.MonkeyPatch) -> CloudBackend:
    return open_naive(server, monkeypatch)


class TestObstoreMemory(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return CloudBackend("memory://conformance", store=MemoryStore())


class TestObstoreMemoryWrapped(BackendSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return RecordingBackend(FaultyBackend(CloudBackend("memory://conformance", store=MemoryStore())))


# Exclusive creates


async def test_a_store_that_creates_exclusively_proves_it_once(
    server: NaiveS3, backend: CloudBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.gather(*(backend.put_new(key, b"1") for key in "abc"))
    await backend.put_new("d", b"1")
    assert server.seen["PUT"] == 2 + 4
    assert sorted(server.objects) == ["run/.aiockpt", "run/a", "run/b", "run/c", "run/d"]
    await open_naive(server, monkeypatch).put_new("e", b"1")  # in another process: it is there and proves at once
    assert server.seen["PUT"] == 2 + 4 + 1 + 1
    assert server.seen["delete batch"] == 0


@pytest.mark.parametrize("server", [False], indirect=True)
async def test_a_store_that_ignores_the_condition_is_refused(server: NaiveS3, backend: CloudBackend) -> None:
    for create in (lambda: backend.put_new("a", b"1"), lambda: backend.create("a", 1)):
        with pytest.raises(StorageError, match=r"cannot create an object exclusively.*unsafe_commit=True") as caught:
            await create()
        assert not caught.value.retryable
    assert sorted(server.objects) == ["run/.aiockpt"]  # before the first byte of a run
    await backend.put("a", b"1")  # what commits nothing is allowed
    assert await backend.get("a", 1) == b"1"


async def test_a_store_that_knows_no_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_naive_s3() as server:
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
        with pytest.raises(StorageError, match="cannot create an object exclusively"):
            await open_naive(server, monkeypatch).put_new("a", b"1")
        assert not server.seen


async def test_an_unsafe_commit_is_warned_of_once_and_looks_before_it_creates(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_naive_s3(conditional=False) as server:
        backend = open_naive(server, monkeypatch, unsafe_commit=True)
        with pytest.warns(RuntimeWarning, match="both may believe"):
            await backend.put_new("a", b"1")
        await fails(backend.put_new("a", b"2"), ObjectExistsError)
        await fails(backend.create("a", 1), ObjectExistsError)
        assert await backend.get("a", 1) == b"1"
        upload = await backend.create("b", 3)
        await upload.write(0, [memoryview(b"123")])
        await upload.finish()
        assert await backend.get("b", 3) == b"123"


# Answers that are lost


def interfering(answer: int, times: int, matches: Callable[[Request], bool]) -> Callable[[Request], int | None]:
    """Return what gives *answer* to the first requests that match; -1 drops the answer after the effect."""
    left = [times]

    def interfere(request: Request) -> int | None:
        if not matches(request) or not left[0]:
            return None
        left[0] -= 1
        return answer

    return interfere


async def test_a_claim_whose_answer_was_lost_is_recognised_by_the_next_try(
    server: NaiveS3, backend: CloudBackend
) -> None:
    server.interfere = interfering(-1, 1, lambda request: (request.kind, request.key) == ("PUT", "run/d/file"))
    await fails(backend.create("d/file", 3), retryable=True)
    upload = await backend.create("d/file", 3)
    with pytest.raises(ObjectExistsError):  # the claim was taken up: the next one is another's
        await backend.create("d/file", 3)
    await upload.write(0, [memoryview(b"123")])
    await upload.finish()
    assert await backend.get("d/file", 10) == b"123"


async def test_a_key_that_another_took_is_not_claimed_after_a_lost_answer(
    server: NaiveS3, backend: CloudBackend
) -> None:
    server.interfere = lambda request: 500 if request.key == "run/d/file" and request.kind == "PUT" else None
    await fails(backend.create("d/file", 3))
    server.interfere = lambda request: None
    server.objects["run/d/file"] = b"theirs"
    await fails(backend.create("d/file", 3), ObjectExistsError)
    assert server.objects["run/d/file"] == b"theirs"


async def test_a_create_that_is_cancelled_takes_its_claim_back(server: NaiveS3, backend: CloudBackend) -> None:
    await backend.put_new("first", b"1")
    claimed = asyncio.Event()

    def tell(request: Request) -> None:
        if request.kind == "PUT":
            claimed.set()

    server.interfere = tell
    creating = asyncio.ensure_future(backend.create("d/file", 3))
    await claimed.wait()
    creating.cancel()
    await asyncio.wait([creating])
    assert creating.cancelled()
    assert sorted(server.objects) == ["run/.aiockpt", "run/first"]


# Who tries again


async def test_a_verb_is_sent_once(server: NaiveS3, backend: CloudBackend) -> None:
    server.interfere = lambda request: 503
    for kind, call in (
        ("PUT", lambda: backend.put("a", b"1")),
        ("GET", lambda: backend.get("a", 1)),
        ("HEAD", lambda: backend.stat("a")),
        ("delete batch", lambda: backend.delete(["a"])),
    ):
        await fails(call(), StorageThrottledError)
        assert server.seen[kind] == 1


async def test_a_part_that_fails_is_sent_again_by_the_client(server: NaiveS3, backend: CloudBackend) -> None:
    data = patterned(40 * MIB)
    server.interfere = interfering(
        503, 2, lambda request: request.query.get("partNumber") == ["2"] and request.kind == "part"
    )
    upload = await backend.create("d/file", data.nbytes)
    for start in range(0, data.nbytes, 8 * MIB):
        await upload.write(start, [data[start : start + 8 * MIB]])
    await upload.finish()
    assert server.seen["part"] == 3 + 2
    assert server.objects["run/d/file"] == data


async def test_a_part_that_keeps_failing_fails_the_file_for_good_and_leaves_nothing(
    server: NaiveS3, backend: CloudBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "part_bytes", lambda size: 1 << 14)
    data = patterned(1 << 14)
    server.interfere = lambda request: 503 if request.kind == "part" else None
    upload = await backend.create("d/file", 4 * PARTS * data.nbytes)

    async def write() -> None:
        for block in range(4 * PARTS):
            await upload.write(block * data.nbytes, [data])

    await fails(write(), StorageThrottledError, retryable=False)
    await upload.abort()
    assert sorted(server.objects) == ["run/.aiockpt"]
    assert server.seen["abort upload"] == 1


# Parts


@pytest.mark.parametrize(("size", "part"), [(0, 16), (16 << 20, 16), (160_000 << 20, 16), (160_001 << 20, 24)])
def test_parts_are_whole_blocks_and_few_enough(size: int, part: int) -> None:
    assert part_bytes(size) == part << 20
    assert -(-size // part_bytes(size)) <= 10_000


async def test_an_aborted_file_leaves_no_parts_behind(server: NaiveS3, backend: CloudBackend) -> None:
    data = patterned(40 * MIB)
    upload = await backend.create("d/file", 2 * data.nbytes)
    await upload.write(0, [data])
    assert server.seen["begin upload"] == 1
    await upload.abort()
    assert server.seen["abort upload"] == 1
    assert sorted(server.objects) == ["run/.aiockpt"]


async def test_an_upload_holds_no_more_than_its_parts_and_the_one_being_written(
    server: NaiveS3, backend: CloudBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "part_bytes", lambda size: 1 << 14)
    data = patterned(1 << 14)
    count = 4 * PARTS
    upload = await backend.create("d/file", count * data.nbytes)
    accepted = 0

    async def write() -> None:
        nonlocal accepted
        for block in range(count):
            await upload.write(block * data.nbytes, [data])
            accepted += 1

    server.open_for_parts.clear()
    writing = asyncio.ensure_future(write())
    await asyncio.wait([writing], timeout=2)  # unbounded it would be done by then
    assert accepted <= PARTS + 1
    assert server.seen["part"] <= PARTS
    server.open_for_parts.set()
    await writing
    await upload.finish()
    assert server.objects["run/d/file"] == bytes(data) * count


def test_memory_of_a_part_is_used_again_only_when_nobody_refers_to_it() -> None:
    memory = PartMemory()
    first = memory.lend(1000)
    first[:] = b"a" * 1000
    held = [Bytes(first)]  # what the client does
    second = memory.lend(1000)
    second[:] = b"b" * 1000
    assert held[0] == b"a" * 1000
    held.clear()
    third = memory.lend(500)
    third[:] = b"c" * 500
    assert second == b"b" * 1000
    with pytest.raises(ValueError, match="released"):
        first[0]  # it is the third's now
