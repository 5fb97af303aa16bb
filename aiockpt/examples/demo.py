"""Does a run that was killed in the middle of a save go on as if nothing had happened, and what did saving cost?

    python -m aiockpt.examples.demo

Three processes run the same trainer. The *reference* never saves and is never interrupted. The *victim* saves every few
steps and dies by SIGKILL in the middle of a save. Started again, it *resumes*, and every loss must be the reference's,
bit by bit. Read `train_sync` and `train_async` to see how a training loop uses aiockpt; this is only their director.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from aiockpt.examples.child import Job, Told
from aiockpt.examples.disk import measure_disk
from aiockpt.examples.display import Display, LiveDisplay, PlainDisplay, print_result
from aiockpt.examples.gpt import GPTSize
from aiockpt.examples.record import Record
from aiockpt.examples.report import Cost, Recovery, account, judge
from aiockpt.format.names import parse_manifest, step_id

REFERENCE, VICTIM, RESUMED, DISK = "reference", "killed", "resumed", "disk"
CHECKPOINTS = "checkpoints"


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to show.

    Attributes:
        steps: optimizer steps of the whole run.
        every: save every so many steps.
        keep: committed steps that retention keeps.
        dir: where everything goes, and stays; None takes a new folder in the current one and removes it at the end.
        asynchronous: use the async trainer.
        json: print the figures as one JSON object and nothing else.
        plain: print lines instead of a live display; so does any output that is not a terminal.
        size: how large the model is.
    """

    steps: int = 120
    every: int = 5
    keep: int = 3
    dir: Path | None = None
    asynchronous: bool = False
    json: bool = False
    plain: bool = False
    size: GPTSize = GPTSize()


class DemoError(Exception):
    """The demo cannot be run, or one of its processes did not do its part; the message says what to look at."""


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return its exit status: 0 all losses are equal, 1 they are not, 2 it could not be run."""
    console = Console(stderr=options.json)
    try:
        folder = _make_folder(options)
        with _open_display(options, console) as display:
            recovery, cost = _direct(options, folder, display)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 2
    if options.json:
        sys.stdout.write(msgspec.json.encode(_figures(options, recovery, cost)).decode() + "\n")
    else:
        print_result(console, recovery, cost)
    if options.dir is None and recovery.exact:
        shutil.rmtree(folder)
    else:
        console.print(f"Everything is in {folder}; try: aiockpt ls {folder / CHECKPOINTS}", markup=False, soft_wrap=True)
    return 0 if recovery.exact else 1


def _direct(options: DemoOptions, folder: Path, display: Display) -> tuple[Recovery, Cost]:
    """Run one process after the other and draw the conclusions."""
    doomed = _step_of_doomed_save(options)
    saving = Job(
        url=str(folder / CHECKPOINTS),
        size=options.size,
        steps=options.steps,
        every=options.every,
        keep=options.keep,
        threads=min(4, len(os.sched_getaffinity(0))),
        asynchronous=options.asynchronous,
    )
    quiet = msgspec.structs.replace(saving, url=str(folder / REFERENCE), every=None)

    reference = _run(quiet, REFERENCE, folder, display)
    victim = _run(msgspec.structs.replace(saving, die_in_save_of=doomed), VICTIM, folder, display)
    if any(parse_manifest(entry.name) is not None for entry in (folder / CHECKPOINTS / step_id(doomed)).iterdir()):
        raise DemoError(f"the save of step {doomed} was committed before the kill; see {folder}")
    resumed = _run(saving, RESUMED, folder, display)

    display.begin(DISK)
    disk = measure_disk(folder, size_bytes=victim.snapshots[doomed].bytes)
    recovery, cost = judge(reference, victim, resumed, doomed), account(reference, [victim, resumed], disk)
    display.finish(f"takes {cost.disk_bytes_per_s / 1e6:,.0f} MB/s from a plain writer")
    return recovery, cost


def _run(job: Job, name: str, folder: Path, display: Display) -> Record:
    """Run *job* in a process of its own, show and record what it tells, and return the record when it is dead.

    Raises:
        DemoError: it did not end as the job says: well, or by SIGKILL.
    """
    display.begin(name, job.steps)
    record, told = Record(), msgspec.json.Decoder(Told)
    hear, tell = os.pipe()
    command = [sys.executable, "-m", "aiockpt.examples.child", msgspec.json.encode(job).decode(), str(tell)]
    with (
        (folder / f"{name}.log").open("wb") as log,
        (folder / f"{name}.jsonl").open("wb") as lines,
        subprocess.Popen(command, pass_fds=[tell], stdin=subprocess.DEVNULL, stdout=log, stderr=log) as child,
    ):
        os.close(tell)  # the child has its own; ours would keep the pipe open
        try:
            with os.fdopen(hear, "rb") as pipe:
                for line in pipe:
                    lines.write(line)
                    event = told.decode(line)
                    record.add(event)
                    display.show(record, event)
        except BaseException:
            child.kill()
            raise
    expected = 0 if job.die_in_save_of is None else -signal.SIGKILL
    if child.returncode != expected:
        tail = (folder / f"{name}.log").read_text(errors="replace")[-2000:]
        raise DemoError(f"the {name} process ended with {child.returncode} instead of {expected}; {folder}:\n{tail}")
    display.finish(_outcome(job, record))
    return record


def _outcome(job: Job, record: Record) -> str:
    """Say in a line how a process ended."""
    losses = [record.steps[step].loss for step in sorted(record.steps)]
    seconds = sum(done.seconds for done in record.steps.values())
    text = f"{len(losses)} steps in {seconds:.1f} s, loss {losses[0]:.4f} → {losses[-1]:.4f}, {len(record.commits)} saves"
    if record.loaded is not None:
        text = f"from step {record.loaded.step}: {text}"
    if job.die_in_save_of is not None:
        text += f", then SIGKILL in the save of step {job.die_in_save_of}"
    return text


def _step_of_doomed_save(options: DemoOptions) -> int:
    """Return the step whose save is to be interrupted: well on in the run, with committed ones before it.

    Raises:
        DemoError: the run is too short for one.
    """
    if options.every < 1 or options.keep < 1:
        raise DemoError("saving every step or less often, and keeping one checkpoint or more, is what can be shown")
    saves = (options.steps - 1) // options.every
    if saves < 3:
        raise DemoError(f"{options.steps} steps with a save every {options.every} are too few: take {3 * options.every + 1}")
    return options.every * max(2, round(0.6 * saves))


def _make_folder(options: DemoOptions) -> Path:
    if options.dir is None:
        return Path(tempfile.mkdtemp(prefix="aiockpt-demo-", dir="."))
    options.dir.mkdir(parents=True, exist_ok=True)
    if any(options.dir.iterdir()):
        raise DemoError(f"{options.dir} is not empty: give --dir a new folder, so that nothing of yours is mixed in")
    return options.dir


def _open_display(options: DemoOptions, console: Console) -> Display:
    if options.plain or options.json or not console.is_terminal:
        return PlainDisplay(console)
    return LiveDisplay(console, (REFERENCE, VICTIM, RESUMED, DISK))


def _figures(options: DemoOptions, recovery: Recovery, cost: Cost) -> dict[str, Any]:
    return {
        "exact": recovery.exact,
        "options": options,
        "recovery": recovery,
        "cost": {**msgspec.structs.asdict(cost), "overhead_fraction": cost.overhead_fraction},
    }


def main() -> int:
    """Read the command line and run the demo."""
    parser = argparse.ArgumentParser(prog="python -m aiockpt.examples.demo", description=(__doc__ or "").partition("\n")[0])
    default = DemoOptions()
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=default.every, help="save every so many (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=default.keep, help="checkpoints to keep (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="a new folder for everything (default: one that is removed)")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="use the async trainer")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress on stderr")
    parser.add_argument("--plain", action="store_true", help="print lines, no live display")
    return run_demo(DemoOptions(**vars(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
