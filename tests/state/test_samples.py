"""Every sample read exactly once, whatever the number of readers becomes. Properties of `reshard`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.data.samples import LoaderPart, Span, Stream, read_part, reshard, split, write_part
from aiockpt.errors import UsageError

sizes = st.integers(1, 9)
Sample = tuple[str, Any]


def whole(count: int) -> LoaderPart:
    return LoaderPart({"epoch": 0}, spans=(Span("order", 0, count),))


def read(part: LoaderPart, count: int) -> tuple[list[int], LoaderPart]:
    """Read some samples of the spans, as a reader would."""
    taken, left = split(part.spans, count)
    return [place for span in taken for place in span.positions], LoaderPart(
        part.shared, part.buffer, left, part.streams
    )


def samples(parts: Sequence[LoaderPart]) -> Counter[Sample]:
    held: Counter[Sample] = Counter()
    for part in parts:
        held.update(("buffer", sample) for sample in part.buffer)
        held.update((span.source, position) for span in part.spans for position in span.positions)
        held.update(("stream", (stream.source, stream.cursor)) for stream in part.streams)
    return held


def in_lock_step(parts: Sequence[LoaderPart]) -> list[int]:
    """The samples of the spans in the order in which readers in lock step give them."""
    queues = [[position for span in part.spans for position in span.positions] for part in parts]
    longest = max(map(len, queues))
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


@st.composite
def readers(draw: st.DrawFn) -> list[LoaderPart]:
    """Readers at work: dealt from wholes, each having read another number of samples."""
    size = draw(sizes)
    spans = tuple(Span(name, draw(st.integers(0, 5)), draw(st.integers(5, 90))) for name in ("a", "b"))
    streams = tuple(
        Stream(f"file-{number}", draw(st.integers(0, 9)), draw(st.none() | st.integers(0, 50)))
        for number in range(draw(st.integers(0, 7)))
    )
    buffer = tuple(range(draw(st.integers(0, 5))))
    parts = reshard([LoaderPart("shared", buffer, spans, streams)], size)
    return [read(part, draw(st.integers(0, 40)))[1] for part in parts]


@given(readers(), st.lists(sizes, min_size=1, max_size=4))
def test_no_sample_is_lost_and_none_is_read_twice(parts: list[LoaderPart], new_sizes: list[int]) -> None:
    before = samples(parts)
    for size in new_sizes:
        parts = reshard(parts, size)
        assert len(parts) == size
        assert samples(parts) == before
        assert max(before.values(), default=1) == 1


@given(readers(), sizes)
def test_counts_differ_by_one_at_most(parts: list[LoaderPart], size: int) -> None:
    dealt = reshard(reshard(parts, 10), size)
    counts = [len(part.buffer) + part.span_count for part in dealt]
    assert max(counts) - min(counts) <= 1
    loads = [sum(stream.remaining_count or 0 for stream in part.streams) for part in dealt]
    longest = max((stream.remaining_count or 0 for part in dealt for stream in part.streams), default=0)
    if all(stream.remaining_count is not None for part in dealt for stream in part.streams):
        assert max(loads) - min(loads) <= longest


@given(readers(), sizes)
def test_the_same_parts_give_the_same_parts(parts: list[LoaderPart], size: int) -> None:
    copies = msgspec.convert(msgspec.to_builtins(parts), list[LoaderPart])
    assert reshard(parts, size) == reshard(copies, size)


@given(readers())
def test_the_same_number_of_readers_gets_its_parts_back(parts: list[LoaderPart]) -> None:
    assert reshard(parts, len(parts)) == parts


@given(st.integers(0, 200), sizes, st.lists(st.tuples(sizes, st.integers(0, 9)), max_size=5))
def test_readers_in_lock_step_go_on_in_the_one_global_order(
    count: int, size: int, changes: list[tuple[int, int]]
) -> None:
    parts = reshard([whole(count)], size)
    read_so_far: list[int] = []
    for new_size, rounds in changes:
        taken, parts = zip(*(read(part, rounds) for part in parts), strict=True)  # type: ignore[assignment]
        read_so_far += sorted(position for some in taken for position in some)
        parts = reshard(parts, new_size)
        assert [*read_so_far, *in_lock_step(parts)] == list(range(count))
        assert all(len(part.spans) <= 1 for part in parts)


@given(readers(), sizes)
def test_spans_stay_few(parts: list[LoaderPart], size: int) -> None:
    """Each reader's own progress makes one border in each source; a border costs at most a span for each stride."""
    again = reshard(reshard(reshard(parts, 10), 7), size)
    assert sum(len(part.spans) for part in again) <= 4 * 100


def test_streams_go_to_the_reader_that_has_the_least_in_the_order_they_had() -> None:
    lengths = {"a": 10, "b": 40, "c": 20, "d": 5}
    parts = [LoaderPart(streams=tuple(Stream(name, 0, count) for name, count in lengths.items())), LoaderPart()]
    assert [[stream.source for stream in part.streams] for part in reshard([*parts, LoaderPart()], 2)] == [
        ["b"],
        ["a", "c", "d"],
    ]


def test_a_stream_of_unknown_length_counts_as_a_long_one() -> None:
    parts = [LoaderPart(streams=(Stream("a", 0, 1), Stream("b", 0, 9), Stream("c", 0, 1), Stream("d")))]
    assert [[stream.source for stream in part.streams] for part in reshard(parts, 2)] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("new_size", [1, 2, 3])
def test_readers_that_hold_the_same_sample_are_refused(new_size: int) -> None:
    parts = [LoaderPart(spans=(Span("order", 0, 10, 2),)), LoaderPart(spans=(Span("order", 4, 5),))]
    with pytest.raises(UsageError, match="two readers both have samples of 'order'"):
        reshard(parts, new_size)


@pytest.mark.parametrize("new_size", [1, 2, 3])
def test_readers_that_own_the_same_stream_are_refused(new_size: int) -> None:
    with pytest.raises(UsageError, match="two readers both own the stream 'file'"):
        reshard([LoaderPart(streams=(Stream("file", 1),)), LoaderPart(streams=(Stream("file", 2),))], new_size)


def test_readers_in_two_epochs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"readers 0 and 1 disagree about what they share: .*1.* and .*2"):
        reshard([LoaderPart({"epoch": 1}), LoaderPart({"epoch": 2})], 1)


@pytest.mark.parametrize(("parts", "size"), [([], 1), ([LoaderPart()], 0)])
def test_no_readers_are_refused(parts: list[LoaderPart], size: int) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        reshard(parts, size)


@pytest.mark.parametrize("bad", [(-1, 5, 1), (0, 5, 0)])
def test_a_span_that_is_none_is_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="start is 0 or more and stride 1 or more"):
        Span("order", *bad)


def test_strides_without_a_small_common_one_are_dealt_as_they_are() -> None:
    parts = [LoaderPart(spans=(Span("order", 0, 9000, 89),)), LoaderPart(spans=(Span("order", 1, 90000, 89 * 97),))]
    assert samples(reshard(parts, 3)) == samples(parts)


@given(readers())
def test_a_part_survives_being_written_as_plain_values(parts: list[LoaderPart]) -> None:
    for part in parts:
        plain = msgspec.json.decode(msgspec.json.encode(write_part(part)))
        assert read_part(plain, part.shared) == part


@pytest.mark.parametrize(
    "damage",
    [{"spans": [["a", 0, 1]]}, {"spans": [["a", -1, 2, 1]]}, {"streams": [[1, 2, 3]]}, {"buffer": None}, {"spans": 3}],
)
def test_a_damaged_part_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read_part({**write_part(LoaderPart()), **damage}, None)
