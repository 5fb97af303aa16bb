"""The tests that run a line: measured once, kept in a file, asked for each mutant.

    python -m tests.campaigns.covering

runs the tests of the core under `coverage`, each in a context of its own, and writes `MAP`. A line is known by the function
that it is in and its place there, so that the map outlives changes elsewhere in the file. Only tests that passed are in it.

As a pytest plugin this module is the recorder; `coverage` is needed for nothing else here.
"""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
MAP = ROOT / ".bench" / "covering.json"
FOLDERS = (
    "format",
    "state",
    "planning",
    "storage",
    "pipeline",
    "adapters",
    "crash",
    "engine",
    "lazy",
    "tiers",
    "worker",
    "runtime",
    "ranks",
    "property",
    "cli",
    "convert",
)
KILLERS = (
    *(f"tests/{folder}" for folder in FOLDERS),
    *(f"tests/backends/test_{name}.py" for name in ("local", "local_faults", "local_root", "power_cuts", "in_order")),
    "tests/backends/test_conformance.py",
)
"""The tests that may kill a mutant. Those of other backends, of trainings and of the examples are not among them."""
BUDGET_S = 90.0
"""What the tests of one mutant may take, by the seconds that they took when the map was made."""
_PARTS = "AIOCKPT_COVERING_PARTS"


class Covered(msgspec.Struct):
    """What was measured.

    Attributes:
        seconds: of each test, by its node id.
        runs: by "module path::function", then by line in it (0 is that of its `def`): the tests, as places in *seconds*.
    """

    seconds: dict[str, float]
    runs: dict[str, dict[int, list[int]]]

    def of(self, function: str, lines: Iterable[int]) -> list[str]:
        """Return the tests that run one of *lines* of *function*; where none does, those that run the function."""
        names = list(self.seconds)
        places = self.runs.get(function, {})
        found = {test for line in lines for test in places.get(line, ())}
        return [names[test] for test in sorted(found or {test for tests in places.values() for test in tests})]

    def pick(self, tests: Iterable[str], budget_s: float = BUDGET_S) -> list[str]:
        """Return as many of *tests* as fit in the budget, from all files in turn; the quickest first."""
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=self._took_s):
            files[test.partition("::")[0]].append(test)
        picked: list[str] = []
        spent_s = 0.0
        for test in _in_turn(files.values()):
            if spent_s + self._took_s(test) <= budget_s:
                spent_s += self._took_s(test)
                picked.append(test)
        return sorted(picked, key=self._took_s)

    def _took_s(self, test: str) -> float:
        return self.seconds.get(test, 0.0)


def _in_turn(lists: Iterable[list[str]]) -> Iterator[str]:
    left = [list(reversed(one)) for one in lists]
    while left := [one for one in left if one]:
        for one in left:
            yield one.pop()


def functions(source: str) -> Iterator[tuple[str, ast.AST, int, int]]:
    """Yield each function of *source* that is in no other: its qualified name, its node, its first line and its last."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child, child.lineno, child.end_lineno or child.lineno
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(ast.parse(source), "")


def load_map(path: Path = MAP) -> Covered:
    """Return what was measured; measure it where that was not done yet."""
    if not path.exists():
        measure(path)
    return msgspec.json.decode(path.read_bytes(), type=Covered, strict=False)


def measure(path: Path = MAP, root: Path = ROOT, killers: Iterable[str] = KILLERS, workers: int = 2) -> None:
    """Run the tests that may kill and write which lines each runs."""
    parts = path.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    for part in parts.iterdir():
        part.unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.campaigns.covering", "-n", str(workers), "--tb=line"]
    paths = os.pathsep.join((str(root), str(ROOT)))
    subprocess.run(
        [*command, *killers],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths, _PARTS: str(parts)},
        stdout=sys.stderr,
        check=False,
    )
    path.write_bytes(msgspec.json.encode(_merged(sorted(parts.glob("*.json")))))


def _merged(parts: Iterable[Path]) -> Covered:
    whole = Covered({}, defaultdict(lambda: defaultdict(list)))
    for path in parts:
        part = msgspec.json.decode(path.read_bytes(), type=Covered, strict=False)
        first = len(whole.seconds)
        whole.seconds.update(part.seconds)
        for function, lines in part.runs.items():
            for line, tests in lines.items():
                whole.runs[function][line] += [first + test for test in tests]
    return whole


class Recorder:
    """Measures each test of this process in a context of its own."""

    def __init__(self, parts: Path, root: Path) -> None:
        import coverage

        sources = [str(root / folder) for folder in ("aiockpt", "backends") if (root / folder).exists()]
        self._root = root
        self._part = parts / f"{os.getpid()}.json"
        self._coverage = coverage.Coverage(data_file=None, branch=False, config_file=False, source=sources)
        self._coverage.start()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._coverage.switch_context(item.nodeid)
        done = yield
        self._coverage.switch_context("between tests")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        passed = {test: round(took, 3) for test, took in self._seconds.items() if test not in self._failed}
        places = {test: place for place, test in enumerate(passed)}
        runs: dict[str, dict[int, list[int]]] = {}
        for file in data.measured_files():
            where = Path(file).resolve().relative_to(self._root.resolve()).as_posix()
            by_line = data.contexts_by_lineno(file)
            for name, _, first, last in functions(Path(file).read_text()):
                lines = {
                    line - first: tests
                    for line in range(first + 1, last + 1)
                    if (tests := [places[test] for test in by_line.get(line, ()) if test in places])
                }
                if lines:
                    runs[f"{where}::{name}"] = lines
        self._part.write_bytes(msgspec.json.encode(Covered(passed, runs)))


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests: not in the one that hands them out."""
    if (parts := os.environ.get(_PARTS)) and (
        hasattr(config, "workerinput") or not config.getoption("numprocesses", 0)
    ):
        config.pluginmanager.register(Recorder(Path(parts), config.rootpath), "covering-recorder")


if __name__ == "__main__":
    measure()
