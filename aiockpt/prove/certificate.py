"""The certificate: the result of a proof, for programs (JSON) and in words."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

import msgspec

from aiockpt.prove.compare import DATA, GRADIENTS, LOSS, RESUME, STEPS, TRAINING, WEIGHTS, Difference, Findings
from aiockpt.prove.records import Labelled, Stepped
from aiockpt.prove.starts import Calendar, Start

if TYPE_CHECKING:
    from aiockpt.prove.starts import Proof, Runner

Verdict = Literal["certified", "differs", "proves nothing"]
Outcome = Literal["equal", "close", "differs", "as when fresh", "not drawn from", "not reproducible", "ignored"]
SHOWN = 44
"""Characters of a value that are displayed; digests are shorter."""


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    Attributes:
        row: "model", "optimizer exp_avg", "training: data", …
        outcome: ``"equal"`` in every comparison, and the control was not; ``"close"``; ``"differs"``; ``"as when fresh"``:
            equal, also in the control, which loaded nothing: a load that omits it would go unnoticed;
            ``"not drawn from"``: an unused random generator; ``"not reproducible"``: two straight runs differ in it;
            ``"ignored"``: by option.
        compared, differing: how often, over all starts and ranks.
        control: whether the control differed in it; None where the control did not reach it.
    """

    row: str
    outcome: Outcome
    compared: int
    differing: int
    control: bool | None


class StartResult(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the script: the step it resumed from, where it was killed, and how long it took.

    Attributes:
        resumed_from: the step it loaded; None for a start from nothing.
        killed: where, in words; None where it ran to its end.
        steps: optimizer steps that it took; *saves* that it began.
    """

    name: str
    world_size: int
    resumed_from: int | None
    killed: str | None
    steps: int
    saves: int
    seconds: float


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a proof.

    Attributes:
        verdict: ``"certified"``: in all that was compared the resumed run is the run that was never stopped.
        reason: of the verdict, in a sentence.
        method: how the runs were started and killed.
        seed: of the draw of kills; the same seed draws the same kills.
        first: the earliest difference; *also*: the other rows that differ; *same*: those that do not.
    """

    format: str = "aiockpt resume certificate 1"
    verdict: Verdict
    reason: str
    command: Sequence[str]
    resume_command: Sequence[str] | None
    method: str
    seed: int
    close: float | None
    versions: dict[str, str]
    starts: Sequence[StartResult]
    rows: Sequence[RowResult]
    first: Difference | None = None
    also: Sequence[str] = ()
    same: Sequence[str] = ()

    @property
    def certified(self) -> bool:
        """Whether the proof showed the resumed run to be the same run."""
        return self.verdict == "certified"

    def explain(self) -> str:
        """Return all of it as plain text, for a log or a failed test."""
        return "\n".join([*self._lines(), *(f"  {row.row}: {row.outcome} ({row.compared})" for row in self.rows)])

    def _lines(self) -> Iterator[str]:
        yield f"{self.verdict}: {self.reason}"
        if self.first is not None:
            yield from describe_difference(self.first)

    def check(self) -> None:
        """Raise AssertionError with the whole explanation, unless the verdict is certified."""
        if not self.certified:
            raise AssertionError(self.explain())

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def describe_difference(found: Difference) -> Iterator[str]:
    """Yield lines that describe what differs first."""
    rank = f", rank {found.rank}" if found.rank else ""
    yield f"first difference: {found.row}: {found.what}, {found.at} ({found.start}{rank})"
    yield f"  straight run: {cut(found.expected)}"
    yield f"  resumed run:  {cut(found.found)}"
    if found.note:
        yield f"  {found.note}"


def cut(text: str) -> str:
    """Return *text*, cut to fit beside a heading."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


# The verdict: findings in, certificate out.


CORE = frozenset(TRAINING + row for row in (DATA, LOSS, WEIGHTS, GRADIENTS))
"""Rows that a proof needs: where two straight runs differ in these, the script is not reproducible."""


class Evidence(msgspec.Struct, frozen=True):
    """What the comparisons of a proof found.

    Attributes:
        findings: of the killed and resumed starts; *control*: of the start that loaded nothing.
        again: of a second straight run; None where it was not needed.
        idle: rows of random generators that nothing draws from.
        ignored: rows that do not count.
    """

    findings: Findings
    control: Findings
    again: Findings | None
    idle: Set[str]
    ignored: Set[str]

    @property
    def unsteady(self) -> Set[str]:
        """Rows in which two straight runs differ."""
        return set() if self.again is None else self.again.differing()

    @property
    def left_out(self) -> Set[str]:
        """Rows that prove nothing about the resume."""
        return {*self.ignored, *self.idle, *self.unsteady}


def judge(runner: Runner, how: Proof, starts: Sequence[Start], evidence: Evidence) -> Certificate:
    near = how.close is not None or how.resume_with is not None
    control = evidence.control.differing()
    rows = [
        RowResult(
            row=name,
            outcome=_outcome(name, row.differing, evidence, near),
            compared=row.compared,
            differing=row.differing,
            control=name in control if name in evidence.control.rows and name not in (RESUME, STEPS) else None,
        )
        for name, row in sorted(evidence.findings.rows.items(), key=lambda item: item[0].startswith(TRAINING))
    ]
    verdict, reason, first = _decide(how, starts, evidence)
    found = evidence.findings.first(evidence.left_out)
    differing = evidence.findings.differing() - evidence.left_out
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
        starts=[_result(start, calendar) for start in starts],
        rows=rows,
        first=first,
        also=sorted(differing - ({found.row} if found else set())),
        same=sorted(row.row for row in rows if row.outcome == "equal" and row.row != RESUME),
    )


def _decide(how: Proof, starts: Sequence[Start], evidence: Evidence) -> tuple[Verdict, str, Difference | None]:
    """Return the verdict, the reason, and the difference that shows it."""
    again, unsteady = evidence.again, evidence.unsteady - evidence.ignored - evidence.idle
    of_itself = None if again is None else again.first({*evidence.ignored, *evidence.idle})
    core = unsteady & CORE
    # First: where the script differs from itself, no difference after a resume can be blamed on the resume.
    if again is not None and core:
        found = again.first(set(again.rows) - unsteady)
        where = f"{found.at}: {found.row.removeprefix(TRAINING)}" if found else ", ".join(sorted(core))
        reason = (
            f"the script is not deterministic by itself: two uninterrupted runs differ {where}. Seed everything, see "
            "torch.use_deterministic_algorithms(True), or give --close"
        )
        return "proves nothing", reason, of_itself
    if again is not None and unsteady & {RESUME, STEPS}:
        reason = (
            "a second uninterrupted run ended elsewhere than the first: nothing can be said of where a resumed one ends"
        )
        return "proves nothing", reason, of_itself
    if (first := evidence.findings.first(evidence.left_out)) is not None:
        return "differs", _blame(first), first
    # A control that failed before it trained differs in where it went on and ended alone.
    if not evidence.control.differing() - evidence.left_out - {RESUME, STEPS}:
        reason = (
            "a control that restarted without the load came to the same: the script does not train from what it loads, or "
            "everything it loads is what a fresh start has anyway"
        )
        return "proves nothing", reason, of_itself
    return "certified", _praise(how, starts), None


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


def _outcome(name: str, differing: int, evidence: Evidence, near: bool) -> Outcome:
    if name in evidence.ignored:
        return "ignored"
    if name in evidence.idle:
        return "not drawn from"
    if name in evidence.unsteady:
        return "not reproducible"
    if differing:
        return "differs"
    if name not in (RESUME, STEPS) and name in evidence.control.rows and name not in evidence.control.differing():
        return "as when fresh"
    return "close" if near and name == TRAINING + LOSS else "equal"


def _result(start: Start, calendar: Calendar) -> StartResult:
    return StartResult(
        name=start.name,
        world_size=start.world_size,
        resumed_from=start.loaded,
        killed=_name_kill(start, calendar),
        steps=len(start.of(Stepped)),
        saves=sum(record.saved for record in start.of(Labelled)),
        seconds=round(start.seconds, 3),
    )


def _name_kill(start: Start, calendar: Calendar) -> str | None:
    kill = start.kill
    if start.died is None or kill is None or kill.kind != "step" or start.died != kill.explain():
        return start.died
    on = f" (rank {kill.rank})" if kill.rank else ""
    return f"after the optimizer step of {calendar.describe((kill.label, kill.count))}{on}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("aiockpt", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
