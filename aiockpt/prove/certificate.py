"""The certificate: the result of a proof, for programs (JSON) and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from aiockpt.prove.compare import Difference

Verdict = Literal["certified", "differs", "proves nothing"]
Outcome = Literal["equal", "close", "differs", "as when fresh", "not drawn from", "not reproducible", "ignored"]
SHOWN = 44
"""Characters of a value that are shown; digests are shorter."""


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    Attributes:
        row: "model", "optimizer exp_avg", "training: data", …
        outcome: ``"equal"`` in every comparison, and the control was not; ``"close"``; ``"differs"``; ``"as when fresh"``:
            equal, and so it was in the control, which had loaded nothing: a load that forgot it would not be noticed;
            ``"not drawn from"``: a random generator that nothing uses; ``"not reproducible"``: two straight runs differ in
            it; ``"ignored"``: by option.
        compared, differing: how often, over all starts and ranks.
        control: whether the control differed in it; None where it did not come so far.
    """

    row: str
    outcome: Outcome
    compared: int
    differing: int
    control: bool | None


class StartResult(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the script: what it went on from, where it was killed, and how long it took.

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
    """What a proof came to.

    Attributes:
        verdict: ``"certified"``: in all that was compared the resumed run is the run that was never stopped.
        reason: in a sentence.
        method: how the runs were started and killed.
        seed: draws the kills; the same seed draws the same ones.
        first: the earliest difference; *also*: the rows that differ too, *same* those that do not.
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
        """Whether the resume was shown to be the same run."""
        return self.verdict == "certified"

    def explain(self) -> str:
        """Return all of it as plain text, for a log or a failed test."""
        return "\n".join([*self._lines(), *(f"  {row.row}: {row.outcome} ({row.compared})" for row in self.rows)])

    def _lines(self) -> Iterator[str]:
        yield f"{self.verdict}: {self.reason}"
        if self.first is not None:
            yield from tell_difference(self.first)

    def check(self) -> None:
        """Raise AssertionError, with all that is known, unless it is certified."""
        if not self.certified:
            raise AssertionError(self.explain())

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def tell_difference(found: Difference) -> Iterator[str]:
    """Yield lines that describe what differs first."""
    rank = f", rank {found.rank}" if found.rank else ""
    yield f"first difference: {found.row}: {found.what}, {found.at} ({found.start}{rank})"
    yield f"  straight run: {cut(found.expected)}"
    yield f"  resumed run:  {cut(found.found)}"
    if found.note:
        yield f"  {found.note}"


def cut(text: str) -> str:
    """Return what fits beside a heading."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
