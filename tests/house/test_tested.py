"""The table of modules and their tests: each module of the product has a test of its name, or a line in `tested.toml`."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tests.house.source import ROOT, Source

TABLE = Path(__file__).with_name("tested.toml")


def is_named_after(test: str, module: str) -> bool:
    """Return whether *test* is ``test_<module>.py`` in a folder of the tests that is called as a folder of the module.

    A module of the top has its test at the top: ``tests/test_options.py`` tests ``aiockpt/options.py``, and nothing else.
    """
    tested, own = PurePosixPath(test), PurePosixPath(module)
    if tested.name != f"test_{own.name}":
        return False
    folders, homes = set(tested.parts[1:-1]), set(own.parts[:-1]) - {"aiockpt"}
    return bool(folders & homes) or not folders | homes


def faults(modules: Iterable[str], tests: Iterable[str], table: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the table: modules without a test, lines without a file, and lines that are not needed."""
    modules, tests = set(modules), set(tests)
    named = {module for module in modules if any(is_named_after(test, module) for test in tests)}
    return [
        *(f"{module}: has no test; name the file that tests it" for module in sorted(modules - named - table.keys())),
        *(f"{module}: {test} is no file with tests" for module, test in table.items() if test not in tests),
        *(f"{module}: is no module" for module in sorted(table.keys() - modules)),
        *(f"{module}: has a test of its name" for module in sorted(table.keys() & named)),
    ]


def test_each_module_has_a_test_of_its_name_or_a_line_that_names_one() -> None:
    modules = [name for name in Source().texts if not name.endswith("__init__.py")]
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    tests = [name for name, text in files.items() if "def test_" in text or "Suite" in text]
    table = tomllib.loads(TABLE.read_text())
    assert len(modules) > 250, "the walk sees the product"
    assert faults(modules, tests, table) == []
    assert list(table) == sorted(table)


def test_what_is_wrong_with_the_table_is_seen() -> None:
    modules = ["aiockpt/engine/save.py", "aiockpt/engine/find.py", "aiockpt/options.py", "backends/s3.py"]
    tests = ["tests/ranks/test_save.py", "tests/engine/test_find.py", "tests/test_options.py", "tests/s3/test_s3.py"]
    assert faults(modules, tests, {}) == [
        "aiockpt/engine/save.py: has no test; name the file that tests it",
        "backends/s3.py: has no test; name the file that tests it",
    ]
    table = {
        "aiockpt/engine/find.py": "tests/engine/test_find.py",
        "aiockpt/engine/gone.py": "tests/engine/test_find.py",
        "aiockpt/engine/save.py": "tests/engine/test_gone.py",
        "backends/s3.py": "tests/s3/test_s3.py",
    }
    assert faults(modules, tests, table) == [
        "aiockpt/engine/save.py: tests/engine/test_gone.py is no file with tests",
        "aiockpt/engine/gone.py: is no module",
        "aiockpt/engine/find.py: has a test of its name",
    ]
