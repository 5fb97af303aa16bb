"""Smoke run of the main comparison: contenders of each kind, and the floors, at a size whose figures mean nothing."""

from pathlib import Path

import pytest

from benchmarks import report, table
from benchmarks.scenarios import MAIN, SCENARIOS
from benchmarks.targets import MAIN as TARGETS
from benchmarks.targets import find
from tests.benchmarks.smoke import smoke

CONTENDERS = ("aiockpt", "dcp-save", "dcp-async-thread", "dcp-async-process", "torch-save", "safetensors")
"""One of each kind, and all that targets name; the others are these with other arguments."""


def known(scenario: str) -> set[str]:
    """Return all who may take part."""
    return {*SCENARIOS[scenario].contenders, *SCENARIOS[scenario].floors}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> report.Report:
    """Return the report of one smoke run."""
    chosen = [argument for name in CONTENDERS for argument in ("--contender", name)]
    return smoke(tmp_path_factory.mktemp("smoke") / "smoke.json", *chosen)[0]


@pytest.mark.timeout(400)
def test_every_contender_takes_part_in_every_scenario(found: report.Report) -> None:
    assert found.unavailable == {}
    assert set(found.results) == set(MAIN)
    for scenario, rows in found.results.items():
        assert set(rows) == {name for name in known(scenario) if name in CONTENDERS or name.startswith("floor")}


def test_every_target_is_compared_with_figures_of_the_run(found: report.Report) -> None:
    for target in TARGETS:
        assert find(found, target.above) is not None, target
        assert find(found, target.below) is not None, target


def test_the_tables_are_written_between_the_markers_and_nowhere_else(found: report.Report, tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    report.write(found, results / "16MiB.json")
    readme.write_text("before\n<!-- results/*.json -->\nearlier tables\n<!-- end of results -->\nafter\n")
    table.write(readme, results)
    table.write(readme, results)
    text = readme.read_text()
    assert text.startswith("before\n<!-- results/*.json -->\n")
    assert text.endswith("<!-- end of results -->\nafter\n")
    assert "earlier tables" not in text
    assert text.count("### 16 MiB") == 1
