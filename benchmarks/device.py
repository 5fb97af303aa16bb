"""What does saving from a GPU take from training? Pauses beside one pinned copy of the same bytes, and steps beside a copy.

    python -m benchmarks.device --size 4GiB --repeat 7 --out benchmarks/results/device/4GiB.json

Each round, in one process, warm (the staging pool holds the state, and is pinned):

- *pinned copy*: one copy of as many bytes from one tensor on the device into one pinned buffer, waited for. The floor.
- *eager*: how long ``save()`` holds the caller, the device idle at the call.
- *lazy*: how long the call is, and what the steps beside the copy cost: steps run from the call until the snapshot is
  taken; *slowed* is their mean over that of the same steps in quiet, right before and after, less one.
- *device*: how long the call is, and until the device has made its copy (`torch.cuda.synchronize` after the call).

The next save begins when the last one is committed. What is not shown: several devices that share one bus, training that
fills the bus itself, and storage (a folder of this machine, in the time of nobody's pause).

Without an accelerator it says so and ends with status 2. ``--twin`` runs it with `aiockpt.testing.twin_accelerator`, to
show that it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import nn

import aiockpt
from aiockpt.events import Event, SnapshotTaken
from aiockpt.options import Snapshot
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.cuda import Cuda
from aiockpt.runtime.world import World
from aiockpt.testing.twin_accelerator import TwinAccelerator
from benchmarks import machine
from benchmarks.__main__ import size
from benchmarks.report import write

MIB = 1 << 20
NO_DEVICE = 2
DEADLINE_S = 600.0
QUIET_STEPS = 20
BATCH = 4096


class Device(Protocol):
    """What is measured: a GPU, or the twin."""

    name: str
    accelerator: Accelerator
    batch: int

    def place(self, module: nn.Module) -> nn.Module: ...
    def batch_of(self, width: int) -> torch.Tensor: ...
    def synchronize(self) -> None: ...
    def pinned(self, size_bytes: int) -> torch.Tensor: ...


class Gpu:
    """The current CUDA device."""

    batch = BATCH

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        self.accelerator: Accelerator = Cuda()

    def place(self, module: nn.Module) -> nn.Module:
        return module.cuda()

    def batch_of(self, width: int) -> torch.Tensor:
        return torch.randn(self.batch, width, device="cuda")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class Twin:
    """No device at all."""

    name = "twin: no device, figures mean nothing"
    batch = 8

    def __init__(self) -> None:
        self._twin = TwinAccelerator("late", immediate=True)
        self.accelerator: Accelerator = self._twin

    def place(self, module: nn.Module) -> nn.Module:
        self._twin.place(module)
        return module

    def batch_of(self, width: int) -> torch.Tensor:
        return torch.randn(self.batch, width)

    def synchronize(self) -> None:
        self._twin.finish()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One round; seconds.

    Attributes:
        state_bytes: on the device.
        pinned_copy_s: the floor.
        eager_pause_s, lazy_call_s, device_call_s: how long the calls held the caller.
        device_copy_s: until the device had its own copy.
        taken: how the last snapshot was really taken, "device" where there was room.
        quiet_step_s, beside_step_s, beside_steps: mean steps, and how many began beside the lazy copy.
        copy_s: how long the lazy copy took.
        lost_s: what all steps beside one lazy copy took longer than in quiet, the call included.
    """

    state_bytes: int
    pinned_copy_s: float
    eager_pause_s: float
    lazy_call_s: float
    device_call_s: float
    device_copy_s: float
    taken: str
    quiet_step_s: float
    beside_step_s: float
    beside_steps: int
    copy_s: float
    lost_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: machine.Machine
    device: str
    samples: list[Sample]


class Run:
    """A training run of about *size_bytes* of state on the device, and its checkpointer."""

    def __init__(self, device: Device, size_bytes: int, place: Path) -> None:
        self.device = device
        width = max(16, min(4096, int((size_bytes / 12 / 4) ** 0.5)))
        layers = max(1, size_bytes // 12 // (width * width))  # 12: a parameter and its two moments
        self.model = device.place(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = device.batch_of(width)
        self._snapshots: list[SnapshotTaken] = []
        self.step()
        for entry in self.optimizer.state.values():
            for held in entry.values():
                if isinstance(device, Twin) and isinstance(held, torch.Tensor):
                    device._twin.place(held)
        self.ckpt = aiockpt.Checkpointer(
            place,
            retention=aiockpt.Retention(last=1),
            io=aiockpt.IO(pool_bytes=2 * size_bytes + 256 * MIB),
            observers=[self],
            world=World(accelerator=device.accelerator),
        )
        self._count = 0
        self.ckpt.warm_up(self.state).result(DEADLINE_S)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def state_bytes(self) -> int:
        moments = (held for entry in self.optimizer.state.values() for held in entry.values())
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *moments])

    def on_event(self, event: Event) -> None:
        if isinstance(event, SnapshotTaken):
            self._snapshots.append(event)

    def step(self) -> None:
        """Train one step, and wait for the device."""
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.device.synchronize()

    def save(self, snapshot: Snapshot) -> tuple[aiockpt.SaveFuture, float]:
        """Save, and return how long the call took."""
        self._count += 1
        begun_s = time.perf_counter()
        future = self.ckpt.save(self._count, self.state, snapshot=snapshot)
        return future, time.perf_counter() - begun_s

    def end(self, future: aiockpt.SaveFuture) -> SnapshotTaken:
        """Wait until *future* is committed; return how its snapshot was taken."""
        future.result(DEADLINE_S)
        return self._snapshots[-1]


def timed(work: Callable[[], object]) -> float:
    """Return how long *work* takes."""
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def pinned_copy(device: Device, size_bytes: int) -> Callable[[], None]:
    """Return what makes one pinned copy of *size_bytes*, and waits for it."""
    source = device.place(nn.ParameterList([nn.Parameter(torch.zeros(size_bytes // 4))]))[0].detach()  # type: ignore[index]
    target = device.pinned(source.nbytes).view(torch.float32)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    return copy


def measure(run: Run) -> Sample:
    """Carry out one round."""
    copy = pinned_copy(run.device, run.state_bytes)
    copy()
    pinned_copy_s = min(timed(copy) for _ in range(3))
    del copy
    future, eager_pause_s = run.save("eager")
    run.end(future)
    quiet = [timed(run.step) for _ in range(QUIET_STEPS)]
    begun_s = time.perf_counter()
    future, lazy_call_s = run.save("lazy")
    beside: list[float] = []
    while not beside or not future.snapshotted().done():
        beside.append(timed(run.step))
    all_s = time.perf_counter() - begun_s
    copy_s = run.end(future).copy_s
    quiet += [timed(run.step) for _ in range(QUIET_STEPS)]
    begun_s = time.perf_counter()
    future, device_call_s = run.save("device")
    run.device.synchronize()
    device_copy_s = time.perf_counter() - begun_s
    taken = run.end(future)
    quiet_step_s = statistics.median(quiet)
    return Sample(
        state_bytes=run.state_bytes,
        pinned_copy_s=pinned_copy_s,
        eager_pause_s=eager_pause_s,
        lazy_call_s=lazy_call_s,
        device_call_s=device_call_s,
        device_copy_s=device_copy_s,
        taken=taken.snapshot,
        quiet_step_s=quiet_step_s,
        beside_step_s=statistics.fmean(beside),
        beside_steps=len(beside),
        copy_s=copy_s,
        lost_s=all_s - len(beside) * quiet_step_s,
    )


def render(report: Report) -> str:
    """Return the medians as a table."""

    def median(of: Callable[[Sample], float]) -> float:
        return statistics.median(map(of, report.samples))

    pinned_s = median(lambda s: s.pinned_copy_s)
    gigabytes = report.samples[0].state_bytes / 1e9
    rows = [
        ("one pinned copy", f"{pinned_s * 1e3:.2f} ms ({gigabytes / pinned_s:.1f} GB/s)"),
        ("eager pause", f"{median(lambda s: s.eager_pause_s) * 1e3:.2f} ms"),
        ("eager pause ÷ pinned copy", f"{median(lambda s: s.eager_pause_s / s.pinned_copy_s):.2f}"),
        ("lazy call", f"{median(lambda s: s.lazy_call_s) * 1e3:.2f} ms"),
        ("lazy: lost beside one copy", f"{median(lambda s: s.lost_s) * 1e3:.2f} ms"),
        ("lazy: steps slowed by", f"{median(lambda s: s.beside_step_s / s.quiet_step_s - 1):.1%}"),
        ("device call", f"{median(lambda s: s.device_call_s) * 1e3:.2f} ms"),
        ("device: until its copy is made", f"{median(lambda s: s.device_copy_s) * 1e3:.2f} ms"),
        ("device: how it was taken", ", ".join(sorted({sample.taken for sample in report.samples}))),
    ]
    lines = [f"{report.device}, {gigabytes:.2f} GB of state, {len(report.samples)} rounds", "", "| what | median |"]
    return "\n".join([*lines, "| --- | --- |", *(f"| {what} | {figure} |" for what, figure in rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--size", type=size, default=1 << 30, help="of the state, for example 4GiB (default: 1GiB)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    parser.add_argument("--work", type=Path, help="where to save to (default: a temporary folder)")
    parser.add_argument("--twin", action="store_true", help="without a device, small: shows that it runs, no figures")
    chosen = parser.parse_args(arguments)
    if not chosen.twin and not torch.cuda.is_available():
        print(
            "benchmarks.device needs an accelerator, and this machine has none (--twin shows that it runs)",
            file=sys.stderr,
        )
        return NO_DEVICE
    device: Device = Twin() if chosen.twin else Gpu()
    with tempfile.TemporaryDirectory(dir=chosen.work) as work:
        run = Run(device, MIB if chosen.twin else chosen.size, Path(work))
        with run.ckpt:
            samples = [measure(run) for _ in range(chosen.repeat)]
        report = Report(machine=machine.facts(Path(work), direct_io=True), device=device.name, samples=samples)
    if chosen.out:
        write(report, chosen.out)
    print(render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
