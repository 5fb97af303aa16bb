"""Demo of a run that is killed in the middle of a save and resumed without loss, and of the cost of saving.

    aiockpt demo

Three processes run the same trainer. The *reference* never saves and is never interrupted. The *killed* one saves every
few steps and dies by SIGKILL in the middle of a save. Started again it is *resumed*, and every loss must be the
reference's, bit by bit. Read `train_sync` and `train_async` to see how a training loop uses aiockpt; this module only
runs them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from aiockpt.events import Committed, Loaded
from aiockpt.format.names import parse_manifest, step_id
from aiockpt.runtime.signals import Interrupted, ended_by_signals
from aiockpt.testing.disk import measure_disk
from aiockpt.tools.examples.child import DemoError, Job, RankRecord, StepDone, run_job
from aiockpt.tools.examples.display import Display, print_result
from aiockpt.tools.examples.figures import Figures, account, judge
from aiockpt.tools.examples.gpt import DEFAULT_SIZE, GPTSize
from aiockpt.units import speed

CHECKPOINTS, DISK = "checkpoints", "disk"
EXACT, DIFFERENT, FAILED, BY_SIGNAL = 0, 1, 2, 128
"""Exit statuses: all losses are equal; they are not; the demo could not be run; with the number of the signal added."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the demo: *steps* optimizer steps, a save every *every*; the command's help explains each."""

    steps: int = 60
    every: int = 5
    lazy: bool = False
    keep: int = 3
    dir: Path | None = None
    asynchronous: bool = False
    json: bool = False
    plain: bool = False
    size: GPTSize = DEFAULT_SIZE


def run_demo(options: DemoOptions) -> int:
    """Run the demo, print what it shows, and return its exit status."""
    console = Console(stderr=options.json)
    return direct(
        console, options.dir, lambda: choose_doomed_save(options), lambda *found: _run(console, options, *found)
    )


def direct(console: Console, folder: Path | None, check: Callable[[], Any], work: Callable[[Path, Any], int]) -> int:
    """Do *work* in a new folder with the result of *check*; return the status. Only a failure keeps a temporary folder."""
    made, status = None, FAILED
    try:
        found = check()
        made = make_work_folder(folder)
        with ended_by_signals():
            status = work(made, found)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
    except Interrupted as interruption:
        status = BY_SIGNAL + interruption.number
    if made is not None and folder is None and (status == EXACT or status > BY_SIGNAL):
        shutil.rmtree(made)
    elif made is not None:
        show(console, f"Everything is in {made}; look at it: aiockpt ls {made / CHECKPOINTS}", style="dim")
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


def show(console: Console, text: str, style: str) -> None:
    """Print a line as it is."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def choose_doomed_save(options: DemoOptions) -> int:
    """Return the step whose save is to be interrupted: late in the run, with committed steps before it.

    Raises:
        DemoError: the options leave no such step.
    """
    if options.every < 1 or options.keep < 1:
        raise DemoError("--every and --keep must be 1 or more")
    saves = (options.steps - 1) // options.every  # beside the one of step 0
    if saves < 3:
        enough = 3 * options.every + 1
        raise DemoError(f"{options.steps} steps are too few for a save every {options.every}: take {enough} or more")
    return options.every * max(2, round(0.6 * saves))


def _run(console: Console, options: DemoOptions, folder: Path, doomed: int) -> int:
    """Run one process after the other, and draw the conclusions."""
    trainer = "async" if options.asynchronous else "sync"
    title = f"a {'lazy ' * options.lazy}save every {options.every}."
    show(console, f"A byte-level GPT reads the standard library: {options.steps} steps, {title}", style="bold")
    show(console, f"The trainer is {Path(__file__).with_name(f'train_{trainer}.py')}", style="dim")
    saving = Job(
        url=str(folder / CHECKPOINTS),
        size=options.size,
        steps=options.steps,
        every=options.every,
        threads=min(4, len(os.sched_getaffinity(0))),
        trainer="async" if options.asynchronous else "sync",
        settings={"keep": options.keep, "snapshot": "lazy" if options.lazy else "eager"},
    )
    quiet = msgspec.structs.replace(saving, url=str(folder / "reference"), every=None)
    doing_harm = msgspec.structs.replace(saving, die_in_save_of=doomed)
    again = options.steps - doomed + options.every - 1  # the newest committed save is the one before, as a rule
    phases = {"reference": options.steps, "killed": doomed + 1, "resumed": again, DISK: 0}
    with Display(console, phases, plain=options.plain or options.json) as display:
        reference = run_phase(display, quiet, "reference", folder)[0]
        killed = run_phase(display, doing_harm, "killed", folder)[0]
        check_uncommitted(folder / CHECKPOINTS, doomed)
        resumed = run_phase(display, saving, "resumed", folder)[0]
        display.begin(DISK)
        recovery = judge(reference, killed, resumed, doomed)
        cost = account(reference, [killed, resumed], measure_disk(folder, recovery["save_bytes"]))
        display.finish(f"{speed(cost['disk_bytes_per_s'])} by a plain writer, nothing else running")
    return conclude(console, options, recovery, cost)


def run_phase(display: Display, job: Job, name: str, folder: Path) -> dict[int, RankRecord]:
    """Run *job* with a display, and return the events of each rank."""
    display.begin(name)
    records = run_job(job, name, folder, lambda record, event: display.show(record, event, job.steps))
    record, losses = records[0], list(records[0].losses.values())
    seconds = sum(done.seconds for done in record[StepDone].values())
    parts = [f"from step {step}" for step in record[Loaded]]
    parts += [f"{len(losses)} steps in {seconds:.1f} s, loss {losses[0]:.3f} → {losses[-1]:.3f}"]
    parts += [f"{len(record[Committed])} saves"] * (job.every is not None)
    parts += ["then SIGKILL"] * (job.die_in_save_of is not None)
    display.finish(", ".join(parts))
    return records


def check_uncommitted(root: Path, step: int) -> None:
    """Check on the disk that the save of *step* has begun and has no manifest.

    Raises:
        DemoError: it has one, so the kill came too late.
    """
    if any(parse_manifest(entry.name) is not None for entry in (root / step_id(step)).iterdir()):
        raise DemoError(f"the save of step {step} was committed before the kill, so that nothing is shown")


def conclude(console: Console, options: DemoOptions, recovery: Figures, cost: Figures) -> int:
    """Print the result in the form of *options*, and return the exit status."""
    if options.json:
        found = {"exact": recovery["exact"], "options": options, "recovery": recovery, "cost": cost}
        sys.stdout.write(msgspec.json.encode(found, enc_hook=str).decode() + "\n")
    else:
        print_result(console, recovery, cost)
    return EXACT if recovery["exact"] else DIFFERENT
