"""The cost of saving from a GPU: pauses beside one pinned copy of the same bytes, and steps beside a copy.

Each round, in one process, warm (the staging pool holds the state, and is pinned):

- *pinned copy*: one copy of as many bytes from one tensor on the device into one pinned buffer, waited for. The floor.
- *eager*: the time that ``save()`` holds the caller, with an idle device at the call.
- *lazy*: the time of the call, and the slowdown of the steps beside the copy: steps run from the call until the snapshot
  is taken; *slowed* is their mean over that of the same steps in quiet, right before and after, less one.
- *device*: the time of the call, and until the device has made its copy (`torch.cuda.synchronize` after the call).

The next save begins when the last one is committed; the last one is loaded and compared. The twin shows without a device
that the measurement runs (`tests.simulated.twin_accelerator`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import aiockpt
from aiockpt.events import Event, SnapshotTaken
from aiockpt.options import Snapshot
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.cuda import Cuda
from aiockpt.runtime.world import World
from benchmarks.pages import MIB
from benchmarks.report import Samples
from benchmarks.steps import run_steps, seconds
from benchmarks.visit import Outcome, Turn
from tests.simulated.twin_accelerator import TwinAccelerator

DEADLINE_S = 600.0
QUIET_STEPS = 20
BATCH, TWIN_BATCH = 4096, 8


class Device:
    """The measured device: the current CUDA device, or with *twin* the twin without a device."""

    def __init__(self, twin: bool) -> None:
        self.twin = TwinAccelerator("late", immediate=True) if twin else None
        self.accelerator: Accelerator = self.twin or Cuda()
        self.name = "twin: no device, figures mean nothing" if twin else torch.cuda.get_device_name()
        self.synchronize: Callable[[], object] = self.twin.finish if self.twin else torch.cuda.synchronize

    def place(self, module: nn.Module) -> nn.Module:
        """Return *module* with its parameters on the device."""
        if self.twin is None:
            return module.cuda()
        self.twin.place(module)
        return module

    def batch_of(self, width: int) -> torch.Tensor:
        """Return the samples of a step."""
        return torch.randn(TWIN_BATCH, width) if self.twin else torch.randn(BATCH, width, device="cuda")

    def pinned_copy(self, size_bytes: int) -> Callable[[], None]:
        """Return a function that makes one pinned copy of *size_bytes*, and waits for it."""
        source = next(self.place(nn.ParameterList([nn.Parameter(torch.zeros(size_bytes // 4))])).parameters()).detach()
        target = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=self.twin is None).view(torch.float32)

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            self.synchronize()

        return copy


class Run:
    """A training run of about *size_bytes* of state on the device, and its checkpointer."""

    def __init__(self, device: Device, size_bytes: int, place: Path) -> None:
        self.device = device
        width = max(16, min(4096, int((size_bytes / 12 / 4) ** 0.5)))
        layers = max(1, size_bytes // 12 // (width * width))  # 12: a parameter and its two moments
        self.model = device.place(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._batch = device.batch_of(width)
        self._snapshots: list[SnapshotTaken] = []
        self.step()
        for entry in self.optimizer.state.values():
            for held in entry.values():
                if device.twin and isinstance(held, torch.Tensor):
                    device.twin.place(held)
        self.ckpt = aiockpt.Checkpointer(
            place,
            retention=aiockpt.Retention(last=1),
            limits=aiockpt.Limits(io=aiockpt.IO(pool_bytes=2 * size_bytes + 256 * MIB)),
            observers=[self],
            world=World(accelerator=device.accelerator),
        )
        self._count = 0
        self.ckpt.warm_up(self.state).result(DEADLINE_S)

    def tensors(self) -> list[torch.Tensor]:
        """Return all saved tensors of the model and its optimizer."""
        moments = (held for entry in self.optimizer.state.values() for held in entry.values())
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

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
        """Save, and return the future and the seconds of the call."""
        self._count += 1
        begun_s = time.perf_counter()
        future = self.ckpt.save(self._count, self.state, snapshot=snapshot)
        return future, time.perf_counter() - begun_s

    def end(self, future: aiockpt.SaveFuture) -> SnapshotTaken:
        """Wait until *future* is committed; return how its snapshot was taken."""
        future.result(DEADLINE_S)
        return self._snapshots[-1]

    def check(self) -> None:
        """Fail unless the last save loads as the current state; no step has been taken since."""
        expected = [tensor.cpu().clone() for tensor in self.tensors()]
        for tensor in self.tensors():
            tensor.zero_()
        self.ckpt.load(self.state).result(DEADLINE_S)
        self.device.synchronize()
        if not all(torch.equal(tensor.cpu(), value) for tensor, value in zip(self.tensors(), expected, strict=True)):
            raise RuntimeError("what was loaded is not what was saved")


def device(turn: Turn, outcome: Outcome) -> None:
    """Measure rounds on the device, or on the twin."""
    twin = bool(turn.settings["twin"])
    if not twin and not torch.cuda.is_available():
        outcome.unavailable["aiockpt"] = (
            "it needs an accelerator, and this machine has none; --set twin=1 shows it runs"
        )
        return
    run = Run(Device(twin), turn.size_bytes, Path(turn.folder) / "saved")
    outcome.note(turn, f"{run.device.name}.")
    samples: Samples = {}
    with run.ckpt:
        for _ in range(turn.repetitions):
            found, taken = measure(run)
            outcome.note(turn, f"A snapshot that was to be the device's own was taken so: {taken}.")
            for metric, value in found.items():
                samples.setdefault(metric, []).append(value)
        run.check()
    outcome.add(turn, "aiockpt", samples)


def measure(run: Run) -> tuple[dict[str, float], str]:
    """Carry out one round; return its figures, and how its last snapshot was taken: "device" where memory sufficed."""
    state_bytes = sum(tensor.nbytes for tensor in run.tensors())
    copy = run.device.pinned_copy(state_bytes)
    copy()
    pinned_copy_s = min(seconds(copy) for _ in range(3))
    del copy
    future, eager_pause_s = run.save("eager")
    run.end(future)
    quiet = run_steps(run.step, lambda count: count >= QUIET_STEPS)
    begun_s = time.perf_counter()
    future, lazy_call_s = run.save("lazy")
    beside = run_steps(run.step, lambda count: bool(count) and future.snapshotted().done())
    all_s = time.perf_counter() - begun_s
    copy_s = run.end(future).copy_s
    quiet += run_steps(run.step, lambda count: count >= QUIET_STEPS)
    begun_s = time.perf_counter()
    last, device_call_s = run.save("device")
    run.device.synchronize()
    device_copy_s = time.perf_counter() - begun_s
    taken = run.end(last)
    quiet_step_s = statistics.median(quiet)
    figures = {
        "state_bytes": state_bytes,
        "pinned_copy_s": pinned_copy_s,
        "eager_pause_s": eager_pause_s,
        "eager_of_pinned_ratio": eager_pause_s / pinned_copy_s,
        "lazy_call_s": lazy_call_s,
        "device_call_s": device_call_s,
        "device_copy_s": device_copy_s,
        "quiet_step_s": quiet_step_s,
        "beside_step_s": statistics.fmean(beside),
        "beside_steps_count": len(beside),
        "slowed_fraction": statistics.fmean(beside) / quiet_step_s - 1,
        "copy_s": copy_s,
        "lost_s": all_s - len(beside) * quiet_step_s,
    }
    return figures, taken.snapshot
