"""What is not asked twice is still answered right: whatever differs is looked at again."""

import json

import pytest
from msgspec.structs import replace

from aiockpt.errors import CommitError, ManifestError
from aiockpt.format import document, merge, validate
from aiockpt.format import manifest as manifests
from aiockpt.format.document import MAX_TREE_DEPTH, Memo, check_tree, seal, unseal, without
from aiockpt.format.manifest import (
    Manifest,
    Receipt,
    TensorEntry,
    decode_manifest,
    decode_receipt,
    encode_manifest,
    encode_receipt,
)
from aiockpt.format.validate import check_manifest
from tests.paper import paper_manifest


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_good", Memo())
    monkeypatch.setattr(merge, "_merged", Memo())
    monkeypatch.setattr(manifests, "_encoded", Memo())
    monkeypatch.setattr(manifests, "_decoded", Memo())
    monkeypatch.setattr(document, "_trees", Memo())


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
    before = paper_manifest(receipts)
    monkeypatch.setattr(merge, "_merge_pieces", None)
    assert paper_manifest([replace(vote, tensors=dict(vote.tensors)) for vote in receipts]) == before


def test_votes_for_other_files_are_merged_anew(receipts: list[Receipt]) -> None:
    paper_manifest(receipts)
    with pytest.raises(CommitError, match="in a file that it does not have"):
        paper_manifest([replace(receipts[0], files=()), receipts[1]])


def test_what_is_done_to_a_merged_manifest_does_not_show_in_the_next(receipts: list[Receipt]) -> None:
    first = paper_manifest(receipts)
    whole = dict(first.tensors)
    first.tensors.clear()
    assert paper_manifest(receipts).tensors == whole


def test_votes_that_are_changed_afterwards_are_merged_anew(receipts: list[Receipt]) -> None:
    paper_manifest(receipts)
    receipts[0].tensors["new"] = TensorEntry("F32", (0,), ())
    assert "new" in paper_manifest(receipts).tensors


def test_tensors_that_were_encoded_are_the_same_bytes_again(manifest: Manifest) -> None:
    first = encode_manifest(manifest)
    assert encode_manifest(replace(manifest, tensors=dict(manifest.tensors))) == first


@pytest.mark.parametrize("change", ["another shape", "another order", "one more", "in place"])
def test_tensors_that_differ_from_those_before_are_encoded_as_they_are(manifest: Manifest, change: str) -> None:
    before, tensors = encode_manifest(manifest), dict(manifest.tensors)
    entry = tensors["w"]
    if change == "another order":
        tensors = dict(reversed(tensors.items()))
    elif change == "one more":
        tensors["v"] = entry
    elif change == "in place":
        tensors = manifest.tensors
    if change in ("another shape", "in place"):
        tensors["w"] = replace(entry, shape=(*entry.shape[:-1], entry.shape[-1] + 1))
    data = encode_manifest(replace(manifest, tensors=tensors))
    assert data != before
    found = decode_manifest(data)
    assert (list(found.tensors), found.tensors) == (list(tensors), tensors)


def test_what_a_reader_refuses_is_refused_beside_tensors_that_were_encoded(manifest: Manifest) -> None:
    encode_manifest(manifest)
    with pytest.raises(ManifestError, match="cannot be read"):
        encode_manifest(replace(manifest, step=-1))


def test_tensors_that_were_decoded_are_decoded_once(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    first, second = decode_manifest(data), decode_manifest(encode_manifest(replace(manifest, metrics={"loss": 1.0})))
    assert (first, second) == (manifest, replace(manifest, metrics={"loss": 1.0}))
    assert second.tensors["w"] is first.tensors["w"]
    for found in (first, second):
        found.tensors.clear()
        assert decode_manifest(data) == manifest


def test_a_member_with_the_bytes_of_the_tensors_before_them_keeps_them(manifest: Manifest) -> None:
    fields = json.loads(unseal(encode_manifest(manifest), "it"))
    user = {"tensors": fields["tensors"], "more": fields["tensors"]}
    data = seal(json.dumps({"user": user} | {name: fields[name] for name in fields if name != "user"}).encode())
    close = seal(json.dumps(json.loads(unseal(data, "it")), separators=(",", ":")).encode())
    for stored in (data, data, close, close):
        found = decode_manifest(stored)
        assert (found.tensors, found.user) == (manifest.tensors, user)


@pytest.mark.parametrize(
    ("user", "tensors"), [('"{ }"', " { }"), ('{"tensors":1,"x":"{ }"}', "{ }"), ('{"{ }":1,"{}":2}', " { }")]
)
def test_tensors_that_are_none_but_spaces_leave_the_same_bytes_elsewhere(
    manifest: Manifest, user: str, tensors: str
) -> None:
    fields = json.loads(unseal(encode_manifest(manifest), "it")) | {"alias": {}, "user": 0, "tensors": 1}
    body = json.dumps({"user": 0} | fields, separators=(",", ":"))
    data = seal(body.replace('"user":0', f'"user":{user}').replace(',"tensors":1,', f',"tensors":{tensors},').encode())
    for _ in range(2):
        found = decode_manifest(data)
        assert (found.user, found.tensors) == (json.loads(user), {})


@pytest.mark.parametrize("state", ['"state": "a"', '"state":"a"'])
def test_a_key_that_stands_twice_beside_the_bytes_of_the_state_is_refused(receipts: list[Receipt], state: str) -> None:
    fields = json.loads(unseal(encode_receipt(receipts[0]), "it"))
    body = json.dumps({"user": 0} | fields | {"user": 0, "state": 1}, separators=(",", ":"))
    user = '"user":{"state":0,"a":1,"a":2}'
    data = seal(body.replace('"user":0', user).replace('"state":1', state).encode())
    with pytest.raises(ManifestError, match="has the key 'a' twice"):
        decode_receipt(data)


def test_a_name_that_stands_twice_is_refused_again_and_again(manifest: Manifest) -> None:
    body = unseal(encode_manifest(manifest), "it")
    entry = json.dumps(json.loads(body)["tensors"]["w"], separators=(",", ":")).encode()
    twice = seal(body.replace(b'"tensors":{', b'"tensors":{"w":' + entry + b",", 1))
    for _ in range(2):
        with pytest.raises(ManifestError, match="has the key 'w' twice"):
            decode_manifest(twice)


def test_what_is_no_member_stays_in_the_document() -> None:
    assert without(b'{"a":1,"state":{}}', "state", b"{}", b"null") == b'{"a":1,"state":null}'
    for body in (b"[1,2,3,{}]", b'{"a":{},"state": {}}', b'{"state":1,"a":{}}'):
        assert without(body, "state", b"{}", b"null") == body


def test_a_tree_is_refused_for_itself() -> None:
    deep, wide = b"[" * (MAX_TREE_DEPTH + 1) + b"]" * (MAX_TREE_DEPTH + 1), b"[" + b"0," * 999 + b"0]"
    assert [check_tree(wide, "a tree") for _ in range(2)] == [1001, 1001]
    for _ in range(2):
        with pytest.raises(ManifestError, match="nested deeper"):
            check_tree(deep, "a tree")


def test_what_is_large_is_not_kept(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MEMO_BYTES", 10)
    monkeypatch.setattr(document, "MEMO_BYTES", 10)
    assert encode_manifest(manifest) == encode_manifest(manifest)
    wide = b"[" + b"0," * 999 + b"0]"
    check_tree(wide, "a tree")
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifests._decoded._last == ()
    assert manifests._encoded.recall((tuple(manifest.tensors), manifest.tensors)) is None
    assert document._trees.recall(wide) is None
