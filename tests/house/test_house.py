"""The ratchet: what is measured of the source and of the path of a save and a load stays below its ceiling."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.ceilings import measure_path, measure_source, read_ceilings
from tests.house.source import ROOT, Source, opens_with_question


@pytest.mark.parametrize("measure", [measure_source, measure_path])
def test_no_figure_is_above_its_ceiling(measure: Callable[[], dict[str, float]]) -> None:
    ceilings, measured = read_ceilings(), measure()
    without = sorted(measured.keys() - ceilings.keys())
    assert not without, f"give these a ceiling, with `make house ARGS=--lower`: {without}"
    above = {name: (figure, ceilings[name].most) for name, figure in measured.items() if figure > ceilings[name].most}
    assert not above, f"above their ceilings; see the head of tests/house/ceilings.toml: {above}"


def test_what_is_measured_is_seen(tmp_path: Path) -> None:
    """Plant each fault once: a circle over an import for types, a question, a person, a file with one user."""
    package = tmp_path / "aiockpt" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "aiockpt" / "__init__.py").write_text("")
    (package / "one.py").write_text('"""Who saves? Nobody."""\n\nfrom aiockpt.engine.two import a\n# because\n')
    (package / "two.py").write_text(
        '"""A table."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aiockpt.engine import one\n'
        "def tell_all(told, self):\n    self._heard = told\n"
    )
    source = Source(tmp_path)
    assert source.circles == [["aiockpt/engine/one.py", "aiockpt/engine/two.py"]]
    assert source.questions() == ["aiockpt/engine/one.py"]
    assert source.single_users == ["aiockpt/engine/one.py", "aiockpt/engine/two.py"]
    assert source.persons_per_1000_words() == 1000 * 2 / 5
    assert source.persons_in_names() == ["_heard", "tell_all", "told"]
    assert source.comment_fraction() == 1 / 10


def test_modules_of_the_tests_open_with_what_they_are() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [path.relative_to(ROOT) for path in files if opens_with_question(ast.parse(path.read_text()))] == []
