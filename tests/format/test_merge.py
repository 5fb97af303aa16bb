"""Receipts become one manifest, or an error that names who and what."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from aiockpt.errors import CommitError
from aiockpt.format.manifest import Manifest, Piece, Receipt, TensorEntry
from aiockpt.format.merge import merge_receipts


def _merge(receipts: list[Receipt]) -> Manifest:
    return merge_receipts(receipts, writer="aiockpt test", write_id="w-1", created_ns=9)


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
    assert all(_merge(list(order)) == manifest for order in itertools.permutations(receipts))


def test_a_piece_that_two_ranks_hold_is_taken_from_the_lowest(receipts: list[Receipt], manifest: Manifest) -> None:
    copy = TensorEntry("BF16", (3,), (Piece(0, 4096, 4102, (0,), (3,)),))
    receipts[1] = replace(receipts[1], tensors={**receipts[1].tensors, "embed": copy})
    assert _merge(receipts) == manifest


def test_a_rank_without_values_of_its_own_has_no_tree(receipts: list[Receipt]) -> None:
    receipts[1] = replace(receipts[1], per_rank=None)
    assert _merge(receipts).state["per_rank"] == {"0": {"seed": 0}}


def test_a_missing_rank_is_named(receipts: list[Receipt]) -> None:
    with pytest.raises(CommitError, match=r"1 ranks have not voted, the first of them \[0\]"):
        _merge(receipts[1:])
    with pytest.raises(CommitError, match=r"\[1, 2, 3, 4, 5\]"):
        _merge([replace(receipts[0], world_size=2**62)])
    with pytest.raises(CommitError, match="no receipts"):
        _merge([])


def test_a_rank_that_voted_twice_or_cannot_be_is_named(receipts: list[Receipt]) -> None:
    with pytest.raises(CommitError, match=r"more than one receipt of ranks \[1\]"):
        _merge([*receipts, receipts[1]])
    with pytest.raises(CommitError, match="rank 5 voted in a world of 2"):
        _merge([*receipts, replace(receipts[1], rank=5)])


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
        ("plan_digest", "other"),
    ],
)
def test_a_receipt_that_differs_is_not_a_vote(receipts: list[Receipt], fact: str, value: object) -> None:
    receipts[1] = replace(receipts[1], **{fact: value})
    with pytest.raises(CommitError, match=f"ranks 0 and 1 disagree about {fact}"):
        _merge(receipts)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"step": 1001}, r"step \(1000 and 1001\)"),
        ({"step": 1000, "a": {"b": 1}}, r"a \(only one of them has it\)"),
        ({"step": 1000.0}, r"step \(1000 and 1000.0\)"),
        ({"step": [1, 2]}, "step"),
        ([], "everything"),
        ({"step": 1000}, "their digests differ"),
    ],
)
def test_plain_values_that_differ_are_named(receipts: list[Receipt], theirs: Any, message: str) -> None:
    receipts[1] = replace(receipts[1], state=theirs, scalars_digest="other")
    with pytest.raises(CommitError, match=f"{message}.*per_rank"):
        _merge(receipts)


def test_a_difference_deep_in_lists_is_named_by_its_path(receipts: list[Receipt]) -> None:
    votes = [
        replace(receipt, state={"a": [{"lr": 1}, {"lr": rank}]}, scalars_digest=str(rank))
        for rank, receipt in enumerate(receipts)
    ]
    with pytest.raises(CommitError, match=r"a\[1\].lr \(0 and 1\)"):
        _merge(votes)


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
        (lambda r: replace(r, alias={"w": "embed"}), "both a tensor and an alias"),
    ],
)  # fmt: skip
def test_votes_that_make_no_checkpoint_are_refused(
    receipts: list[Receipt], change: Callable[[Receipt], Receipt], message: str
) -> None:
    receipts[1] = change(receipts[1])
    with pytest.raises(CommitError, match=message):
        _merge(receipts)
