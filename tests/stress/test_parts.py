"""The parts of a stress test, each by itself."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import StorageError
from aiockpt.storage.backend import Seen
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.tools.stress.lab import Payload, new_buffer, percentile
from benchmarks.clients.moving import WINDOW_BYTES, read_file, write_file
from tests.stress.conftest import names_in

BLOCK = 64 << 10


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, fraction)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= fraction * len(ordered) - 1e-9
    below = [value for value in ordered if value < found]
    assert len(below) < fraction * len(ordered)


def test_of_nothing_there_is_no_percentile() -> None:
    assert percentile([], 0.99) is None


def test_blocks_differ_from_their_neighbours_and_from_the_same_block_of_other_files() -> None:
    content = Payload(0, BLOCK)
    block = bytes(content.block(3, 4, BLOCK))
    for file, number in ((3, 3), (3, 5), (2, 4), (4, 4), (0, 0)):
        assert not content.is_block(file, number, memoryview(block))
    assert content.is_block(3, 4, memoryview(block))


def test_objects_differ_and_have_just_their_size() -> None:
    content = Payload(0, BLOCK)
    documents = {content.document(number, 4096) for number in range(3000)}
    assert len(documents) == 3000
    assert {len(document) for document in documents} == {4096}
    assert len(content.document(5, 3)) == 3


@pytest.mark.parametrize("size", [0, 1, WINDOW_BYTES, 5 * WINDOW_BYTES + 7])
async def test_a_file_is_moved_as_the_engine_moves_it(memory: MemoryBackend, size: int) -> None:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    shown: dict[int, int] = {}

    def seen_from(offset: int) -> Seen:
        def seen(view: memoryview) -> None:
            shown[offset] = shown.get(offset, 0) + view.nbytes

        return seen

    await write_file(memory, "a/file", data, seen_from)
    assert sum(shown.values()) == size
    into = new_buffer(max(size, 1))[:size]
    await read_file(memory, "a/file", into)
    assert into == data


async def test_a_file_that_could_not_be_written_is_aborted(memory: MemoryBackend) -> None:
    faulty = FaultyBackend(memory, [Fault(do="fail", verb="upload.write", at=2, error=errno.EIO)])
    with pytest.raises(StorageError):
        await write_file(faulty, "a/file", memoryview(bytes(5 * WINDOW_BYTES)))
    assert await names_in(memory) == []
