"""Does a run that was killed in the middle of a save go on as if nothing had happened, and what did saving cost?

    python -m aiockpt.examples.demo

Three processes run the same trainer. The *reference* never saves and is never interrupted. The *killed* one saves every
few steps and dies by SIGKILL in the middle of a save. Started again it is *resumed*, and every loss must be the
reference's, bit by bit. Read `train_sync` and `train_async` to see how a training loop uses aiockpt; this is only their
director.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from aiockpt.examples.child import Job, StepDone, Told
from aiockpt.examples.cost import Cost, account
from aiockpt.examples.display import Display, LiveDisplay, PlainDisplay, print_result
from aiockpt.examples.gpt import DEFAULT_SIZE, GPTSize
from aiockpt.examples.outlook import Outlook
from aiockpt.examples.process import DemoError, Interrupted, ended_by_signals, make_work_folder, run_job
from aiockpt.examples.record import Record
from aiockpt.examples.verdict import Recovery, judge
from aiockpt.format.names import parse_manifest, step_id
from aiockpt.testing.disk import measure_disk
from aiockpt.units import speed

REFERENCE, KILLED, RESUMED, DISK = "reference", "killed", "resumed", "disk"
CHECKPOINTS = "checkpoints"

EXACT, DIFFERENT, FAILED, BY_SIGNAL = 0, 1, 2, 128
"""Exit statuses: all losses are equal; they are not; the demo could not be run; with the number of the signal added."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to show.

    Attributes:
        steps: optimizer steps of the whole run.
        every: save every so many steps.
        lazy: copy the state beside training, and not in the call.
        keep: committed steps that retention keeps.
        dir: where everything goes, and stays; None takes a new folder in the current one and removes it at the end.
        asynchronous: use the async trainer.
        json: print the figures as one JSON object on standard output, and progress on standard error.
        plain: print lines instead of a live display; so does any output that is not a terminal.
        size: how large the model is.
    """

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
    try:
        doomed = choose_doomed_save(options)
        folder = make_work_folder(options.dir)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return FAILED
    status = FAILED
    try:
        with ended_by_signals():
            _print_title(console, options)
            with _open_display(options, console) as display:
                recovery, cost = _direct(options, doomed, folder, display)
            status = conclude(console, options, recovery, cost)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
    except Interrupted as interruption:
        status = BY_SIGNAL + interruption.number
    if options.dir is None and (status == EXACT or status > BY_SIGNAL):
        shutil.rmtree(folder)
    else:
        advice = f"Everything is in {folder}; look at it: aiockpt ls {folder / CHECKPOINTS}"
        console.print(advice, style="dim", markup=False, highlight=False, soft_wrap=True)
    return status


def choose_doomed_save(options: DemoOptions) -> int:
    """Return the step whose save is to be interrupted: well on in the run, with committed ones before it.

    Raises:
        DemoError: the options leave no such step.
    """
    if options.every < 1 or options.keep < 1:
        raise DemoError("a save every step or less often, and one checkpoint or more to keep, are needed")
    saves = (options.steps - 1) // options.every  # beside the one of step 0
    if saves < 3:
        enough = 3 * options.every + 1
        raise DemoError(f"{options.steps} steps are too few for a save every {options.every}: take {enough} or more")
    return options.every * max(2, round(0.6 * saves))


def _direct(options: DemoOptions, doomed: int, folder: Path, display: Display) -> tuple[Recovery, Cost]:
    """Run one process after the other and draw the conclusions."""
    saving = Job(
        url=str(folder / CHECKPOINTS),
        size=options.size,
        steps=options.steps,
        every=options.every,
        keep=options.keep,
        threads=min(4, len(os.sched_getaffinity(0))),
        asynchronous=options.asynchronous,
        snapshot="lazy" if options.lazy else "eager",
    )
    quiet = msgspec.structs.replace(saving, url=str(folder / REFERENCE), every=None)
    doing_harm = msgspec.structs.replace(saving, die_in_save_of=doomed)

    again = options.steps - doomed + options.every - 1  # the newest committed save is the one before, as a rule
    outlook = Outlook({REFERENCE: options.steps, KILLED: doomed + 1, RESUMED: again})
    reference = _show(quiet, REFERENCE, folder, display, outlook)
    killed = _show(doing_harm, KILLED, folder, display, outlook)
    check_uncommitted(folder / CHECKPOINTS, doomed)
    resumed = _show(saving, RESUMED, folder, display, outlook)

    display.begin(DISK)
    recovery = judge(reference, killed, resumed, doomed)
    disk = measure_disk(folder, recovery.save_bytes)
    cost = account(reference, [killed, resumed], disk)
    display.finish(f"{speed(cost.disk_bytes_per_s)} by a plain writer, nothing else running")
    return recovery, cost


def check_uncommitted(root: Path, step: int) -> None:
    """Look at the disk: the save of *step* has begun and has no manifest.

    Raises:
        DemoError: it has one, so the kill came too late to show anything.
    """
    if any(parse_manifest(entry.name) is not None for entry in (root / step_id(step)).iterdir()):
        raise DemoError(f"the save of step {step} was committed before the kill, so that nothing is shown")


def _show(job: Job, name: str, folder: Path, display: Display, outlook: Outlook) -> Record:
    def show(record: Record, told: Told) -> None:
        if isinstance(told, StepDone):
            outlook.step(told.seconds)
            display.expect(outlook.remaining_s())
        display.show(record, told)

    outlook.begin(name)
    display.begin(name, job.steps)
    record = run_job(job, name, folder, show)
    outlook.finish()
    display.finish(_outcome(job, record))
    return record


def _outcome(job: Job, record: Record) -> str:
    """Say in a line how a process ended."""
    losses = [record.steps[step].loss for step in sorted(record.steps)]
    seconds = sum(done.seconds for done in record.steps.values())
    parts = [f"{len(losses)} steps in {seconds:.1f} s, loss {losses[0]:.3f} → {losses[-1]:.3f}"]
    if record.loaded is not None:
        parts.insert(0, f"from step {record.loaded.step}")
    if job.every is not None:
        parts.append(f"{len(record.commits)} saves")
    if job.die_in_save_of is not None:
        parts.append("then SIGKILL")
    return ", ".join(parts)


def conclude(console: Console, options: DemoOptions, recovery: Recovery, cost: Cost) -> int:
    """Print what was found as *options* want it and return the exit status that follows from it."""
    if options.json:
        sys.stdout.write(msgspec.json.encode(_figures(options, recovery, cost), enc_hook=str).decode() + "\n")
    else:
        print_result(console, recovery, cost)
    return EXACT if recovery.exact else DIFFERENT


def _figures(options: DemoOptions, recovery: Recovery, cost: Cost) -> dict[str, Any]:
    return {
        "exact": recovery.exact,
        "options": options,
        "recovery": recovery,
        "cost": {
            **msgspec.structs.asdict(cost),
            "blocked_fraction": cost.blocked_fraction,
            "overhead_fraction": cost.overhead_fraction,
            "overhead_is_noise": cost.overhead_is_noise,
            "overhead_is_measurable": cost.overhead_is_measurable,
            "slowed_is_measurable": cost.slowed_is_measurable,
        },
    }


def _open_display(options: DemoOptions, console: Console) -> Display:
    if options.plain or options.json or not console.is_terminal:
        return PlainDisplay(console)
    return LiveDisplay(console, (REFERENCE, KILLED, RESUMED, DISK))


def _print_title(console: Console, options: DemoOptions) -> None:
    trainer = "train_async" if options.asynchronous else "train_sync"
    saves = f"a {'lazy ' * options.lazy}save every {options.every}"
    title = f"A byte-level GPT reads the standard library: {options.steps} steps, {saves}."
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    source = f"The trainer is {Path(__file__).with_name(trainer + '.py')}"
    console.print(source, style="dim", markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    """Read the command line and run the demo."""
    question = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m aiockpt.examples.demo", description=question)
    default = DemoOptions()
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=default.every, help="save every so many (default: %(default)s)")
    parser.add_argument("--lazy", action="store_true", help="copy states beside training, and not in the call")
    parser.add_argument("--keep", type=int, default=default.keep, help="checkpoints to keep (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="a new folder for everything (default: one here that is removed)")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="use the async trainer")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and progress on stderr")
    parser.add_argument("--plain", action="store_true", help="print lines, no live display")
    return run_demo(DemoOptions(**vars(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
