"""Sums of blocks and digests of documents."""

from itertools import pairwise

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.format import document


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_a_block_in_runs_has_the_sum_of_the_whole_block(data: bytes, cuts: list[int]) -> None:
    hasher = document.BlockHasher()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        hasher.update(memoryview(data)[start:end])
    assert hasher.digest() == document.hash_block(memoryview(data)) == xxhash.xxh3_64(data).digest()
    assert len(hasher.digest()) == document.SUM_BYTES


def test_known_sums_never_change() -> None:
    assert document.hash_block(b"aiockpt").hex() == xxhash.xxh3_64_hexdigest(b"aiockpt")
    assert document.hash_block(b"").hex() == "2d06800538d394c2"
    assert document.digest128(b"") == "xxh3_128:99aa06d3014798d86001c324468d497f"


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_blocks_cover_a_file_once(size: int, block_bytes: int) -> None:
    count = document.block_count(size, block_bytes)
    ranges = [document.block_range(index, size, block_bytes) for index in range(min(count, 50))]
    cursor = 0
    for start, end in ranges:
        assert start == cursor < end <= start + block_bytes
        cursor = end
    assert count > 50 or cursor == size
