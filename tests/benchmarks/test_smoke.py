"""Do the benchmarks run? All contenders and floors at a size whose figures mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report, table
from benchmarks.contenders import CONTENDERS
from benchmarks.scenarios import SCENARIOS
from benchmarks.targets import TARGETS
from benchmarks.visit import participants

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> report.Report:
    """Return the report of one smoke run. On the checkout's own disk: a memory file system has no cold load."""
    out = tmp_path_factory.mktemp("smoke") / "smoke.json"
    work = CHECKOUT / ".bench" / out.parent.name
    command = [sys.executable, "-m", "benchmarks", "run", "--smoke", "--out", str(out), "--work", str(work)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(work.iterdir()), "a run leaves nothing behind"
    work.rmdir()
    return report.read(out)


@pytest.mark.timeout(400)
def test_every_contender_takes_part_in_every_scenario(smoke: report.Report) -> None:
    assert smoke.failures == []
    assert smoke.unavailable == {}
    assert set(smoke.results) == set(SCENARIOS)
    for scenario, per in smoke.results.items():
        assert set(per) == set(participants(scenario))
    ours = set(smoke.results["save"])
    assert set(CONTENDERS) == {name for name in ours if not name.startswith("floor: ")}


def test_every_target_is_compared_with_figures_of_the_run(smoke: report.Report) -> None:
    for target in TARGETS:
        assert target.above.find(smoke) is not None, target
        assert target.below.find(smoke) is not None, target


def test_the_table_is_written_between_the_markers_and_nowhere_else(smoke: report.Report, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nearlier tables\n{table.END}\nafter\n")
    table.write([smoke], readme)
    table.write([smoke], readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n")
    assert text.endswith(f"{table.END}\nafter\n")
    assert "earlier tables" not in text
    assert text.count("### 16 MiB") == 1
