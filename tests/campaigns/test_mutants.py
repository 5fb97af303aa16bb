"""Planted mistakes are told apart: those that a test notices, those that none does, and those that need no test."""

import ast
from collections.abc import Callable

import pytest

from tests.campaigns import covering
from tests.campaigns.covering import Covered
from tests.campaigns.mutants import MODULES, Mutants
from tests.campaigns.source_mutations import Mutation, mutations

SOURCE = """
def larger(a, b):
    if a > b:
        return a
    return b


def untested(values):
    for value in values:
        if value is None:
            continue
        return value
"""
TESTS = """
from aiockpt.engine.small import larger, untested

def test_the_larger_one():
    assert larger(1, 2) == 2
    assert larger(2, 1) == 2

def test_it_runs_and_looks_at_nothing():
    untested([1])

def test_that_fails_without_any_mistake_too():
    assert larger(1, 2) == 3
"""
PYTEST_INI = "[pytest]\naddopts = --import-mode=importlib\n"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    """A package with one function that is tested, one that only runs, and a test that fails anyway."""
    root = tmp_path_factory.mktemp("planted")
    for file, text in {
        "aiockpt/__init__.py": "",
        "aiockpt/engine/__init__.py": "",
        "aiockpt/engine/small.py": SOURCE,
        "tests/test_small.py": TESTS,
        "pytest.ini": PYTEST_INI,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    covering.measure(root / "map.json", root, ["tests"], workers=0)
    return Mutants(root, ["aiockpt/engine/small.py"], covering.load_map(root / "map.json"))


def seed_of(mutants: Mutants, wanted: Callable[[Mutation], bool]) -> int:
    return next(seed for seed in range(1000) if wanted(mutants.draw(seed)))


def test_a_mistake_that_a_test_notices_is_killed_and_one_that_none_does_is_told_with_its_diff(planted: Mutants) -> None:
    noticed = seed_of(
        planted,
        lambda mutant: mutant.function == "larger" and mutant.kind == "comparison" and mutant.new.strip() == b"<=",
    )
    assert planted.case(noticed) == {"killed: comparison": 1}
    lives = seed_of(planted, lambda mutant: mutant.kind == "continue → pass")
    with pytest.raises(AssertionError, match=r"SURVIVED aiockpt/engine/small\.py:11 in untested") as told:
        planted.case(lives)
    assert "-            continue\n+            pass" in str(told.value)
    assert "1 of 1 tests that run it" in str(told.value), "no test runs the line: those of the function are tried"


def test_the_map_knows_which_tests_run_a_line_and_leaves_out_those_that_fail_anyway(planted: Mutants) -> None:
    assert [test.rpartition(":")[2] for test in planted._tests.of("aiockpt/engine/small.py::larger", [1])] == [
        "test_the_larger_one"
    ]
    assert planted._tests.of("aiockpt/engine/small.py::untested", [4]) != []


def test_what_fails_without_a_mistake_kills_nobody(planted: Mutants) -> None:
    """The map is told that the test which always fails had passed: as one would be that broke since."""
    broken = "tests/test_small.py::test_that_fails_without_any_mistake_too"
    seconds = {**planted._tests.seconds, broken: 0.0}
    line = {"aiockpt/engine/small.py::untested": {4: [list(seconds).index(broken)]}}
    trusting = Mutants(planted.root, ["aiockpt/engine/small.py"], Covered(seconds, line))
    lives = seed_of(trusting, lambda mutant: mutant.kind == "return → pass" and mutant.function == "untested")
    with pytest.raises(AssertionError, match="SURVIVED"):
        trusting.case(lives)


def test_a_mutant_on_which_the_tests_do_not_end_is_killed(planted: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.campaigns.mutants.LIMIT_S", 8.0)
    ends = "def larger(a, b):\n    return a if a > b else b\n"
    (planted.root / "aiockpt/engine/ends.py").write_text(ends)
    test = "from aiockpt.engine.ends import larger\n\ndef test_it():\n    while larger(1, 2) != 2:\n        pass\n"
    (planted.root / "tests/test_ends.py").write_text(test)
    runs = {"aiockpt/engine/ends.py::larger": {1: [0]}}
    hanging = Mutants(planted.root, ["aiockpt/engine/ends.py"], Covered({"tests/test_ends.py::test_it": 0.1}, runs))
    seed = seed_of(hanging, lambda mutant: mutant.new.strip() == b"<=")
    assert hanging.case(seed) == {"killed: comparison": 1}


def test_a_mutant_is_tried_in_a_copy(planted: Mutants) -> None:
    assert (planted.root / "aiockpt/engine/small.py").read_text() == SOURCE
    assert planted.tree != planted.root
    assert (planted.tree / "aiockpt/engine/small.py").read_text() == SOURCE


def drawn(source: str) -> dict[str, str]:
    """Return the text of each change of a function *source*, and why it is not worth killing."""
    return {mutant.apply(source): mutant.not_worth for mutant in mutations("aiockpt/engine/x.py", source)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return a < b", "return a <= b"),
        ("return a is b", "return a is not b"),
        ("return a and b and c", "return a and b or c"),
        ("return not a", "return a"),
        ("return max(a, b)", "return min(a, b)"),
        ("return f(a, b=1)", "return f(a, )"),
        ("f(a)", "pass"),
        ("await f(a)", "pass"),
        ("raise a", "pass"),
        ("a = [0, True]", "a = [1, True]"),
        ("a = [0, True]", "a = [0, False]"),
        (
            "try:\n        f = a\n    finally:\n        a = b\n        b = a",
            "try:\n        f = a\n    finally:\n        pass",
        ),
        ("for é in a:\n        if é: break", "for é in a:\n        if é: pass"),
    ],
)
def test_each_kind_of_mistake_is_made(before: str, after: str) -> None:
    head = "async def g(a, b, c):\n    "
    changes = drawn(head + before + "\n")
    assert head + after + "\n" in changes
    for changed in changes:
        ast.parse(changed)


@pytest.mark.parametrize(
    ("code", "after", "reason"),
    [
        ("logger.warning(a)", "pass", "log text"),
        (
            "raise ValueError(f(a, b=1) if a > b else a)",
            "raise ValueError(f(a, b=1) if a >= b else a)",
            "the text of an error",
        ),
        ("emit(Event(at_ns=a, step=1))", "emit(Event(at_ns=a, step=0))", "shown to people"),
        ("return now_s < b", "return now_s <= b", "a time"),
        ("return wait(timeout=1)", "return wait(timeout=0)", "a time"),
        ("return zip(a, b, strict=True)", "return zip(a, b, strict=False)", "a check of what cannot be"),
        ("assert a is not None", "assert a is None", "a check of what cannot be"),
        ("if a:\n        return", "if a:\n        pass", "equal"),
    ],
)
def test_what_nobody_need_notice_is_known_by_rule(code: str, after: str, reason: str) -> None:
    assert drawn(f"def g(a, b):\n    {code}\n")[f"def g(a, b):\n    {after}\n"].startswith(reason)


@pytest.mark.parametrize(
    ("code", "after"),
    [
        ("raise ValueError(a)", "pass"),
        ("raise StepError(a, step=b)", "raise StepError(a, )"),
        ("emit(Event(at_ns=a))", "pass"),
        ("return now_s < b", "return now_s >= b"),
        ("if a:\n        return\n    b()", "if a:\n        pass\n    b()"),
        ("return zip(f(a=1), b, strict=True)", "return zip(f(), b, strict=True)"),
    ],
)
def test_what_is_near_to_that_is_worth_killing(code: str, after: str) -> None:
    assert drawn(f"def g(a, b):\n    {code}\n")[f"def g(a, b):\n    {after}\n"] == ""


def test_a_seed_names_the_same_mutant_while_other_functions_change(planted: Mutants) -> None:
    before = {mutant.key for mutant in mutations("x.py", SOURCE)}
    assert before <= {mutant.key for mutant in mutations("x.py", "def other(a):\n    return a > 1\n" + SOURCE)}
    assert planted.draw(5) == planted.draw(5)


def test_all_folders_where_a_mistake_loses_checkpoints_are_looked_at() -> None:
    files = {path.relative_to(covering.ROOT).as_posix() for glob in MODULES for path in covering.ROOT.glob(glob)}
    assert {
        "aiockpt/engine/save.py",
        "aiockpt/format/manifest.py",
        "aiockpt/adapters/matcher.py",
        "backends/local_tree.py",
    } <= files
    assert all((covering.ROOT / path).exists() for path in covering.KILLERS)
