"""A campaign: one question asked ten million times, a case for each seed, counted, reported as it goes, repeatable.

Guarantees:

- A case depends on its seed alone: what failed in a campaign of days fails again alone.
- A case that raises anything is a finding; the campaign goes on to the next seed, up to `MAX_FINDINGS`.
- What is counted is what was looked at (states, inputs, flips), not how often the campaign went around.
"""

import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

Outcomes = Counter[str]
"""How often a case met what: its values add up to the number of things that it looked at."""
Case = Callable[[int], Outcomes]
"""Looks at what a seed says; raises where the contract is broken."""

MAX_FINDINGS = 10


@contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Add *note* to what is raised in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(note())
        raise


def in_folders(look: Callable[[int, Path], Outcomes]) -> Case:
    """Return a case that gives *look*, beside the seed, a folder of its own, and removes it."""
    above = tempfile.TemporaryDirectory(prefix="aiockpt-campaign-")

    def case(seed: int) -> Outcomes:
        place = Path(above.name) / f"case-{seed}"
        place.mkdir()
        try:
            return look(seed, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    return case


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """One question.

    Attributes:
        name: what the command line calls it.
        counts: what is counted, in the plural.
        prepare: makes what all cases share, and returns the case.
        smoke_count: the small end, which the tests run.
        apart: its cases fork, or take long: the tests run it by its command, if at all.
    """

    name: str
    counts: str
    prepare: Callable[[], Case]
    smoke_count: int
    apart: bool = False


class Finding(msgspec.Struct, frozen=True):
    """A case that broke the contract, and how."""

    seed: int
    problem: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a campaign did: *count* things were looked at, in the cases of the seeds from *first_seed* to *last_seed*."""

    name: str
    counts: str
    count: int
    first_seed: int
    last_seed: int
    seconds: float
    outcomes: dict[str, int]
    findings: tuple[Finding, ...]


Tell = Callable[[Report], object]


def run(
    campaign: Campaign,
    count: int,
    *,
    first_seed: int = 0,
    most_findings: int = MAX_FINDINGS,
    tell: Tell = lambda _: None,
) -> Report:
    """Look at *count* things or a few more: a case is never cut short.

    Args:
        first_seed: of the first case; each further one has the next.
        most_findings: as many end it.
        tell: given the report so far after each case.
    """
    case = campaign.prepare()
    began_s = time.monotonic()
    outcomes: Outcomes = Counter()
    findings: list[Finding] = []
    seed = first_seed
    while True:
        try:
            outcomes += case(seed)
        except Exception:  # noqa: BLE001  whatever it is, it is what the campaign looks for
            outcomes["FOUND"] += 1
            findings.append(Finding(seed, traceback.format_exc()))
        report = Report(
            name=campaign.name,
            counts=campaign.counts,
            count=outcomes.total(),
            first_seed=first_seed,
            last_seed=seed,
            seconds=time.monotonic() - began_s,
            outcomes=dict(outcomes.most_common()),
            findings=tuple(findings),
        )
        tell(report)
        if report.count >= count or len(findings) >= most_findings:
            return report
        seed += 1
