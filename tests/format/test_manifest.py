"""Manifests and receipts as JSON."""

import json
import math
from base64 import b64decode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aiockpt.errors import ManifestError, UsageError
from aiockpt.format import manifest as manifest_module
from aiockpt.format.document import MAX_TREE_NODES, digest128, seal, unseal
from aiockpt.format.manifest import (
    HEAD_BYTES,
    MAX_ANCESTORS,
    FileEntry,
    Head,
    Manifest,
    Receipt,
    decode_head,
    decode_manifest,
    decode_receipt,
    encode_manifest,
    encode_receipt,
)

RUN = "c0ffee00c0de"


def test_a_manifest_is_read_back_as_it_was_written(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_receipt_is_read_back_as_it_was_written(receipts: list[Receipt]) -> None:
    assert [decode_receipt(encode_receipt(receipt)) for receipt in receipts] == receipts


def test_the_members_of_a_manifest_stand_in_the_order_of_the_format(manifest: Manifest) -> None:
    found = json.loads(encode_manifest(manifest))
    assert list(found) == [
        *("format", "version", "min_reader", "writer", "requires", "id", "step", "generation", "sequence", "run"),
        *(
            "parent",
            "attempt",
            "world_size",
            "head",
            "write_id",
            "created_ns",
            "files",
            "tensors",
            "alias",
            "state",
            "metrics",
            "user",
        ),
        "digest",
    ]
    assert found["tensors"]["w"]["pieces"][1] == [1, 4096, 4160, [2, 0], [2, 8]]
    assert list(found["files"][0]) == ["p", "size", "rank", "algo", "block", "sums", "digest"]
    assert found["state"] == {"global": {"step": 1000}, "per_rank": {"0": {"seed": 0}, "1": {"seed": 1}}}


def test_the_order_of_axes_is_written_where_it_is_not_their_own_and_nowhere_else(manifest: Manifest) -> None:
    plain = json.loads(encode_manifest(manifest))
    assert all(list(entry) == ["dtype", "shape", "pieces"] for entry in plain["tensors"].values())
    w = replace(manifest.tensors["w"], axes=(1, 0))
    lying = replace(manifest, tensors={**manifest.tensors, "w": w})
    assert json.loads(encode_manifest(lying))["tensors"]["w"]["axes"] == [1, 0]
    assert decode_manifest(encode_manifest(lying)) == lying


def test_orders_of_axes_do_not_make_a_manifest_slow_to_read(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = replace(manifest.tensors["w"], axes=(1, 0))
    data = encode_manifest(replace(manifest, tensors={**manifest.tensors, "w": w}))
    looked_at: list[bytes] = []
    monkeypatch.setattr(manifest_module, "check_unique_keys", lambda body, what: looked_at.append(body))
    decode_manifest(data)
    (body,) = looked_at
    assert b'"axes"' not in body


def _edited(data: bytes, **members: Any) -> bytes:
    return seal(json.dumps({**json.loads(unseal(data, "it")), **members}).encode())


def test_unknown_members_are_ignored_everywhere(manifest: Manifest) -> None:
    plain = json.loads(unseal(encode_manifest(manifest), "it"))
    plain["future"] = {"x": [1]}
    plain["files"][0]["future"] = 1
    plain["tensors"]["w"]["future"] = {"y": 1}
    plain["tensors"]["w"]["pieces"][0].append("future")
    assert decode_manifest(seal(json.dumps(plain).encode())) == manifest


def test_a_later_version_is_refused_and_named(manifest: Manifest, receipts: list[Receipt]) -> None:
    data = encode_manifest(manifest)
    for members, message in (
        ({"version": 2}, "version 2"),
        ({"version": 0}, "version 0"),
        ({"min_reader": 3}, "reader of version 3"),
        ({"version": 2, "files": "not what version 1 has"}, "version 2"),
        ({"requires": ["parts", "warp"]}, "'warp'.*install a newer"),
        ({"format": "other"}, "'other'"),
    ):
        with pytest.raises(ManifestError, match=message):
            decode_manifest(_edited(data, **members))
    with pytest.raises(ManifestError, match="version 2"):
        decode_receipt(_edited(encode_receipt(receipts[0]), version=2))


def test_a_receipt_is_no_manifest_and_the_other_way_round(manifest: Manifest, receipts: list[Receipt]) -> None:
    with pytest.raises(ManifestError, match="'aiockpt-receipt', not 'aiockpt'"):
        decode_manifest(encode_receipt(receipts[0]))
    with pytest.raises(ManifestError, match="'aiockpt', not 'aiockpt-receipt'"):
        decode_receipt(encode_manifest(manifest))


def test_a_metric_that_is_not_finite_does_not_make_a_manifest_unreadable(manifest: Manifest) -> None:
    diverged = msgspec.structs.replace(manifest, metrics={"loss": math.nan, "best": -math.inf, "lr": 0.1})
    assert decode_manifest(encode_manifest(diverged)).metrics == {"loss": None, "best": None, "lr": 0.1}


@pytest.mark.parametrize("value", [object(), 10**5000, "\ud800"], ids=["object", "10**5000", "surrogate"])
def test_a_value_that_json_cannot_hold_is_refused_when_it_is_written(manifest: Manifest, value: object) -> None:
    with pytest.raises((UsageError, ManifestError), match="the manifest of step-00001000 cannot be"):
        encode_manifest(msgspec.structs.replace(manifest, user={"x": value}))
    with pytest.raises(ManifestError, match="cannot be read"):
        encode_manifest(msgspec.structs.replace(manifest, sequence=-1))


def test_nothing_is_written_that_a_reader_would_refuse(manifest: Manifest, receipts: list[Receipt]) -> None:
    large = [0] * (MAX_TREE_NODES + 1)
    with pytest.raises(ManifestError, match="values"):
        encode_manifest(msgspec.structs.replace(manifest, user=large))
    with pytest.raises(ManifestError, match="values"):
        encode_receipt(msgspec.structs.replace(receipts[0], state=large))
    with pytest.raises(ManifestError, match="values"):
        encode_receipt(msgspec.structs.replace(receipts[0], per_rank=large))


def test_plain_values_are_bounded_over_all_ranks_too(manifest: Manifest) -> None:
    ranks = {str(rank): [0] * (MAX_TREE_NODES - 10) for rank in range(5)}
    with pytest.raises(ManifestError, match="over all ranks"):
        encode_manifest(msgspec.structs.replace(manifest, state={"global": None, "per_rank": ranks}))


@given(st.binary(max_size=400).map(lambda raw: raw[: len(raw) // 8 * 8]))
def test_the_sum_of_a_block_is_found_without_decoding_all(sums: bytes) -> None:
    file = FileEntry.of("p", size=0, rank=0, algo="xxh3_64", block=4096, sums=sums)
    assert b64decode(file.sums) == sums == file.sums_bytes()
    assert [file.sum_of(index) for index in range(len(sums) // 8)] == [sums[i : i + 8] for i in range(0, len(sums), 8)]


def test_the_head_in_the_first_bytes_says_what_orders_steps(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    head = Head("step-00001000", 1000, 2, 7, RUN, "step-00000500", "3f9c21d07b44")
    assert decode_head(data[:HEAD_BYTES]) == head == Head.of(decode_manifest(data))
    ancestors = ((RUN, 2**63 - 1),) * MAX_ANCESTORS
    longest = msgspec.structs.replace(
        manifest, parent="p" * 128, ancestors=ancestors, id="x" * 128, step=2**63 - 1, sequence=2**63 - 1
    )
    assert decode_head(encode_manifest(longest)[:HEAD_BYTES]) == Head.of(longest)
    root = msgspec.structs.replace(manifest, parent=None)
    assert decode_head(encode_manifest(root)[:HEAD_BYTES]) == Head.of(root)


def test_the_fields_that_order_steps_stand_first_and_their_digest_after_them(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    keys = list(json.loads(data))
    order = ["step", "generation", "sequence", "run", "parent", "attempt", "world_size", "head"]
    assert keys[keys.index("step") : keys.index("head") + 1] == order
    head, _, rest = data.partition(b',"head":"')
    assert rest.startswith(digest128(head).encode() + b'"')


def test_a_head_of_which_one_bit_is_not_as_it_was_written_says_nothing(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    end = data.index(b',"write_id"')
    for bit in range(8 * end):
        flipped = bytearray(data[:HEAD_BYTES])
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_head(bytes(flipped)) is None, f"bit {bit}"
    for size in range(end):
        assert decode_head(data[:size]) is None, f"{size} bytes"


def test_a_manifest_from_before_its_head_had_a_digest_says_nothing_and_is_read_whole(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    head, _, rest = unseal(data, "it").partition(b',"head":"')
    before = seal(head + rest[rest.index(b'"') + 1 :])
    assert decode_head(before[:HEAD_BYTES]) is None
    assert decode_manifest(before) == decode_manifest(data) == manifest


def test_a_string_that_looks_like_the_end_of_the_head_is_none(manifest: Manifest) -> None:
    tricky = msgspec.structs.replace(manifest, writer='","write_id":"x","head":"')
    assert decode_head(encode_manifest(tricky)[:HEAD_BYTES]) == Head.of(tricky)
    assert decode_manifest(encode_manifest(tricky)) == tricky


def test_a_receipt_has_no_head(receipts: list[Receipt]) -> None:
    assert decode_head(encode_receipt(receipts[0])) is None


@given(st.binary(max_size=100))
def test_a_head_of_anything_never_raises(noise: bytes) -> None:
    for start in (noise, b'{"format":"aiockpt",' + noise):
        decode_head(start)
        decode_head(start + b',"head":"' + digest128(start).encode() + b'"')
