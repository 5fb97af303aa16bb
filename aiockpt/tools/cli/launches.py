"""Display of what launchers have noted: their attempts and stalls, and the check of a node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from aiockpt.launch import telling
from aiockpt.launch.history import NodeRun
from aiockpt.launch.node_check import UNHEALTHY, check_node, in_words, report_path
from aiockpt.tools.cli import show


def show_launches(launches: Sequence[NodeRun]) -> None:
    """Print the table of each launch."""
    for launch in launches:
        show.title(f"{launch.run_id} on {launch.host}", f"since {show.moment(int(launch.began_s * 1e9))}")
        show.say(escape(telling.of_launch(launch)))


def run_node_check(folder: Path, as_json: bool) -> int:
    """Check this node, print its report, and return the exit status."""
    report = check_node(folder)

    def display() -> None:
        show.title(report.host, str(report_path(folder, report.host)))
        rows = [
            (name, in_words(name, figure), in_words(name, report.reference[name]) if name in report.reference else "")
            for name, figure in report.figures.items()
        ]
        show.print_table(("", "now", "last healthy check"), rows, folds="", gap=False)
        for problem in report.problems:
            show.say(f"{show.mark(False)} {escape(problem)}")
        if report.healthy:
            show.say(f"{show.mark(True)} healthy: nothing fails, and nothing is more than twice as slow as before")

    show.json_or(as_json, report, display)
    return 0 if report.healthy else UNHEALTHY
