"""Demo of a run that is killed in the middle of a save and resumed without loss, and of the cost of saving.

    aiockpt demo

The *reference* never saves and is never interrupted. The *killed* run saves every few steps and dies by SIGKILL in the
middle of a save. Started again it is *resumed*, and every loss must be the reference's, bit by bit. With ``--elastic`` it
is killed three times, and goes on with other ranks and another parallelism. Read `train_sync`, `train_async` and
`train_elastic` to see how a training loop uses aiockpt; this module only runs them. ``--recovery`` is in `recovery`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

from aiockpt.format.names import parse_manifest, step_id
from aiockpt.runtime.signals import Interrupted, ended_by_signals
from aiockpt.tools.examples.child import Job
from aiockpt.tools.examples.gpt import GPTSize
from aiockpt.tools.examples.phases import DemoError, Outcome, Phase, RankRecord, account, judge, run_job
from aiockpt.units import size

CHECKPOINTS = "checkpoints"
EXACT, DIFFERENT, FAILED, BY_SIGNAL = 0, 1, 2, 128
"""Exit statuses: all losses are equal; they are not; the demo could not be run; with the number of the signal added."""

COST = (
    "{saves} saves in {steps} steps blocked {blocked_fraction:.2%} of the training: a pause of {pause_median_s:.4f} s each, "
    "{pause_max_s:.4f} s at most; committed after {commit_median_s:.3f} s"
)
CLOSE = " (Other ranks take sums in another order: there, losses are close, not equal.)"

ONE_PROCESS = (Phase("reference", 1.0), Phase("killed", 0.6), Phase("resumed", 1.0))
ELASTIC = (
    Phase("reference", 1.0, ranks=2),
    Phase("FSDP2 on 2 ranks", 0.25, ranks=2),
    Phase("again on 2 ranks", 0.5, ranks=2),
    Phase("one rank", 0.75, ranks=1, exact=False),
    Phase("TP 2 × FSDP2 2 on 4 ranks", 1.0, ranks=4, tensor_parallel=2, exact=False),
)


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the demo: *steps* optimizer steps, a save every *every*; the command's help explains each."""

    steps: int = 60
    every: int = 5
    lazy: bool = False
    keep: int = 3
    dir: Path | None = None
    asynchronous: bool = False
    elastic: bool = False
    json: bool = False
    size: GPTSize | None = None
    is_kept: ClassVar[bool] = False
    look: ClassVar[str] = f"aiockpt ls {{}}/{CHECKPOINTS}"

    def run(self, folder: Path, say: Callable[[str], object]) -> int:
        return conclude(self, *run_phases(self, folder, say), say)

    def check(self) -> None:
        """Raise DemoError where the options leave no save to die in, with a committed one before it."""
        if self.every < 1 or self.keep < 1:
            raise DemoError("--every and --keep must be 1 or more")
        enough = 8 * self.every if self.elastic else 3 * self.every + 1
        if self.steps < enough:
            raise DemoError(f"{self.steps} steps are too few for a save every {self.every}: take {enough} or more")

    def doomed_save(self, phase: Phase) -> int | None:
        """Return the step in whose save *phase* is killed; None where it is not."""
        return None if phase.until == 1.0 else max(2, int(phase.until * self.steps) // self.every) * self.every

    def job(self, phase: Phase, folder: Path) -> Job:
        settings = {"keep": self.keep, "snapshot": "lazy" if self.lazy else "eager"}
        reference = phase.name == "reference"
        return Job(
            url=str(folder.resolve() / ("reference" if reference else CHECKPOINTS)),
            steps=self.steps,
            every=None if reference else self.every,
            trainer="elastic" if self.elastic else "async" if self.asynchronous else "sync",
            size=self.size,
            settings={"tensor_parallel": phase.tensor_parallel} if self.elastic else settings,
            threads=1 if self.elastic else min(4, len(os.sched_getaffinity(0))),
            die_in_save_of=self.doomed_save(phase),
            ranks=phase.ranks,
        )


class Demo(Protocol):
    """A demo, by its options.

    Attributes:
        dir: the folder that it works in; None: a temporary one.
        json: only its result goes to stdout.
        is_kept: whether a temporary folder is kept although all went well.
        look: the command that shows what is in the folder, whose path replaces ``{}``.
    """

    is_kept: ClassVar[bool]
    look: ClassVar[str]

    @property
    def dir(self) -> Path | None: ...

    @property
    def json(self) -> bool: ...

    def check(self) -> None:
        """Raise DemoError where the options fit nothing."""

    def run(self, folder: Path, say: Callable[[str], object]) -> int:
        """Run it in *folder*, print what it shows, and return the exit status."""
        ...


def run_demo(demo: Demo) -> int:
    """Run a demo, and return its exit status."""
    say = partial(print, file=sys.stderr if demo.json else sys.stdout, flush=True)
    folder, status = None, FAILED
    try:
        demo.check()
        folder = make_work_folder(demo.dir)
        with ended_by_signals():
            status = demo.run(folder, say)
    except DemoError as error:
        say(f"demo: {error}")
    except Interrupted as interruption:
        status = BY_SIGNAL + interruption.number
    if folder is not None and demo.dir is None and ((status == EXACT and not demo.is_kept) or status > BY_SIGNAL):
        shutil.rmtree(folder)
    elif folder is not None:
        say(f"Everything is in {folder}; look at it: {demo.look.format(folder)}")
    return status


def make_work_folder(folder: Path | None) -> Path:
    """Return an empty folder: *folder*, made with its parents, or a new one in the current one for None.

    Raises:
        DemoError: it cannot be made, or is not empty.
    """
    try:
        if folder is None:
            return Path(tempfile.mkdtemp(prefix="aiockpt-demo-", dir="."))
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return folder
    except OSError as error:
        raise DemoError(f"no folder to work in: {error}; give one with --dir") from error
    raise DemoError(f"{folder} is not empty: give --dir a new folder, so that nothing of yours is mixed in")


def run_phases(
    options: DemoOptions, folder: Path, say: Callable[[str], object]
) -> tuple[list[Outcome], dict[str, float]]:
    """Run one phase after the other; return what each showed, and what their saves cost."""
    first, *others = ELASTIC if options.elastic else ONE_PROCESS
    say(f"A byte-level GPT reads the standard library: {options.steps} steps, a save every {options.every}.")
    reference = run_job(options.job(first, folder), first.name, folder, say)[0].losses
    outcomes: list[Outcome] = []
    saving: list[RankRecord] = []
    for phase in others:
        job = options.job(phase, folder)
        newest = max((step for record in saving for step in record.commits), default=None)
        records = run_job(job, phase.name, folder, say)
        saving.append(records[0])
        outcomes.append(judge(phase, records, reference, newest))
        say(str(outcomes[-1]))
        if (doomed := job.die_in_save_of) is not None:
            check_uncommitted(folder / CHECKPOINTS, doomed)
            written = sum(record.written_bytes[doomed] for record in records.values())
            say(f"{phase.name}: SIGKILL in the save of step {doomed}; {size(written)} written, no manifest")
    return outcomes, account(saving)


def check_uncommitted(root: Path, step: int) -> None:
    """Check on the disk that the save of *step* has begun and has no manifest.

    Raises:
        DemoError: it has one, so the kill came too late.
    """
    if any(parse_manifest(entry.name) is not None for entry in (root / step_id(step)).iterdir()):
        raise DemoError(f"the save of step {step} was committed before the kill, so that nothing is shown")


def conclude(
    options: DemoOptions, outcomes: Sequence[Outcome], cost: dict[str, float], say: Callable[[str], object]
) -> int:
    """Print the result in the form of *options*, and return the exit status."""
    failed = [outcome.phase.name for outcome in outcomes if not outcome.passed]
    if options.json:
        found = {"exact": not failed, "options": options, "phases": outcomes, "cost": cost}
        sys.stdout.write(msgspec.json.encode(found, enc_hook=str).decode() + "\n")
    say(COST.format_map(cost))
    if failed:
        say(f"THE LOSSES DIFFER from the reference's, or a committed step was lost: {'; '.join(failed)}.")
    else:
        say("The run went on as if it had never been killed." + CLOSE * options.elastic)
    return DIFFERENT if failed else EXACT
