"""Conformance suite of the backend contract (`aiockpt.storage.backend`): a test per guarantee. Subclass, and run pytest.

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
from collections.abc import Awaitable, Callable

import pytest

from aiockpt.errors import ObjectExistsError, ObjectNotFoundError, UsageError
from aiockpt.redaction import redact
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import put_unflushed
from aiockpt.testing.backend_suite_files import DataFileTests
from aiockpt.testing.data_files import download as download
from aiockpt.testing.data_files import patterned as patterned
from aiockpt.testing.data_files import upload as upload

BAD_KEYS = ["", "/", "/abs", "a//b", "a/", ".", "..", "a/../b", "./a", "a\\b", "a\nb", "a\0b", "c:/x", "k" * 1025]


@pytest.mark.asyncio
class BackendSuite(DataFileTests):
    """The conformance suite. A subclass provides the fixture ``backend``: an empty backend for each test."""

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

    async def test_what_is_put_without_a_flush_is_put_all_the_same(self, backend: Backend) -> None:
        await put_unflushed(backend, "a/b", b"first", new=True)
        with pytest.raises(ObjectExistsError):
            await put_unflushed(backend, "a/b", b"second", new=True)
        assert await backend.get("a/b", 100) == b"first"
        await put_unflushed(backend, "a/b", b"third", new=False)
        assert await backend.get("a/b", 100) == b"third"

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
            for save_round in range(5):
                key = f"shared/deep/{worker}-{save_round}"
                await backend.put_new(key, b"new")
                await backend.put(key, b"replaced")
                assert await backend.get(key, 100) == b"replaced"
                await backend.delete([key])

        await asyncio.gather(*(churn(worker) for worker in range(8)))
        assert (await backend.list("")).folders == ()

    # The rest

    async def test_the_backend_says_what_it_is(self, backend: Backend) -> None:
        assert "://" in backend.url
        assert redact(backend.url) == backend.url, "it is shown and logged: no credentials"
        traits = backend.traits
        assert traits.scope in ("shared", "hosts", "node", "process")
        assert min(traits.alignment, traits.block_writes, traits.block_reads) >= 1
        space = await backend.space()
        if space.free_bytes is not None and space.total_bytes is not None:
            assert 0 <= space.free_bytes <= space.total_bytes

    async def test_closing_twice_is_fine(self, backend: Backend) -> None:
        await backend.close()
        await backend.close()
