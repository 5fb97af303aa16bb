"""What does copying a checkpoint to a farther tier take from training? Steps beside it, and steps without.

    python -m benchmarks.promotion --size 512MiB --repeat 5 --out benchmarks/results/promotion/512MiB.json

A save is committed on the nearest tier, and all that follows a save has ended; then it is copied to the next tier, at that
tier's bandwidth, while a loop of small training steps runs (`benchmarks.training`, the kind that suffers most). Right
before and after the same loop runs in quiet: *slowed* is the mean step beside the copy over the mean of both quiet runs,
less one. The first copy to each place, which allocates what the later ones use again, is not counted. In turn, in one
process:

- *none*: nothing is copied; shows how far two quiet runs differ by chance.
- *folder*: to another folder of the same disk, at the default bandwidth.
- *folder, no limit*: the same as fast as it goes.
- *bucket*, *bucket, no limit*: over the network of this machine to an S3 server that throws away what it gets
  (`benchmarks.drain`): a real one is elsewhere and takes nothing of the trainer's processors.
- *bucket, weights*: as *bucket*, the weights alone (a seventh of the bytes).
- *SeaweedFS here*: to a real store on the same processors, at the lowest priority. It takes more of them than training
  does, and that is told; no trainer has its store beside it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import torch

import aiockpt
from aiockpt.backends.s3 import S3Backend
from aiockpt.events import Event, Promoted
from aiockpt.storage.backend import Backend, Upload
from aiockpt.storage.open import open_backend
from aiockpt.storage.retry import Retrying
from benchmarks import floors, machine
from benchmarks import state as states
from benchmarks.drain_listing import draining
from benchmarks.pages import MIB
from benchmarks.report import write
from benchmarks.training import percentile, small_step
from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

SETTLE_S = 1.0
LOWEST_PRIORITY = 19
DEADLINE_S = 300.0
POOL_BYTES = 64 * MIB
_UNITS = {"MiB": MIB, "GiB": 1 << 30}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One copy, and the steps beside it.

    Attributes:
        copied_bytes, copy_s: what was copied, and for how long steps were counted beside it.
        quiet_s, busy_s: the mean step without, and beside it; *slowed_fraction* is what that comes to.
        own_cpu_s: of this process beside the copy, above what its steps take in quiet.
        server_cpu_s: of the store's process.
    """

    way: str
    copied_bytes: int
    copy_s: float
    quiet_s: float
    busy_s: float
    quiet_p50_s: float
    busy_p50_s: float
    quiet_p99_s: float
    busy_p99_s: float
    slowed_fraction: float
    own_cpu_s: float
    server_cpu_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: machine.Machine
    state_bytes: int
    default_bandwidth: float | None
    samples: list[Sample]


class Steps(msgspec.Struct, frozen=True):
    """The seconds that each of some steps took, and the processor's time of this process meanwhile."""

    seconds: list[float]
    cpu_s: float

    @property
    def mean_s(self) -> float:
        """Mean of a step."""
        return statistics.fmean(self.seconds)


def run_steps(step: Callable[[], None], enough: Callable[[float], bool]) -> Steps:
    """Run steps until *enough* says so of the seconds since the first."""
    seconds: list[float] = []
    cpu_s = _cpu_s()
    begun_s = before_s = time.perf_counter()
    while not enough(before_s - begun_s):
        step()
        now_s = time.perf_counter()
        seconds.append(now_s - before_s)
        before_s = now_s
    return Steps(seconds, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_of_s(pid: int | None) -> float:
    """Return the processor's time of a process so far; of none, none."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Place(msgspec.Struct, frozen=True):
    """Where to copy to; *tier* None copies nothing. With *endpoint_url*, a bucket there, served by *server_pid*."""

    way: str
    tier: aiockpt.Tier | None = None
    endpoint_url: str = ""
    server_pid: int | None = None

    def open(self) -> Backend:
        """Return the place's backend."""
        assert self.tier is not None
        if not self.endpoint_url:
            return open_backend(self.tier.url)
        return Retrying(S3Backend(self.tier.url, endpoint_url=self.endpoint_url, region="us-east-1"))


class Sizes:
    """Hears how many bytes were copied."""

    def __init__(self) -> None:
        self.copied_bytes = 0

    def on_event(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Promoted):
            self.copied_bytes += event.bytes


class Gated:
    """A backend that makes no data file until *gate* is set: so a copy begins when it is to be measured."""

    def __init__(self, inner: Backend, gate: threading.Event) -> None:
        self._inner = inner
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, key: str, size: int) -> Upload:
        """Wait for the gate, then as the inner backend does."""
        await anyio.to_thread.run_sync(self._gate.wait, DEADLINE_S)
        return await self._inner.create(key, size)


class Opened:
    """A checkpointer of a near folder and *place*, kept open from one copy to the next."""

    def __init__(self, place: Place, work: Path) -> None:
        self.gate = threading.Event()
        self.sizes = Sizes()
        self.far = None if place.tier is None else Gated(place.open(), self.gate)
        tiers = [aiockpt.Tier(work / f"near {place.way}", keep=1)]
        if place.tier is not None:
            tiers.append(msgspec.structs.replace(place.tier, url=self.far))
        self.checkpointer = aiockpt.Checkpointer(tiers, observers=[self.sizes], io=aiockpt.IO(pool_bytes=POOL_BYTES))


class Bench:
    """The training process: its steps, its state, and the places."""

    def __init__(self, work: Path, size_bytes: int, quiet_s: float) -> None:
        self._work = work
        self._state = states.build(size_bytes)
        self._state["model"] = _as_module(self._state["model"])
        self._quiet_s = quiet_s
        self._step = small_step()
        self._opened: dict[str, Opened] = {}
        self._numbers = iter(range(1, 1 << 30))

    def sample(self, place: Place) -> Sample:
        """Save once and copy it to *place* beside the steps."""
        opened = self._opened.get(place.way) or self._opened.setdefault(place.way, Opened(place, self._work))
        opened.sizes.copied_bytes = 0
        opened.gate.clear()
        save = opened.checkpointer.save(next(self._numbers), self._state)
        save.result(DEADLINE_S)
        before = self._quiet()
        server_s = _cpu_of_s(place.server_pid)
        opened.gate.set()
        if opened.far is None:
            busy = run_steps(self._step, lambda seconds: seconds >= 2 * self._quiet_s)
        else:
            there = save.committed(opened.far)
            busy = run_steps(self._step, lambda _: there.done())
            there.result(DEADLINE_S)
        server_s = _cpu_of_s(place.server_pid) - server_s
        after = self._quiet()
        quiet = before.seconds + after.seconds
        quiet_s = statistics.fmean(quiet)
        quiet_cpu_s = (before.cpu_s + after.cpu_s) / len(quiet)
        return Sample(
            way=place.way,
            copied_bytes=opened.sizes.copied_bytes,
            copy_s=sum(busy.seconds),
            quiet_s=quiet_s,
            busy_s=busy.mean_s,
            quiet_p50_s=percentile(quiet, 0.5),
            busy_p50_s=percentile(busy.seconds, 0.5),
            quiet_p99_s=percentile(quiet, 0.99),
            busy_p99_s=percentile(busy.seconds, 0.99),
            slowed_fraction=busy.mean_s / quiet_s - 1,
            own_cpu_s=busy.cpu_s - quiet_cpu_s * len(busy.seconds),
            server_cpu_s=server_s,
        )

    def close(self) -> None:
        """Close all places."""
        for opened in self._opened.values():
            opened.gate.set()
            opened.checkpointer.close()

    def _quiet(self) -> Steps:
        os.sync()
        time.sleep(SETTLE_S)
        return run_steps(self._step, lambda seconds: seconds >= self._quiet_s)


def _as_module(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with these parameters, so that there are weights."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor, requires_grad=False))
    return module


@contextmanager
def places(work: Path) -> Iterator[list[Place]]:
    """Yield where to copy to, while the servers run; SeaweedFS where it is installed."""
    with ExitStack() as running:
        os.environ.update(CREDENTIALS)
        drain, pid = running.enter_context(draining())
        bucket = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        found = [
            Place("none"),
            Place("folder", aiockpt.Tier(work / "far", keep=1)),
            Place("folder, no limit", aiockpt.Tier(work / "far without limit", keep=1, bandwidth=None)),
            Place("bucket", aiockpt.Tier(f"{bucket}/a"), drain, pid),
            Place("bucket, no limit", aiockpt.Tier(f"{bucket}/b", bandwidth=None), drain, pid),
            Place("bucket, weights", aiockpt.Tier(f"{bucket}/c", content="weights"), drain, pid),
        ]
        if (program := find_weed()) is not None:
            server = running.enter_context(seaweed_server(program))
            assert server._process is not None
            pid = server._process.pid
            os.setpriority(os.PRIO_PGRP, pid, LOWEST_PRIORITY)
            found.append(Place("SeaweedFS here", aiockpt.Tier(bucket, keep=1), server.endpoint_url, pid))
        yield found


def run(work: Path, size_bytes: int, repeat: int, quiet_s: float, chosen: Sequence[str]) -> Report:
    """Measure every way *repeat* times, in turn."""
    samples = []
    with places(work) as found:
        bench = Bench(work, size_bytes, quiet_s)
        wanted = [place for place in found if not chosen or place.way in chosen]
        for place in wanted:
            bench.sample(place)
        for _ in range(repeat):
            for place in wanted:
                samples.append(bench.sample(place))
                print(f"{place.way}: {samples[-1].slowed_fraction:+.1%}", file=sys.stderr)
        bench.close()
    return Report(
        machine=machine.facts(work, floors.supports_direct_io(work)),
        state_bytes=size_bytes,
        default_bandwidth=aiockpt.Tier(work).bandwidth,
        samples=samples,
    )


def render(report: Report) -> str:
    """Return the table, as Markdown: medians, and the least and the most of *slowed*."""
    lines = [
        "| copied to | mean step slowed: median (all) | median step | at | CPU s/GiB: own · store's | p99: quiet · beside |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way in dict.fromkeys(sample.way for sample in report.samples):
        some = [sample for sample in report.samples if sample.way == way]
        slowed = sorted(sample.slowed_fraction for sample in some)
        gib = statistics.median(sample.copied_bytes for sample in some) / (1 << 30)
        speed = statistics.median(sample.copied_bytes / sample.copy_s for sample in some) / 1e6
        own, stores = (
            statistics.median(getattr(sample, name) for sample in some) / gib if gib else 0.0
            for name in ("own_cpu_s", "server_cpu_s")
        )
        middle = statistics.median(sample.busy_p50_s / sample.quiet_p50_s - 1 for sample in some)
        quiet, busy = (statistics.median(getattr(sample, name) for sample in some) for name in _P99)
        lines.append(
            f"| {way} | {statistics.median(slowed):+.1%} ({slowed[0]:+.1%} … {slowed[-1]:+.1%}) | {middle:+.1%} | "
            f"{f'{speed:.0f} MB/s' if gib else '–'} | {f'{own:.2f} · {stores:.2f}' if gib else '–'} | "
            f"{quiet * 1e3:.2f} · {busy * 1e3:.2f} ms |"
        )
    return "\n".join(lines)


_P99 = ("quiet_p99_s", "busy_p99_s")


def _size(text: str) -> int:
    number, unit = text[:-3], text[-3:]
    if unit not in _UNITS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give 512MiB or 2GiB")
    return int(number) * _UNITS[unit]


def main() -> int:
    """Run what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.promotion", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--size", type=_size, default=_size("512MiB"), help="of the state (default: 512MiB)")
    parser.add_argument("--repeat", type=int, default=5, help="copies of each kind (default: 5)")
    parser.add_argument("--quiet-s", type=float, default=1.0, help="of each quiet run (default: 1)")
    parser.add_argument("--way", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--work", type=Path, help="the folder, and so the disk (default: a temporary one here)")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: none)")
    parser.add_argument("--smoke", action="store_true", help="8 MiB, once: shows that it runs, no figures")
    arguments = parser.parse_args()
    size, repeat, quiet_s = (
        (8 * MIB, 1, 0.1) if arguments.smoke else (arguments.size, arguments.repeat, arguments.quiet_s)
    )
    with tempfile.TemporaryDirectory(prefix=".bench-promotion-", dir=arguments.work or Path.cwd()) as work:
        report = run(Path(work), size, repeat, quiet_s, arguments.way)
    print(render(report))
    if arguments.out:
        write(report, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
