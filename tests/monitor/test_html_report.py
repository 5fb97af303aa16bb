"""The page of a run: all in one file, with what the run reported, written by the command that says so."""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.monitor import TraceFile
from aiockpt.monitor.findings import find_problems
from aiockpt.monitor.html import html_report
from aiockpt.monitor.html.html_report import ReportData, StageGrid, gather, html_page, size_map
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.save_points import save_points
from aiockpt.monitor.spans import BLOCKS, TimeSpan, spans
from aiockpt.monitor.summary import summarize
from aiockpt.tools.cli.main import app
from tests.monitor.synthetic_run import Fault, SyntheticRun

SLOW = SyntheticRun(
    saves=8,
    mesh={"pp": 2, "dp": 3, "tp": 2},
    faults=(Fault(ranks=frozenset({9}), stage="write", factor=4.0, since=1),),
    retried=frozenset({2}),
    restart_after=5,
)


def data_of(folder: Path, name: str = "a run") -> ReportData:
    told = read_run(folder)
    found = spans(told)
    summary, points = summarize(told, found), save_points(told)
    return gather(name, told, found, summary, points, find_problems(told, summary, points, summary.ended_s), None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    folder = tmp_path_factory.mktemp("run")
    SLOW.write(folder)
    return data_of(folder)


def seconds_of(grid: StageGrid, ranks: int) -> Any:
    flat = np.frombuffer(base64.b64decode(grid.seconds), "<f4")
    return flat.reshape(len(grid.stages), ranks, len(grid.occasions))


def test_each_rank_has_its_host_and_its_place_in_the_mesh(data: ReportData) -> None:
    assert [one.rank for one in data.ranks] == list(range(12))
    assert (data.ranks[9].host, data.ranks[9].mesh) == ("node-001", {"pp": 1, "dp": 1, "tp": 1})


def test_the_grid_has_every_stage_of_every_rank_and_save(data: ReportData) -> None:
    saves, loads = data.grids
    assert (saves.operation, loads.operation) == ("save", "load")
    assert saves.stages[:4] == ["whole", "pause", "snapshot", "write"]
    assert BLOCKS not in saves.stages
    assert saves.occasions == [(0, step) for step in range(0, 600, 100)] + [(1, 600), (1, 700)]
    assert loads.occasions == [(1, 500)]
    written = seconds_of(saves, 12)[saves.stages.index("write")]
    assert written[:, 0] == pytest.approx(1.23, abs=0.15), "both files of a rank together"
    assert written[9, 1:] == pytest.approx(4.3, abs=0.4)
    assert np.isnan(seconds_of(saves, 12)[saves.stages.index("barrier")][:, 0]).all()


def test_files_that_are_written_at_once_count_once() -> None:
    span = TimeSpan(process=0, rank=0, host="a", step=3, operation="save", stage="write", begin_s=10.0, seconds=1.0)
    beside = [msgspec.structs.replace(span, begin_s=10.5), msgspec.structs.replace(span, begin_s=10.1, seconds=0.2)]
    later = msgspec.structs.replace(span, begin_s=20.0)
    (grid,) = html_report.stage_grids([span, *beside, later], [0], {0: 0})
    assert seconds_of(grid, 1)[0, 0] == pytest.approx(2.5)


def test_metrics_of_the_saves_are_in_the_page(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, observers=[TraceFile()]) as ckpt:
        for step, loss in enumerate((0.5, float("nan"))):
            ckpt.save(step, {"x": torch.ones(1)}, metrics={"loss": loss}).result()
    assert [one.metrics for one in data_of(tmp_path).saves] == [{"loss": 0.5}, {"loss": None}]


def test_the_timeline_has_the_spans_of_each_save(data: ReportData) -> None:
    shown = next(one for one in data.timelines if (one.operation, one.step) == ("save", 700))
    rows = np.array(shown.rows).reshape(-1, 6)
    assert len(rows) == len(shown.keys)
    assert shown.ranks == len(set(rows[:, 0])) == 12
    assert rows[:, 2].min() == 0
    of_slow = rows[(rows[:, 0] == 9) & (rows[:, 1] == data.stages.index("write"))]
    assert of_slow[:, 3].sum() == pytest.approx(4.3e6, rel=0.1)
    assert of_slow[:, 4].sum() == 1200 << 20


def test_of_many_ranks_the_timeline_has_the_slowest_and_those_that_are_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_report, "MOST_SPANS", 9 * 12 * 5)
    SLOW.write(tmp_path)
    data = data_of(tmp_path)
    shown = [one for one in data.timelines if one.operation == "save"]
    ranks = [set(np.array(one.rows).reshape(-1, 6)[:, 0]) for one in shown]
    assert all({0, 1, 9} <= some for some in ranks), "the first, the one with retries, the slow one"
    assert all(3 < len(some) < 12 for some in ranks)


def test_retries_and_starts_are_on_the_line_of_time(data: ReportData) -> None:
    ((_, rank, what),) = data.retries
    assert (rank, what) == (1, "put d: TimeoutError()")
    assert len(data.starts) == 2


# ------------------------------------------------------------------ sizes


def tensor(name: str, size: int) -> aiockpt.TensorInfo:
    return aiockpt.TensorInfo(name=name, dtype="F32", shape=(size // 4,), bytes=size, files=())


def test_sizes_are_a_tree_in_which_each_part_is_the_sum_of_what_is_below() -> None:
    sizes = size_map(7, [tensor("model.a.weight", 400), tensor("model.a.bias", 40), tensor("model.b.weight", 800)])
    assert sizes.labels == ["step 7", "model", "b.weight", "a", "weight", "bias"]
    assert sizes.parents == [-1, 0, 1, 1, 3, 3]
    assert sizes.bytes == [1240, 1240, 800, 440, 400, 40]
    assert sizes.about[2:5] == ["F32 200", "2 tensors", "F32 100"]


def test_small_parts_of_one_level_are_shown_as_one() -> None:
    many = [tensor(f"model.{at}", 4) for at in range(100)]
    sizes = size_map(7, [tensor("model.big", 100_000), *many])
    assert sizes.labels == ["step 7", "model", "big", "100 small parts"]
    assert sizes.bytes[2:] == [100_000, 400]
    assert size_map(7, [tensor("big", 100_000), tensor("small", 4)]).labels == ["step 7", "big", "small"]


# ------------------------------------------------------------------ the file


@pytest.fixture
def plotly() -> None:
    pytest.importorskip("plotly")


@pytest.mark.usefixtures("plotly")
def test_the_page_is_one_file_that_asks_for_nothing(data: ReportData, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html_page(data), "utf-8")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "default-src 'none'" in page
    ours = re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", page, count=1, flags=re.DOTALL)
    assert len(ours) < len(page) / 2
    assert not re.search(r"(?:src|href)=(?!\"data:)", ours)
    assert "http" not in re.sub(r"http-equiv", "", ours)
    assert "$style" not in page
    assert "$data" not in page


@pytest.mark.usefixtures("plotly")
def test_what_a_run_told_cannot_become_part_of_the_page(data: ReportData, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    (tmp_path / "page.html").write_text(html_page(msgspec.structs.replace(data, name=evil)), "utf-8")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert evil not in page
    assert "\\u003c/script>\\u003cscript>alert(1)" in page


@pytest.mark.usefixtures("plotly")
def test_credentials_are_not_in_the_page(tmp_path: Path) -> None:
    SLOW.write(tmp_path)
    data = data_of(tmp_path, "s3://user:swordfish@host/run")
    (tmp_path / "page.html").write_text(html_page(data), "utf-8")
    assert "swordfish" not in (tmp_path / "page.html").read_text("utf-8")


def test_without_plotly_it_says_what_to_install(
    data: ReportData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(aiockpt.UsageError, match="pip install plotly; --text needs nothing"):
        (tmp_path / "page.html").write_text(html_page(data), "utf-8")
    assert not (tmp_path / "page.html").exists()


# ------------------------------------------------------------------ the command


def saved_run(tmp_path: Path, trace: TraceFile) -> Path:
    with aiockpt.Checkpointer(tmp_path / "run", observers=[trace]) as ckpt:
        ckpt.save(3, {"model": {"weight": torch.ones(300), "bias": torch.ones(3)}}).result()
    return tmp_path / "run"


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found
    decoded: dict[str, Any] = msgspec.json.decode(found[1])
    return decoded


@pytest.mark.usefixtures("plotly")
def test_the_command_writes_the_page_and_says_where_it_is_and_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved_run(tmp_path, TraceFile())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("report.html   1 save committed on 1 rank")
    assert data_in(tmp_path / "report.html")["sizes"]["labels"] == ["step 3", "model", "weight", "bias"]

    SLOW.write(tmp_path / "slow")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "slow"), "--out", str(tmp_path / "slow.html")])
    assert "warning  Rank 9 (node-001) is slow: write takes" in done.output
    assert data_in(tmp_path / "slow.html")["sizes"] is None


@pytest.mark.usefixtures("plotly")
def test_sizes_are_found_where_the_trace_says_that_the_run_is(tmp_path: Path) -> None:
    saved_run(tmp_path, TraceFile(tmp_path / "trace.jsonl"))
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "trace.jsonl"), "-o", str(page)]).exit_code == 0
    assert data_in(page)["sizes"]["step"] == 3


@pytest.mark.usefixtures("plotly")
def test_a_page_or_a_timeline_for_stdout_is_written_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SLOW.write(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "run", "-o", "-"])
    assert done.exit_code == 0
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    done = CliRunner().invoke(app, ["report", "run", "--chrome", "-"])
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["traceEvents"]) > 10
    for two in (
        ["-o", "-", "--text"],
        ["-o", "-", "--json"],
        ["-o", "-", "--chrome", "t.json"],
        ["--chrome", "-", "-o", "p"],
    ):
        refused = CliRunner().invoke(app, ["report", "run", *two])
        assert "has room for one of -o, --chrome, --text and --json" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("asked", [["--text"], ["--json"], ["--chrome", "timeline.json"]])
def test_no_page_is_written_where_something_else_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    SLOW.write(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "run", *asked])
    assert done.exit_code == 0
    assert "write" in done.output
    assert not (tmp_path / "report.html").exists()


def test_a_run_in_which_all_is_well_is_said_to_be(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    SyntheticRun(saves=8, mesh={"dp": 4}).write(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert "no failure, no slow rank, nothing lost" in done.output
