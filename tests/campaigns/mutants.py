"""Planted mistakes: one small change of the source in a copy of the tree, and the tests that run that line.

A seed names one change among all that `source_mutations` knows in `MODULES`, where a mistake loses checkpoints. It goes on
naming the same one while other functions change, for each change has its own number under each seed, and the lowest wins.

Guarantees:

- The tests run on a copy: the working tree is not touched, and processes do not meet.
- A mutant is killed when a test fails, or does not end, that passes on the copy as it was: who fails there too kills nobody,
  and is left out from then on.
- A survivor is a finding, with its diff. It is one of the tests that were run: of all that run its line those that fit into
  `BUDGET_S`, from every file some. No test at all runs it: that is a survivor as well.
"""

import atexit
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.campaigns import covering
from tests.campaigns.campaign import Campaign, Case, Outcomes
from tests.campaigns.source_mutations import Mutation, mutations
from tests.campaigns.warm import NOT_TAKEN

MODULES = (
    *(
        f"aiockpt/{layer}/*.py"
        for layer in (
            *(
                "data",
                "engine",
                "ranks",
                "lazy",
                "places/tiers",
                "pipeline",
                "format",
                "planning",
                "state",
                "storage",
                "adapters",
            ),
        )
    ),
    "backends/local*.py",
)
BUDGET_S = float(os.environ.get("AIOCKPT_MUTANT_SECONDS", "90"))
"""What the tests of one mutant may take, by the map; more for a survivor that is looked at again."""
FIRST_S = 8.0
FIRST_FILES = 4
"""Some of a few files run first, those of the same layer before others: most mutants die there."""
TEST_S = 60
"""A test that takes longer hangs."""
LIMIT_S = 600.0
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "results")


_OPTIONS = ("-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", f"--timeout={TEST_S}", "--hypothesis-seed=0")


class Workplace:
    """A copy of the tree in *root*, in which one file at a time is changed; *python* runs its tests.

    Args:
        collected: files of tests that are collected once, at first: for many runs of few tests.
    """

    def __init__(self, root: Path, python: Path = Path(sys.executable), collected: Sequence[str] = ()) -> None:
        self.root = root
        self.tree = Path(tempfile.mkdtemp(prefix="mutants-")) / "tree"
        atexit.register(shutil.rmtree, self.tree.parent, ignore_errors=True)
        shutil.copytree(root, self.tree, symlinks=True, ignore=_LEFT_OUT)
        self._output = self.tree.parent / "output"
        self._warm = _Warm(python, self.tree, [])
        self._with_tests: _Warm | None = None
        if collected:  # while the source is as it was
            whole = ["-o", "session_timeout=1000000", "-p", "no:xdist", *_OPTIONS, *collected]
            self._with_tests = _Warm(python, self.tree, [str(self._output), *whole])
            self._with_tests.answer()

    def put(self, file: str, source: str) -> None:
        """Have *source* in *file*. Its compiled form goes: it is known by size and second, which may be the same."""
        path = self.tree / file
        path.write_text(source)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run(self, tests: list[str], changed: tuple[str, str] | None = None) -> tuple[int, str]:
        """Run *tests* up to the first that fails; return the exit status and what pytest printed.

        Args:
            changed: the file that is not as it was, and the function in it.
        """
        status = NOT_TAKEN
        if self._with_tests is not None:
            status = self._with_tests.run(tests=tests, changed=changed, limit_s=LIMIT_S)
        if status == NOT_TAKEN:
            status = self._warm.run(arguments=[*_OPTIONS, *tests], output=str(self._output), limit_s=LIMIT_S)
        return status, self._output.read_text(errors="replace")


class _Warm:
    """A process of `warm`, which runs in *tree*."""

    def __init__(self, python: Path, tree: Path, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [str(python), "-P", str(Path(__file__).with_name("warm.py")), *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def run(self, **request: object) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


class Mutants:
    """All mutants of a tree, and what is known of its tests."""

    def __init__(self, root: Path, modules: Iterable[str], tests: covering.Covered) -> None:
        self.root = root
        self._work = Workplace(root, collected=sorted({test.partition("::")[0] for test in tests.seconds}))
        self._tests = tests
        self._sources = {
            path.relative_to(root).as_posix(): path.read_text() for glob in modules for path in sorted(root.glob(glob))
        }
        self.all = [mutant for file, source in self._sources.items() for mutant in mutations(file, source)]
        self._sound: set[str] = set()
        self._unsound: set[str] = set()

    @property
    def tree(self) -> Path:
        """The copy in which they are tried."""
        return self._work.tree

    def draw(self, seed: int) -> Mutation:
        """Return the mutant that *seed* names."""
        return min(
            self.all, key=lambda mutant: hashlib.blake2b(f"{seed} {mutant.key}".encode(), digest_size=8).digest()
        )

    def case(self, seed: int) -> Outcomes:
        """Try the mutant of *seed*; raise when it lives."""
        mutant = self.draw(seed)
        if mutant.not_worth:
            return Counter({f"not worth: {mutant.not_worth}": 1})
        running, tests = self.tests_of(mutant)
        if self.killers(mutant, tests):
            return Counter({f"killed: {mutant.kind}": 1})
        source = self._sources[mutant.file]
        raise AssertionError(
            f"SURVIVED {mutant.file}:{mutant.line} in {mutant.function} ({mutant.kind}), "
            f"{len(tests)} of {len(running)} tests that run it passed\n{mutant.diff(source)}"
        )

    def tests_of(self, mutant: Mutation) -> tuple[list[str], list[str]]:
        """Return the tests that run the changed line, and those of them that fit into `BUDGET_S`."""
        running = self._tests.of(f"{mutant.file}::{mutant.function}", mutant.lines)
        return running, self._tests.pick(running, BUDGET_S)

    def killers(self, mutant: Mutation, tests: list[str]) -> list[str]:
        """Return the test that failed first on *mutant*, or all that ran where none is named; none when it lives."""
        source = self._sources[mutant.file]
        first = self._tests.pick(_near(mutant.file, tests), FIRST_S)
        for some in (first, [test for test in tests if test not in set(first)]):
            while left := [test for test in some if test not in self._unsound]:
                self._work.put(mutant.file, mutant.apply(source))
                try:
                    status, said = self._work.run(left, (mutant.file, mutant.function))
                finally:
                    self._work.put(mutant.file, source)
                if status == 0:
                    break
                if sound := self._sound_ones(left, said):
                    return sound
        return []

    def _sound_ones(self, tests: list[str], said: str) -> list[str]:
        """Return the test that failed if it passes on the tree as it was; where none is named, all, if they do."""
        failed = [test for test in tests if f"FAILED {test}" in said or f"ERROR {test}" in said]
        suspects = [max(failed, key=len)] if failed else tests
        if self._sound.issuperset(suspects):
            return suspects
        status, said = self._work.run(suspects)
        if status == 0:
            self._sound.update(suspects)
            return suspects
        if len(suspects) > 1 and not any(f"FAILED {test}" in said for test in suspects):
            raise RuntimeError(f"the tests do not run on the tree as it is: make the map anew\n{said}")
        self._unsound.update(test for test in suspects if len(suspects) == 1 or f"FAILED {test}" in said)
        return []


def _near(file: str, tests: list[str]) -> list[str]:
    """Return those of *tests* that lie in a few files; *tests* come with the quickest first."""
    layer = f"tests/{Path(file).parts[-2]}/"
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    near = sorted(files, key=lambda name: not name.startswith(layer))[:FIRST_FILES]
    return [test for test in tests if test.partition("::")[0] in near]


def prepare(root: Path = covering.ROOT, modules: Iterable[str] = MODULES, path: Path = covering.MAP) -> Case:
    """Return the case of the mutants in *root*, with the map of its tests, which is made where there is none."""
    return Mutants(root, modules, covering.load_map(path)).case


CAMPAIGN = Campaign(name="mutants", counts="mutants", prepare=prepare, smoke_count=3, apart=True)
