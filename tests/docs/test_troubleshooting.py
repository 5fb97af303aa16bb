"""The page of errors has every error that there is, and no other."""

import re
from collections.abc import Iterator

import aiockpt
from aiockpt import errors
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \|(.+)\|(.*)\|$", PAGE, re.MULTILINE)


def all_below(cls: type[errors.CheckpointError]) -> Iterator[str]:
    """Yield the names of the classes of errors below *cls*."""
    for below in cls.__subclasses__():
        if below.__module__ == errors.__name__:
            yield below.__name__
            yield from all_below(below)


def test_every_error_has_one_row() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(all_below(errors.CheckpointError))


def test_every_row_says_what_it_means_and_the_page_names_no_error_that_is_not_there() -> None:
    assert all(meaning.strip() for _, meaning, _ in ROWS)
    assert set(re.findall(r"`(\w+Error)`", PAGE)) - {"CheckpointError"} <= set(all_below(errors.CheckpointError))


def test_the_deadlines_that_it_names_are_those_that_hold() -> None:
    named = re.findall(r"Deadlines\((\w+)=(\d+)\)", PAGE)
    assert named
    for field, seconds in named:
        assert getattr(aiockpt.Deadlines(), field) == float(seconds), field
