"""The launch of a command line: torchrun's own parser and start, with the options of ``aiockpt run`` beside them.

Exit status: that of torchrun, 1 where trainers have failed; 4 (`STOPPED`) where another start would have failed alike; 5
where ``--check`` found that this node should stay away; 75 to 77 where the run was told to end (`aiockpt.Preempted`).
"""

from __future__ import annotations

import argparse
import copy
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from aiockpt.errors import UsageError
from aiockpt.launch.agent import WatchedAgent, watched
from aiockpt.launch.node_check import (
    PEER_FAILED,
    UNHEALTHY,
    NodeReport,
    check_node_apart,
    in_words,
    read_report,
    report_path,
    write_report,
)
from aiockpt.launch.node_watch import say

FOLDER = "aiockpt-run"
CHECKS = 2
"""Of all ranks together: the second is without nodes that have failed in the first."""


def make_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser, which knows the options of ``aiockpt run``, too."""
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = "aiockpt run"
    own = parser.add_argument_group("options of aiockpt run, beside those of torchrun")
    own.add_argument(
        "--hang-s",
        "--hang_s",
        default="auto",
        metavar="SECONDS",
        help="A rank whose training thread stands at one place for so long is hung, whatever it does there. "
        "auto (default): by the median step, at least a minute, and never a process that is busy.",
    )
    own.add_argument(
        "--check",
        action="store_true",
        help="Before the start, test memory, disk, devices and network of all nodes; one that is slow or fails stays away.",
    )
    return parser


def parse_hang_s(text: str) -> float | None:
    """Return the seconds of ``--hang-s``; None for ``auto``.

    Raises:
        UsageError: it is no number above 0.
    """
    if text == "auto":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"--hang-s {text}: give seconds above 0, such as 300, or auto")
    return seconds


def launch(arguments: Sequence[str]) -> int:
    """Run what ``torchrun`` would run with *arguments*, watched; return the exit status of a run that ended.

    Raises:
        UsageError: a wrong option of ``aiockpt run``; torchrun's own end the program, as argparse does.
        ChildFailedError: trainers have failed, and no restart is left.
    """
    options = make_parser().parse_args(list(arguments))
    hang_s = parse_hang_s(options.hang_s)
    folder = Path(options.log_dir or FOLDER)
    earlier: list[WatchedAgent] = []
    with watched(folder, hang_s=hang_s) as agents:
        try:
            if options.check and (status := check_nodes(options, folder, earlier)):
                return status
            torchrun.run(options)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            if not any(agent.stopped for agent in agents):
                raise
            sys.stderr.write(f"{error}\n")
            return max(agent.status for agent in agents)
        except (RendezvousError, DistError) as error:
            say(
                f"the nodes have lost each other, and the trainers here are ended. {_why_lost(options, error)}: {error}"
            )
            return 1
    return 0


def _why_lost(options: argparse.Namespace, error: Exception) -> str:
    if isinstance(error, RendezvousTimeoutError):
        return f"Fewer than --nnodes {options.nnodes} came in time"
    if isinstance(error, RendezvousClosedError):
        return "Another one has ended the job"
    if isinstance(error, RendezvousStateError):
        return "The clock of one is behind that of another by more than its keep-alive, perhaps (15 s)"
    return f"The store of --rdzv-endpoint {options.rdzv_endpoint} is gone, or did not answer for a minute"


# ------------------------------------------------------------------ checks before the start


def check_nodes(options: argparse.Namespace, folder: Path, keep: list[WatchedAgent]) -> int:
    """Check this node, and with the others the network; return 0, or the exit status.

    Args:
        keep: gets agents that are to live until the trainers are started: one of them may host the store of the rendezvous.
    """
    report = check_node_apart(folder)
    if report.healthy and not _is_static(options):
        report = _check_together(options, folder, report, keep)
    _report(report, folder)
    return 0 if report.healthy else UNHEALTHY


def _is_static(options: argparse.Namespace) -> bool:
    """Return whether all starts of several nodes share a store: the trainers would read the notes of the check there."""
    several = torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1
    return options.rdzv_backend == "static" and several and not options.rdzv_endpoint


def _check_together(
    options: argparse.Namespace, folder: Path, report: NodeReport, keep: list[WatchedAgent]
) -> NodeReport:
    checking = copy.copy(options)
    checking.max_restarts = 0
    checking.module, checking.no_python, checking.run_path = True, False, False
    checking.training_script, checking.training_script_args = "aiockpt.launch.joint_check", [str(folder)]
    for number in range(CHECKS):
        checking.rdzv_id = f"{options.rdzv_id}-check-{number}"
        with watched(folder) as agents:
            try:
                torchrun.run(checking)  # type: ignore[no-untyped-call]
                return read_report(folder, report.host)
            except ChildFailedError as error:
                report.problems = [f"the check of all ranks together failed: {error.name}"]
                statuses = {failure.exitcode for failure in error.failures.values()}
            finally:
                keep += agents
        if not statuses <= {PEER_FAILED, -signal.SIGTERM}:
            break
    write_report(folder, report)
    return report


def _report(report: NodeReport, folder: Path) -> None:
    figures = ", ".join(f"{name} {in_words(name, figure)}" for name, figure in report.figures.items())
    say(f"check of {report.host}: {figures}")
    for problem in report.problems:
        say(f"{report.host} stays away: {problem}")
    if report.problems:
        say(f"the report: {report_path(folder, report.host)}")
