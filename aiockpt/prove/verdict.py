"""The verdict of a proof: findings in, certificate out."""

from __future__ import annotations

import platform
from collections.abc import Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from aiockpt.prove.certificate import Certificate, Outcome, RowResult, StartResult, Verdict
from aiockpt.prove.compare import DATA, GRADIENTS, LOSS, RESUME, STEPS, TRAINING, WEIGHTS, Difference, Findings
from aiockpt.prove.records import Labelled, Stepped
from aiockpt.prove.starts import Calendar, Start

if TYPE_CHECKING:
    from aiockpt.prove.starts import Proof, Runner

CORE = frozenset(TRAINING + row for row in (DATA, LOSS, WEIGHTS, GRADIENTS))
"""Rows without which nothing is shown: where two straight runs differ in these, the script is not reproducible."""


def judge(
    runner: Runner,
    how: Proof,
    starts: Sequence[Start],
    findings: Findings,
    control: Findings,
    again: Findings | None,
    idle: Set[str],
    ignored: Set[str],
) -> Certificate:
    """Return the certificate.

    Args:
        findings: of the starts that were killed and resumed; *control*: of the one that loaded nothing.
        again: of a second straight run; None where it was not needed.
        idle: rows of random generators that nothing draws from.
        ignored: rows that do not count.
    """
    unsteady = set() if again is None else again.differing()
    near = how.close is not None or how.resume_with is not None
    left_out = {*ignored, *idle, *unsteady}
    first = findings.first(left_out)
    rows = [
        RowResult(
            row=name,
            outcome=_outcome(name, row.differing, control, idle, ignored, unsteady, near),
            compared=row.compared,
            differing=row.differing,
            control=name in control.differing() if name in control.rows and name not in (RESUME, STEPS) else None,
        )
        for name, row in sorted(findings.rows.items(), key=lambda item: item[0].startswith(TRAINING))
    ]
    verdict, reason = _decide(how, starts, first, again, unsteady - ignored - idle, control, left_out)
    differing = findings.differing() - left_out
    calendar = Calendar(starts[0].ranks[0])
    return Certificate(
        verdict=verdict,
        reason=reason,
        command=runner.command,
        resume_command=how.resume_with,
        method=runner.method,
        seed=how.seed,
        close=how.close,
        versions=_versions(),
        starts=[_tell(start, calendar) for start in starts],
        rows=rows,
        first=first
        if verdict == "differs"
        else again.first({*ignored, *idle})
        if verdict != "certified" and again
        else None,
        also=sorted(differing - ({first.row} if first else set())),
        same=sorted(row.row for row in rows if row.outcome == "equal" and row.row != RESUME),
    )


def _shown(verdict: Verdict, first: Difference | None, again: Findings | None, left_out: Set[str]) -> Difference | None:
    """Return the difference that explains the verdict."""
    if verdict == "differs":
        return first
    return again.first(left_out) if verdict == "proves nothing" and again is not None else None


def _decide(
    how: Proof,
    starts: Sequence[Start],
    first: Difference | None,
    again: Findings | None,
    unsteady: Set[str],
    control: Findings,
    left_out: Set[str],
) -> tuple[Verdict, str]:
    core = unsteady & CORE
    if again is not None and core:
        found = again.first(set(again.rows) - unsteady)
        where = f"{found.at}: {found.row.removeprefix(TRAINING)}" if found else ", ".join(sorted(core))
        return "proves nothing", (
            f"the script is not deterministic by itself: two runs that nobody stopped differ {where}. Seed everything, see "
            "torch.use_deterministic_algorithms(True), or give --close"
        )
    if first is not None:
        return "differs", _blame(first)
    if not control.differing() - left_out:
        return "proves nothing", (
            "a control that restarted without the load came to the same: the script does not train from what it loads, or "
            "everything it loads is what a fresh start has anyway"
        )
    return "certified", _praise(how, starts)


def _praise(how: Proof, starts: Sequence[Start]) -> str:
    killed = sum(start.died is not None for start in starts if start.name != "control")
    times = "once" if killed == 1 else "twice" if killed == 2 else f"{killed} times"
    if how.resume_with is not None:
        return (
            f"killed {times} and resumed by the other command, the run is the run that was never stopped: equal in all that "
            "is loaded, and close in its losses"
        )
    how_near = "bit by bit" if how.close is None else f"within {how.close:g} in its losses"
    return f"killed {times} and resumed, the run is, {how_near}, the run that was never stopped"


def _blame(first: Difference) -> str:
    if first.row == RESUME:
        return f"{first.found}, where {first.expected}"
    return f"the resumed run is another run: {first.row.removeprefix(TRAINING)} differs first, {first.at}"


def _outcome(
    name: str,
    differing: int,
    control: Findings,
    idle: Set[str],
    ignored: Set[str],
    unsteady: Set[str],
    near: bool,
) -> Outcome:
    if name in ignored:
        return "ignored"
    if name in idle:
        return "not drawn from"
    if name in unsteady:
        return "not reproducible"
    if differing:
        return "differs"
    if name not in (RESUME, STEPS) and name in control.rows and name not in control.differing():
        return "as when fresh"
    return "close" if near and name == TRAINING + LOSS else "equal"


def _tell(start: Start, calendar: Calendar) -> StartResult:
    return StartResult(
        name=start.name,
        world_size=start.world_size,
        resumed_from=start.loaded,
        killed=_tell_kill(start, calendar),
        steps=len(start.of(Stepped)),
        saves=sum(record.saved for record in start.of(Labelled)),
        seconds=round(start.seconds, 3),
    )


def _tell_kill(start: Start, calendar: Calendar) -> str | None:
    kill = start.kill
    if start.died is None or kill is None or kill.kind != "step" or start.died != kill.explain():
        return start.died
    on = f" (rank {kill.rank})" if kill.rank else ""
    return f"after the optimizer step of {calendar.tell((kill.label, kill.count))}{on}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("aiockpt", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
