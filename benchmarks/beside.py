"""What does a lazy save take from forward and backward? Steps beside it, and steps beside a thread that only writes.

    python -m benchmarks.beside --size 2GiB --rounds 12 --out benchmarks/results/beside/2GiB.json

Steps of half a millisecond on one thread (`benchmarks.training`, the kind that suffers most) run for an *interval* between
two optimizer steps that is more than twice as long as writing takes, so no optimizer ever waits for a copy. A save begins
with the interval; the rest of it is quiet. Ways take turns in one process:

- *none*: nothing is saved; shows how far two quiet runs differ by chance.
- *raw writer*: one plain thread writes as many bytes past the page cache (`benchmarks.floors`): the floor.
- *copying writer*: the same, which copies and hashes them first, in pieces of 16 MiB, and commits nothing.
- *aiockpt lazy*, *aiockpt lazy, process*: a lazy save with the newest checkpoint kept, written by a thread or a process.

*Time lost* is what the steps from the call until the bytes are durable, and the 300 after them (old checkpoints are deleted
then), took longer than as many quiet ones of the same interval and of the one before. A round has one interval of each way;
a ratio is one of medians, its 90 % interval from 2,000 resamples of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import xxhash

import aiockpt
from aiockpt.options import Worker
from benchmarks import floors, machine
from benchmarks import state as states
from benchmarks.__main__ import size
from benchmarks.report import write
from benchmarks.training import percentile, small_step

AFTER = 300
"""Steps counted behind a durable save."""
ROOM = 2.2
"""The interval, of the time that the raw writer needs."""
WARM = 2
RESAMPLES = 2000


class Saving(Protocol):
    """A save under way."""

    def done(self) -> bool:
        """Say whether it is durable."""
        ...


class Sample(msgspec.Struct, frozen=True):
    """One interval: *steps* counted, the seconds they lost, and when the bytes were durable."""

    lost_s: float
    durable_s: float
    steps: int
    quiet_p50_s: float
    p50_s: float
    p99_s: float


class Result(msgspec.Struct, kw_only=True):
    """One run; each way has a sample for every round."""

    machine: machine.Machine
    state_bytes: int
    interval_steps: int
    ways: dict[str, list[Sample]]


class CopyingWriter:
    """What a lazy save cannot do without, in one thread: copy, hash, write."""

    def __init__(self, folder: Path, state: states.State) -> None:
        self._path = folder / "copied"
        self._tensors = [tensor for _, tensor in states.leaves(state)]
        self._slab = floors.aligned_buffer(floors.DIRECT_CHUNK_BYTES)
        self._thread = ThreadPoolExecutor(1)

    def save(self) -> Future[None]:
        return self._thread.submit(self._write)

    def _write(self) -> None:
        base, full, at = ctypes.addressof(ctypes.c_char.from_buffer(self._slab)), 0, 0
        with floors.opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            for tensor in self._tensors:
                done = 0
                while done < tensor.nbytes:
                    count = min(tensor.nbytes - done, len(self._slab) - full)
                    ctypes.memmove(base + full, tensor.data_ptr() + done, count)
                    done, full = done + count, full + count
                    if full == len(self._slab):
                        at, full = at + self._flush(descriptor, at), 0
            self._flush(descriptor, at)
            os.fdatasync(descriptor)

    def _flush(self, descriptor: int, at: int) -> int:
        xxhash.xxh3_64_digest(self._slab)
        return os.pwrite(descriptor, self._slab, at)


class Lazy:
    """aiockpt; what no optimizer owns here changes only behind the barrier, and is said to."""

    def __init__(self, folder: Path, state: states.State, worker: Worker) -> None:
        self.checkpointer = aiockpt.Checkpointer(
            folder, snapshot="lazy", immutable=list(state), retention=aiockpt.Retention(last=1), worker=worker
        )
        self._state, self._step = state, 0

    def save(self) -> aiockpt.SaveFuture:
        self._step += 1
        return self.checkpointer.save(self._step, self._state)


class Training:
    """Forward and backward in small steps, with an optimizer step now and then."""

    def __init__(self) -> None:
        self._step = small_step(optimizes=False)
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def optimize(self) -> None:
        """End an interval."""
        os.sync()
        self._optimizer.step()

    def run(self, enough: Callable[[int], bool]) -> list[float]:
        """Run steps until *enough* says so of their count; return the seconds that each took."""
        seconds: list[float] = []
        before_s = time.perf_counter()
        while not enough(len(seconds)):
            self._step()
            now_s = time.perf_counter()
            seconds.append(now_s - before_s)
            before_s = now_s
        return seconds


def run(size_bytes: int, rounds: int, work: Path) -> Result:
    """Measure; ways take turns, in another order in each round."""
    state, training = states.build(size_bytes), Training()
    with ExitStack() as stack:
        lazy, process = (Lazy(work / worker, state, worker) for worker in ("thread", "process"))
        for ours in (lazy, process):
            stack.enter_context(ours.checkpointer)
        raw, copying = floors.RawSaver(work, state), CopyingWriter(work, state)
        interval = _interval_steps(training, raw)
        ways: dict[str, Callable[[], Saving | None]] = {
            "none": lambda: None,
            "raw writer": lambda: raw.write(0),
            "copying writer": copying.save,
            "aiockpt lazy": lazy.save,
            "aiockpt lazy, process": process.save,
        }
        samples: dict[str, list[Sample]] = {name: [] for name in ways}
        quiet = training.run(lambda count: count >= AFTER)
        for done in range(WARM + rounds):
            names = list(ways)[done % len(ways) :] + list(ways)[: done % len(ways)]
            for name in names:
                sample, quiet = _interval(training, ways[name], interval, quiet)
                if done >= WARM:
                    samples[name].append(sample)
        facts = machine.facts(work, floors.supports_direct_io(work))
    return Result(machine=facts, state_bytes=states.size_bytes(state), interval_steps=interval, ways=samples)


def _interval_steps(training: Training, raw: floors.RawSaver) -> int:
    quiet_s = statistics.median(training.run(lambda count: count >= 1000))
    seconds = []
    for _ in range(3):
        begun_s = time.perf_counter()
        raw.write(0).result()
        seconds.append(time.perf_counter() - begun_s)
    return AFTER + round(ROOM * max(seconds) / quiet_s)


def _interval(
    training: Training, save: Callable[[], Saving | None], steps: int, before: Sequence[float]
) -> tuple[Sample, list[float]]:
    """Run one interval, a save at its begin; return its quiet steps too. *before* are those of the interval before it."""
    training.optimize()
    begun_s = time.perf_counter()
    saving = save()
    called_s = time.perf_counter() - begun_s
    half = steps // 2
    beside = training.run(lambda count: count >= half if saving is None else count >= AFTER and saving.done())
    durable_s = time.perf_counter() - begun_s
    if isinstance(saving, Future | aiockpt.SaveFuture):
        saving.result(0)
    behind = training.run(lambda count: count >= AFTER)
    quiet = training.run(lambda count: count >= max(AFTER, steps - len(beside) - len(behind)))
    quiet_mean_s = statistics.fmean([*before, *quiet])
    took_s = called_s + sum(beside) + sum(behind)
    counted = len(beside) + len(behind)
    sample = Sample(
        lost_s=took_s - counted * quiet_mean_s,
        durable_s=durable_s,
        steps=counted,
        quiet_p50_s=percentile([*before, *quiet], 0.5),
        p50_s=percentile(beside, 0.5),
        p99_s=percentile(beside, 0.99),
    )
    return sample, quiet


def table(result: Result) -> str:
    """Return the run as a table in Markdown."""
    lines = [
        "| beside | time lost: median (quartiles) | of the raw writer's (90 %) | step p50, of quiet | p99 | durable after |",
        "| --- " * 6 + "|",
    ]
    raw = [sample.lost_s for sample in result.ways["raw writer"]]
    for name, samples in result.ways.items():
        lost = [sample.lost_s for sample in samples]
        low, middle, high = (_ms(value) for value in statistics.quantiles(lost, n=4))
        p50 = statistics.median(sample.p50_s / sample.quiet_p50_s for sample in samples)
        p99, durable = (
            statistics.median(values) for values in zip(*((s.p99_s, s.durable_s) for s in samples), strict=True)
        )
        compared = "–" if name in ("none", "raw writer") else _compared(lost, raw)
        safe = "–" if name == "none" else f"{_ms(durable)} ms"
        lines.append(
            f"| {name} | {middle} ms ({low} … {high}) | {compared} | {p50:.3f} | {p99 * 1e3:.2f} ms | {safe} |"
        )
    seen = f"{result.state_bytes / 2**20:.0f} MiB; {len(raw)} rounds; {result.interval_steps} steps between optimizer steps"
    return "\n".join([*lines, "", seen])


def _compared(lost: Sequence[float], raw: Sequence[float]) -> str:
    chance = random.Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(range(len(raw)), k=len(raw))
        below = statistics.median(raw[index] for index in drawn)
        ratios.append(statistics.median(lost[index] for index in drawn) / below if below > 0 else float("inf"))
    ratios.sort()
    below = statistics.median(raw)
    middle = f"{statistics.median(lost) / below:.1f} ×" if below > 0 else "–"
    return f"{middle} ({ratios[RESAMPLES // 20]:.1f} … {ratios[-RESAMPLES // 20]:.1f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=size, default=512 << 20, help="of the state (default: 512MiB)")
    parser.add_argument("--rounds", type=int, default=20, help="intervals of each way (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as work:
        result = run(given.size, given.rounds, Path(work))
    print(table(result))
    if given.out:
        write(result, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
