"""The checks of nodes: what is named, and what a scheduler finds."""

import errno
import json
import socket
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from aiockpt.launch import joint_check, node_check
from aiockpt.launch.history import read_launches
from aiockpt.launch.node_check import UNHEALTHY, check_node, read_report, report_path
from tests.cli.small_checkpoints import Command
from tests.launch.launched import TRAINER, Launched, finish, start, start_nodes

HOST = socket.gethostname()
FIGURES = """
import os
if "FIGURE" in os.environ:
    import torch.distributed
    from aiockpt.launch import node_check
    figure = float(os.environ["FIGURE"])
    node_check._probes = lambda folder: {"memory copy": lambda: figure}
    node_check.FACTOR = 20.0  # the network of a busy machine is slow for all nodes, now and then
    if not figure:
        torch.distributed.all_reduce = lambda *of: None
"""
LATE_S = "last_call_timeout=20"
"""For all nodes to come; the job begins when so long no other has."""


def check_nodes(folder: Path, figures: Sequence[float], nnodes: str) -> list[Launched]:
    """Launch a checked job on as many nodes as there are *figures*; the sums of one without are wrong. Return their ends."""
    (folder / "sitecustomize.py").write_text(FIGURES)
    each = [{"FIGURE": str(figure), "PYTHONPATH": str(folder)} for figure in figures]
    own = ["--check", "--nnodes", nnodes, "--rdzv-conf", LATE_S, TRAINER, folder / "place", 4, "none"]
    return [finish(folder / str(number), node) for number, node in enumerate(start_nodes(folder, each, *own))]


@pytest.mark.parametrize("world_size", [2, 3, 6, 7])
def test_each_two_ranks_meet_once(world_size: int) -> None:
    met: list[frozenset[int]] = []
    schedules = [list(joint_check.find_partners(rank, world_size)) for rank in range(world_size)]
    for row in zip(*schedules, strict=True):
        pairs = {frozenset((rank, partner)) for rank, partner in enumerate(row) if partner is not None}
        assert all(row[partner] == rank for rank, partner in enumerate(row) if partner is not None)
        met += pairs
    assert sorted(map(sorted, met)) == [list(pair) for pair in combinations(range(world_size), 2)]


def test_a_host_that_is_twice_as_slow_as_its_peers_is_named() -> None:
    usual = {"memory copy": 10e9, "pairs": 1e9}
    slow = joint_check.find_slow_nodes(
        {"a": usual, "b": {**usual, "pairs": 0.3e9}, "c": usual, "d": usual, "e": {"pairs": 0.6e9}}
    )
    assert slow["b"] == ["pairs: 286.1 MiB/s, 3.3 times slower than its peers"]
    assert slow["a"] == slow["c"] == slow["e"] == []


def test_a_node_is_compared_with_its_last_healthy_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    figures = {"disk write": 1e9}
    probes: Any = lambda _: {name: lambda name=name: figures[name] for name in figures}  # noqa: E731
    monkeypatch.setattr(node_check, "_probes", probes)
    assert check_node(tmp_path).healthy
    figures["disk write"] = 0.3e9
    for _ in range(2):  # a slow check is no measure for the next one
        report = check_node(tmp_path)
        assert report.problems == ["disk write: 286.1 MiB/s, 3.3 times slower than its last check"]
    assert not json.loads(report_path(tmp_path, HOST).read_bytes())["healthy"]
    assert aiockpt_command("doctor", tmp_path, "--node").status == UNHEALTHY
    figures["disk write"] = 0.9e9
    assert check_node(tmp_path).healthy


def test_a_probe_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise OSError("no device")

    monkeypatch.setattr(node_check, "_probes", lambda _: {"gpu 3 copy": broken})
    assert check_node(tmp_path).problems == ["gpu 3 copy: failed: no device"]


def test_a_node_without_room_for_the_report_is_named_and_keeps_the_figures_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    monkeypatch.setattr(node_check, "_probes", lambda _: {"disk write": lambda: 1e9})
    assert check_node(tmp_path).healthy

    def fill(path: Path, _: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", fill)
        report = check_node(tmp_path)
        assert not report.healthy
        assert f"free space in {tmp_path}" in report.problems[0]
        assert aiockpt_command("doctor", tmp_path, "--node").status == UNHEALTHY
    assert read_report(tmp_path, HOST).figures == {"disk write": 1e9}


@pytest.mark.parametrize(
    ("figure", "why"),
    [
        (1e8, "memory copy: 95.4 MiB/s, 100.0 times slower than its peers"),
        (0.0, "the check of all ranks together failed: aiockpt.launch.joint_check"),
    ],
)
def test_a_node_that_is_slow_or_whose_check_fails_stays_away_and_the_others_go_on(
    tmp_path: Path, figure: float, why: str
) -> None:
    done = check_nodes(tmp_path, (1e10, 1e10, figure), "2:3")
    assert [each.status for each in done] == [0, 0, UNHEALTHY], "".join(each.output for each in done)
    assert why in done[2].output
    for each in done[:2]:
        (launch,) = read_launches(each.folder / "aiockpt-run" / "job")  # a check that failed has a history of its own
        assert launch.attempts[-1].world_size == 2
        assert read_report(each.folder / "aiockpt-run", HOST).healthy
    assert not read_report(done[2].folder / "aiockpt-run", HOST).healthy


def test_nodes_that_are_alike_begin_together(tmp_path: Path) -> None:
    done = check_nodes(tmp_path, (1e10, 1.1e10), "2")
    assert [each.status for each in done] == [0, 0], "".join(each.output for each in done)
    assert [each.launch.attempts[-1].world_size for each in done] == [2, 2]


def test_a_check_that_ends_its_process_is_that_of_a_node_that_stays_away(tmp_path: Path) -> None:
    """And a healthy one leaves its devices to the trainers: they may be for one process alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os; from aiockpt.launch import node_check; node_check._probes = lambda _: os.abort()\n"
        "import torch; torch.cuda.is_available = lambda: True"
    )
    done = finish(tmp_path, start(tmp_path, ["--check", TRAINER], PYTHONPATH=str(tmp_path)))
    assert done.status == UNHEALTHY, done.output
    assert "stays away: the check ended with signal SIGABRT" in done.output
    assert not read_report(tmp_path / "aiockpt-run", HOST).healthy


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_are_checked_before_the_start(tmp_path: Path, ranks: int) -> None:
    own = ["--check", "--standalone", "--nproc-per-node", ranks, TRAINER, tmp_path / "place", 4, "none"]
    done = finish(tmp_path, start(tmp_path, own))
    report = read_report(tmp_path / "aiockpt-run", HOST)
    assert {"memory copy", "disk write", "loopback", "all-reduce"} <= report.figures.keys()
    assert ("pairs" in report.figures) == (ranks > 1)
    assert done.status == 0, done.output
    assert done.launch.attempts[0].last_step == 3
