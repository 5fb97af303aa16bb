"""What is not asked twice is still answered right: whatever differs is looked at again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aiockpt.errors import CommitError, ManifestError
from aiockpt.format import merge, validate
from aiockpt.format.manifest import Manifest, Receipt, TensorEntry
from aiockpt.format.merge import merge_receipts
from aiockpt.format.validate import Memo, check_manifest


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_good", Memo())
    monkeypatch.setattr(merge, "_merged", Memo())


def _merge(receipts: list[Receipt]) -> Manifest:
    return merge_receipts(receipts, writer="aiockpt test", write_id="w-1", created_ns=9)


def _check(manifest: Manifest) -> None:
    check_manifest(manifest, manifest.id, manifest.generation)


def test_only_the_last_question_is_remembered_and_by_its_value() -> None:
    memo: Memo[list[int], str] = Memo()
    assert memo.recall([1]) is None
    assert memo.remember([1], "one") == "one"
    assert memo.recall([1]) == "one"
    memo.remember([2], "two")
    assert memo.recall([1]) is None


def test_a_layout_that_was_good_is_looked_at_once(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(manifest)
    monkeypatch.setattr(validate, "_check_tensors", None)
    _check(replace(manifest, tensors=dict(manifest.tensors)))


def test_a_layout_that_differs_from_a_good_one_is_looked_at(manifest: Manifest) -> None:
    _check(manifest)
    with pytest.raises(ManifestError, match="no tensor"):
        _check(replace(manifest, alias={"head": "nowhere"}))
    _check(manifest)
    entry = manifest.tensors["w"]
    with pytest.raises(ManifestError, match="leave a gap"):
        _check(replace(manifest, tensors={**manifest.tensors, "w": replace(entry, pieces=entry.pieces[:1])}))


def test_a_layout_that_is_changed_after_it_was_good_is_looked_at(manifest: Manifest) -> None:
    _check(manifest)
    manifest.tensors["w"] = replace(manifest.tensors["w"], pieces=())
    with pytest.raises(ManifestError, match="leave a gap"):
        _check(manifest)


def test_votes_that_say_the_same_are_merged_once(receipts: list[Receipt], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _merge(receipts)
    monkeypatch.setattr(merge, "_merge_pieces", None)
    assert _merge([replace(vote, tensors=dict(vote.tensors)) for vote in receipts]) == before


def test_votes_for_other_files_are_merged_anew(receipts: list[Receipt]) -> None:
    _merge(receipts)
    with pytest.raises(CommitError, match="in a file that it does not have"):
        _merge([replace(receipts[0], files=()), receipts[1]])


def test_what_is_done_to_a_merged_manifest_does_not_show_in_the_next(receipts: list[Receipt]) -> None:
    first = _merge(receipts)
    whole = dict(first.tensors)
    first.tensors.clear()
    assert _merge(receipts).tensors == whole


def test_votes_that_are_changed_afterwards_are_merged_anew(receipts: list[Receipt]) -> None:
    _merge(receipts)
    receipts[0].tensors["new"] = TensorEntry("F32", (0,), ())
    assert "new" in _merge(receipts).tensors
