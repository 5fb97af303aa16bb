"""Sealed documents: any change is found before anything is parsed, and parsing is never hurt."""

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import ManifestError
from aiockpt.format import document
from aiockpt.format.document import RARELY, check_tree, check_unique_keys, collector_paused, parse, seal, unseal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(alphabet='ab"\\{}[],:é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='ab"\\{}:é', max_size=3), inner),
    max_leaves=20,
)


def test_a_sealed_document_is_json_with_the_digest_last() -> None:
    data = seal(b'{"a":1}')
    assert data.startswith(b'{"a":1,"digest":"xxh3_128:')
    assert data.endswith(b'"}\n')
    assert list(json.loads(data)) == ["a", "digest"]
    assert unseal(data, "it") == b'{"a":1}'


@given(st.dictionaries(st.text(max_size=4), JSON, min_size=1, max_size=4))
def test_unsealing_returns_the_sealed_bytes(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    assert unseal(seal(body), "it") == body


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"", b'{"a":1}\n'])
def test_only_an_object_with_a_member_can_be_sealed(body: bytes) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        seal(body)


def test_every_flipped_bit_is_found() -> None:
    data = seal(b'{"a":1,"b":[1,2,3]}')
    for position in range(8 * len(data)):
        broken = bytearray(data)
        broken[position // 8] ^= 1 << position % 8
        with pytest.raises(ManifestError, match="it "):
            unseal(bytes(broken), "it")


def test_every_truncation_and_extension_is_found() -> None:
    data = seal(b'{"a":1}')
    for broken in [data[:size] for size in range(len(data))] + [data + b"\n", data + b" ", b" " + data, data + data]:
        with pytest.raises(ManifestError):
            unseal(broken, "it")


def test_a_document_beyond_the_limit_is_refused_unread_and_never_written() -> None:
    with pytest.raises(ManifestError, match="more than"):
        unseal(bytes(document.MAX_DOCUMENT_BYTES + 1), "it")
    with pytest.raises(ManifestError, match="more than"):
        seal(b'{"a":"' + bytes(document.MAX_DOCUMENT_BYTES) + b'"}')


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b'"\xff"', b'"\\ud800"', b"[" * 100_000, b"1" * 5000, b"1e999", b"NaN", b"\xef\xbb\xbf{}"],
)
def test_what_is_not_json_is_our_error(body: bytes) -> None:
    with pytest.raises(ManifestError, match="it cannot be read"):
        parse(body, object, "it")


@pytest.fixture
def collector() -> Iterator[None]:
    """Leave the collector as it was, whatever a test does to it."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    before = gc.get_threshold()
    parse(b"1", int, "it")
    with pytest.raises(ManifestError):
        parse(b"x", int, "it")
    assert (gc.isenabled(), gc.get_threshold()) == (enabled, before)


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("change", [gc.disable, lambda: gc.set_threshold(50_000, 20, 30), lambda: gc.set_threshold(0)])
def test_what_a_program_does_to_the_collector_during_a_pause_stays(change: Callable[[], object]) -> None:
    change()
    wanted = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    with collector_paused(), collector_paused():
        assert gc.get_threshold()[0] == RARELY
        change()
    if change is gc.disable:
        assert not gc.isenabled()
        assert gc.get_threshold() == (700, 10, 10)
    else:
        assert (gc.isenabled(), gc.get_threshold()) == wanted


@pytest.mark.usefixtures("collector")
def test_a_collector_that_runs_by_no_threshold_is_given_none() -> None:
    gc.set_threshold(0)
    with collector_paused():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


@pytest.mark.usefixtures("collector")
def test_pauses_that_overlap_end_with_the_last_of_them() -> None:
    gc.enable()
    before = gc.get_threshold()
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    gc.disable()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == RARELY
    second.__exit__(None, None, None)
    assert (gc.isenabled(), gc.get_threshold()) == (False, before)


@pytest.mark.usefixtures("collector")
def test_pauses_of_many_threads_leave_the_collector_off_and_its_thresholds_as_they_were() -> None:
    document, ends = json.dumps([[n] for n in range(300)]).encode(), threading.Event()
    gc.enable()
    before, often = gc.get_threshold(), sys.getswitchinterval()

    def decode() -> None:
        while not ends.is_set():
            parse(document, list[list[int]], "it")

    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=decode) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(200):
            gc.disable()
            assert not any(map(_look, [gc.isenabled] * 20))
            gc.enable()
        gc.disable()
    finally:
        ends.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(often)
    assert (gc.isenabled(), gc.get_threshold()) == (False, before)


def _look(at: Callable[[], bool]) -> bool:
    return at()


def _has_duplicates(text: str) -> bool:
    found = False

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=collect)
    return found


@given(JSON, st.booleans(), st.booleans())
def test_json_without_duplicate_keys_is_accepted(value: Any, ascii_only: bool, spaced: bool) -> None:
    separators = (" ,\n", "\t: ") if spaced else (",", ":")
    check_unique_keys(json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode(), "it")


@given(st.data())
def test_duplicate_keys_are_found_wherever_they_are(data: st.DataObject) -> None:
    def write(depth: int) -> str:
        if depth == 0:
            return json.dumps(data.draw(JSON))
        items = data.draw(st.lists(st.text(alphabet='a"\\,:{', max_size=2), max_size=3))
        return "{" + ",".join(f"{json.dumps(key)} : {write(depth - 1)}" for key in items) + "}"

    text = write(data.draw(st.integers(1, 3)))
    if _has_duplicates(text):
        with pytest.raises(ManifestError, match="twice in one object"):
            check_unique_keys(text.encode(), "it")
    else:
        check_unique_keys(text.encode(), "it")


def test_an_escaped_key_is_the_same_key() -> None:
    with pytest.raises(ManifestError, match="'a' twice"):
        check_unique_keys(b'{"a":1,"\\u0061":2}', "it")


@given(JSON)
def test_the_node_count_of_a_tree_is_an_upper_bound(value: Any) -> None:
    def count(node: Any) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return 1 + sum(count(item) for item in inner)

    assert check_tree(json.dumps(value).encode(), "it") >= count(value)


def test_a_tree_at_each_limit_is_accepted_and_beyond_it_refused() -> None:
    depth = document.MAX_TREE_DEPTH
    check_tree(b"[" * depth + b"]" * depth, "it")
    check_tree(b'{"a":' * depth + b"1" + b"}" * depth, "it")
    with pytest.raises(ManifestError, match="deeper"):
        check_tree(b"[" * (depth + 1) + b"]" * (depth + 1), "it")
    with pytest.raises(ManifestError, match="values"):
        check_tree(b"[" + b"0," * document.MAX_TREE_NODES + b"0]", "it")
    with pytest.raises(ManifestError, match="bytes of plain values"):
        check_tree(b'"' + bytes(document.MAX_TREE_BYTES) + b'"', "it")


@pytest.mark.parametrize("escaped", ["", '\\"{', "\\", '"', '\\\\"', '\\"\\'])
def test_brackets_and_commas_in_strings_are_text(escaped: str) -> None:
    text = json.dumps("[" * 1000 + "," * 2 * document.MAX_TREE_NODES + escaped).encode()
    assert check_tree(text, "it") == 1
    check_tree(b"[" + text + b"," + text + b"]", "it")
    depth = document.MAX_TREE_DEPTH
    check_tree(b"[" * depth + text + b"]" * depth, "it")
    with pytest.raises(ManifestError, match="deeper"):
        check_tree(b"[" * depth + text + b",[]" + b"]" * depth, "it")
