"""Does the simulation of gathering run, and does what it counts grow as the tree says?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aiockpt.engine.together import RELIST_S
from aiockpt.pipeline.votes import PATIENCE_S, READS_AT_ONCE
from aiockpt.planning.groups import group_size, groups_of
from benchmarks import gathering
from benchmarks.slow_places import STORE_ROUND_TRIP_S

CHECKOUT = Path(__file__).resolve().parents[2]
LATENCY_S = 0.02
LISTINGS = 2
"""Of what was gathered, and of the data files."""


def test_a_smoke_run_writes_a_table_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "gathering.json"
    command = [sys.executable, "-m", "benchmarks.gathering", "--smoke", "--out", str(out)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(out.read_bytes(), type=gathering.Gathering)
    assert [(row.ranks, row.way) for row in report.rows] == [(10, "flat"), *((300, way) for way in gathering.WAYS)]
    assert [one.ranks for one in report.exchanges] == [10, 50]
    assert done.stdout.count("| ") > 5 * 4


@pytest.mark.parametrize("ranks", [300, 600, 1200])
def test_no_process_reads_more_than_its_level_of_the_tree(ranks: int) -> None:
    flat, tree = (gathering.simulate(ranks, way, LATENCY_S) for way in gathering.WAYS[:2])
    groups = len(groups_of(ranks))
    looks = 2 + gathering.WRITING_S / RELIST_S  # while ranks still write rank 0 looks what is there
    assert tree.read_count <= max(group_size(ranks), groups) + LISTINGS + looks
    assert flat.read_count >= ranks


def test_the_time_to_commit_is_that_of_the_requests_in_line() -> None:
    ranks = 600
    tree = gathering.simulate(ranks, "tree", LATENCY_S)
    rounds = -(-group_size(ranks) // READS_AT_ONCE) + -(-len(groups_of(ranks)) // READS_AT_ONCE)
    written = ("gathered", "decision", "manifest")
    in_line = rounds + LISTINGS + len(written)
    woken_s = 0.2 + 10 * STORE_ROUND_TRIP_S  # the longest pause between two looks at the store
    assert tree.commit_s <= in_line * LATENCY_S + woken_s
    flat = gathering.simulate(ranks, "flat", LATENCY_S)
    assert flat.commit_s > tree.commit_s


def test_gatherers_that_die_cost_patience_and_no_step() -> None:
    ranks = 300
    row = gathering.simulate(ranks, gathering.WAYS[2], LATENCY_S)
    assert PATIENCE_S < row.commit_s < 3 * PATIENCE_S
    assert row.read_count < ranks


def test_what_ranks_hold_is_exchanged_with_calls_that_grow_with_the_ranks() -> None:
    few, many = gathering.exchange(50), gathering.exchange(200)
    assert many.store_count <= 4.5 * few.store_count
    assert many.store_count_of_all <= 6 * few.store_count_of_all
