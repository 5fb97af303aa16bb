"""Who writes what: everything once, by someone who holds it, and nobody much more than the others."""

from collections.abc import Sequence

import pytest

from aiockpt.errors import RanksDisagreeError, UsageError
from aiockpt.format.dtypes import itemsize
from aiockpt.planning import spread as spread_module
from aiockpt.planning.spread import LocalBoxes, Part, local_boxes_of, spread
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard

Holdings = Sequence[Sequence[LocalBoxes]]


def whole(name: str, *shape: int, dtype: str = "U8") -> LocalBoxes:
    return LocalBoxes(name, dtype, shape, (Box.whole(shape),))


def rows(name: str, start: int, stop: int, shape: tuple[int, ...]) -> LocalBoxes:
    return LocalBoxes(name, "U8", shape, (Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])),))


def loads(holdings: Holdings, parts: Sequence[Sequence[Part]]) -> list[int]:
    return [
        sum(part.box.volume * itemsize(holdings[rank][part.holding].dtype) for part in some)
        for rank, some in enumerate(parts)
    ]


def test_the_holdings_of_a_state_are_its_shards_without_memory() -> None:
    box = Box((0,), (2,))
    shard = TensorShard(name="w", dtype="F32", shape=(4,), boxes=(box,), data=object())
    state = ShardedState(tensors=(shard,), alias={}, values={}, per_rank={}, structure="")
    assert local_boxes_of(state) == (LocalBoxes("w", "F32", (4,), (box,)),)


def test_one_rank_writes_what_it_holds() -> None:
    assert spread([[whole("a", 3, 4), whole("b")]]) == [
        (Part(0, Box((0, 0), (3, 4)), 0), Part(1, Box((), ()), 0))
    ]  # fmt: skip


def test_what_one_rank_holds_alone_stays_whole_whatever_its_size() -> None:
    parts = spread([[rows("w", 0, 90, (100, 5))], [rows("w", 90, 100, (100, 5))]], block_bytes=8)
    assert [[part.box.sizes for part in some] for some in parts] == [[(90, 5)], [(10, 5)]]


def test_a_large_replica_is_cut_between_rows_into_one_run_a_rank() -> None:
    parts = spread([[whole("w", 1, 100, 10)]] * 4, block_bytes=64)
    assert parts == [
        (Part(0, Box((0, 25 * rank, 0), (1, 25, 10)), 250 * rank),) for rank in range(4)
    ]  # fmt: skip


def test_a_replica_up_to_a_block_stays_whole() -> None:
    parts = spread([[whole("w", 64)]] * 2, block_bytes=64)
    assert parts == [(Part(0, Box((0,), (64,)), 0),), ()]


def test_small_replicas_go_to_who_has_least() -> None:
    holdings = [[whole("a", 30), whole("b", 20), whole("c", 20), whole("d", 10)]] * 2
    parts = spread(holdings, block_bytes=64)
    assert loads(holdings, parts) == [40, 40]
    assert sum(map(len, parts)) == 4


def test_what_rows_leave_uneven_small_replicas_even_out() -> None:
    holdings = [[whole("coarse", 3, 100), *(whole(f"fine{number}", 10) for number in range(10))]] * 2
    assert loads(holdings, spread(holdings, block_bytes=64)) == [200, 200]


def test_replicas_level_what_ranks_hold_alone() -> None:
    both = whole("both", 60, 1)
    holdings = [[whole("mine", 50), both], [both], [whole("third", 20), both]]
    assert loads(holdings, spread(holdings, block_bytes=10)) == [50, 40, 40]
    holdings[0] = [whole("mine", 200), both]
    assert loads(holdings, spread(holdings, block_bytes=10)) == [200, 40, 40]


def test_overlapping_groups_of_holders_are_levelled_together() -> None:
    """Ranks 0 and 1 share, 1 and 2 share: pouring each group once would leave rank 1 with too much."""
    left, right = whole("left", 300, 1), whole("right", 600, 1)
    holdings = [[left], [left, right], [right]]
    assert loads(holdings, spread(holdings, block_bytes=1)) == [300, 300, 300]


def test_columns_and_rows_of_a_mesh_are_levelled_together() -> None:
    """Tensors split over one axis of a 3 × 4 mesh and replicated over the other, both ways."""
    holdings = [
        [rows("by row", 40 * row, 40 * row + 40, (120, 7)), rows("by column", 30 * column, 30 * column + 30, (120, 7))]
        for row in range(3)
        for column in range(4)
    ]
    found = loads(holdings, spread(holdings, block_bytes=14))
    assert max(found) - min(found) <= 14
    assert sum(found) == 2 * 120 * 7


def test_the_parts_of_a_rank_lie_in_the_order_of_its_holdings() -> None:
    holdings = [[whole("small", 3), whole("big", 100, 1), whole("tiny", 2)]] * 3
    for some in spread(holdings, block_bytes=10):
        places = [(part.holding, part.start) for part in some]
        assert places == sorted(places)


def test_a_box_lies_behind_the_boxes_before_it_in_its_holding() -> None:
    boxes = (Box((0, 3), (1, 2)), Box((1, 0), (0, 5)), Box((1, 0), (1, 5)))
    first = LocalBoxes("w", "U8", (2, 5), (Box((0, 0), (1, 3)),))
    parts = spread([[first], [LocalBoxes("w", "U8", (2, 5), boxes)]])
    assert parts[1] == (Part(0, boxes[0], 0), Part(0, boxes[2], 2))


def test_a_box_that_a_rank_has_twice_is_written_once() -> None:
    assert spread([[whole("w", 4), whole("w", 4)]]) == [(Part(0, Box((0,), (4,)), 0),)]


# ------------------------------------------------------------------ what each rank may have of its own


def own(name: str, size: int, unit: str) -> LocalBoxes:
    return LocalBoxes(name, "U8", (size,), (Box.whole((size,)),), unit)


def writers(holdings: Holdings, parts: Sequence[Sequence[Part]]) -> dict[str, list[int]]:
    """Return the ranks that write something of each tensor."""
    found: dict[str, list[int]] = {}
    for rank, some in enumerate(parts):
        for part in some:
            found.setdefault(holdings[rank][part.holding].name, []).append(rank)
    return found


def test_replicas_that_may_differ_are_all_of_the_lowest_rank_that_has_them() -> None:
    buffers = [own(f"m{number}.{what}", 1000, f"m{number}") for number in range(4) for what in ("mean", "var")]
    holdings = [[whole("w", 8000, 1)], [whole("w", 8000, 1), *buffers], [whole("w", 8000, 1), *buffers]]
    parts = spread(holdings, block_bytes=10)
    found = writers(holdings, parts)
    assert {name: ranks for name, ranks in found.items() if name != "w"} == {one.name: [1] for one in buffers}
    assert loads(holdings, parts) == [4000, 8000, 4000]  # what may come from any rank makes up for it


def test_many_of_them_are_spread_a_whole_module_or_dict_from_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_module, "LOWEST_RANK_BYTES", 1000)
    buffers = [own(f"m{number}.{what}", 500 + number, f"m{number}") for number in range(9) for what in ("mean", "var")]
    holdings = [[*buffers, whole("w", 300, 1)]] * 3
    parts = spread(holdings, block_bytes=10)
    found = writers(holdings, parts)
    for number in range(9):
        assert found[f"m{number}.mean"] == found[f"m{number}.var"]
        assert len(found[f"m{number}.mean"]) == 1
    assert max(loads(holdings, parts)) <= 1.01 * sum(loads(holdings, parts)) / 3


def test_a_large_one_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_module, "LOWEST_RANK_BYTES", 1000)
    holdings = [[own("ema.w", 9000, "ema"), whole("w", 9000, 1)]] * 2
    parts = spread(holdings, block_bytes=10)
    assert writers(holdings, parts) == {"ema.w": [0], "w": [1]}


def test_those_of_one_module_that_different_ranks_have_come_from_one_rank_for_each_set_of_ranks() -> None:
    holdings = [
        [own("m.a", 10, "m"), own("m.b", 20, "m")],
        [own("m.a", 10, "m"), own("m.b", 20, "m")],
        [own("m.b", 20, "m")],
    ]
    found = writers(holdings, spread(holdings))
    assert found == {"m.a": [0], "m.b": [0]}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.bn1.running_mean", "model.bn1"),
        ("ema.layers\\.0\\.weight", "ema.layers\\.0\\"),
        ("queue", ""),
        ("lists[3]", "lists"),
    ],
)
def test_a_unit_is_the_module_or_dict_that_a_tensor_lies_in(name: str, unit: str) -> None:
    def shard(may_differ: bool) -> TensorShard:
        return TensorShard(name, "F32", (4,), (Box.whole((4,)),), object(), may_differ=may_differ)

    state = ShardedState(tensors=(shard(True), shard(False)), alias={}, values={}, per_rank={}, structure="")
    assert [holding.unit for holding in local_boxes_of(state)] == [unit, None]


MIB = 1 << 20
GPT = [
    (f"h.{layer}.{part}", rows) for layer in range(24) for part, rows in (("q", 4), ("k", 4), ("up", 16), ("down", 16))
]
"""The modules of a model, and how many MiB each has."""


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["DDP and an EMA dict", "GPTQ buffers"])
def test_no_rank_writes_a_tenth_more_than_the_mean(kind: str, world_size: int) -> None:
    if kind == "GPTQ buffers":
        state = [
            own(f"{name}.{what}", size * MIB // part, name)
            for name, size in GPT
            for what, part in (("qweight", 1), ("scales", 16), ("zeros", 32))
        ]
    else:
        weights = [whole(f"model.{name}.weight", size * MIB, 1) for name, size in GPT]
        moments = [whole(f"opt.{name}.{key}", size * MIB, 1) for name, size in GPT for key in ("m", "v")]
        state = [*weights, *moments, *(own(f"ema.{name}.weight", size * MIB, f"ema.{name}") for name, size in GPT)]
    found = loads([state] * world_size, spread([state] * world_size))
    assert max(found) <= 1.1 * sum(found) / world_size
    assert sum(found) == sum(holding.boxes[0].volume for holding in state)


def test_a_tensor_without_elements_is_kept_by_the_lowest_rank_that_has_it() -> None:
    nothing = LocalBoxes("none", "U8", (0, 5), ())
    parts = spread([[], [whole("w", 4), nothing], [nothing]])
    assert parts == [(), (Part(0, Box((0,), (4,)), 0), Part(1, Box((0, 0), (0, 5)), 0)), ()]


def test_ranks_outside_a_mesh_write_nothing_of_it() -> None:
    outside = LocalBoxes("w", "U8", (4,), (Box((0,), (0,)),))
    assert spread([[outside], [whole("w", 4)], [LocalBoxes("w", "U8", (4,), ())]])[::2] == [(), ()]


def test_equal_lists_are_recognised_whether_they_are_one_object_or_not() -> None:
    same = [whole("w", 100, 3), whole("b", 7)]
    assert spread([same] * 3, block_bytes=10) == spread(
        [list(same), same, [whole("w", 100, 3), same[1]]], block_bytes=10
    )


@pytest.mark.parametrize(
    ("holdings", "message", "ranks"),
    [
        ([[whole("w", 4)], [whole("w", 4, dtype="I8")]], r"w: I8 \[4\] on rank 1, U8 \[4\] on rank 0", (0, 1)),
        ([[whole("w", 4)], [whole("w", 5)]], r"w: U8 \[5\] on rank 1, U8 \[4\] on rank 0", (0, 1)),
        ([[], [rows("w", 0, 3, (4,))]], r"w: 3 of 4 elements are held by any rank \(rank 1\)", (1,)),
        ([[LocalBoxes("w", "U8", (4,), ())]], "w: 0 of 4 elements", (0,)),
        ([[rows("w", 0, 3, (4,))], [rows("w", 1, 4, (4,))]], "overlap without being equal.* 6 elements of 4", (0, 1)),
        ([[rows("w", 0, 3, (6,))], [rows("w", 1, 4, (6,))]], r"overlap and leave a gap.*\(ranks 0, 1\)", (0, 1)),
        ([[LocalBoxes("w", "U8", (4,), (Box((1,), (4,)),))]], "rank 0 holds a box outside its shape", (0,)),
        ([[LocalBoxes("w", "U8", (4,), (Box((-1,), (4,)),))]], "rank 0 holds a box outside its shape", (0,)),
        ([[LocalBoxes("w", "U8", (4,), (Box((0, 0), (4, 1)),))]], "rank 0 holds a box outside its shape", (0,)),
    ],
)  # fmt: skip
def test_holdings_that_make_no_whole_tensor_are_refused(holdings: Holdings, message: str, ranks: object) -> None:
    with pytest.raises(RanksDisagreeError, match=message) as caught:
        spread(holdings)
    assert caught.value.ranks == ranks


def test_every_wrong_tensor_is_named_twenty_of_them_in_full() -> None:
    half = [rows(f"w{number}", 0, 1, (2,)) for number in range(30)]
    with pytest.raises(RanksDisagreeError, match=r"(?s)w0:.*w19:.*and 10 more") as caught:
        spread([[whole("fine", 3)], half])
    assert "w20:" not in str(caught.value)
    assert caught.value.ranks == (1,)
    with pytest.raises(RanksDisagreeError, match="w19:") as caught:
        spread([[whole("fine", 3)], half[:20]])
    assert "more" not in str(caught.value)


def test_many_ranks_are_named_by_the_first_five() -> None:
    with pytest.raises(RanksDisagreeError, match=r"ranks 0, 1, 2, 3, 4, …"):
        spread([[rows("w", 0, 1, (2,))]] * 9)


def test_more_pieces_than_a_manifest_can_have_are_refused_before_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spread_module, "MAX_TABLE_PIECES", 3)
    assert sum(map(len, spread([[whole("w", 3, 1)]] * 3, block_bytes=1))) == 3
    with pytest.raises(UsageError, match="4 ranks would write 4 pieces, more than the 3"):
        spread([[whole("w", 4, 1)]] * 4, block_bytes=1)


@pytest.mark.parametrize("holders", [2, 3, 4, 5, 7])
def test_a_box_is_cut_once_for_each_holder_at_most(holders: int) -> None:
    for row_count in range(2, 60):
        parts = spread([[whole("w", row_count, 264)]] * holders, block_bytes=64)
        assert all(len(some) <= 1 for some in parts), row_count
