"""What several ranks want is read by one of them and reaches each exactly once; what one wants is its own affair."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.planning.exchange import (
    MIN_PARCEL_BYTES,
    Exchange,
    FileSpan,
    landings_of,
    landings_within,
    plan_exchange,
    wanted_spans,
)
from aiockpt.planning.read_plan import Landing
from tests.example_counts import examples

BLOCKS = (1024, 4096)
MIB = 1 << 20


def blocks_in(spans: Sequence[FileSpan]) -> Counter[tuple[int, int]]:
    """Return how often each block is in *spans*."""
    return Counter(
        (span.file, number)
        for span in spans
        for number in range(span.start // BLOCKS[span.file], -(-span.end // BLOCKS[span.file]))
    )


def spans_of(blocks: set[tuple[int, int]], sizes: Sequence[int]) -> list[FileSpan]:
    """Return the spans of whole blocks, as a rank says what it wants; the last block of a file may be short."""
    landings: dict[int, list[Landing]] = {}
    for file, number in sorted(blocks):
        start = number * BLOCKS[file]
        if start < sizes[file]:
            landings.setdefault(file, []).append(Landing(start, min(start + 1, sizes[file]), 0, 0))
    return wanted_spans([landings], list(zip(sizes, BLOCKS, strict=True)))


def bytes_read(exchange: Exchange) -> list[int]:
    read = [sum(span.end - span.start for span in spans) for spans in exchange.alone]
    for parcel in exchange.parcels:
        read[parcel.reader] += parcel.size_bytes
    return read


WANTED = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 15)), max_size=24)
SIZES = st.tuples(st.integers(1, 16 * BLOCKS[0]), st.integers(1, 16 * BLOCKS[1]))


@examples(300)
@given(
    wanted=st.lists(WANTED, min_size=2, max_size=6), sizes=SIZES, parcel_bytes=st.sampled_from([512, 5000, 16 * MIB])
)
def test_every_wanted_block_reaches_each_rank_that_wants_it_exactly_once(
    wanted: list[set[tuple[int, int]]], sizes: tuple[int, int], parcel_bytes: int
) -> None:
    spans = [spans_of(blocks, sizes) for blocks in wanted]
    exchange = plan_exchange(spans, BLOCKS, parcel_bytes=parcel_bytes)
    for rank, mine in enumerate(spans):
        arrives = blocks_in(exchange.alone[rank])
        for parcel in exchange.parcels:
            if rank in parcel.takers:
                arrives += blocks_in(parcel.spans)
        assert arrives == blocks_in(mine)
    read = sum((blocks_in(parcel.spans) for parcel in exchange.parcels), Counter[tuple[int, int]]())
    read += sum(map(blocks_in, exchange.alone), Counter[tuple[int, int]]())
    assert set(read.values()) <= {1}, "a block is read by two ranks"


@examples(300)
@given(
    wanted=st.lists(WANTED, min_size=2, max_size=6), sizes=SIZES, parcel_bytes=st.sampled_from([512, 5000, 16 * MIB])
)
def test_parcels_are_whole_blocks_of_a_bounded_size_that_their_reader_wants_too(
    wanted: list[set[tuple[int, int]]], sizes: tuple[int, int], parcel_bytes: int
) -> None:
    exchange = plan_exchange([spans_of(blocks, sizes) for blocks in wanted], BLOCKS, parcel_bytes=parcel_bytes)
    opened: list[int] = []
    for parcel in exchange.parcels:
        assert parcel.reader in parcel.takers
        assert len(parcel.takers) > 1
        assert list(parcel.takers) == sorted(set(parcel.takers))
        assert 0 < parcel.size_bytes <= max(parcel_bytes, *BLOCKS)
        for span in parcel.spans:
            assert span.start % BLOCKS[span.file] == 0
            assert span.end % BLOCKS[span.file] == 0 or span.end == sizes[span.file]
        opened += parcel.opens
    assert sorted(opened) == sorted({span.file for parcel in exchange.parcels for span in parcel.spans})


@examples(50)
@given(ranks=st.integers(2, 8), size=st.integers(1, 64 * MIB), seed=st.integers(0, 99))
def test_replicas_read_alike_within_one_parcel(ranks: int, size: int, seed: int) -> None:
    half = size * (seed % 10) // 10 // 4096 * 4096
    spans = [FileSpan(0, 0, half), FileSpan(1, 0, size)] if half else [FileSpan(1, 0, size)]
    exchange = plan_exchange([spans] * ranks, (4096, 4096), parcel_bytes=4 * MIB)
    read = bytes_read(exchange)
    assert sum(read) == sum(span.end - span.start for span in spans)
    largest = max(parcel.size_bytes for parcel in exchange.parcels)
    assert largest <= 4 * MIB
    assert max(read) - min(read) <= largest


def test_a_rank_that_reads_much_alone_reads_less_for_others() -> None:
    own = FileSpan(0, 0, 8 * MIB)
    shared = FileSpan(1, 0, 16 * MIB)
    exchange = plan_exchange([[own, shared], [shared], [shared]], (4096, 4096), parcel_bytes=MIB)
    assert bytes_read(exchange) == [8 * MIB] * 3


def test_small_checkpoints_are_cut_so_that_all_ranks_read() -> None:
    exchange = plan_exchange([[FileSpan(0, 0, 8 * MIB)]] * 2, (4096,), parcel_bytes=16 * MIB)
    assert bytes_read(exchange) == [4 * MIB] * 2
    assert [parcel.reader for parcel in exchange.parcels] == [0, 1] * 4, "in turn"
    assert all(parcel.size_bytes == MIN_PARCEL_BYTES for parcel in exchange.parcels)


def test_few_wanted_blocks_of_many_tensors_travel_in_one_message() -> None:
    norms = [FileSpan(0, number * 40960, number * 40960 + 4096) for number in range(100)]
    exchange = plan_exchange([norms, norms], (4096,), parcel_bytes=16 * MIB)
    assert [len(parcel.spans) for parcel in exchange.parcels] == [100]


def test_nothing_is_exchanged_where_nobody_wants_the_same() -> None:
    exchange = plan_exchange([[FileSpan(0, 0, 4096)], [FileSpan(0, 4096, 8192)], []], (4096,), parcel_bytes=MIB)
    assert exchange.parcels == ()
    assert exchange.alone == ((FileSpan(0, 0, 4096),), (FileSpan(0, 4096, 8192),), ())


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12), st.integers(0, 60), st.integers(1, 60))
def test_landings_are_clipped_to_a_span(gaps: list[tuple[int, int]], start: int, length: int) -> None:
    landings, cursor, filled = [], 0, 0
    for gap, size in gaps:
        landings.append(Landing(cursor + gap, cursor + gap + size, 0, filled))
        cursor, filled = cursor + gap + size, filled + size
    where = {at: one.target_offset + at - one.start for one in landings for at in range(one.start, one.end)}
    found = landings_within(landings, FileSpan(0, start, start + length))
    clipped = {at: one.target_offset + at - one.start for one in found for at in range(one.start, one.end)}
    assert clipped == {at: to for at, to in where.items() if start <= at < start + length}


@pytest.mark.parametrize("count", [1, 2])
def test_landings_of_every_pass_are_clipped(count: int) -> None:
    passes = [{0: [Landing(0, 100, number, 0)], 1: [Landing(5, 9, number, 100)]} for number in range(count)]
    found = landings_of(passes, [FileSpan(0, 10, 20), FileSpan(0, 50, 60), FileSpan(1, 0, 7)])
    assert found == [
        {0: [Landing(10, 20, number, 10), Landing(50, 60, number, 50)], 1: [Landing(5, 7, number, 100)]}
        for number in range(count)
    ]
