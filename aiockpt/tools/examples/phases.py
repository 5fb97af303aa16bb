"""The phases of the demo: each is one start of the job; its events are recorded, and its losses compared with a reference.

Losses are compared as floats that must be equal, not close; where another parallelism takes sums in another order, they
must be close.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from aiockpt.events import BarrierWaited, BytesWritten, Committed, Loaded, SnapshotTaken
from aiockpt.runtime.signals import open_child
from aiockpt.tools.examples.child import DemoEvent, Job, StepDone
from aiockpt.units import size

LINES = 6
"""Lines of a process while it trains."""
SILENCE_S = 300.0
"""Seconds without an event after which a process is ended."""
LOG_TAIL_CHARACTERS = 2000
TOLERANCE = 0.02
"""Tolerance of the losses of another parallelism, relative to the reference: float32 sums, amplified by training."""


class DemoError(Exception):
    """The demo cannot run, or one of its processes failed; the message names the log to read."""


class Phase(msgspec.Struct, frozen=True):
    """One start of the job.

    Attributes:
        until: the fraction of the run at which it is killed; 1: it ends by itself.
        ranks: None for a process without torchrun.
        tensor_parallel: ranks that split a matrix.
        exact: its losses must be the reference's, bit by bit.
    """

    name: str
    until: float
    ranks: int | None = None
    tensor_parallel: int = 1
    exact: bool = True


class RankRecord:
    """What one rank did: losses and seconds by step, pauses, written bytes and commits by step of the save, and its load."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.step_s: dict[int, float] = {}
        self.pauses_s: dict[int, float] = defaultdict(float)
        self.written_bytes: Counter[int] = Counter()
        self.commits: dict[int, Committed] = {}
        self.load: Loaded | None = None

    def add(self, event: DemoEvent) -> None:
        match event:
            case StepDone():
                self.losses[event.step], self.step_s[event.step] = event.loss, event.seconds
            case SnapshotTaken():
                self.pauses_s[event.step] += event.pause_s
            case BarrierWaited():
                self.pauses_s[event.step] += event.seconds
            case BytesWritten():
                self.written_bytes[event.step] += event.bytes
            case Committed():
                self.commits[event.step] = event
            case Loaded():
                self.load = event


def run_job(job: Job, name: str, folder: Path, say: Callable[[str], object]) -> dict[int, RankRecord]:
    """Run *job* to its end, *say* how far rank 0 is now and then, and return the record of each rank's events.

    Its output goes to ``<name>.log`` in *folder*.

    Raises:
        DemoError: the processes did not end as the job requires: with status 0, or by SIGKILL.
    """
    records: dict[int, RankRecord] = defaultdict(RankRecord)
    decoder = msgspec.json.Decoder(tuple[int, DemoEvent])
    command = [sys.executable, "-m", "aiockpt.tools.examples.child", msgspec.json.encode(job).decode()]
    env = {**os.environ}
    if job.ranks:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        env |= {"OMP_NUM_THREADS": str(job.threads), "GLOO_SOCKET_IFNAME": "lo"}
    log = folder / f"{name}.log"
    with log.open("wb") as errors, open_child(command, errors, env) as child:
        for line in _lines(child, log):
            rank, event = decoder.decode(line)
            records[rank].add(event)
            if rank == 0 and isinstance(event, StepDone) and event.step % max(1, job.steps // LINES) == 0:
                say(f"{name}: step {event.step:>3}/{job.steps}, loss {event.loss:.4f}")
    status = child.returncode
    expected = 0 if job.die_in_save_of is None else 1 if job.ranks else -signal.SIGKILL  # 1: torchrun's, of a dead rank
    if status != expected:
        tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        raise DemoError(f"the {name} process ended with status {status} instead of {expected}. {log} says:\n{tail}")
    return records


def _lines(child: subprocess.Popen[bytes], log: Path) -> Iterator[bytes]:
    """Yield the whole lines that *child* writes; a kill may cut the last one."""
    assert child.stdout is not None
    pipe, rest = child.stdout.fileno(), b""
    while select.select([pipe], [], [], SILENCE_S)[0]:
        if not (read := os.read(pipe, 1 << 16)):
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from lines
    raise DemoError(f"no event for {SILENCE_S:g} s: the process was ended; see {log}")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a phase showed.

    Attributes:
        resumed_from: the step that it loaded, and *newest_committed* that of the phases before it; None: nothing.
        needed_bytes: of the tensors that all its ranks loaded, and *read_bytes* read for them, in whole blocks.
        compared: steps whose losses were compared, and *differences* those that are another: step, expected, actual.
        apart: the largest difference, relative to the reference.
        passed: no committed step was lost, and no loss is different.
    """

    phase: Phase
    resumed_from: int | None
    newest_committed: int | None
    needed_bytes: int
    read_bytes: int
    compared: int
    differences: tuple[tuple[int, float, float | None], ...]
    apart: float
    passed: bool

    def __str__(self) -> str:
        start = "from the start"
        if self.resumed_from is not None:
            start = f"from step {self.resumed_from}, the newest committed was {self.newest_committed}"
            start += f" ({size(self.read_bytes)} read for {size(self.needed_bytes)})"
        same = f"{self.compared - len(self.differences)} of {self.compared} losses"
        how = "equal, bit by bit" if self.apart == 0 else f"within {self.apart:.1e}"
        lines = [f"{self.phase.name}: {start}; {same} {how}"]
        lines += [
            f"  step {step}: loss {actual!r} instead of {expected!r}" for step, expected, actual in self.differences
        ]
        return "\n".join(lines)


def judge(
    phase: Phase, records: Mapping[int, RankRecord], reference: Mapping[int, float], newest_committed: int | None
) -> Outcome:
    """Compare the losses of a phase with the reference's, by step; one that ends by itself must have all of them."""
    taken = records[0].losses
    loads = [record.load for record in records.values() if record.load is not None]
    loaded = loads[0].step if loads else None
    rest = [step for step in reference if loaded is None or step > loaded]
    steps = rest if phase.until == 1.0 else list(taken)
    apart = {step: abs(taken[step] - reference[step]) / abs(reference[step]) for step in steps if step in taken}
    tolerance = 0.0 if phase.exact else TOLERANCE
    differences = tuple(
        (step, reference[step], taken.get(step)) for step in steps if not apart.get(step, 1.0) <= tolerance
    )
    return Outcome(
        phase=phase,
        resumed_from=loaded,
        newest_committed=newest_committed,
        needed_bytes=sum(load.bytes for load in loads),
        read_bytes=sum(load.read_bytes for load in loads),
        compared=len(steps),
        differences=differences,
        apart=max(apart.values(), default=0.0),
        passed=not differences and (newest_committed is None or (loaded is not None and loaded >= newest_committed)),
    )


def account(records: Sequence[RankRecord]) -> dict[str, float]:
    """Return what saving cost the training, of all *records* together."""
    pauses_s = [pause_s for record in records for pause_s in record.pauses_s.values()]
    commits_s = [commit.seconds for record in records for commit in record.commits.values()]
    steps_s = [step_s for record in records for step_s in record.step_s.values()]
    return {
        "steps": len(steps_s),
        "saves": len(commits_s),
        "pause_median_s": median(pauses_s),
        "pause_max_s": max(pauses_s),
        "commit_median_s": median(commits_s),
        "blocked_fraction": sum(pauses_s) / sum(steps_s),
    }
