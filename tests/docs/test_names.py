"""Each name of a module or a class means one thing in the package, and is the field's word."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SHARED_MODULES = {
    # One implements, for a wing, what the other is for one process.
    "coordinator": {"engine", "ranks"},
    "load": {"engine", "ranks"},
    "save": {"engine", "ranks"},
}
_WORDS = """
rung climb leisure rhythm stillness owners census elsewhere errand orders hello heeding doubt renounce withdraw asking
patience leftover instead keep tidy ending launch ticket together sharing meeting votes companion flights lanes marks cargo
content parcel intake witness
"""
NOT_OURS = frozenset(_WORDS.split())
"""What one of us once called a thing for which the field has a word."""


def modules() -> Iterator[Path]:
    """Yield the modules of the package, relative to it."""
    for folder in (ROOT / "aiockpt", ROOT / "backends"):
        for path in folder.rglob("*.py"):
            if path.stem != "__init__" and not path.is_relative_to(ROOT / "aiockpt" / "backends"):
                yield path


def classes() -> Iterator[tuple[str, Path]]:
    """Yield the name of each class, and where it is."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, path


def home(path: Path) -> str:
    """Return the folder of a module, or the module where it lies at the top."""
    parts = path.relative_to(ROOT / "aiockpt").with_suffix("").parts if "aiockpt" in path.parts else path.parts[-2:]
    return parts[0]


def named_twice(names: Iterable[tuple[str, Path]], known: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the names that several places have, but those that are *known* to be in these folders."""
    places = defaultdict(list)
    for name, path in names:
        places[name].append(path)
    return {
        name: sorted(str(path.relative_to(ROOT)) for path in paths)
        for name, paths in places.items()
        if len(paths) > 1 and not set(map(home, paths)) <= known.get(name, set())
    }


def stale(names: Iterable[tuple[str, Path]], known: Mapping[str, set[str]]) -> set[str]:
    """Return the *known* names that are not where they are said to be any more."""
    homes = defaultdict(set)
    for name, path in names:
        homes[name].add(home(path))
    return {name for name, places in known.items() if homes[name] != places}


def words_of(name: str) -> set[str]:
    """Return the words that a name is made of."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}


def test_no_two_modules_have_one_name() -> None:
    names = [(path.stem, path) for path in modules()]
    assert named_twice(names, SHARED_MODULES) == {}
    assert not stale(names, SHARED_MODULES)


def test_no_two_classes_have_one_name() -> None:
    assert named_twice(classes(), {}) == {}


def test_modules_and_classes_have_the_words_of_the_field() -> None:
    names = {path.stem for path in modules()} | {name for name, _ in classes()}
    assert len(names) > 500, "the walk sees the package"
    assert not {name for name in names if words_of(name) & NOT_OURS}


@pytest.mark.parametrize("name", ["FinishedVotes", "leftover", "pending_errand"])
def test_a_word_is_found_in_any_name(name: str) -> None:
    assert words_of(name) & NOT_OURS


def test_two_of_one_name_are_found_wherever_they_are() -> None:
    twice = [("Plan", ROOT / "aiockpt/tools/stress/plan.py"), ("Plan", ROOT / "backends/s3.py")]
    assert named_twice(twice, {}) == {"Plan": ["aiockpt/tools/stress/plan.py", "backends/s3.py"]}
    assert named_twice(twice, {"Plan": {"tools"}}), "one of the two places is not known"
    assert not named_twice(twice, {"Plan": {"tools", "backends"}})
