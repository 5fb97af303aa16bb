"""The receipts of a group in one object: equal to the receipts, or refused as a whole."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from aiockpt.errors import ManifestError
from aiockpt.format import gathered
from aiockpt.format.gathered import decode_gathered, encode_gathered
from aiockpt.format.manifest import Receipt, encode_receipt
from aiockpt.format.merge import merge_receipts

BOTH = range(2)


def _decode(data: bytes, ranks: range = BOTH, attempt: str = "3f9c21d07b44") -> dict[int, Receipt]:
    return decode_gathered(data, "step-00001000", attempt, ranks)


def test_what_was_gathered_are_the_receipts_themselves(receipts: list[Receipt]) -> None:
    assert _decode(encode_gathered(receipts)) == dict(enumerate(receipts))


def test_values_that_ranks_say_alike_are_written_once(receipts: list[Receipt]) -> None:
    told = [replace(receipt, state={"note": "unusual words"}) for receipt in receipts]
    data = encode_gathered(told)
    assert data.count(b"unusual words") == 1
    assert _decode(data) == dict(enumerate(told))


def test_values_that_differ_are_all_kept_even_where_their_digests_lie(receipts: list[Receipt]) -> None:
    told = [receipts[0], replace(receipts[1], state={"step": 7})]
    assert _decode(encode_gathered(told)) == dict(enumerate(told))


def test_ranks_with_other_digests_do_not_borrow_values(receipts: list[Receipt]) -> None:
    told = [receipts[0], replace(receipts[1], state=None, scalars_digest="xxh3_128:none")]
    assert _decode(encode_gathered(told)) == dict(enumerate(told))


def test_the_manifest_is_the_same_with_and_without_gathering(receipts: list[Receipt]) -> None:
    found = list(_decode(encode_gathered(receipts)).values())
    one, other = (merge_receipts(votes, writer="w", write_id="w", created_ns=9) for votes in (receipts, found))
    assert one == other


def test_any_damaged_byte_refuses_the_whole(receipts: list[Receipt]) -> None:
    data = encode_gathered(receipts)
    for place in range(len(data)):
        with pytest.raises(ManifestError):
            _decode(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: data + b"x",
        lambda data: data[: data.index(b"\n") + 1],
        lambda data: data + data[data.index(b"\n") + 1 :],
        lambda data: data[data.index(b"\n") + 1 :] + data[: data.index(b"\n") + 1],
        lambda data: data[: data.index(b"\n") + 1] * 2,
    ],
)
def test_lines_that_are_missing_added_or_out_of_order_refuse_the_whole(
    receipts: list[Receipt], damage: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(ManifestError):
        _decode(damage(encode_gathered(receipts)))


def test_votes_of_other_ranks_or_another_attempt_are_refused(receipts: list[Receipt]) -> None:
    data = encode_gathered(receipts)
    with pytest.raises(ManifestError, match="receipt of rank 0"):
        _decode(data, ranks=range(1, 3))
    with pytest.raises(ManifestError, match="attempt"):
        _decode(data, attempt="000000000000")
    with pytest.raises(ManifestError, match="rank 1"):
        _decode(encode_receipt(receipts[0]) + encode_receipt(replace(receipts[1], attempt="000000000000")))


def test_receipts_too_large_for_one_object_are_not_gathered(
    receipts: list[Receipt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "MAX_DOCUMENT_BYTES", len(encode_gathered(receipts)) - 1)
    with pytest.raises(ManifestError, match="2 ranks"):
        encode_gathered(receipts)
