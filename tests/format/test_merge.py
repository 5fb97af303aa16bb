"""Receipts become one manifest, or an error that names who and what."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from aiockpt.errors import CommitError
from aiockpt.format import merge
from aiockpt.format.manifest import Manifest, Piece, Receipt, TensorEntry
from tests.paper import paper_manifest


def test_the_pieces_of_all_ranks_tile_the_tensors(manifest: Manifest) -> None:
    assert [file.rank for file in manifest.files] == [0, 1]
    assert manifest.tensors["w"].pieces == (
        Piece(0, 4096, 4160, (0, 0), (2, 8)),
        Piece(1, 4096, 4160, (2, 0), (2, 8)),
    )
    assert manifest.alias == {"head": "embed"}
    assert manifest.state == {"global": {"step": 1000}, "per_rank": {"0": {"seed": 0}, "1": {"seed": 1}}}
    assert (manifest.generation, manifest.sequence, manifest.parent) == (2, 7, "step-00000500")
    assert (manifest.metrics, manifest.user) == ({"loss": 1.5}, {"note": "ünï"})


def test_the_order_of_receipts_does_not_matter(receipts: list[Receipt], manifest: Manifest) -> None:
    assert all(paper_manifest(list(order)) == manifest for order in itertools.permutations(receipts))


def test_a_piece_that_two_ranks_hold_is_taken_from_the_lowest(receipts: list[Receipt], manifest: Manifest) -> None:
    copy = TensorEntry("BF16", (3,), (Piece(0, 4096, 4102, (0,), (3,)),))
    receipts[1] = replace(receipts[1], tensors={**receipts[1].tensors, "embed": copy})
    assert paper_manifest(receipts) == manifest


def test_a_rank_without_values_of_its_own_has_no_tree(receipts: list[Receipt]) -> None:
    receipts[1] = replace(receipts[1], per_rank=None)
    assert paper_manifest(receipts).state["per_rank"] == {"0": {"seed": 0}}


def test_a_missing_rank_is_named(receipts: list[Receipt]) -> None:
    with pytest.raises(CommitError, match=r"1 ranks have not voted, the first of them \[0\]"):
        paper_manifest(receipts[1:])
    with pytest.raises(CommitError, match=r"\[1, 2, 3, 4, 5\]"):
        paper_manifest([replace(receipts[0], world_size=2**62)])
    with pytest.raises(CommitError, match="no receipts"):
        paper_manifest([])


def test_a_rank_that_voted_twice_or_cannot_be_is_named(receipts: list[Receipt]) -> None:
    with pytest.raises(CommitError, match=r"more than one receipt of ranks \[1\]"):
        paper_manifest([*receipts, receipts[1]])
    with pytest.raises(CommitError, match="rank 5 voted in a world of 2"):
        paper_manifest([*receipts, replace(receipts[1], rank=5)])


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("id", "step-00001001"),
        ("step", 1001),
        ("attempt", "000000000000"),
        ("generation", 3),
        ("sequence", 8),
        ("parent", None),
        ("run", "000000000000"),
        ("world_size", 3),
    ],
)
def test_a_receipt_that_differs_is_not_a_vote(receipts: list[Receipt], fact: str, value: object) -> None:
    receipts[1] = replace(receipts[1], **{fact: value})
    with pytest.raises(CommitError, match=f"ranks 0 and 1 disagree about {fact}"):
        paper_manifest(receipts)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"step": 1001}, r"step \(1000 on rank 0, 1001 on rank 1\)"),
        ({"step": 1000.0}, r"step \(1000 on rank 0, 1000.0 on rank 1\)"),
        ({"step": [1, 2]}, "step"),
        ([], "everything"),
    ],
)
def test_plain_values_that_differ_are_named(receipts: list[Receipt], theirs: Any, message: str) -> None:
    receipts[1] = replace(receipts[1], state=theirs, scalars_digest="other")
    with pytest.raises(CommitError, match=f"{message}.*per_rank"):
        paper_manifest(receipts)


def test_ranks_may_have_values_of_their_own_parts(receipts: list[Receipt]) -> None:
    receipts[1] = replace(receipts[1], state={"step": 1000, "stage": {"b": 1}}, scalars_digest="other")
    assert paper_manifest(receipts).state["global"] == {"step": 1000, "stage": {"b": 1}}


def test_ranks_that_planned_differently_still_make_a_checkpoint(receipts: list[Receipt], manifest: Manifest) -> None:
    receipts[1] = replace(receipts[1], plan_digest="other")
    assert paper_manifest(receipts) == manifest


def test_more_than_five_differences_are_counted(receipts: list[Receipt]) -> None:
    votes = [
        replace(receipt, state={f"v{number}": rank for number in range(8)}, scalars_digest=str(rank))
        for rank, receipt in enumerate(receipts)
    ]
    with pytest.raises(CommitError, match=r"v4 \(0 on rank 0, 1 on rank 1\) and 3 more"):
        paper_manifest(votes)


def test_a_name_that_is_tied_here_and_a_tensor_there_is_a_tensor(receipts: list[Receipt], manifest: Manifest) -> None:
    receipts[1] = replace(receipts[1], alias={"w": "embed", "head": "embed"})
    assert paper_manifest(receipts) == manifest


def test_a_chain_of_ties_ends_at_its_tensor(receipts: list[Receipt]) -> None:
    receipts[1] = replace(receipts[1], alias={"tail": "head"})
    assert paper_manifest(receipts).alias == {"head": "embed", "tail": "embed"}


def test_ties_in_a_circle_are_refused(receipts: list[Receipt]) -> None:
    receipts[1] = replace(receipts[1], alias={"one": "two", "two": "one"})
    with pytest.raises(CommitError, match="which is another alias"):
        paper_manifest(receipts)


def test_pieces_lie_by_their_offsets_whoever_wrote_them(receipts: list[Receipt]) -> None:
    swapped = [
        replace(
            receipt,
            tensors={
                **receipt.tensors,
                "w": TensorEntry("F32", (4, 8), (Piece(0, 4096, 4160, (2 - 2 * receipt.rank, 0), (2, 8)),)),
            },
        )
        for receipt in receipts
    ]
    assert [(piece.file, piece.offsets) for piece in paper_manifest(swapped).tensors["w"].pieces] == [
        (1, (0, 0)),
        (0, (2, 0)),
    ]


def test_a_difference_deep_in_lists_is_named_by_its_path(receipts: list[Receipt]) -> None:
    votes = [
        replace(receipt, state={"a": [{"lr": 1}, {"lr": rank}]}, scalars_digest=str(rank))
        for rank, receipt in enumerate(receipts)
    ]
    with pytest.raises(CommitError, match=r"a\[1\].lr \(0 on rank 0, 1 on rank 1\)"):
        paper_manifest(votes)


def _with_tensor(name: str, entry: TensorEntry) -> Callable[[Receipt], Receipt]:
    return lambda receipt: replace(receipt, tensors={**receipt.tensors, name: entry})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, tensors={}), "pieces of 'w' leave a gap"),
        (_with_tensor("w", TensorEntry("F32", (4, 8), (Piece(0, 4096, 4160, (1, 0), (2, 8)),))), "overlap and leave a gap"),
        (_with_tensor("embed", TensorEntry("BF16", (3,), (Piece(0, 4096, 4098, (0,), (1,)),))), "'embed' overlap"),
        (_with_tensor("embed", TensorEntry("F16", (3,), ())), "'embed' is BF16 .* on rank 0 and F16 .* on rank 1"),
        (_with_tensor("embed", TensorEntry("BF16", (4,), ())), r"\(3,\) on rank 0 and BF16 \(4,\) on rank 1"),
        (_with_tensor("x", TensorEntry("U8", (1,), (Piece(1, 0, 1, (0,), (1,)),))), "a file that it does not have"),
        (_with_tensor("x", TensorEntry("U8", (1,), (Piece(-1, 0, 1, (0,), (1,)),))), "a file that it does not have"),
        (lambda r: replace(r, files=(replace(r.files[0], rank=0),)), "claims .* of rank 0"),
        (lambda r: replace(r, alias={"head": "w"}), "'head' is tied to 'embed'"),
        (lambda r: replace(r, alias={"tail": "nowhere"}), "'tail' points at 'nowhere', which is no tensor"),
    ],
)  # fmt: skip
def test_votes_that_make_no_checkpoint_are_refused(
    receipts: list[Receipt], change: Callable[[Receipt], Receipt], message: str
) -> None:
    receipts[1] = change(receipts[1])
    with pytest.raises(CommitError, match=message):
        paper_manifest(receipts)


def test_what_was_left_out_is_the_union_and_what_a_rank_saved_is_there(receipts: list[Receipt]) -> None:
    receipts[0] = replace(receipts[0], left_out={"a": ("F32", (2,)), "w": ("BF16", (4, 8))})
    receipts[1] = replace(receipts[1], left_out={"a": ("F32", (2,)), "b": None})
    assert paper_manifest(receipts).left_out == {"a": ("F32", (2,)), "b": None}
    receipts[1] = replace(receipts[1], left_out={"a": ("F32", (3,))})
    with pytest.raises(CommitError, match=r"'a' was left out as F32 \(2,\) on rank 0 and as F32 \(3,\) on rank 1"):
        paper_manifest(receipts)


def _lying(receipt: Receipt, axes: tuple[int, ...] | None) -> Receipt:
    w = replace(receipt.tensors["w"], axes=UNSET if axes is None else axes)
    return replace(receipt, tensors={**receipt.tensors, "w": w})


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        ((1, 0), (1, 0), (1, 0)),
        ((1, 0), None, None),
        (None, (1, 0), None),
        ((1, 0), (0, 1), None),
        ((0, 1), (0, 1), (0, 1)),
    ],
)
@pytest.mark.parametrize("in_columns", [False, True])
def test_an_order_of_axes_is_kept_where_all_who_wrote_the_tensor_say_the_same(
    receipts: list[Receipt],
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[int, ...] | None,
    second: tuple[int, ...] | None,
    merged: tuple[int, ...] | None,
    in_columns: bool,
) -> None:
    if in_columns:
        monkeypatch.setattr(merge, "MAX_PIECES", 1)
    votes = [_lying(receipts[0], first), _lying(receipts[1], second)]
    for order in (votes, votes[::-1]):
        manifest = paper_manifest(order)
        assert manifest.tensors["w"].axes == (UNSET if merged is None else merged)
        assert list(manifest.tensors["w"].pieces) == list(paper_manifest(receipts).tensors["w"].pieces)
        assert manifest.requires == (("parts",) if in_columns else ())


def test_an_order_of_axes_of_tensors_that_one_rank_has_alone_is_kept(receipts: list[Receipt]) -> None:
    alone = TensorEntry("U8", (2, 3), (Piece(0, 4096, 4102, (0, 0), (2, 3)),), (1, 0))
    votes = [receipts[0], replace(receipts[1], tensors={"mine": alone, **receipts[1].tensors})]
    manifest = paper_manifest(votes)
    assert manifest.tensors["mine"].axes == (1, 0)
    assert manifest.tensors["w"].axes is UNSET
