"""Does the planning benchmark run, and does its report say what it should?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aiockpt.format import merge
from benchmarks import planning

CHECKOUT = Path(__file__).resolve().parents[2]


def test_a_smoke_run_writes_a_table_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "planning.json"
    command = [sys.executable, "-m", "benchmarks.planning", "--smoke", "--out", str(out)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(out.read_bytes(), type=planning.Planning)
    assert [(row.sharding, row.ranks, row.pieces) for row in report.rows] == [
        ("HSDP", 2, 20),
        ("FSDP", 2, 20),
        ("HSDP", 8, 80),
        ("FSDP", 8, 80),
    ]
    assert done.stdout.count("\n| ") == 5


def test_replicas_do_not_add_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_SHARDS", 2)
    assert planning.measure("HSDP", 6, 10).pieces == 20


def test_more_pieces_than_a_checkpoint_may_have_are_said_to_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "MAX_TABLE_PIECES", 20)
    report = planning.run([4], 10, tmp_path)
    assert [row.tensors for row in report.rows] == [10, 5]
    assert "40 pieces are more than the 20" in planning.render(report)


def test_a_world_of_many_pieces_is_measured_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planning.measure("FSDP", 4, 10)
    monkeypatch.setattr(merge, "MAX_PIECES", 0)
    columns = planning.measure("FSDP", 4, 10)
    assert columns.pieces == plain.pieces == 40
    assert columns.manifest_bytes != plain.manifest_bytes
