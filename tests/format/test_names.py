"""Keys and leaf names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import UsageError
from aiockpt.format import names

ATTEMPT = "3f9c21d07b44"
KEYS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6) | st.text(alphabet=".\\[]e-0", max_size=6)
PATHS = st.lists(KEYS | st.integers(-(2**63), 2**63), max_size=6).map(tuple)


def test_keys_are_as_the_format_says() -> None:
    assert names.step_id(1000) == "step-00001000"
    assert names.step_id(10**9) == "step-1000000000"
    assert names.manifest_key("step-00001000", 3) == "step-00001000/MANIFEST-3.json"
    assert names.verified_key("best", 3) == "best/VERIFIED-3.json"
    assert names.attempt_folder("best", ATTEMPT) == "best/a-3f9c21d07b44"
    assert names.data_path(ATTEMPT, 7, 2) == "a-3f9c21d07b44/d/r00007-0002.safetensors"
    assert names.receipt_folder("best", ATTEMPT) == "best/a-3f9c21d07b44/r"
    assert names.receipt_key("best", ATTEMPT, 7) == "best/a-3f9c21d07b44/r/r00007.json"
    assert names.failure_key("best", ATTEMPT, 7) == "best/a-3f9c21d07b44/r/r00007.fail.json"
    assert names.decision_key("best", ATTEMPT) == "best/a-3f9c21d07b44/DECISION.json"


@given(st.integers(0, 10**15))
def test_a_step_is_read_back_from_its_id(step: int) -> None:
    assert names.parse_step(names.step_id(step)) == step


@pytest.mark.parametrize(
    "text", ["", "step-1", "step-000000001", "step-00001000x", "best", "step-0000-100", "step-٠٠٠٠٠٠٠١"]
)
def test_an_id_of_another_form_has_no_step(text: str) -> None:
    assert names.parse_step(text) is None


@pytest.mark.parametrize(
    "text", ["", ".", "..", ".x", "a/b", "a\\b", "-a", "é", "a\n", "a" * 129, "LATEST", "a b", "C:", "a\0", "../a"]
)
def test_an_unsafe_step_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a step id"):
        names.check_step_id(text)
    with pytest.raises(UsageError, match="is not a step id"):
        names.manifest_key(text, 1)


@pytest.mark.parametrize("text", ["a", "0", "step-00001000", "best.1_x-Y", "a" * 128])
def test_a_safe_step_id_is_returned(text: str) -> None:
    assert names.check_step_id(text) == text


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="negative"):
        names.step_id(-1)
    for generation in (0, -1, 10**18):
        with pytest.raises(UsageError, match="generation"):
            names.manifest_key("a", generation)
    for rank in (-1, 10**9):
        with pytest.raises(UsageError, match="rank"):
            names.receipt_key("a", ATTEMPT, rank)
    for attempt in ("", "..", "3F9C21D07B44", ATTEMPT + "0", ATTEMPT[:-1] + "\n"):
        with pytest.raises(UsageError, match="attempt"):
            names.attempt_folder("a", attempt)


def test_generations_are_read_from_canonical_names_only() -> None:
    assert names.parse_manifest("MANIFEST-3.json") == 3
    assert names.parse_verified("VERIFIED-12.json") == 12
    for text in ("MANIFEST-0.json", "MANIFEST-03.json", "MANIFEST--3.json", "MANIFEST-+3.json", "MANIFEST-3.json.tmp"):
        assert names.parse_manifest(text) is None
    for text in ("MANIFEST-٣.json", "MANIFEST-3.jso", "manifest-3.json", "MANIFEST-" + "9" * 19 + ".json", ""):
        assert names.parse_manifest(text) is None
        assert names.parse_verified(text) is None


@given(st.integers(0, 10**9 - 1))
def test_ranks_are_read_back_from_receipts_and_failures(rank: int) -> None:
    receipt = names.receipt_key("a", ATTEMPT, rank).rpartition("/")[2]
    failure = names.failure_key("a", ATTEMPT, rank).rpartition("/")[2]
    assert names.parse_receipt(receipt) == rank == names.parse_failure(failure)
    assert names.parse_receipt(failure) is None
    assert names.parse_failure(receipt) is None


def test_other_file_names_have_no_rank() -> None:
    assert [names.parse_receipt(text) for text in ("r0.json", "r000001.json", "x", "r00000.json~")] == [None] * 4


def test_attempts_are_read_from_their_folders_only() -> None:
    assert names.parse_attempt("a-3f9c21d07b44") == ATTEMPT
    for text in (ATTEMPT, "a-", "a-3F9C21D07B44", "a-3f9c21d07b4", "a-a-3f9c21d07b44", "b-3f9c21d07b44"):
        assert names.parse_attempt(text) is None


def test_a_leaf_name_reads_like_an_attribute_path() -> None:
    assert names.join_name(["optimizer", "groups", 0, "lr"]) == "optimizer.groups[0].lr"
    assert names.join_name(["model", "layers.0.weight"]) == r"model.layers\.0\.weight"
    assert names.join_name(["a[0]", "\\"]) == r"a\[0].\\"
    assert names.join_name([0, -1, "x"]) == "[0][-1].x"
    assert names.join_name(["", "e", ""]) == r"\e.e.\e"


@given(PATHS)
def test_splitting_is_the_exact_inverse_of_joining(path: tuple[str | int, ...]) -> None:
    assert names.split_name(names.join_name(path)) == path


@given(PATHS, st.integers(0, 999))
def test_the_name_of_a_tensor_of_one_rank_has_the_path_of_its_leaf(path: tuple[str | int, ...], rank: int) -> None:
    if path:
        assert names.split_name(f"{names.join_name(path)}@rank{rank}") == (*path[:-1], f"{path[-1]}@rank{rank}")


@given(st.text(alphabet=".\\[]e-01x", max_size=10) | st.text(max_size=10))
def test_a_name_that_can_be_split_is_the_one_that_joining_writes(name: str) -> None:
    try:
        path = names.split_name(name)
    except UsageError:
        return
    assert names.join_name(path) == name or "@rank" in name


@pytest.mark.parametrize(
    "name", ["a.", ".a", "a..b", "a[", "a[01]", "a[-0]", "a[x]", "a\\", r"\x", r"a\e", "[1]a", "[" + "9" * 5000 + "]"]
)
def test_a_name_that_joining_never_writes_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        names.split_name(name)


@pytest.mark.parametrize("part", [True, None, 1.5, b"x", 2**64, "\ud800"])
def test_a_part_that_has_no_name_is_refused(part: object) -> None:
    with pytest.raises(UsageError):
        names.join_name(["a", part])  # type: ignore[list-item]


@given(st.lists(PATHS.filter(bool), max_size=6), PATHS.filter(bool))
def test_names_are_reached_by_what_they_are_parts_of(
    paths: list[tuple[str | int, ...]], other: tuple[str | int, ...]
) -> None:
    every = list(map(names.join_name, paths))
    known = names.Names(every)
    for name in (names.join_name(other), *(part for one in every for part in names.prefixes(one))):
        assert known.reach(name) == any(name in names.prefixes(one) for one in every)
    *outer, last = other
    assert names.name_within(names.join_name(outer), last) == names.join_name(other)
