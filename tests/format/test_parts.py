"""Pieces in columns: the same pieces, the same refusals, and nothing believed before its digest."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aiockpt.errors import CommitError, ManifestError
from aiockpt.format import manifest as manifest_module
from aiockpt.format import merge, parts, pieces, validate
from aiockpt.format.document import ALGORITHM, digest128
from aiockpt.format.manifest import (
    FileEntry,
    Manifest,
    PartEntry,
    Piece,
    Receipt,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from aiockpt.format.names import data_path, part_path
from aiockpt.format.parts import attach, detach, part_paths
from aiockpt.format.pieces import PieceRows, PieceTable, lay_out, sort_boxes, table_of
from aiockpt.format.validate import check_manifest, pieces_by_file
from tests.example_counts import examples
from tests.paper import paper_manifest, paper_receipt

ATTEMPT = "3f9c21d07b44"
WHERE = ("step-00001000", 2)


@pytest.fixture(autouse=True)
def columns_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one piece be many, and a few tensors: every table has blobs, and is looked at some tensors after the others."""
    monkeypatch.setattr(merge, "MAX_PIECES", 0)
    monkeypatch.setattr(pieces, "TENSORS_AT_ONCE", 5)
    monkeypatch.setattr(validate, "_ROWS_AT_ONCE", 7)


def grid(ranks: int = 6) -> list[Receipt]:
    """Return votes of a matrix cut on two axes, a vector cut on one, a scalar, and nothing."""
    receipts = []
    for rank in range(ranks):
        row, column = divmod(rank, 2)
        tensors = {
            "matrix": TensorEntry("F32", (ranks // 2 * 3, 10), (Piece(0, 4096, 4156, (row * 3, column * 5), (3, 5)),)),
            "vector": TensorEntry("U8", (ranks,), (Piece(0, 4156, 4157, (rank,), (1,)),)),
        }
        if rank == 0:
            tensors["scalar"] = TensorEntry("F64", (), (Piece(0, 4157, 4165, (), ()),))
            tensors["nothing"] = TensorEntry("F64", (0, 3), (Piece(0, 4165, 4165, (0, 0), (0, 3)),))
        size = 4165 if rank == 0 else 4157
        path = data_path(ATTEMPT, rank, 0)
        receipts.append(
            paper_receipt(
                rank,
                world_size=ranks,
                generation=2,
                parent=None,
                files=(FileEntry.of(path, size=size, rank=rank, algo=ALGORITHM, block=8 << 20, sums=bytes(8)),),
                tensors=tensors,
            )
        )
    return receipts


def as_table(plain: Manifest) -> Manifest:
    """Return a manifest with the pieces of *plain* in a table, as they are."""
    tensors = plain.tensors
    every = [piece for entry in tensors.values() for piece in entry.pieces]
    table = PieceTable(
        [len(entry.shape) for entry in tensors.values()],
        [len(entry.pieces) for entry in tensors.values()],
        file=np.array([piece.file for piece in every], np.uint64),
        start=np.array([piece.start for piece in every], np.uint64),
        end=np.array([piece.end for piece in every], np.uint64),
        offsets=np.array([number for piece in every for number in piece.offsets], np.uint64),
        sizes=np.array([number for piece in every for number in piece.sizes], np.uint64),
    )
    return replace(plain, tensors=lay_out(tensors, table), requires=("parts",))


def one_by_one(votes: list[Receipt]) -> dict[str, tuple[Piece, ...]]:
    """Merge piece by piece: of equal boxes that of the lowest rank, by their offsets."""
    found: dict[str, dict[object, Piece]] = {}
    base = 0
    for vote in sorted(votes, key=lambda vote: vote.rank):
        for name, entry in vote.tensors.items():
            for piece in entry.pieces:
                moved = replace(piece, file=piece.file + base)
                found.setdefault(name, {}).setdefault((piece.offsets, piece.sizes), moved)
        base += len(vote.files)
    return {name: tuple(sorted(some.values(), key=lambda piece: piece.offsets)) for name, some in found.items()}


def plainly(votes: list[Receipt]) -> Manifest:
    """Merge *votes* into a manifest as it is decoded from JSON."""
    whole = paper_manifest(votes)
    plain = one_by_one(votes)
    return replace(
        whole, requires=(), tensors={name: replace(one, pieces=plain[name]) for name, one in whole.tensors.items()}
    )


def test_a_merge_into_columns_has_the_pieces_of_a_merge_one_by_one() -> None:
    votes = grid()
    plain = plainly(votes)
    for order in itertools.islice(itertools.permutations(votes), 0, 720, 90):
        table = paper_manifest(list(order))
        assert table_of(table.tensors) is not None
        assert table.requires == ("parts",)
        assert {name: list(entry.pieces) for name, entry in table.tensors.items()} == {
            name: list(entry.pieces) for name, entry in plain.tensors.items()
        }
        assert table.files == plain.files


def test_a_piece_that_two_ranks_hold_is_taken_from_the_lowest() -> None:
    votes = grid()
    copy = TensorEntry("F64", (), (Piece(0, 4096, 4104, (), ()),))
    double = replace(
        votes[3].tensors["matrix"], pieces=(votes[3].tensors["matrix"].pieces[0], Piece(0, 4096, 4156, (0, 0), (3, 5)))
    )
    votes[3] = replace(votes[3], tensors={**votes[3].tensors, "scalar": copy, "matrix": double})
    assert list(paper_manifest(votes).tensors["scalar"].pieces) == [Piece(0, 4157, 4165, (), ())]
    assert list(paper_manifest(votes).tensors["matrix"].pieces) == list(plainly(votes).tensors["matrix"].pieces)


def test_pieces_of_unlike_sizes_that_two_ranks_hold_are_taken_once() -> None:
    """The sizes are no offsets of other pieces, as they are in a grid: what mixes the two up is seen."""
    votes = grid(3)
    boxes = [((0,), (4,)), ((4,), (5,)), ((0,), (4,))]
    votes = [
        replace(
            vote,
            tensors={
                **vote.tensors,
                "matrix": TensorEntry("U8", (9,), (Piece(0, 4096, 4096 + size[0], offsets, size),)),
                "vector": TensorEntry("U8", (3,), (Piece(0, 4156, 4157, (rank,), (1,)),)),
            },
        )
        for rank, (vote, (offsets, size)) in enumerate(zip(votes, boxes, strict=True))
    ]
    assert list(paper_manifest(votes).tensors["matrix"].pieces) == list(plainly(votes).tensors["matrix"].pieces)
    assert [piece.file for piece in paper_manifest(votes).tensors["matrix"].pieces] == [0, 1]


def test_of_few_pieces_those_with_equal_offsets_lie_in_the_order_of_the_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = grid(2)
    for rank, at in enumerate([1, 0]):
        both = tuple(Piece(0, 4096, 4096 + size, (at,), (size,)) for size in (1, 0))
        votes[rank] = replace(votes[rank], tensors={"vector": TensorEntry("U8", (2,), both)})
    assert [piece.sizes for piece in paper_manifest(votes).tensors["vector"].pieces] == [(0,), (1,), (0,), (1,)]
    monkeypatch.setattr(merge, "MAX_PIECES", 4)
    assert tuple(paper_manifest(votes).tensors["vector"].pieces) == one_by_one(votes)["vector"]
    assert [piece.sizes for piece in paper_manifest(votes).tensors["vector"].pieces] == [(1,), (0,), (1,), (0,)]


def test_a_table_that_is_not_kept_beside_the_manifest_is_written_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_PIECES", 10**6)
    monkeypatch.setattr(merge, "_MEMO_PIECES", 0)
    whole = paper_manifest(grid())
    assert table_of(whole.tensors) is not None
    assert detach(whole) == (whole, {})
    before = list(whole.tensors["matrix"].pieces)
    assert encode_manifest(whole) == encode_manifest(plainly(grid()))
    rows = whole.tensors["matrix"].pieces
    assert (list(rows), rows[-1], rows[1:3]) == (before, before[-1], before[1:3])
    assert whole == decode_manifest(encode_manifest(whole))


def test_a_table_that_no_reader_accepts_is_not_written() -> None:
    whole = as_table(plainly(grid()))
    table = table_of(whole.tensors)
    assert table is not None
    table.sizes[-1] = 2**48
    with pytest.raises(ManifestError, match=r"cannot be read: Expected `int` <= 281474976710655 - at"):
        encode_manifest(replace(whole, requires=()))


def test_one_number_above_four_bytes_widens_its_column_and_loses_none() -> None:
    votes = grid()
    far = 2**32 + 4096
    vector = votes[4].tensors["vector"]
    piece = replace(vector.pieces[0], start=far, end=far + 1)
    votes[4] = replace(
        votes[4],
        tensors={**votes[4].tensors, "vector": replace(vector, pieces=(piece,))},
    )
    found = merge._merge_pieces(votes)
    assert [piece.start for piece in found["vector"].pieces] == [4156, 4156, 4156, 4156, far, 4156]


def test_columns_that_turn_out_to_be_few_become_a_plain_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = grid()
    votes[1] = replace(
        votes[1], tensors={**votes[1].tensors, "scalar": TensorEntry("F64", (), (Piece(0, 4096, 4104, (), ()),))}
    )
    monkeypatch.setattr(merge, "MAX_PIECES", 14)
    assert paper_manifest(votes) == plainly(votes)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(1, 4156, 4157, (3,), (1,)), "rank 3 places 'vector' in a file that it does not have"),
        (Piece(0, 4156, 4157, (3, 0), (1, 1)), "a piece of 'vector' has 2 offsets and 2 sizes in 1 dimensions"),
        (Piece(0, 4156, 4157, (-1,), (1,)), r"a piece of 'vector' at \(-1,\) of sizes \(1,\) is outside the shape"),
        (Piece(0, 2**63, 2**63 + 1, (3,), (1,)), "a piece of 'vector' has bytes 9223372036854775808–"),
        (Piece(0, 4156, 4157, (2,), (1,)), "leave a gap"),
    ],
)
def test_votes_that_make_no_table_are_refused_by_name(piece: Piece, message: str) -> None:
    votes = grid()
    votes[3] = replace(votes[3], tensors={**votes[3].tensors, "vector": TensorEntry("U8", (6,), (piece,))})
    with pytest.raises(CommitError, match=message):
        paper_manifest(votes)


@pytest.mark.parametrize("blob_bytes", [64 << 20, 8])
def test_what_is_written_is_read_again(monkeypatch: pytest.MonkeyPatch, blob_bytes: int) -> None:
    monkeypatch.setattr(parts, "BLOB_BYTES", blob_bytes)
    columns_first = [
        replace(vote, tensors={**vote.tensors, "matrix": replace(vote.tensors["matrix"], axes=(1, 0))})
        for vote in grid()
    ]
    whole = paper_manifest(columns_first)
    assert whole.tensors["matrix"].axes == (1, 0)
    written, blobs = detach(whole)
    assert not any(entry.pieces for entry in written.tensors.values())
    decoded = decode_manifest(encode_manifest(written))
    assert part_paths(decoded) == list(blobs)
    found = attach(decoded, blobs)
    check_manifest(found, *WHERE)
    assert found.tensors == whole.tensors
    assert all(isinstance(entry.pieces, PieceRows) for entry in found.tensors.values())


def test_large_numbers_take_eight_bytes() -> None:
    votes, far = grid(), 2**40
    path = votes[5].files[0].p
    file = FileEntry.of(path, size=far + 1, rank=5, algo=ALGORITHM, block=1 << 30, sums=bytes(8 * 1025))
    vector = TensorEntry("U8", (6,), (Piece(0, far, far + 1, (5,), (1,)),))
    votes[5] = replace(votes[5], files=(file,), tensors={**votes[5].tensors, "vector": vector})
    written, blobs = detach(paper_manifest(votes))
    assert written.parts
    assert [entry.width for entry in written.parts] == [4, 4, 8, 8, 4, 4]
    assert attach(written, blobs).tensors["vector"].pieces[5] == replace(vector.pieces[0], file=5)


def test_a_reader_that_does_not_know_of_parts_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    document = encode_manifest(detach(paper_manifest(grid()))[0])
    monkeypatch.setattr(manifest_module, "KNOWN_REQUIRES", frozenset())
    with pytest.raises(ManifestError, match="requires 'parts', which this aiockpt cannot read: install a newer one"):
        decode_manifest(document)


def test_pieces_are_there_only_for_who_asks() -> None:
    rows = paper_manifest(grid()).tensors["matrix"].pieces
    assert len(rows) == 6
    assert rows[-1] == Piece(5, 4096, 4156, (6, 5), (3, 5))
    assert rows[1:3] == [rows[1], rows[2]]
    assert list(rows) == [rows[place] for place in range(6)]
    assert rows != list(rows)[:-1]
    with pytest.raises(IndexError):
        rows[6]


def test_the_pieces_of_a_file_are_those_of_all_tensors_in_file_order() -> None:
    table, plain = (list(pieces_by_file(found)) for found in (paper_manifest(grid()), plainly(grid())))
    assert table == plain
    assert pieces_by_file(paper_manifest(grid()))[1:3] == plain[1:3]


def _changed(column: str, change: Callable[[Any], Any]) -> Callable[[Manifest, dict[str, bytes]], None]:
    def edit(written: Manifest, blobs: dict[str, bytes]) -> None:
        path = part_path(ATTEMPT, column, 0)
        numbers = np.frombuffer(blobs[path], "<u4").copy()
        blobs[path] = np.asarray(change(numbers), "<u4").tobytes()

    return edit


def _put(numbers: Any, place: int, value: int) -> Any:
    numbers[place] = value
    return numbers


def sealed(edit: Callable[[Manifest, dict[str, bytes]], None]) -> tuple[Manifest, dict[str, bytes]]:
    """Return a manifest whose blobs were changed and whose digests fit them."""
    written, blobs = detach(paper_manifest(grid()))
    edit(written, blobs)
    assert written.parts
    entries = tuple(
        PartEntry(
            entry.column,
            4,
            len(blobs[part_path(ATTEMPT, entry.column, 0)]) // 4,
            (digest128(blobs[part_path(ATTEMPT, entry.column, 0)]),),
        )
        for entry in written.parts
    )
    return replace(written, parts=entries), blobs


HOSTILE: dict[str, tuple[Callable[[Manifest, dict[str, bytes]], None], str]] = {
    "a name out of range": (_changed("name", lambda c: _put(c, -1, 4)), "name tensors that are not there"),
    "names out of order": (_changed("name", lambda c: _put(c, 0, 1)), "not in their order"),
    "a name too many": (_changed("name", lambda c: [*c, 3]), "have different lengths"),
    "a start too few": (_changed("start", lambda c: c[:-1]), "have different lengths"),
    "offsets too few": (_changed("offsets", lambda c: c[:-1]), "more or fewer numbers in their boxes"),
    "sizes too many": (_changed("sizes", lambda c: [*c, 0]), "more or fewer numbers in their boxes"),
    "a piece of another tensor": (_changed("name", lambda c: _put(c, 6, 0)), "more or fewer numbers in their boxes"),
    "a file out of range": (_changed("file", lambda c: _put(c, 2, 6)), "a piece of 'matrix' is in file number 6 of 6"),
    "bytes past the file": (_changed("end", lambda c: _put(c, 0, 2**32 - 1)), "outside its file"),
    "bytes backwards": (_changed("start", lambda c: _put(c, 0, 4157)), "outside its file"),
    "bytes too few": (_changed("end", lambda c: _put(c, 0, 4100)), "has 4 bytes and needs 60"),
    "outside the shape": (_changed("offsets", lambda c: _put(c, 0, 7)), "outside the shape"),
    "an offset past all": (_changed("offsets", lambda c: _put(c, 0, 2**32 - 1)), "outside the shape"),
    "two boxes in one place": (_changed("offsets", lambda c: _put(c, 0, 3)), "overlap and leave a gap"),
    "a vector's box twice": (_changed("offsets", lambda c: _put(c, 12, 1)), "overlap and leave a gap"),
}


@pytest.mark.parametrize(("edit", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_columns_with_valid_digests_are_refused(
    edit: Callable[[Manifest, dict[str, bytes]], None], message: str
) -> None:
    written, blobs = sealed(edit)
    with pytest.raises(ManifestError, match=message):
        check_manifest(attach(decode_manifest(encode_manifest(written)), blobs), *WHERE)


def test_a_number_that_no_file_has_is_refused() -> None:
    written, blobs = detach(paper_manifest(grid()))
    assert written.parts
    path = part_path(ATTEMPT, "start", 0)
    blobs[path] = np.full(written.parts[2].count, 2**63, "<u8").tobytes()
    entry = PartEntry("start", 8, written.parts[2].count, (digest128(blobs[path]),))
    with pytest.raises(ManifestError, match="a number in 'start'"):
        attach(replace(written, parts=(*written.parts[:2], entry, *written.parts[3:])), blobs)


@pytest.mark.parametrize("column", parts.COLUMNS)
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: bytes([b[0] ^ 1]) + b[1:]])
def test_a_damaged_blob_is_refused_by_its_digest(column: str, damage: Callable[[bytes], bytes]) -> None:
    written, blobs = detach(paper_manifest(grid()))
    path = part_path(ATTEMPT, column, 0)
    blobs[path] = damage(blobs[path])
    with pytest.raises(ManifestError, match=f"damaged: blob 0 of '{column}'"):
        attach(written, blobs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace(m, parts=m.parts[:-1]), "are not name, file"),
        (lambda m: replace(m, parts=m.parts[::-1]), "are not name, file"),
        (lambda m: replace(m, requires=()), "not announced"),
        (lambda m: replace(m, parts=(replace(m.parts[0], width=2), *m.parts[1:])), "do not hold"),
        (lambda m: replace(m, parts=(replace(m.parts[0], digests=()), *m.parts[1:])), "have 0 blobs"),
        (lambda m: replace(m, parts=(m.parts[0], replace(m.parts[1], count=10**9), *m.parts[2:])), "1000000000 pieces"),
        (lambda m: replace(m, tensors=plainly(grid()).tensors), "pieces in the manifest too"),
    ],
)
def test_descriptions_that_fit_no_table_are_refused_before_a_blob_is_read(
    change: Callable[[Manifest], Manifest], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        part_paths(change(detach(paper_manifest(grid()))[0]))


def test_a_manifest_whose_parts_were_not_read_is_not_believed() -> None:
    with pytest.raises(ManifestError, match="not in a table"):
        check_manifest(detach(paper_manifest(grid()))[0], *WHERE)


def test_a_table_of_more_pieces_than_json_may_have_needs_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(paper_manifest(grid()), requires=())
    check_manifest(whole, *WHERE)
    monkeypatch.setattr(validate, "MAX_PIECES", 13)
    with pytest.raises(ManifestError, match="14 pieces are more than 13"):
        check_manifest(whole, *WHERE)


def _refusal(found: Manifest) -> str | None:
    try:
        check_manifest(found, *WHERE)
    except ManifestError as error:
        return str(error)
    return None


@examples(100)
@given(st.data())
def test_a_table_is_refused_where_plain_pieces_are_and_for_the_same_reason(data: st.DataObject) -> None:
    plain = plainly(grid())
    name = data.draw(st.sampled_from(sorted(plain.tensors)))
    entry = plain.tensors[name]
    place = data.draw(st.integers(0, len(entry.pieces) - 1))
    piece = msgspec.structs.asdict(entry.pieces[place])
    number = st.sampled_from([0, 1, 2, 3, 5, 9, 10, 4096, 4155, 4156, 2**47, 2**62, 2**63 - 1])
    for field in data.draw(st.sets(st.sampled_from(["file", "start", "end", "offsets", "sizes"]), max_size=3)):
        piece[field] = (
            tuple(data.draw(number) for _ in entry.shape) if field in ("offsets", "sizes") else data.draw(number)
        )
    changed = replace(entry, pieces=(*entry.pieces[:place], Piece(**piece), *entry.pieces[place + 1 :]))
    hostile = replace(plain, tensors={**plain.tensors, name: changed})
    assert _refusal(as_table(hostile)) == _refusal(hostile)


def test_volumes_do_not_wrap() -> None:
    wide = Piece(0, 4096, 4096 + 2**60, (0, 0), (2**30, 2**30))
    file = FileEntry.of(data_path(ATTEMPT, 0, 0), size=4096 + 2**60, rank=0, algo=ALGORITHM, block=1 << 30, sums=b"")
    twenty = TensorEntry("U8", (2**30, 2**30), (wide,) * 20)
    with pytest.raises(ManifestError, match=f"'wide' overlap: they hold {20 * 2**60} elements of {2**60}"):
        validate._check_tensors({"wide": twenty}, (file,), "here", None, whole=True)


def test_what_else_a_reader_must_know_stays_announced() -> None:
    detached, _ = detach(replace(paper_manifest(grid()), requires=("parts", "dtypes")))
    assert detached.requires == ("parts", "dtypes")


def test_equal_boxes_of_two_tensors_are_two() -> None:
    owner, offsets, sizes = np.array([0, 1, 0, 1]), np.zeros((4, 1), np.int64), np.full((4, 1), 5)
    order, fresh = sort_boxes(owner, 2, offsets, sizes)
    assert (order.tolist(), fresh.tolist()) == ([0, 2, 1, 3], [True, False, True, False])
