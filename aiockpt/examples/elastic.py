"""Does a run go on when it is killed and started again with other ranks and another parallelism?

    aiockpt demo --elastic

torchrun starts the trainer (`train_elastic`) four times, each time with other ranks; in all but the last one a rank dies
by SIGKILL in the middle of a save. Beside them a *reference* of two ranks trains without interruption. Where the
parallelism is the reference's, every loss must be equal bit by bit; elsewhere sums are taken in another order, and the
losses must be close. Each rank's bytes are counted: what it read, and what it needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from aiockpt.examples.child import Told
from aiockpt.examples.elastic_child import ElasticJob
from aiockpt.examples.outlook import tell
from aiockpt.examples.process import DemoError, Interrupted, ended_by_signals, make_work_folder, open_process
from aiockpt.examples.record import Record
from aiockpt.units import size

EXACT, DIFFERENT, FAILED, BY_SIGNAL = 0, 1, 2, 128
EXPLANATION = (
    "needed: tensor bytes that the ranks of a start hold, copies included. read: what was fetched from storage for them, in "
    "whole blocks, since a block is what is verified: much for tensors as small as these, some per cent for large ones."
)
TOLERANCE = 0.02
"""How far the losses of another parallelism may be, relative to the reference: float32 sums, amplified by training."""
PHASE_DEADLINE_S = 300.0
END_DEADLINE_S = 30.0
"""For torchrun to end its ranks after SIGTERM; killed itself, it would leave them behind."""


class Phase(msgspec.Struct, frozen=True):
    """One start of the job: how many ranks, how many of them split a matrix, and how much of the run until it dies."""

    name: str
    ranks: int
    tensor_parallel: int
    until: float
    exact: bool


REFERENCE = Phase("reference: FSDP2 on 2 ranks", 2, 1, 1.0, exact=True)
PHASES = (
    Phase("FSDP2 on 2 ranks", 2, 1, 0.25, exact=True),
    Phase("again on 2 ranks", 2, 1, 0.5, exact=True),
    Phase("one rank", 1, 1, 0.75, exact=False),
    Phase("TP 2 × FSDP2 2 on 4 ranks", 4, 2, 1.0, exact=False),
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one phase came to.

    Attributes:
        resumed_from: the step that was loaded; None for a start from nothing.
        last_step: the last one it took.
        load_s: of the slowest rank.
        needed_bytes, read_bytes: of tensors on all ranks, and what was read for them.
        difference: the largest relative difference of a loss from the reference's.
        exact: whether it had to be equal, and *passed* whether it was, or was close enough.
    """

    name: str
    ranks: int
    resumed_from: int | None
    last_step: int
    seconds: float
    load_s: float
    needed_bytes: int
    read_bytes: int
    difference: float
    exact: bool
    passed: bool


def run_elastic(*, steps: int = 60, every: int = 5, folder: Path | None = None, as_json: bool = False) -> int:
    """Run the demo, print what it shows, and return its exit status."""
    console = Console(stderr=as_json)
    try:
        _check_length(steps, every)
        place = make_work_folder(folder)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return FAILED
    status = FAILED
    try:
        with ended_by_signals():
            status = conclude(console, _direct(console, place, steps, every), as_json=as_json)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False)
    except Interrupted as interruption:
        status = BY_SIGNAL + interruption.number
    if folder is None and (status == EXACT or status > BY_SIGNAL):
        shutil.rmtree(place)
    else:
        console.print(f"Everything is in {place}.", style="dim", markup=False, highlight=False, soft_wrap=True)
    return status


def _check_length(steps: int, every: int) -> None:
    """Raise DemoError unless a save is there to die in before each of the three kills, and one before it."""
    if every < 1:
        raise DemoError(f"a save every {every} steps cannot be: take 1 or more")
    if steps < 8 * every:
        raise DemoError(f"{steps} steps are too few for a save every {every}: take {8 * every} or more")


def conclude(console: Console, outcomes: Sequence[Outcome], *, as_json: bool) -> int:
    """Print what was found and return the exit status that follows from it."""
    passed = all(outcome.passed for outcome in outcomes)
    if as_json:
        sys.stdout.write(msgspec.json.encode(outcomes).decode() + "\n")
    else:
        console.print()
        console.print(_table(outcomes))
        console.print(EXPLANATION, style="dim", markup=False, highlight=False)
        console.print()
        console.print(verdict(outcomes), style="bold green" if passed else "bold red", markup=False, highlight=False)
    return EXACT if passed else DIFFERENT


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Say in a sentence what the run came to."""
    worlds = ", ".join(str(outcome.ranks) for outcome in outcomes[:-1]) + f" and {outcomes[-1].ranks}"
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    if failed:
        return f"THE LOSSES DIFFER from the reference's: {'; '.join(failed)}."
    apart = max((outcome.difference for outcome in outcomes if not outcome.exact), default=0.0)
    return (
        f"Killed {len(outcomes) - 1} times and started on {worlds} ranks, the run went on as if nothing had happened: its "
        f"losses are equal bit by bit on the ranks of the reference, and within {apart:.0e} on others, where sums are "
        "taken in another order."
    )


def _direct(console: Console, place: Path, steps: int, every: int) -> list[Outcome]:
    console.print("A byte-level GPT trains on 2, 2, 1 and 4 ranks; it is killed in between.", style="bold")
    reference, seconds = _run(console, REFERENCE, place, steps, None, None)
    remaining = forecast(steps, every, seconds, [done.seconds for done in reference[0].steps.values()])
    console.print(f"the {len(PHASES)} starts to come will take {tell(remaining)}", style="dim", highlight=False)
    losses = {step: done.loss for step, done in reference[0].steps.items()}
    outcomes = []
    for phase in PHASES:
        dies_in = None if phase.until == 1.0 else int(phase.until * steps) // every * every
        records, seconds = _run(console, phase, place, steps, every, dies_in)
        outcomes.append(judge(phase, records, seconds, losses))
    return outcomes


def forecast(steps: int, every: int, reference_s: float, steps_s: Sequence[float]) -> float:
    """Return about how many seconds the starts after the reference will take.

    Each starts as the reference did, and together they take its steps, shared by as many processors as they have ranks; a
    kill costs the steps since the last save.
    """
    processors = len(os.sched_getaffinity(0))
    start_s = max(0.0, reference_s - sum(steps_s))
    turns, begun = 0.0, 0.0
    for phase in PHASES:
        again = every if begun else 0
        slower = min(REFERENCE.ranks, processors) / min(phase.ranks, processors)
        turns += ((phase.until - begun) * steps + again) * slower
        begun = phase.until
    return len(PHASES) * start_s + turns * median(steps_s)


def judge(phase: Phase, records: Mapping[int, Record], seconds: float, reference: Mapping[int, float]) -> Outcome:
    """Compare a phase with the reference's losses, by step."""
    losses = {step: done.loss for step, done in records[0].steps.items()}
    difference = max(abs(loss - reference[step]) / abs(reference[step]) for step, loss in losses.items())
    loads = [record.loaded for record in records.values() if record.loaded is not None]
    return Outcome(
        name=phase.name,
        ranks=phase.ranks,
        resumed_from=loads[0].step if loads else None,
        last_step=max(losses),
        seconds=seconds,
        load_s=max((load.seconds for load in loads), default=0.0),
        needed_bytes=sum(load.bytes for load in loads),
        read_bytes=sum(load.read_bytes for load in loads),
        difference=difference,
        exact=phase.exact,
        passed=difference == 0 if phase.exact else difference <= TOLERANCE,
    )


def _run(
    console: Console, phase: Phase, place: Path, steps: int, every: int | None, dies_in: int | None
) -> tuple[dict[int, Record], float]:
    """Run one phase under torchrun; return what each rank told, and the seconds it took.

    Raises:
        DemoError: it did not end as it should.
    """
    label = phase.name.replace(" ", "-").replace("×", "x").replace(":", "")
    job = ElasticJob(
        url=str((place / "checkpoints").resolve()),
        tell=str((place / label).resolve()),
        tensor_parallel=phase.tensor_parallel,
        steps=steps,
        every=every,
        die_in_save_of=dies_in,
    )
    if every is None:
        job = msgspec.structs.replace(job, url=job.url + "-of-the-reference")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={phase.ranks}"]
    command += ["-m", "aiockpt.examples.elastic_child", msgspec.json.encode(job).decode()]
    log = place / f"{label}.log"
    begun = time.monotonic()
    with log.open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        try:
            with open_process(command, _end_with_its_ranks, output, env=environment) as torchrun:
                status = torchrun.wait(PHASE_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{phase.name!r} did not end within {PHASE_DEADLINE_S:g} s; see {log}") from error
    seconds = time.monotonic() - begun
    records = {rank: _read_record(Path(f"{job.tell}.{rank}.jsonl")) for rank in range(phase.ranks)}
    if (status == 0) != (dies_in is None) or not records[0].steps:
        raise DemoError(f"{phase.name!r} ended with status {status}. {log} says:\n{log.read_text()[-2000:]}")
    if dies_in is not None and dies_in in records[0].commits:
        raise DemoError(f"the save of step {dies_in} was committed before the kill, so that nothing is shown")
    console.print(_line(phase, records[0], seconds, dies_in), markup=False, highlight=False, soft_wrap=True)
    return records, seconds


def _end_with_its_ranks(torchrun: subprocess.Popen[bytes]) -> None:
    torchrun.terminate()
    with suppress(subprocess.TimeoutExpired):
        torchrun.wait(END_DEADLINE_S)
    torchrun.kill()


def _read_record(path: Path) -> Record:
    record = Record()
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # a kill may cut the last one
                record.add(msgspec.json.decode(line, type=Told))
    return record


def _line(phase: Phase, record: Record, seconds: float, dies_in: int | None) -> str:
    first, last = min(record.steps), max(record.steps)
    end = "to the end" if dies_in is None else f"killed in save {dies_in}"
    return f"{phase.name:30} steps {first:3}–{last:3}  loss {record.steps[last].loss:.3f}  {seconds:5.1f} s  {end}"


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("ranks", "resumed from", "load", "needed", "read", "loss beside the reference"):
        table.add_column(column, justify="left" if column.startswith("loss") else "right")
    for it in outcomes:
        how = "equal, bit by bit" if it.difference == 0 else f"within {it.difference:.1e}"
        found = it.resumed_from is not None
        table.add_row(
            str(it.ranks),
            f"step {it.resumed_from}" if found else "–",
            f"{it.load_s * 1e3:.0f} ms" if found else "–",
            size(it.needed_bytes) if found else "–",
            size(it.read_bytes) if found else "–",
            f"[{'green' if it.passed else 'red'}]{how}[/]",
        )
    return table
