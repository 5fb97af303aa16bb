"""The list of guards: each is where the list says; the loss of some is noticed here, that of others each day."""

import datetime
import random
from pathlib import Path

import pytest

from tests.guards.guard import ROOT, Guard, Trial, read_guards
from tests.traces.scenarios import NAMES

GUARDS = read_guards()
DRAWN = 2


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.name for guard in GUARDS])
def test_a_guard_is_where_the_list_says(guard: Guard) -> None:
    """Once: whoever moves it, or writes it differently, changes the list."""
    without = guard.remove((ROOT / guard.file).read_text())
    compile(without, guard.file, "exec")
    file, _, name = guard.test.partition("::")
    assert guard.framework == (Path(file).stem.removeprefix("test_") if "frameworks" in file else "")
    function, _, case = name.partition("[")
    assert f"def {function}(" in (ROOT / file).read_text()
    assert "traces" not in file or case.rstrip("]") in NAMES


def test_the_list_is_long_and_names_each_guard_once() -> None:
    assert len(GUARDS) >= 60
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)
    assert len({(guard.file, guard.code, guard.without) for guard in GUARDS}) == len(GUARDS)


def test_a_guard_that_is_not_there_or_twice_is_told() -> None:
    guard = Guard(name="a", file="b", code="x = 1\n", without="", test="c")
    for source in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=f"{source.count('x')} times in b"):
            guard.remove(source)


def test_guards_drawn_for_today_are_noticed_when_they_are_gone() -> None:
    trial = Trial()
    here = [guard for guard in GUARDS if not guard.framework]
    for guard in random.Random(datetime.datetime.now(datetime.UTC).toordinal()).sample(here, DRAWN):
        noticed, said = trial.is_noticed(guard)
        assert noticed, f"without {guard.name!r} ({guard.file}) {guard.test} passes:\n{said[-2000:]}"
        assert trial.passes(guard.test), f"{guard.test} fails with all guards where they are"
