"""Does a backend keep the contract of `aiockpt.storage.backend`? Every guarantee as a test. Subclass, and run pytest.

    class TestMine(BackendSuite):
        @pytest.fixture
        async def backend(self):
            backend = MyBackend(…)   # empty, or a fresh prefix
            yield backend
            await backend.close()

Run it plain and wrapped (`recording.RecordingBackend`, `faults.FaultyBackend`): a wrapper keeps the contract too. With
pytest-asyncio in strict mode, make the fixture with ``pytest_asyncio.fixture``. No test sleeps or needs a clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import random
from collections.abc import Awaitable, Callable

import pytest

from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, StorageError, UsageError
from aiockpt.storage.backend import Backend, Reader

BAD_KEYS = ["", "/", "/abs", "a//b", "a/", ".", "..", "a/../b", "./a", "a\\b", "a\nb", "a\0b", "c:/x", "k" * 1025]


def patterned(size_bytes: int, seed: int = 0) -> memoryview:
    """Return page-aligned memory whose bytes tell where they belong: no two blocks are equal."""
    memory = memoryview(mmap.mmap(-1, max(1, size_bytes)))[:size_bytes]
    memory[:] = random.Random(seed).randbytes(size_bytes)
    return memory


async def upload(backend: Backend, key: str, data: memoryview, block_bytes: int = 1 << 20) -> None:
    """Write *data* as a data file, block by block in order."""
    file = await backend.create(key, data.nbytes)
    for start in range(0, data.nbytes, block_bytes):
        await file.write(start, [data[start : start + block_bytes]])
    await file.finish()


async def download(reader: Reader, offset: int = 0, size_bytes: int | None = None) -> bytes:
    """Return *size_bytes* from *offset*, by default all there is."""
    data = bytearray(reader.size - offset if size_bytes is None else size_bytes)
    await reader.read(offset, [memoryview(data)])
    return bytes(data)


@pytest.mark.asyncio
class BackendSuite:
    """The conformance suite. A subclass gives the fixture ``backend``: an empty one for each test."""

    BLOCK_BYTES = 1 << 20
    """Blocks of the larger data files; make it what the backend likes to be given."""

    RACERS = 64

    async def test_what_was_put_is_what_is_got(self, backend: Backend) -> None:
        await backend.put("a/b", b"some bytes\0\xff")
        assert await backend.get("a/b", 1000) == b"some bytes\0\xff"

    async def test_put_replaces_the_whole_object(self, backend: Backend) -> None:
        await backend.put("a", b"long and old")
        await backend.put("a", b"new")
        assert await backend.get("a", 1000) == b"new"

    async def test_get_returns_the_first_bytes_of_a_longer_object(self, backend: Backend) -> None:
        await backend.put("a", b"0123456789")
        assert await backend.get("a", 4) == b"0123"
        assert await backend.get("a", 10) == b"0123456789"
        assert await backend.get("a", 0) == b""

    async def test_an_empty_object_is_an_object(self, backend: Backend) -> None:
        await backend.put("e/put", b"")
        await backend.put_new("e/new", b"")
        await upload(backend, "e/file", memoryview(b""))
        for key in ("e/put", "e/new", "e/file"):
            assert await backend.get(key, 10) == b""
            assert (await backend.stat(key)).size == 0
            reader = await backend.open(key)
            assert reader.size == 0
            await reader.read(0, [])
            await reader.close()

    async def test_keys_may_have_any_printable_characters(self, backend: Backend) -> None:
        for key in ("step-00000001/a-0f/d/r00000-0000.safetensors", "with space/ü/日本/%41+?#&='\"", "k" * 200):
            await backend.put(key, key.encode())
            assert await backend.get(key, 1000) == key.encode()
            assert (await backend.stat(key)).key == key

    @pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
    async def test_a_key_that_could_leave_the_root_is_refused_by_every_verb(self, backend: Backend, key: str) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: backend.put(key, b""),
            lambda: backend.put_new(key, b""),
            lambda: backend.get(key, 1),
            lambda: backend.open(key),
            lambda: backend.create(key, 1),
            lambda: backend.stat(key),
            lambda: backend.delete([key]),
        ]
        for call in calls + ([lambda: backend.list(key)] if key else []):
            with pytest.raises(UsageError):
                await call()

    async def test_a_bad_key_keeps_delete_from_removing_the_good_ones(self, backend: Backend) -> None:
        await backend.put("good", b"x")
        with pytest.raises(UsageError):
            await backend.delete(["good", "../bad"])
        assert await backend.get("good", 1) == b"x"

    # Existence

    async def test_an_absent_object_is_not_found_by_any_verb(self, backend: Backend) -> None:
        await backend.put("a/here", b"x")
        calls: list[Callable[[str], Awaitable[object]]] = [
            lambda key: backend.get(key, 1),
            backend.open,
            backend.stat,
        ]
        for key in ("absent", "a/absent", "a/absent/deeper", "a", "a/here/below"):
            for call in calls:
                with pytest.raises(ObjectNotFoundError) as caught:
                    await call(key)
                assert caught.value.key == key

    async def test_put_new_refuses_a_taken_key_and_leaves_the_object_alone(self, backend: Backend) -> None:
        await backend.put_new("a/b", b"first")
        with pytest.raises(ObjectExistsError) as caught:
            await backend.put_new("a/b", b"second")
        assert caught.value.key == "a/b"
        assert await backend.get("a/b", 100) == b"first"

    async def test_of_many_racing_put_new_exactly_one_wins(self, backend: Backend) -> None:
        async def race(racer: int) -> bool:
            try:
                await backend.put_new("race/key", b"%03d" % racer * 1000)
            except ObjectExistsError:
                return False
            return True

        won = await asyncio.gather(*(race(racer) for racer in range(self.RACERS)))
        assert won.count(True) == 1
        assert await backend.get("race/key", 1 << 20) == b"%03d" % won.index(True) * 1000
        assert [found.key for found in (await backend.list("race")).objects] == ["race/key"]

    async def test_racing_puts_leave_one_of_them_whole(self, backend: Backend) -> None:
        written = [b"%03d" % racer * 1000 for racer in range(self.RACERS)]
        await asyncio.gather(*(backend.put("race/key", data) for data in written))
        assert await backend.get("race/key", 1 << 20) in written

    async def test_of_many_racing_creates_exactly_one_wins(self, backend: Backend) -> None:
        outcomes = await asyncio.gather(
            *(backend.create("race/file", 4) for _ in range(self.RACERS)), return_exceptions=True
        )
        files = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert len(files) == 1
        assert all(isinstance(outcome, ObjectExistsError) for outcome in outcomes if outcome is not files[0])
        await files[0].write(0, [memoryview(b"mine")])
        await files[0].finish()
        assert await backend.get("race/file", 10) == b"mine"

    async def test_create_refuses_a_taken_key(self, backend: Backend) -> None:
        await backend.put("a/b", b"first")
        with pytest.raises(ObjectExistsError):
            await backend.create("a/b", 10)
        assert await backend.get("a/b", 100) == b"first"

    # Data files

    async def test_a_large_file_written_out_of_order_and_at_once_is_read_back(self, backend: Backend) -> None:
        data = patterned(5 * self.BLOCK_BYTES + 12_345)
        file = await backend.create("d/file", data.nbytes)
        starts = list(range(0, data.nbytes, self.BLOCK_BYTES))
        random.Random(1).shuffle(starts)
        await asyncio.gather(*(file.write(start, [data[start : start + self.BLOCK_BYTES]]) for start in starts))
        await file.finish()
        assert (await backend.stat("d/file")).size == data.nbytes
        reader = await backend.open("d/file")
        assert reader.size == data.nbytes
        assert await download(reader) == bytes(data)
        await reader.close()

    async def test_blocks_may_begin_and_end_anywhere(self, backend: Backend) -> None:
        data = patterned(100_001)
        edges = [0, 1, 4095, 4096, 4097, 12_288, 50_000, 53_248, 100_000, 100_001]
        file = await backend.create("odd", data.nbytes)
        for start, end in itertools.pairwise(edges):
            await file.write(start, [data[start:end]])
        await file.write(7, [memoryview(b"")])
        await file.finish()
        assert await backend.get("odd", 1 << 20) == bytes(data)

    async def test_runs_are_written_one_after_the_other_and_shown_in_order(self, backend: Backend) -> None:
        data = patterned(3 * self.BLOCK_BYTES + 99)
        edges = [0, 4096, 4096, 4097, self.BLOCK_BYTES + 5, 3 * self.BLOCK_BYTES, data.nbytes]
        shown: list[bytes] = []
        file = await backend.create("runs", data.nbytes)
        runs = [data[start:end] for start, end in itertools.pairwise(edges)]
        await file.write(0, runs[:2], lambda run: shown.append(bytes(run)))
        await file.write(4096, runs[2:], lambda run: shown.append(bytes(run)))
        await file.finish()
        assert shown == [bytes(run) for run in runs]
        reader = await backend.open("runs")
        assert await download(reader) == bytes(data)
        await reader.close()

    async def test_memory_may_be_unaligned_and_read_only(self, backend: Backend) -> None:
        data = patterned(3 * 4096 + 1)
        await upload(backend, "unaligned", data[1:])
        await upload(backend, "read-only", memoryview(bytes(data)))
        assert await backend.get("unaligned", 1 << 20) == bytes(data[1:])
        assert await backend.get("read-only", 1 << 20) == bytes(data)

    async def test_a_write_beyond_the_announced_size_is_refused(self, backend: Backend) -> None:
        file = await backend.create("small", 10)
        for offset, data in ((8, b"123"), (-1, b"12"), (11, b"")):
            with pytest.raises(UsageError):
                await file.write(offset, [memoryview(data)])
        await file.abort()

    async def test_a_file_with_bytes_missing_cannot_be_finished(self, backend: Backend) -> None:
        file = await backend.create("holes", 10)
        await file.write(0, [memoryview(b"12345")])
        with pytest.raises(UsageError):
            await file.finish()
        await file.abort()
        with pytest.raises(ObjectNotFoundError):
            await backend.stat("holes")

    async def test_an_aborted_file_is_gone_and_its_key_is_free(self, backend: Backend) -> None:
        file = await backend.create("d/file", 10)
        await file.write(0, [memoryview(b"12345")])
        await file.abort()
        await file.abort()
        with pytest.raises(ObjectNotFoundError):
            await backend.stat("d/file")
        with pytest.raises(UsageError):
            await file.write(5, [memoryview(b"12345")])
        await upload(backend, "d/file", memoryview(b"again"))
        assert await backend.get("d/file", 10) == b"again"

    async def test_a_finished_file_takes_no_more_and_an_abort_leaves_it_alone(self, backend: Backend) -> None:
        file = await backend.create("d/file", 4)
        await file.write(0, [memoryview(b"1234")])
        await file.finish()
        with pytest.raises(UsageError):
            await file.write(0, [memoryview(b"x")])
        with pytest.raises(UsageError):
            await file.finish()
        await file.abort()
        assert await backend.get("d/file", 10) == b"1234"

    async def test_a_cancelled_create_leaves_the_key_free(self, backend: Backend) -> None:
        for steps in range(6):
            creating = asyncio.ensure_future(backend.create("cancelled", 4096))
            for _ in range(steps):
                await asyncio.sleep(0)
            creating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await creating).abort()
            with pytest.raises(ObjectNotFoundError):
                await backend.stat("cancelled")

    async def test_a_cancelled_write_leaves_memory_and_file_to_their_owner(self, backend: Backend) -> None:
        for steps in range(6):
            data = patterned(self.BLOCK_BYTES)
            file = await backend.create("cancelled", data.nbytes)
            writing = asyncio.ensure_future(file.write(0, [data]))
            for _ in range(steps):
                await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            data[:] = bytes(data.nbytes)
            await file.abort()
            assert (await backend.list("")).objects == ()

    # Ranged reads

    async def test_a_range_is_read_into_buffers_of_any_size(self, backend: Backend) -> None:
        data = patterned(2 * self.BLOCK_BYTES + 100)
        await upload(backend, "file", data)
        reader = await backend.open("file")
        for offset, sizes in ((0, [1]), (1, [4096, 0, 10]), (4095, [2, self.BLOCK_BYTES, 3]), (data.nbytes - 1, [1])):
            buffers = [bytearray(size) for size in sizes]
            await reader.read(offset, [memoryview(buffer) for buffer in buffers])
            assert b"".join(buffers) == bytes(data[offset : offset + sum(sizes)])
        await reader.close()

    async def test_thousands_of_buffers_are_filled_by_one_read(self, backend: Backend) -> None:
        data = patterned(5000 * 3)
        await upload(backend, "file", data)
        reader = await backend.open("file")
        buffers = [bytearray(3) for _ in range(5000)]
        await reader.read(0, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == bytes(data)
        await reader.close()

    async def test_buffers_of_any_item_type_are_filled(self, backend: Backend) -> None:
        await backend.put("file", bytes(range(16)))
        buffer = memoryview(bytearray(16)).cast("Q", (2,))
        reader = await backend.open("file")
        await reader.read(0, [buffer])
        assert bytes(buffer) == bytes(range(16))
        await reader.close()

    async def test_seen_gets_every_byte_once_and_in_order(self, backend: Backend) -> None:
        data = patterned(2 * self.BLOCK_BYTES + 4097)
        await upload(backend, "file", data)
        reader = await backend.open("file")
        for offset in (0, 1, 4096, self.BLOCK_BYTES + 1):
            seen = bytearray()
            into = bytearray(data.nbytes - offset)
            await reader.read(offset, [memoryview(into)[:10], memoryview(into)[10:]], seen.extend)
            assert bytes(seen) == bytes(into) == bytes(data[offset:])
        await reader.close()

    async def test_an_error_in_seen_reaches_the_reader(self, backend: Backend) -> None:
        await backend.put("file", b"data")
        reader = await backend.open("file")

        def refuse(run: memoryview) -> None:
            raise ArithmeticError("bad checksum")

        with pytest.raises(ArithmeticError, match="bad checksum"):
            await reader.read(0, [memoryview(bytearray(4))], refuse)
        assert await download(reader) == b"data"
        await reader.close()

    async def test_many_reads_of_one_object_run_at_once(self, backend: Backend) -> None:
        data = patterned(4 * self.BLOCK_BYTES)
        await upload(backend, "file", data)
        reader = await backend.open("file")
        starts = range(0, data.nbytes, data.nbytes // 16)
        parts = await asyncio.gather(*(download(reader, start, data.nbytes // 16) for start in starts))
        assert b"".join(parts) == bytes(data)
        await reader.close()

    async def test_a_read_past_the_end_says_where_the_object_ends(self, backend: Backend) -> None:
        await backend.put("short", b"0123456789")
        reader = await backend.open("short")
        with pytest.raises(StorageError, match="ends at byte 10") as caught:
            await reader.read(5, [memoryview(bytearray(6))])
        assert caught.value.key == "short"
        with pytest.raises(UsageError):
            await reader.read(-1, [memoryview(bytearray(1))])
        await reader.close()

    async def test_a_cancelled_read_leaves_the_buffer_to_its_owner(self, backend: Backend) -> None:
        data = patterned(self.BLOCK_BYTES)
        await upload(backend, "file", data)
        reader = await backend.open("file")
        for steps in range(6):
            into = memoryview(bytearray(data.nbytes))
            reading = asyncio.ensure_future(reader.read(0, [into]))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            into[:] = b"\1" * data.nbytes
            assert await download(reader) == bytes(data)
            assert bytes(into) == b"\1" * data.nbytes
        await reader.close()

    async def test_a_closed_reader_refuses_to_read(self, backend: Backend) -> None:
        await backend.put("file", b"data")
        reader = await backend.open("file")
        await reader.close()
        await reader.close()
        with pytest.raises(UsageError):
            await reader.read(0, [memoryview(bytearray(1))])

    # Listing, deleting

    async def test_list_shows_one_level_sorted(self, backend: Backend) -> None:
        for key in ("b", "a", "f/z", "f/y", "f/g/deep/er", "f.0", "f-1/x"):
            await backend.put(key, key.encode())
        top = await backend.list("")
        assert [found.key for found in top.objects] == ["a", "b", "f.0"]
        assert list(top.folders) == ["f", "f-1"]
        below = await backend.list("f")
        assert [(found.key, found.size) for found in below.objects] == [("f/y", 3), ("f/z", 3)]
        assert list(below.folders) == ["f/g"]

    async def test_a_folder_that_does_not_exist_is_empty(self, backend: Backend) -> None:
        await backend.put("a/b", b"x")
        for prefix in ("absent", "a/absent", "a/b", "a/b/c"):
            listing = await backend.list(prefix)
            assert (listing.objects, listing.folders) == ((), ())

    async def test_stat_and_list_agree(self, backend: Backend) -> None:
        await backend.put("a/b", b"12345")
        assert (await backend.list("a")).objects == (await backend.stat("a/b"),)

    async def test_a_changed_object_is_not_dated_earlier(self, backend: Backend) -> None:
        await backend.put("a", b"1")
        before = await backend.stat("a")
        await backend.put("a", b"2")
        assert (await backend.stat("a")).modified_ns >= before.modified_ns

    async def test_delete_removes_objects_and_the_folders_they_leave_empty(self, backend: Backend) -> None:
        for key in ("s/m", "s/a/d/f", "s/a/r/v", "t/m"):
            await backend.put(key, b"x")
        await backend.delete(["s/a/d/f"])
        assert list((await backend.list("s/a")).folders) == ["s/a/r"]
        await backend.delete(["s/m", "s/a/r/v"])
        assert list((await backend.list("")).folders) == ["t"]

    async def test_deleting_what_is_absent_is_fine(self, backend: Backend) -> None:
        await backend.put("a/b", b"x")
        await backend.delete(["absent", "a/absent", "a/b/below", "x/y/z"])
        await backend.delete([])
        await backend.delete(["a/b", "a/b"])
        await backend.delete(["a/b"])
        with pytest.raises(ObjectNotFoundError):
            await backend.stat("a/b")

    async def test_deleting_a_folder_that_holds_objects_does_nothing(self, backend: Backend) -> None:
        await backend.put("a/b", b"x")
        await backend.delete(["a"])
        assert await backend.get("a/b", 1) == b"x"

    async def test_a_deleted_key_can_be_written_again(self, backend: Backend) -> None:
        for data in (b"1", b"2"):
            await backend.put_new("a/b", data)
            assert await backend.get("a/b", 1) == data
            await backend.delete(["a/b"])
        await upload(backend, "a/b", memoryview(b"3"))
        assert await backend.get("a/b", 1) == b"3"

    async def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(self, backend: Backend) -> None:
        async def churn(worker: int) -> None:
            for turn in range(5):
                key = f"shared/deep/{worker}-{turn}"
                await backend.put_new(key, b"new")
                await backend.put(key, b"replaced")
                assert await backend.get(key, 100) == b"replaced"
                await backend.delete([key])

        await asyncio.gather(*(churn(worker) for worker in range(8)))
        assert (await backend.list("")).folders == ()

    # The rest

    async def test_the_backend_says_what_it_is(self, backend: Backend) -> None:
        assert "://" in backend.url
        traits = backend.traits
        assert traits.scope in ("shared", "node", "process")
        assert min(traits.alignment, traits.block_writes, traits.block_reads) >= 1
        space = await backend.space()
        if space.free_bytes is not None and space.total_bytes is not None:
            assert 0 <= space.free_bytes <= space.total_bytes

    async def test_closing_twice_is_fine(self, backend: Backend) -> None:
        await backend.close()
        await backend.close()
