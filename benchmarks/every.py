"""What does a checkpoint of every iteration cost? A real training loop, end to end, with and without.

    python -m benchmarks.every --out benchmarks/results/every/256MiB.json

One process trains a network with AdamW. Ways to save after every step take turns with not saving at all: lazily, lazily
through a writer process, eagerly, and DCP's ``async_save``, which waits for the save before it. Each way runs a block of
steps and then waits until its last checkpoint is durable: that wait counts. Memory is warm, only the newest checkpoint is
kept, and what was saved last is loaded and compared at the end. A ratio is the median of a way's blocks over the median of
the blocks without saves.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import aiockpt
from aiockpt.events import BarrierWaited, Event, SnapshotTaken
from benchmarks import floors, machine
from benchmarks.__main__ import size
from benchmarks.report import write

WIDTH = 1024


class Way(msgspec.Struct, kw_only=True):
    """One way to save, and its blocks.

    Attributes:
        block_s: seconds of each block of steps, the last save durable.
        call_s: how long each call of its save held training.
        waited_s: how long optimizers were held by each snapshot that they met.
        loop_s: processor seconds of our loop thread in each block: what it takes of the interpreter's lock, at most.
    """

    block_s: list[float] = []
    call_s: list[float] = []
    waited_s: list[float] = []
    loop_s: list[float] = []


class Result(msgspec.Struct, kw_only=True):
    """One run."""

    machine: machine.Machine
    state_bytes: int
    steps: int
    ways: dict[str, Way]


class Training:
    """A network of *size_bytes* with its optimizer; *batch* samples a step set how long one takes."""

    def __init__(self, size_bytes: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = max(1, size_bytes // (3 * 4 * WIDTH * WIDTH))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(batch, WIDTH)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()


class Ours:
    """aiockpt, its snapshots *lazy* or not."""

    def __init__(self, folder: Path, training: Training, snapshot: Any, way: Way, worker: Any = "thread") -> None:
        self._way = way
        retention = aiockpt.Retention(last=1)
        self.checkpointer = aiockpt.Checkpointer(
            folder, snapshot=snapshot, retention=retention, observers=[self], worker=worker
        )
        self._training = training

    def on_event(self, event: Event) -> None:
        if isinstance(event, SnapshotTaken):
            self._way.call_s.append(event.pause_s)
        elif isinstance(event, BarrierWaited):
            self._way.waited_s.append(event.seconds)

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self._training.state)

    def wait(self) -> None:
        self.checkpointer.wait()

    def loop_s(self) -> float:
        """Return the processor seconds of the loop thread so far; it is of one engine."""
        return self.checkpointer._engine.loop.cpu_s()


class Dcp:
    """``async_save`` by its defaults; the folder of the save before is removed off the clock of its call."""

    def __init__(self, folder: Path, training: Training, way: Way) -> None:
        self._folder, self._training, self._way = folder, training, way
        self._saving: Any = None
        self._last = folder

    def save(self, step: int) -> None:
        began_s = time.perf_counter()
        self.wait()
        shutil.rmtree(self._last, ignore_errors=True)
        self._last = self._folder / f"step-{step}"
        state = {"model": self._training.model.state_dict(), "optimizer": self._training.optimizer.state_dict()}
        self._saving = async_save(state, checkpoint_id=self._last)
        self._way.call_s.append(time.perf_counter() - began_s)

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result(600)
            self._saving = None


def run(size_bytes: int, batch: int, steps: int, rounds: int, work: Path) -> Result:
    """Measure; ways take turns in each round."""
    training = Training(size_bytes, batch)
    names = ("none", "aiockpt lazy", "aiockpt lazy, process", "aiockpt eager", "dcp async")
    ways = {name: Way() for name in names}
    lazy = Ours(work / "lazy", training, "lazy", ways["aiockpt lazy"])
    process = Ours(work / "process", training, "lazy", ways["aiockpt lazy, process"], "process")
    eager = Ours(work / "eager", training, "eager", ways["aiockpt eager"])
    dcp = Dcp(work / "dcp", training, ways["dcp async"])
    savers = dict[str, Any](zip(names, (None, lazy, process, eager, dcp), strict=True))
    number = 0
    for done in range(rounds + 1):
        for name, saver in savers.items():
            busy_s = saver.loop_s() if isinstance(saver, Ours) else None
            seconds = _block(training, saver, number, steps if done else 2)
            number += steps
            if done:
                ways[name].block_s.append(seconds)
                if busy_s is not None:
                    ways[name].loop_s.append(saver.loop_s() - busy_s)
            else:  # the first block warms up
                ways[name].call_s.clear()
                ways[name].waited_s.clear()
    _check(lazy, training)
    for ours in (lazy, process, eager):
        ours.checkpointer.close()
    state_bytes = sum(tensor.nbytes for tensor in training.model.parameters()) * 3
    return Result(
        machine=machine.facts(work, floors.supports_direct_io(work)), state_bytes=state_bytes, steps=steps, ways=ways
    )


def _block(training: Training, saver: Any, first: int, steps: int) -> float:
    began_s = time.perf_counter()
    for step in range(first, first + steps):
        training.step()
        if saver is not None:
            saver.save(step)
    if saver is not None:
        saver.wait()
    return time.perf_counter() - began_s


def _check(lazy: Ours, training: Training) -> None:
    """Fail unless a lazy save, with a step right behind it, loads as what the state was at the call."""
    expected = [tensor.detach().clone() for tensor in training.model.parameters()]
    lazy.save(10**6)
    training.step()
    lazy.wait()
    lazy.checkpointer.load(training.state, 10**6).result(600)
    if not all(map(torch.equal, training.model.parameters(), expected)):
        raise RuntimeError("what was loaded is not what was saved")


def table(result: Result) -> str:
    """Return the run as a table in Markdown."""
    quiet_s = statistics.median(result.ways["none"].block_s)
    lines = [
        "| a save every step | time, of that without saves | held by the call | held at the optimizer | loop thread |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, way in result.ways.items():
        calls, waits = _shown(way.call_s), _shown(way.waited_s)
        share = f"{100 * sum(way.loop_s) / sum(way.block_s):.1f} % of the time" if way.loop_s else "–"
        lines.append(f"| {name} | {statistics.median(way.block_s) / quiet_s:.3f} | {calls} | {waits} | {share} |")
    step_s = quiet_s / result.steps
    return "\n".join([*lines, "", f"{result.state_bytes / 2**20:.0f} MiB of state; a step takes {step_s * 1e3:.0f} ms"])


def _shown(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    return f"{statistics.median(seconds) * 1e3:.2f} ms (most {max(seconds) * 1e3:.1f}, {len(seconds)} times)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.every", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", type=size, default=256 << 20, help="of the state (default: 256MiB)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each way (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    given = parser.parse_args()
    timeout = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(dir=given.folder) as work:
        result = run(given.size, given.batch, given.steps, given.rounds, Path(work))
    dist.destroy_process_group()
    print(table(result))
    if given.out:
        write(result, given.out)


if __name__ == "__main__":
    main()
