"""What is particular to the memory backend: names, its clock, what an open reader keeps."""

import asyncio
import uuid

import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import ObjectNotFoundError, StorageFullError
from aiockpt.runtime.world import World
from aiockpt.testing.backend_suite import download, patterned, upload
from tests.fails import fails
from tests.simulated.simulation import SimulatedClock


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


async def test_backends_of_one_name_share_their_objects(name: str) -> None:
    first = MemoryBackend(name)
    await first.put("k", b"x")
    await first.close()
    assert await MemoryBackend(name).get("k", 1) == b"x"
    await fails(MemoryBackend(name + "-other").get("k", 1), ObjectNotFoundError)
    await first.delete(["k"])
    await MemoryBackend().put("k", b"x")  # without a name nothing is shared
    await fails(MemoryBackend().get("k", 1), ObjectNotFoundError)


def test_event_loops_of_one_process_share_them_too(name: str) -> None:
    asyncio.run(MemoryBackend(name).put("k", b"x"))
    assert asyncio.run(MemoryBackend(name).get("k", 1)) == b"x"


async def test_an_open_reader_keeps_its_object() -> None:
    backend = MemoryBackend()
    await backend.put("k", b"old")
    reader = await backend.open("k")
    await backend.put("k", b"new!")
    await backend.delete(["k"])
    assert await download(reader) == b"old"
    await reader.close()


async def test_what_the_caller_changes_later_is_not_in_the_object() -> None:
    backend = MemoryBackend()
    data = bytearray(b"before")
    await backend.put("k", data)  # type: ignore[arg-type]  # a careless caller
    data[:] = b"after!"
    assert await backend.get("k", 10) == b"before"


async def test_objects_are_dated_by_the_clock_when_they_are_finished() -> None:
    clock = SimulatedClock(now_ns=5)
    backend = MemoryBackend(world=World(clock=clock))
    file = await backend.create("f", 1)
    clock.advance(2)
    await file.write(0, [memoryview(b"x")])
    await file.finish()
    assert (await backend.stat("f")).modified_ns == 2_000_000_005


async def test_aborting_leaves_an_object_that_took_the_key_meanwhile() -> None:
    backend = MemoryBackend()
    file = await backend.create("k", 1)
    await backend.delete(["k"])
    await backend.put("k", b"other")
    await file.abort()
    assert await backend.get("k", 10) == b"other"


async def test_a_file_larger_than_the_memory_is_refused() -> None:
    await fails(MemoryBackend().create("huge", 1 << 60), StorageFullError)


async def test_large_copies_leave_the_event_loop_free() -> None:
    """While a large block is copied, the loop goes round; a small one is copied in one step."""

    async def steps_of(size_bytes: int) -> int:
        data = patterned(size_bytes)
        backend = MemoryBackend()
        writing = asyncio.ensure_future(upload(backend, "f", data, block_bytes=size_bytes))
        steps = 0
        while not writing.done():
            await asyncio.sleep(0)
            steps += 1
        return steps

    assert await steps_of(1000) < 3 < await steps_of(1 << 20)


async def test_the_repr_tells_what_is_held() -> None:
    backend = MemoryBackend()
    await backend.put("k", b"12345")
    assert repr(backend) == "<MemoryBackend 'memory://' 1 objects, 5 bytes>"
