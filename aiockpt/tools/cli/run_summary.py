"""Summary of a run, for people: a few lines, and a table of the stages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from aiockpt.monitor.findings import Finding, Level
from aiockpt.monitor.spans import WHOLE
from aiockpt.monitor.summary import Summary
from aiockpt.tools.cli import show
from aiockpt.units import duration

MOST_FINDINGS = 6
_TONES: dict[Level, str] = {"bad": "bold red", "warning": "yellow", "note": "dim"}


def show_findings(page: str, found: Summary, problems: Sequence[Finding]) -> None:
    """Print the path of the page, and the problems."""
    show.title(page, f"{show.count(found.committed, 'save')} committed on {show.count(found.ranks, 'rank')}")
    _show_problems(problems[:MOST_FINDINGS])
    if len(problems) > MOST_FINDINGS:
        show.say(f"[dim]{len(problems) - MOST_FINDINGS} more are on the page[/]")


def _show_problems(problems: Sequence[Finding]) -> None:
    for problem in problems:
        since = "" if problem.since_s is None else f" [dim]since {show.moment(int(problem.since_s * 1e9))}[/]"
        advice = f" {escape(problem.advice)}" if problem.advice else ""
        show.say(f"[{_TONES[problem.level]}]{problem.level:8}[/] {escape(problem.what)}{advice}{since}")
    if not problems:
        show.say("[green]ok[/]       no failure, no slow rank, nothing lost")


def show_summary(root: str, found: Summary, problems: Sequence[Finding]) -> None:
    """Print a summary; problems come first."""
    lasted, begun = duration(found.ended_s - found.begun_s), show.moment(int(found.begun_s * 1e9))
    show.title(root, f"{show.count(found.ranks, 'rank')} on {show.count(found.hosts, 'host')}, {lasted} from {begun}")
    if found.forked_from:
        show.say(f"[dim]forked from {escape(found.forked_from)}[/]")
    _show_problems(problems)
    show.say("")
    last = "" if found.last_step is None else f", the last of step {found.last_step}"
    retried = show.count(found.retries, "call")
    show.say(f"saves       {found.committed} committed{last}, {found.failed} failed; {retried} retried")
    if found.committed or found.failed:
        show.say(f"pause       {duration(found.pauses_s[0])}, at most {duration(found.pauses_s[1])}")
    if found.committed:
        show.say(f"durable     {duration(found.durable_s[0])} after the call, at most {duration(found.durable_s[1])}")
    show.say(f"effective   {found.effective:.1%} of the time trained: not held, loading, lost or down (ETTR)")
    _show_stages(found)


def _show_stages(found: Summary) -> None:
    rows = []
    before = ""
    for stage in found.stages:
        rows.append(
            (
                stage.operation if stage.operation != before else "",
                "all of it" if stage.stage == WHOLE else stage.stage,
                str(stage.count),
                duration(stage.median_s),
                duration(stage.most_s),
                f"rank {stage.slowest_rank}, step {stage.slowest_step}",
                show.speed(stage.bytes_per_s) if stage.bytes_per_s else "",
            )
        )
        before = stage.operation
    right = ("count", "median", "most", "speed")
    show.print_table(("", "stage", "count", "median", "most", "where", "speed"), rows, right=right, folds="where")
