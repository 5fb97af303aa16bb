"""A guard: a piece of the source, what is there without it, and the test that fails then."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from tests.campaigns.mutants import Workplace

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).parent / "guards.toml"
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
    """

    name: str
    file: str
    code: str
    without: str
    test: str

    def remove(self, source: str) -> str:
        """Return *source* without it.

        Raises:
            ValueError: its text is not there, or more than once: change it in `guards.toml`, too.
        """
        if source.count(self.code) != 1:
            raise ValueError(f"{self.name!r}: its code is {source.count(self.code)} times in {self.file}")
        return source.replace(self.code, self.without)


def read_guards() -> list[Guard]:
    """Return all that are listed."""
    return msgspec.convert(tomllib.loads(LIST.read_text())["guard"], list[Guard])


class Trial:
    """Takes guards away, one at a time, in a copy of the tree."""

    def __init__(self) -> None:
        self._work = Workplace(ROOT)

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
