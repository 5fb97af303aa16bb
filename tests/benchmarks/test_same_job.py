"""Comparison of scripts: lines are counted as its rule says, and what a run did is read from the run."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.same_job import observe, table
from benchmarks.same_job.__main__ import SMOKE
from benchmarks.same_job.contenders import CONTENDERS, Contender
from tests.benchmarks.smoke import CHECKOUT

AIOCKPT = CONTENDERS[0]


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    source = '"""What it\n\ndoes."""\n\n# why\nx = """a\nb"""\n\n\n'
    source += 'def f():\n    """Say it."""\n    return [\n        1,  # one\n    ]\n'
    assert observe.code_lines(source) == ['x = """a', 'b"""', "def f():", "return [", "1,  # one", "]"]


def test_the_lines_that_a_script_adds_or_changes_are_counted_and_indentation_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain.py").write_text("import a\nfor step in range(3):\n    a.train()\n")
    (tmp_path / "more.py").write_text(
        '"""With."""\nimport a\nimport b\nwith b.c():\n    for step in range(b.d(), 3):\n        a.train()\n'
    )
    monkeypatch.setattr(observe, "SCRIPTS", tmp_path)
    assert observe.count_lines(Contender("more", "more", "*")) == 3


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.script)
def test_a_script_leaves_no_line_of_the_job_out_but_those_it_changes(contender: Contender) -> None:
    texts = ((observe.SCRIPTS / f"{name}.py").read_text() for name in (contender.baseline, contender.script))
    job, script = (observe.code_lines(text) for text in texts)
    assert len([line for line in job if line not in script]) <= 2


TRUTH: list[dict[str, Any]] = [{"step": step, "before": "new", "after": f"s{step}"} for step in range(4)]


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([], {"failed": "no step was trained"}),
        (TRUTH[:], {"from": -1, "state": True, "end": True}),
        ([{"step": 2, "before": "s1", "after": "s2"}], {"from": 1, "state": True, "end": True}),
        ([{"step": 2, "before": "else", "after": "s2"}], {"from": 1, "state": False, "end": True}),
        ([{"step": 3, "before": "s2", "after": "else"}], {"from": 2, "state": True, "end": False}),
    ],
)
def test_a_run_that_was_started_again_is_compared_with_the_one_that_was_not_stopped(
    notes: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    assert observe.compare(notes, TRUTH, "") == expected


def test_a_flipped_bit_is_told_only_where_the_run_stepped_back_and_said_so() -> None:
    report = _report(
        flips=[
            {"failed": "ValueError: no"},
            {"from": 9, "state": False, "told": True},
            {"from": 9, "state": True, "told": False},
            {"from": 6, "state": True, "told": True},
            {"from": 6, "state": True, "told": False},
        ]
    )
    shown = table.render(report)
    words = ("refused", "**loaded silently**", "not in the state", "is taken, told", "is taken, **untold**")
    assert all(f"1 of 5 {word}" in shown or f"1 of 5 the save before {word}" in shown for word in words), shown


def test_a_run_that_goes_on_as_another_is_shown_as_one() -> None:
    kills = [
        {"step": 3, "from": 3, "state": True, "end": True},
        {"step": 3, "from": 0, "state": True, "end": False},
        {"step": 3, "failed": "E"},
    ]
    shown = table.render(_report(kills=kills))
    assert "1 of 3 go on from that save, the same run; 1 of 3 go on from an earlier one, **another run**" in shown
    assert "1 of 3 do not start again" in shown
    assert "- x: `killed: E`." in shown


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    readme = (CHECKOUT / "benchmarks/README.md").read_text()
    (match,) = table.MARKED.finditer(readme)
    found = json.loads((CHECKOUT / "benchmarks/results/same_job" / match[2]).read_text())
    assert table.render(found) in match[0]
    for contender in CONTENDERS:
        assert found["contenders"][contender.name]["lines"] == observe.count_lines(contender), contender.name


@pytest.mark.timeout(400)
def test_the_job_runs_and_its_checkpoints_survive_what_is_done_to_them(tmp_path: Path) -> None:
    """The parts of a run, once each; `python -m benchmarks.same_job run --smoke` is all of it."""
    size = dataclasses.replace(SMOKE, every=3, steps=8)
    truth = observe.straight(AIOCKPT, tmp_path, size)
    assert set(observe.measure(AIOCKPT, tmp_path, size, baseline_s=0.0)) == {"pause_s", "durable_s", "lost_s"}
    killed = observe.kill_in_save(AIOCKPT, tmp_path, size, truth, delay_s=0.05)
    flipped = observe.flip(AIOCKPT, tmp_path, size, truth, random.Random(0))
    assert [(one["state"], one["end"]) for one in (killed, flipped)] == [(True, True)] * 2
    other = observe.restart_on(1, AIOCKPT, tmp_path, size, truth)
    assert (other["ranks"], other["state"]) == (1, True)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["straight"]


def _report(**of_one: Any) -> dict[str, Any]:
    one = {"note": "", "lines": 5, "timed": {}, "newest": 9, "kills": [], "flips": [], "worlds": [], **of_one}
    machine = {"date": "2026", "cpu": "x", "cores": 2, "filesystem": "ext4", "torch": "2"}
    return {
        "smoke": False,
        "load_before": 0.0,
        "machine": machine,
        "size": {"steps": 1, "every": 1},
        "state_bytes": 1,
        "rounds": 1,
        "contenders": {"x": one},
    }
