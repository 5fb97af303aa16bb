"""The list of mutants that a rebuilding must not let live: drawn the same again, found again, tried again."""

from pathlib import Path

import msgspec
import pytest

from tests.campaigns import covering, net
from tests.campaigns.source_mutations import mutations

SOURCE = "def larger(a, b):\n    if a > b:\n        return a\n    if a > b:\n        return a\n    return b\n"
SOURCES = {"aiockpt/engine/small.py": SOURCE, "aiockpt/engine/other.py": "def other(a):\n    return a and not a\n"}
CHANGED_BODY = SOURCE.replace("return a", "return max(a, a)")
CHANGED_HEAD = SOURCE.replace("if a > b", "if b < a")


def found(entry: net.Entry, **sources: str) -> str:
    """Return where *entry* is found in modules of the engine, or why it is not."""
    files = {f"aiockpt/engine/{name}.py": text for name, text in sources.items()}
    among = [(net.entry_of(one, text), one) for file, text in files.items() for one in mutations(file, text)]
    where = net.find(entry, among)
    return where if isinstance(where, str) else f"{Path(where.file).stem}:{where.line}"


@pytest.fixture
def second() -> net.Entry:
    """The comparison of the second of two equal statements."""
    drawn = net.draw(SOURCES, 100, 1).drawn
    return next(one for one in drawn if one.new == ">=" and one.ordinals[0] == 1)


def test_a_draw_is_the_same_again_whatever_the_order_of_the_files(tmp_path: Path) -> None:
    drawn = net.draw(SOURCES, 3, 27)
    assert drawn == net.draw(dict(reversed(SOURCES.items())), 3, 27)
    assert drawn.drawn != net.draw(SOURCES, 3, 28).drawn
    drawn.write(tmp_path / "net.json")
    assert msgspec.json.decode((tmp_path / "net.json").read_bytes(), type=net.Net) == drawn


def test_a_mutant_is_found_again_where_its_function_moved_to(second: net.Entry) -> None:
    assert found(second, small=SOURCE) == "small:4"
    assert found(second, moved="import os\n\n\n" + SOURCE) == "moved:7"
    assert found(second, small="", moved=CHANGED_BODY) == "moved:4", "what stands in a block is not its head"
    assert found(second, small=SOURCE, copied=SOURCE) == "small:4"


def test_what_changed_needs_a_hand(second: net.Entry) -> None:
    assert found(second, small=CHANGED_HEAD) == "the statement is not in aiockpt/engine/small.py"
    assert found(second, small=SOURCE.replace("larger", "greater")) == "no such function"
    assert found(second, one=SOURCE, two=SOURCE).startswith("ambiguous")


def small_tree(root: Path, test: str) -> net.Net:
    """Write a package of one module with *test*; return its mutants of two kinds, one of which was tried."""
    for file, text in {
        "aiockpt/__init__.py": "",
        "aiockpt/engine/__init__.py": "",
        "aiockpt/engine/small.py": SOURCE,
        "tests/test_small.py": test.format("small"),
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    drawn = net.draw({"aiockpt/engine/small.py": SOURCE}, 100, 27)
    drawn.drawn = [one for one in drawn.drawn if one.new in ("<=", "pass")]
    drawn.drawn[0].before.outcome = "lives"
    return drawn


def test_a_run_goes_on_and_what_died_is_tried_again_after_it_moved(tmp_path: Path) -> None:
    test = "def test_it():\n    from aiockpt.engine.{} import larger\n    assert larger(1, 2) == 2\n"
    drawn, path = small_tree(tmp_path, test), tmp_path / "net.json"
    runs = {"aiockpt/engine/small.py::larger": {line: [0] for line in range(1, 6)}}
    tests = covering.Covered({"tests/test_small.py::test_it": 0.1}, runs)
    assert net.attempt(drawn, path, tmp_path, tests, "before") == {"dies": 2, "lives": 3}
    written = msgspec.json.decode(path.read_bytes(), type=net.Net)
    written.drawn = [one for one in written.drawn if one.before.outcome == "dies"]
    assert [one.before.killers for one in written.drawn] == [["tests/test_small.py::test_it"]] * 2

    (tmp_path / "aiockpt/engine/small.py").rename(tmp_path / "aiockpt/engine/moved.py")
    (tmp_path / "tests/test_small.py").unlink()
    (tmp_path / "tests/inner").mkdir()
    (tmp_path / "tests/inner/test_small.py").write_text(test.format("moved"))
    nothing = covering.Covered({}, {})
    assert net.attempt(written, path, tmp_path, nothing, "after") == {"dies": 2}
    (tmp_path / "tests/inner/test_small.py").write_text("def test_it():\n    pass\n")
    assert net.attempt(written, path, tmp_path, nothing, "after") == {"dies": 2}, "it has a verdict"
    assert net.attempt(written, path, tmp_path, nothing, "after", again=True) == {"lives": 2}


def test_what_was_found_by_hand_is_what_stands_there(second: net.Entry) -> None:
    text = SOURCE.replace("    if a > b:\n        return a\n    return b", "    return a if b < a else b")
    place = net.Place("aiockpt/engine/now.py", [("if b < a", "if b >= a")])
    mutant = place.mutant(second, text)
    assert not isinstance(mutant, str)
    assert mutant.apply(text) == text.replace("b < a", "b >= a")
    assert (mutant.function, mutant.line, mutant.lines) == ("larger", 4, (3,))
    assert place.mutant(second, SOURCE) == "'if b < a' is 0 times in aiockpt/engine/now.py"


def test_the_drawn_mutants_can_be_told_apart() -> None:
    drawn = msgspec.json.decode(net.LIST.read_bytes(), type=net.Net).drawn
    assert len({(one.file, *one.identity) for one in drawn}) == len(drawn) == 300
