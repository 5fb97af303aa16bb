"""The requests to the storage, as when the traces were recorded. ``python -m tests.traces record`` renews."""

from pathlib import Path

import pytest

from tests.traces.documents import FOLDER, read
from tests.traces.scenarios import INLINE, NAMES, play
from tests.traces.trace import Trace


@pytest.mark.parametrize("name", NAMES)
def test_the_storage_is_asked_for_the_same(name: str, tmp_path: Path) -> None:
    assert play(name, tmp_path) == read(name)


def test_every_recorded_trace_is_of_a_scenario_and_says_something() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)
    assert len(NAMES) >= 30
    for name in NAMES:
        assert len(read(name)) > 10, name


def test_a_flush_after_the_commit_is_another_trace() -> None:
    """Of the recorded first save: the flush of the data moves behind the manifest, or is left out."""
    lines = read("first_save")
    flush = next(line for line in lines if line.startswith("fdatasync") and "/d/" in line)
    commit = next(index for index, line in enumerate(lines) if line.startswith("put_new") and "MANIFEST" in line)
    late, none = Trace(), Trace()
    none.lines = [line for line in lines[:-1] if line != flush]
    late.lines = [*none.lines[:commit], flush, *none.lines[commit:]]
    assert none.in_order() != lines
    assert late.in_order() != lines


def test_what_is_free_to_change_its_order_is_the_same_trace() -> None:
    one, other = Trace(), Trace()
    one.lines = ["upload.write a @0 5", "upload.write b @0 5", "== x", "get aaaaaaaaaaaa 1", "get bbbbbbbbbbbb 2"]
    other.lines = ["upload.write b @0 5", "upload.write a @0 5", "== x", "get cccccccccccc 2", "get dddddddddddd 1"]
    assert one.in_order() == other.in_order()
    other.lines.insert(2, "get eeeeeeeeeeee 1")
    assert one.in_order() != other.in_order()


def test_scenarios_on_one_thread_are_most_of_them() -> None:
    assert len(INLINE) >= 25
