"""The checks before a start, ``aiockpt run --check``: this node alone, then all ranks together.

A node that fails, or is slow, does not join: its launcher ends with status `UNHEALTHY`, and with ``--nnodes MIN:MAX`` the
others go on without it.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from aiockpt.launch.agent import WatchedAgent, watched
from aiockpt.launch.node_check import UNHEALTHY, NodeReport, check_node, in_words, read_report, report_path
from aiockpt.launch.node_watch import say


def check_nodes(options: argparse.Namespace, folder: Path, keep: list[WatchedAgent]) -> int:
    """Check this node, and with the others the network; return 0, or the exit status.

    Args:
        keep: gets agents that are to live until the trainers are started: one of them may host the store of the rendezvous.
    """
    report = check_node(folder)
    if report.healthy and not _is_static(options):
        report = _check_together(options, folder, report, keep)
    _tell(report, folder)
    return 0 if report.healthy else UNHEALTHY


def _is_static(options: argparse.Namespace) -> bool:
    """Return whether all starts of several nodes share a store: the trainers would read the notes of the check there."""
    several = torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1
    return options.rdzv_backend == "static" and several and not options.rdzv_endpoint


def _check_together(
    options: argparse.Namespace, folder: Path, report: NodeReport, keep: list[WatchedAgent]
) -> NodeReport:
    checking = copy.copy(options)
    checking.rdzv_id, checking.max_restarts = f"{options.rdzv_id}-check", 0
    checking.module, checking.no_python, checking.run_path = True, False, False
    checking.training_script, checking.training_script_args = "aiockpt.launch.joint_check", [str(folder)]
    with watched(folder) as agents:
        try:
            torchrun.run(checking)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            report.problems, report.healthy = [f"the check of all ranks together failed: {error.name}"], False
            return report
        finally:
            keep += agents
    return read_report(folder, report.host)


def _tell(report: NodeReport, folder: Path) -> None:
    figures = ", ".join(f"{name} {in_words(name, figure)}" for name, figure in report.figures.items())
    say(f"check of {report.host}: {figures}")
    for problem in report.problems:
        say(f"{report.host} stays away: {problem}")
    if report.problems:
        say(f"the report: {report_path(folder, report.host)}")
