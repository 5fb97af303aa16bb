"""Conformance tests of data files: the part of `backend_suite` on uploads and readers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from aiockpt.errors import ObjectNotFoundError, StorageError, UsageError
from aiockpt.storage.backend import Backend
from aiockpt.testing.data_files import download, patterned, upload


class DataFileTests:
    """Tests of ``create`` and ``open``, and of what they return; collected as a part of `BackendSuite`."""

    BLOCK_BYTES = 1 << 20
    """Blocks of the larger data files; set it to the block size that the backend prefers."""

    # Writing

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
            assert "cancelled" not in [found.key for found in (await backend.list("")).objects]

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
