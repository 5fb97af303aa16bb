"""A guard: a piece of the source, what is there without it, and the test that fails then."""

import os
import sys
import tomllib
from pathlib import Path

import msgspec

from tests.campaigns.mutants import Workplace
from tests.environments import build

ROOT = Path(__file__).parents[2]
LISTS = [Path(__file__).parent / name for name in ("guards.toml", "frameworks.toml")]
FAILED = 1
"""The exit status of pytest when tests ran, and one failed."""


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """One guard.

    Attributes:
        name: what holds because of it, in words.
        file: where it is.
        code: its text, which is in the file exactly once.
        without: what stands there when it is taken away.
        test: the test that fails then.
        framework: whose environment that needs, as `tests/frameworks/run` builds it; none if it is empty.
    """

    name: str
    file: str
    code: str
    without: str
    test: str
    framework: str = ""

    def remove(self, source: str) -> str:
        """Return *source* without it.

        Raises:
            ValueError: its text is not there, or more than once: change it in the list, too.
        """
        if source.count(self.code) != 1:
            raise ValueError(f"{self.name!r}: its code is {source.count(self.code)} times in {self.file}")
        return source.replace(self.code, self.without)


def read_guards() -> list[Guard]:
    """Return all that are listed."""
    return [guard for file in LISTS for guard in msgspec.convert(tomllib.loads(file.read_text())["guard"], list[Guard])]


class Trial:
    """Takes guards away, one at a time, in a copy of the tree; its tests run in the environment of *framework*, or here."""

    def __init__(self, framework: str = "") -> None:
        python = Path(sys.executable)
        if framework:
            python = build("frameworks", framework, ROOT / "tests" / "frameworks" / "requirements" / f"{framework}.txt")
            os.environ |= {"AIOCKPT_FRAMEWORK": framework, "GLOO_SOCKET_IFNAME": "lo"}
        self._work = Workplace(ROOT, python)

    def is_noticed(self, guard: Guard) -> tuple[bool, str]:
        """Say whether the test fails without *guard*, and what it printed."""
        source = (ROOT / guard.file).read_text()
        self._work.put(guard.file, guard.remove(source))
        try:
            status, said = self._work.run([guard.test])
        finally:
            self._work.put(guard.file, source)
        return status == FAILED, said

    def passes(self, test: str) -> bool:
        """Say whether *test* passes with all guards where they are."""
        return self._work.run([test])[0] == 0
