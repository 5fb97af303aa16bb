"""Demo of a run that is killed and started again with other ranks and another parallelism.

    aiockpt demo --elastic

torchrun starts the trainer (`train_elastic`) four times, each time with other ranks; in all but the last one a rank dies
by SIGKILL in the middle of a save. Beside them a *reference* of two ranks trains without interruption. Where the
parallelism is the reference's, every loss must be equal bit by bit; elsewhere sums are taken in another order, and the
losses must be close. Each rank's bytes are counted: those read, and those needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from aiockpt.events import Loaded
from aiockpt.tools.examples.child import DemoError, Job, RankRecord
from aiockpt.tools.examples.demo import CHECKPOINTS, DIFFERENT, EXACT, check_uncommitted, direct, run_phase, show
from aiockpt.tools.examples.display import Display, table_of
from aiockpt.tools.examples.figures import Figures
from aiockpt.tools.examples.train_elastic import SMALL_SIZE
from aiockpt.units import size

EXPLANATION = (
    "needed: tensor bytes that the ranks of a start hold, copies included. read: what was fetched from storage for them, in "
    "whole blocks, since a block is what is verified: much for tensors as small as these, some per cent for large ones."
)
TOLERANCE = 0.02
"""Tolerance of the losses of another parallelism, relative to the reference: float32 sums, amplified by training."""


class Phase(msgspec.Struct, frozen=True):
    """One start of the job: its ranks, how many of them split a matrix, and the fraction of the run until its kill."""

    name: str
    ranks: int
    tensor_parallel: int
    until: float
    exact: bool


REFERENCE = Phase("reference", 2, 1, 1.0, exact=True)
PHASES = (
    Phase("FSDP2 on 2 ranks", 2, 1, 0.25, exact=True),
    Phase("again on 2 ranks", 2, 1, 0.5, exact=True),
    Phase("one rank", 1, 1, 0.75, exact=False),
    Phase("TP 2 × FSDP2 2 on 4 ranks", 4, 2, 1.0, exact=False),
)


def run_elastic(
    *, steps: int = 60, every: int = 5, folder: Path | None = None, as_json: bool = False, plain: bool = False
) -> int:
    """Run the demo, print what it shows, and return its exit status."""
    console = Console(stderr=as_json)

    def check() -> None:
        if every < 1:
            raise DemoError(f"--every {every}: give 1 or more")
        if steps < 8 * every:  # for each of the three kills a save to die in, and one before it
            raise DemoError(f"{steps} steps are too few for a save every {every}: take {8 * every} or more")

    def work(made: Path, _: None) -> int:
        outcomes = _run(console, made, steps, every, plain=plain or as_json)
        return conclude(console, outcomes, as_json=as_json)

    return direct(console, folder, check, work)


def _run(console: Console, folder: Path, steps: int, every: int, *, plain: bool) -> list[Figures]:
    show(console, "A byte-level GPT trains on 2, 2, 1 and 4 ranks; it is killed in between.", style="bold")
    root = folder.resolve() / CHECKPOINTS
    ends = [int(phase.until * steps) // every * every for phase in PHASES]
    begins = [0, *(end - every + 1 for end in ends)]
    taken = {phase.name: end - begin + 1 for phase, begin, end in zip(PHASES, begins, ends, strict=False)}
    with Display(console, {REFERENCE.name: steps, **taken}, plain=plain) as display:

        def run(phase: Phase, url: Path, every: int | None, dies_in: int | None) -> dict[int, RankRecord]:
            job = Job(
                url=str(url),
                trainer="elastic",
                size=SMALL_SIZE,
                settings={"tensor_parallel": phase.tensor_parallel},
                steps=steps,
                every=every,
                ranks=phase.ranks,
                die_in_save_of=dies_in,
            )
            return run_phase(display, job, phase.name, folder)

        reference = run(REFERENCE, root.with_name("reference"), None, None)[0].losses
        outcomes = []
        for phase, end in zip(PHASES, ends, strict=True):
            dies_in = None if phase.until == 1.0 else end
            begun = time.monotonic()
            records = run(phase, root, every, dies_in)
            outcomes.append(judge(phase, records, time.monotonic() - begun, reference))
            if dies_in is not None:
                check_uncommitted(root, dies_in)
    return outcomes


def judge(phase: Phase, records: Mapping[int, RankRecord], seconds: float, reference: Mapping[int, float]) -> Figures:
    """Compare a phase with the reference's losses, by step; ``load_s`` is the slowest rank's, bytes are of all ranks."""
    losses = records[0].losses
    difference = max(abs(loss - reference[step]) / abs(reference[step]) for step, loss in losses.items())
    loads = [load for record in records.values() for load in record[Loaded].values()]
    return {
        "name": phase.name,
        "ranks": phase.ranks,
        "resumed_from": loads[0].step if loads else None,
        "last_step": max(losses),
        "seconds": seconds,
        "load_s": max((load.seconds for load in loads), default=0.0),
        "needed_bytes": sum(load.bytes for load in loads),
        "read_bytes": sum(load.read_bytes for load in loads),
        "difference": difference,
        "exact": phase.exact,
        "passed": difference == 0 if phase.exact else difference <= TOLERANCE,
    }


def conclude(console: Console, outcomes: Sequence[Figures], *, as_json: bool) -> int:
    """Print the results and return the exit status."""
    passed = all(outcome["passed"] for outcome in outcomes)
    if as_json:
        sys.stdout.write(msgspec.json.encode(outcomes).decode() + "\n")
        return EXACT if passed else DIFFERENT
    headings = ("ranks", "resumed from", "load", "needed", "read", "loss beside the reference")
    console.print("", table_of(headings, map(_row, outcomes), left=headings[-1]), sep="\n")
    console.print(EXPLANATION, "", style="dim", markup=False, highlight=False, sep="\n")
    console.print(verdict(outcomes), style="bold green" if passed else "bold red", markup=False, highlight=False)
    return EXACT if passed else DIFFERENT


def verdict(outcomes: Sequence[Figures]) -> str:
    """Return the outcome of the run in a sentence."""
    failed = [outcome["name"] for outcome in outcomes if not outcome["passed"]]
    if failed:
        return f"THE LOSSES DIFFER from the reference's: {'; '.join(failed)}."
    *before, last = (str(outcome["ranks"]) for outcome in outcomes)
    apart = max((outcome["difference"] for outcome in outcomes if not outcome["exact"]), default=0.0)
    return (
        f"Killed {len(before)} times and started on {', '.join(before)} and {last} ranks, the run went on as if nothing had "
        f"happened: its losses are equal bit by bit on the ranks of the reference, and within {apart:.0e} on others, where "
        "sums are taken in another order."
    )


def _row(it: Figures) -> tuple[str, ...]:
    how = "equal, bit by bit" if it["difference"] == 0 else f"within {it['difference']:.1e}"
    found = ["–"] * 4
    if it["resumed_from"] is not None:
        found = [f"step {it['resumed_from']}", f"{it['load_s'] * 1e3:.0f} ms"]
        found += [size(it["needed_bytes"]), size(it["read_bytes"])]
    return str(it["ranks"]), *found, f"[{'green' if it['passed'] else 'red'}]{how}[/]"
