"""Blocks in any order become one stream, and a stream that broke stays broken."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.backends.in_order import InOrderUpload
from aiockpt.errors import StorageError, UsageError
from aiockpt.runtime.limits import Limiter
from aiockpt.storage.backend import Seen
from tests.fails import fails


class Tape:
    """A stream that keeps what it gets; each send waits until it may go on."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.ended = ""
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.fails = False

    async def send(self, runs: Sequence[memoryview], seen: Seen | None) -> None:
        await self.may_go_on.wait()
        if self.fails:
            raise StorageError("the stream broke", retryable=True)
        for run in runs:
            if seen is not None:
                seen(run)
            self.sent += run

    async def finish(self) -> None:
        self.ended += "finished"

    async def abort(self) -> None:
        self.ended += "aborted"


def make_upload(size: int) -> tuple[InOrderUpload, Tape]:
    tape = Tape()
    return InOrderUpload("d/file", size, tape, Limiter("test", 2)), tape


@given(edges=st.sets(st.integers(0, 300), max_size=12), order=st.randoms(use_true_random=False), at_once=st.booleans())
def test_any_order_of_blocks_becomes_the_stream(edges: set[int], order: object, at_once: bool) -> None:
    data = bytes(index % 251 for index in range(300))
    cuts = [0, *sorted(edges), 300]
    blocks = [(start, end) for start, end in itertools.pairwise(cuts)]
    order.shuffle(blocks)  # type: ignore[attr-defined]
    shown: list[bytes] = []

    async def write_all() -> bytes:
        upload, tape = make_upload(300)
        writes = [
            upload.write(start, [memoryview(data)[start:end]], lambda run: shown.append(bytes(run)))
            for start, end in blocks
        ]
        if at_once:
            await asyncio.gather(*writes)
        else:
            for write in writes:
                await write
        await upload.finish()
        assert tape.ended == "finished"
        return bytes(tape.sent)

    assert asyncio.run(write_all()) == data
    assert sorted(shown) == sorted(data[start:end] for start, end in blocks if start < end)


async def test_a_block_that_came_early_was_copied() -> None:
    upload, tape = make_upload(8)
    memory = bytearray(b"late")
    await upload.write(4, [memoryview(memory)])
    memory[:] = b"XXXX"
    await upload.write(0, [memoryview(b"soon")])
    assert tape.sent == b"soonlate"


async def test_after_a_failed_block_nothing_is_sent_any_more() -> None:
    upload, tape = make_upload(12)
    tape.fails = True
    await fails(upload.write(0, [memoryview(b"1234")]), StorageError, "the stream broke")
    tape.fails = False
    for start in (0, 4):
        with pytest.raises(StorageError, match="an earlier block was not written") as caught:
            await upload.write(start, [memoryview(b"1234")])
        assert not caught.value.retryable
    await fails(upload.finish(), StorageError, "an earlier block")
    assert tape.sent == b""
    await upload.abort()
    assert tape.ended == "aborted"


async def test_a_block_in_line_behind_one_that_failed_is_not_sent() -> None:
    upload, tape = make_upload(8)
    tape.may_go_on.clear()
    tape.fails = True
    first = asyncio.ensure_future(upload.write(0, [memoryview(b"1234")]))
    second = asyncio.ensure_future(upload.write(4, [memoryview(b"5678")]))
    await asyncio.sleep(0)
    tape.may_go_on.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StorageError, StorageError]
    assert tape.sent == b""


async def test_a_cancelled_block_breaks_the_stream() -> None:
    upload, tape = make_upload(8)
    tape.may_go_on.clear()
    writing = asyncio.ensure_future(upload.write(0, [memoryview(b"1234")]))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    tape.may_go_on.set()
    await fails(upload.write(4, [memoryview(b"5678")]), StorageError, "an earlier block")


async def test_an_upload_that_cannot_be_finished_is_aborted() -> None:
    upload, tape = make_upload(0)

    async def fail() -> None:
        raise StorageError("no")

    tape.finish = fail  # type: ignore[method-assign]
    await fails(upload.finish(), StorageError, "no")
    await upload.abort()
    assert tape.ended == "aborted"
    await fails(upload.write(0, []), UsageError)
