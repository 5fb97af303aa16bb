"""What check_manifest, check_receipt and check_header say about structs; hostile documents are in test_hostile."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from aiockpt.errors import CorruptionError, ManifestError
from aiockpt.format import validate
from aiockpt.format.manifest import LeftOut, Manifest, Piece, Receipt, TensorEntry
from aiockpt.format.safetensors import Entry, Header
from aiockpt.format.validate import check_header, check_manifest, check_receipt, pieces_by_file

STEP, GENERATION, ATTEMPT = "step-00001000", 2, "3f9c21d07b44"


def test_a_good_manifest_and_good_receipts_pass(manifest: Manifest, receipts: list[Receipt]) -> None:
    check_manifest(manifest, STEP, GENERATION)
    for rank, receipt in enumerate(receipts):
        check_receipt(receipt, STEP, ATTEMPT, rank)


def test_a_manifest_that_was_copied_elsewhere_is_refused(manifest: Manifest) -> None:
    for step_id, generation in (("step-00001001", GENERATION), (STEP, 1)):
        with pytest.raises(ManifestError, match=f"{step_id}/MANIFEST-{generation}.json: .*copied"):
            check_manifest(manifest, step_id, generation)


def test_an_id_that_is_no_number_may_belong_to_any_step(manifest: Manifest) -> None:
    check_manifest(replace(manifest, id="best", step=77), "best", GENERATION)


def test_the_error_carries_the_key(manifest: Manifest) -> None:
    with pytest.raises(ManifestError) as caught:
        check_manifest(replace(manifest, world_size=1), STEP, GENERATION)
    assert caught.value.key == f"{STEP}/MANIFEST-2.json"


def test_more_tensors_or_pieces_than_the_format_allows_are_refused_by_counting(manifest: Manifest) -> None:
    entry = TensorEntry("U8", (0,), ())
    with pytest.raises(ManifestError, match="tensors are more"):
        check_manifest(
            replace(manifest, tensors=dict.fromkeys(map(str, range(validate.MAX_TENSORS + 1)), entry)), STEP, GENERATION
        )
    many = (Piece(0, 0, 0, (0,), (0,)),) * (validate.MAX_PIECES + 1)
    with pytest.raises(ManifestError, match="pieces are more"):
        check_manifest(replace(manifest, tensors={"x": TensorEntry("U8", (0,), many)}), STEP, GENERATION)
    with pytest.raises(ManifestError, match="aliases are more"):
        check_manifest(
            replace(manifest, alias=dict.fromkeys(map(str, range(validate.MAX_TENSORS + 1)), "w")), STEP, GENERATION
        )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (TensorEntry("U8", (-1,), ()), "impossible shape"),
        (TensorEntry("U8", (2**48, 0), ()), "impossible shape"),
        (TensorEntry("U8", (1,) * 33, ()), "impossible shape"),
        (TensorEntry("U8", (1,), (Piece(-1, 0, 1, (0,), (1,)),)), "file number -1"),
        (TensorEntry("U8", (1,), (Piece(0, -1, 0, (0,), (1,)),)), "outside its file"),
        (TensorEntry("U8", (1,), (Piece(0, 5, 4, (0,), (1,)),)), "outside its file"),
        (TensorEntry("U8", (4,), (Piece(0, 0, 1, (-1,), (1,)),)), "outside the shape"),
        (TensorEntry("U8", (4, 4), (Piece(0, 0, 4, (0, 0), (-2, -2)),)), "outside the shape"),
        (TensorEntry("U8", (2, 0), (), (-1, 0)), "an order that is none"),
        (TensorEntry("U8", (2, 0), (), (0, 10**9)), "an order that is none"),
    ],
)
def test_numbers_that_decoding_would_refuse_are_refused_in_structs_too(
    manifest: Manifest, entry: TensorEntry, message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        check_manifest(replace(manifest, tensors={"x": entry}, alias={}), STEP, GENERATION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, rank=1), "receipt of rank 1"),
        (lambda r: replace(r, id="other"), "for 'other'"),
        (lambda r: replace(r, attempt="0" * 12), "attempt '000000000000'"),
        (lambda r: replace(r, world_size=0), "world of 0"),
        (lambda r: replace(r, generation=0), "generation 0"),
        (lambda r: replace(r, files=(replace(r.files[0], rank=1),)), "said to be of rank 1"),
        (lambda r: replace(r, files=(replace(r.files[0], size=5),)), "outside its file"),
        (lambda r: replace(r, files=(replace(r.files[0], p="../x"),)), "does not begin with"),
        (lambda r: replace(r, tensors={"w": replace(r.tensors["w"], axes=(1, 1))}), "an order that is none"),
    ],
)
def test_a_receipt_that_is_no_vote_is_refused(
    receipts: list[Receipt], change: Callable[[Receipt], Receipt], message: str
) -> None:
    with pytest.raises(ManifestError, match=f"r/r00000.json: .*{message}"):
        check_receipt(change(receipts[0]), STEP, ATTEMPT, 0)


def test_a_receipt_of_a_rank_outside_its_world_is_refused(receipts: list[Receipt]) -> None:
    with pytest.raises(ManifestError, match="no rank 1 in a world of 1"):
        check_receipt(replace(receipts[1], world_size=1), STEP, ATTEMPT, 1)


def _header(*entries: Entry) -> Header:
    return Header(entries, {}, 4096)


W = Entry("w", "F32", (2, 8), 0, 64)
EMBED = Entry("embed", "BF16", (3,), 64, 70)
SCALE = Entry("scale", "F64", (), 70, 78)
EMPTY = Entry("empty", "U8", (0, 5), 70, 70)


def test_a_header_that_agrees_passes(manifest: Manifest) -> None:
    placed = pieces_by_file(manifest)
    check_header(0, manifest, _header(W, EMBED, EMPTY, SCALE))
    check_header(0, manifest, _header(W, EMBED, EMPTY, SCALE), placed[0])
    check_header(1, manifest, _header(replace(W, name="w#1"), Entry("unused", "U8", (3,), 64, 67)), placed[1])
    check_header(1, manifest, _header(replace(W, shape=(16,))), placed[1])
    assert [[name for name, _ in some] for some in placed] == [["w", "embed", "scale"], ["w"]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            (Entry("w", "F32", (1, 8), 0, 32), Entry("x", "U8", (46,), 32, 78)),
            "'w' has bytes 4096–4160, .* ends at 4128",
        ),
        ((replace(W, name="v"), EMBED, SCALE), "gives to 'v'"),
        ((replace(W, name="w2"), EMBED, SCALE), "gives to 'w2'"),
        ((replace(W, dtype="I32"), EMBED, SCALE), "is F32, stored as F32; the header says I32"),
        ((replace(W, shape=(8, 2)), EMBED, SCALE), r"sizes \(2, 8\); the header says \(8, 2\)"),
        ((), "before the payload"),
    ],
)
def test_a_header_that_contradicts_the_manifest_is_refused(
    manifest: Manifest, entries: tuple[Entry, ...], message: str
) -> None:
    with pytest.raises(CorruptionError, match=message) as caught:
        check_header(0, manifest, _header(*entries))
    assert caught.value.tensors == ("w",)
    assert caught.value.key == manifest.files[0].p


def test_a_dtype_that_safetensors_lacks_is_a_u8_entry(manifest: Manifest) -> None:
    tensors = {"c": TensorEntry("C128", (2,), (Piece(0, 4096, 4128, (0,), (2,)),))}
    odd = replace(manifest, tensors=tensors, alias={})
    check_header(0, odd, _header(Entry("c", "U8", (32,), 0, 32)))
    with pytest.raises(CorruptionError, match="stored as U8; the header says C64"):
        check_header(0, odd, _header(Entry("c", "C64", (4,), 0, 32)))


def test_boxes_of_one_flat_range_share_an_entry_and_no_byte(manifest: Manifest) -> None:
    boxes = (Piece(0, 4096, 4112, (0, 4), (1, 4)), Piece(0, 4112, 4144, (1, 0), (1, 8)))
    flat = replace(manifest, tensors={"w": TensorEntry("F32", (4, 8), boxes)})
    check_header(0, flat, _header(Entry("w", "F32", (12,), 0, 48)))
    shared = (boxes[0], replace(boxes[1], start=4108, end=4140))
    with pytest.raises(CorruptionError, match="shares the bytes 4108–4112"):
        check_header(0, replace(flat, tensors={"w": TensorEntry("F32", (4, 8), shared)}), _header(W))


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ({"w": None}, "'w' is both stored and left out"),
        ({"head": ("F32", (1,))}, "'head' is both stored and left out"),
        ({"x": ("F13", (1,))}, "'x' was left out with the unknown dtype 'F13'"),
        ({"": None}, "is empty or longer"),
        (dict.fromkeys(map(str, range(validate.MAX_TENSORS + 1))), "names that were left out are more"),
    ],
    ids=["stored", "alias", "dtype", "empty", "many"],
)
def test_what_was_left_out_must_make_sense(manifest: Manifest, left_out: LeftOut, message: str) -> None:
    check_manifest(replace(manifest, left_out={"x": ("F32", (1,)), "y": None}), STEP, GENERATION)
    with pytest.raises(ManifestError, match=message):
        check_manifest(replace(manifest, left_out=left_out), STEP, GENERATION)
