"""Trainings on several hosts under ``aiockpt run`` that meet one to four faults of all kinds, one after or into the other.

A case draws hosts and ranks, bad batches, and faults at steps: a trainer or all of them killed, a host lost with its memory
(also that of rank 0), a bit flipped in one copy, a disk that is full or away for a while, a stall, SIGTERM to a trainer or
to all launchers. A host is a folder for its memory, and a process group with a launcher and its trainers, which are forks
of this process: so a start costs no imports. The driver is what a scheduler is: it replaces lost hosts, and starts the job
again when that was told to end.

Each rank must be in the end, bit by bit, what it is after the expected batches alone (`tests.rewind.jobs`), and each start
must go on from what the events of the ranks before have promised (`Promises`).
"""

from __future__ import annotations

import faulthandler
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, Literal, get_args
from unittest import mock

import msgspec
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from aiockpt.events import Committed, Loaded, Opened, Promoted, Replicated, Rewound
from aiockpt.launch import restart_policy
from aiockpt.launch.torchrun import launch
from aiockpt.tools.examples.child import StepDone
from aiockpt.tools.examples.recovering_rank import DISK, FAULTS, RUN
from aiockpt.tools.examples.recovery import KEEP_ALIVE, Log
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.campaigns.faulty_rank import END, PLACES, FaultyJob, StallRequest, be_rank
from tests.campaigns.sigkill import fork, in_child, store_apart
from tests.rewind.jobs import BATCH, SAMPLES, Bad, Plan

STEPS = 36
RUN_S = 300.0
"""For a job to end: some seconds on a quiet machine."""
HANG_S = 6.0
WAITS_S = 15.0
"""For the launchers of other hosts, after one has failed."""
LAST_STEPS = 5
STACKS = signal.SIGUSR2
POLL_S = 0.01
MOST_SHOWN = 9000
"""Characters of each log, of a job that has failed."""
PRELOADED = (
    "torch._dynamo",
    "anyio._backends._asyncio",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
PACKAGES = ("engine", "lazy", "pipeline", "places", "ranks", "session")
"""What each trainer and launcher would import after its fork: three seconds of a processor."""
Kind = Literal["kill", "kill all", "host", "flip", "disk", "preempt", "preempt all"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Harm(msgspec.Struct, frozen=True):
    """What the driver does once rank 0 has done *step*, and *after_s* later.

    Attributes:
        which: a number from 0 to 1, by which a rank, a host or a file is chosen.
        lasts_s: of a disk.
    """

    step: int
    kind: Kind
    which: float
    after_s: float
    lasts_s: float = 0.0


class Schedule(msgspec.Struct, frozen=True):
    """A case."""

    hosts: int
    ranks: int
    job: FaultyJob
    harms: tuple[Harm, ...]

    @classmethod
    def draw(cls, dice: random.Random) -> Schedule:
        """Return a random one."""
        hosts, ranks = dice.choice(((2, 1), (2, 1), (3, 1), (2, 2)))
        world_size = hosts * ranks
        harms: list[Harm] = []
        stalls: list[StallRequest] = []
        bad: dict[int, Bad] = {}
        skip: Literal["bad"] | None = dice.choice(("bad", None))
        kinds = dice.choices((*KINDS, "stall", "batch"), weights=(3, 1, 3, 2, 2, 1, 1, 2, 3), k=dice.randint(1, 4))
        kind: Any
        for kind in kinds:
            step = dice.randint(3, STEPS - 8)
            if kind == "stall":
                stalls.append(StallRequest(dice.choice(PLACES), dice.randrange(world_size), step))
            elif kind == "batch":
                # The losses that a spike is seen by begin anew with each start.
                sign: Literal["nan", "spike"] = "spike" if len(kinds) == 1 and dice.random() < 0.5 else "nan"
                of = dice.sample(range(world_size), dice.randint(1, world_size))
                bad[step] = Bad(tuple(sorted(of)), sign)
            else:
                after_s = dice.choice((0.0, dice.uniform(0, 0.2), dice.uniform(0, 3)))
                harms.append(Harm(step, kind, dice.random(), after_s, dice.uniform(0.1, 3.0)))
                if kind == "flip" and dice.random() < 0.7:
                    then: Kind = dice.choice(("kill", "kill all", "host"))
                    harms.append(Harm(step, then, dice.random(), 0.0))
        # A stream is dealt out in parts that are even for two or three ranks.
        source: Literal["sampler", "stream"] = dice.choice(("sampler", "stream")) if world_size < 4 else "sampler"
        plan = Plan(world_size, skip, source, epochs=STEPS * BATCH * world_size // SAMPLES, bad=bad)
        waits = not bad and dice.random() < 0.5  # the ranks with a bad step save it in the next call, or never
        job = FaultyJob(
            plan,
            tuple(stalls),
            dice.choice((5, 10)),
            dice.choice((0.0, 0.02, 0.05)),
            waits,
            dice.choice(("full", "away")),
        )
        return cls(hosts, ranks, job, tuple(sorted(harms, key=lambda harm: harm.step)))


class Host:
    """A host: a memory, and a launcher with its trainers, as long as that runs; then its *status*."""

    def __init__(self, number: int, memory: Path) -> None:
        self.number, self.memory = number, memory
        self._pid, self.status = 0, -1
        memory.mkdir(mode=0o700)

    def start(self, launch: Callable[[Host], int]) -> None:
        """Fork the launcher."""
        self.status = -1
        self._pid = fork(lambda: launch(self))

    def runs(self) -> bool:
        """Return whether the launcher has not ended."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.kill()
        return bool(self._pid)

    def tell(self) -> None:
        """Send SIGTERM to the launcher."""
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)

    def show(self) -> None:
        """Have all processes of it write their stacks."""
        if self._pid:
            os.killpg(self._pid, STACKS)

    def kill(self) -> None:
        """Kill all of it."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


class Hosts:
    """The hosts of a job; the rendezvous's store is beside them, at *port*, so that any of them may be lost."""

    def __init__(self, schedule: Schedule, folder: Path, memory: Path, port: int) -> None:
        self._schedule, self._folder, self._memory = schedule, folder, memory
        self._port = port
        self.all: list[Host] = []
        self.jobs = self._count = 0
        for _ in range(schedule.hosts):
            self._add()

    def _add(self) -> Host:
        host = Host(self._count, self._memory / f"host-{self._count}")
        self._count += 1
        self.all.append(host)
        return host

    def start_job(self) -> None:
        """Start the launchers of all hosts."""
        self.jobs += 1
        for host in self.all:
            host.start(self._launch)

    def replace(self, host: Host, *, starts: bool) -> None:
        """Lose a host with its memory, and have another one in its place; *starts* where the job is to go on now."""
        host.kill()
        self.all.remove(host)
        shutil.rmtree(host.memory)
        new = self._add()
        if starts:
            new.start(self._launch)

    def show(self) -> None:
        """Have all processes write their stacks into the log."""
        for host in self.all:
            host.show()
        time.sleep(1.0)

    def close(self) -> None:
        """Kill what runs."""
        for host in self.all:
            host.kill()

    def _launch(self, host: Host) -> int:
        """Be the launcher of a host; return its exit status."""
        os.setsid()
        os.chdir(self._folder)
        log = os.open("launchers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  of this process, to its end
        faulthandler.register(STACKS)
        job, folder = self._schedule.job, self._folder

        def trainer() -> None:
            be_rank(job, folder, host.memory, host.number)

        read = torchrun.config_from_args

        def read_forking(options: Any) -> Any:
            config, _, _ = read(options)
            config.start_method = "fork"
            return config, trainer, []

        options = [f"--hang-s={HANG_S:g}", "--max-restarts=100", f"--rdzv-id=job-{self.jobs}", "--rdzv-backend=c10d"]
        options += [f"--nnodes={self._schedule.hosts}", f"--nproc-per-node={self._schedule.ranks}"]
        options += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--local-addr=127.0.0.1"]
        options += [f"--rdzv-conf=is_host=0,{KEEP_ALIVE}", "trainer"]
        try:
            with (
                mock.patch.object(torchrun, "config_from_args", read_forking),
                mock.patch.object(dynamic_rendezvous, "get_method_name", str),  # for a log; it takes 0.1 s at a time
            ):
                return launch(options)
        except BaseException:  # noqa: BLE001  whatever ends it
            traceback.print_exc()
            return 1


class Driver:
    """One case: the job, and what is done to it."""

    def __init__(self, schedule: Schedule, folder: Path, hosts: Hosts) -> None:
        self._schedule, self._folder, self._hosts = schedule, folder, hosts
        self._pending = list(schedule.harms)
        self._log = Log(folder)
        self._due_s: float | None = None
        self._back_s = math.inf
        self._is_told = False
        self.done: list[tuple[int, Kind, int]] = []

    def run(self) -> None:
        """Run the job to its end, as a scheduler would."""
        ends_s, failed_s = time.monotonic() + RUN_S, math.inf
        self._hosts.start_job()
        while True:
            self._log.read()
            self._harm()
            now_s = time.monotonic()
            running = [host for host in self._hosts.all if host.runs()]
            statuses = [host.status for host in self._hosts.all if host not in running]
            assert restart_policy.STOPPED not in statuses, "a launcher gave up"
            if any(statuses):
                failed_s = min(failed_s, now_s)
            if not running and not any(statuses):
                break
            if not running or now_s > failed_s + WAITS_S:  # as `srun --wait` ends what is left of a job
                self._start_again(statuses)
                failed_s = math.inf
            if now_s > ends_s:
                self._hosts.show()
                raise AssertionError(
                    f"it hangs: {[(host.number, host.runs(), host.status) for host in self._hosts.all]}"
                )
            time.sleep(POLL_S)
        self._log.read()

    def _start_again(self, statuses: list[int]) -> None:
        """Start a job again that has ended without being done."""
        reasons = [kind for _, kind, _ in self.done if kind in ("preempt", "preempt all", "host")]
        assert self._hosts.jobs <= len(reasons), f"the job ended by itself: {statuses}"
        self._hosts.close()
        self._is_told = False
        self._hosts.start_job()

    def _harm(self) -> None:
        now_s = time.monotonic()
        if now_s > self._back_s:
            self._back_s = math.inf
            (self._folder / FAULTS / DISK).unlink()
        if not self._pending or self._log.last_step() < self._pending[0].step:
            return
        if self._due_s is None:
            self._due_s = now_s + self._pending[0].after_s
        if now_s < self._due_s:
            return
        self._due_s = None
        harm = self._pending.pop(0)
        at = self._do(harm, time.monotonic_ns())
        if at is not None:
            self.done.append(at)

    def _do(self, harm: Harm, now_ns: int) -> tuple[int, Kind, int] | None:
        running = [host for host in self._hosts.all if host.runs()]
        if len(running) < len(self._hosts.all):  # it ends, or was told to
            return None
        if harm.kind in ("host", "preempt", "preempt all") and self._log.last_step() > STEPS - LAST_STEPS:
            return None  # a node that is to join those that have ended may come when they have left
        processes = [event.pid for event in self._log.processes().values()]
        step = -1
        self._is_told = self._is_told or harm.kind in ("preempt", "preempt all")
        match harm.kind:
            case "kill" | "preempt":
                number = signal.SIGKILL if harm.kind == "kill" else signal.SIGTERM
                _send(number, [processes[int(harm.which * len(processes))]])
            case "kill all":
                _send(signal.SIGKILL, processes)
            case "preempt all":
                for host in running:
                    host.tell()
            case "host":
                self._hosts.replace(running[int(harm.which * len(running))], starts=not self._is_told)
            case "disk":
                (self._folder / FAULTS / DISK).touch()
                self._back_s = time.monotonic() + harm.lasts_s
            case "flip":
                step = self._flip(harm.which)
                if step < 0:
                    return None
        return now_ns, harm.kind, step

    def _flip(self, which: float) -> int:
        """Flip a bit of the newest step in the memory of one host; return the step."""
        try:
            files = [
                (int(path.parts[-4].removeprefix("step-")), path)
                for host in self._hosts.all
                for path in host.memory.glob(f"aiockpt-*/peer/{RUN}/step-*/a-*/d/*")
            ]
            newest = max(step for step, _ in files)
            paths = sorted(path for step, path in files if step == newest)
            path = paths[int(which * len(paths))]
            with path.open("r+b") as file:
                at = int(which * 1e6) % max(path.stat().st_size, 1)
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << int(which * 1e9) % 8]))
        except (OSError, ValueError):  # it was removed meanwhile
            return -1
        return newest

    def tail(self) -> str:
        """Return what launchers and ranks said last."""
        texts = [(name, self._folder / name) for name in ("launchers.log", "errors")]
        said = "\n".join(f"{name}: {path.read_text()[-MOST_SHOWN:]}" for name, path in texts if path.exists())
        return f"{self.done}\n{said}"

    def judge(self) -> str:
        """Raise where a start, or the end, is not what it should be; return what was lost."""
        for rank in range(self._schedule.job.plan.world_size):
            assert not in_child(partial(self._compare, rank))[1], f"rank {rank} differs"
        promises = Promises()
        events: list[tuple[int, int, Any]] = [(event.at_ns, rank, event) for rank, _, event in self._log.events]
        events += [(at_ns, -1, (kind, step)) for at_ns, kind, step in self.done]
        for _, rank, event in sorted(events, key=lambda one: one[0]):
            promises.take(rank, event)
        return f"{len(promises.lost) - 1} restarts, most steps lost: {max(promises.lost)}"

    def _compare(self, rank: int) -> int:
        """Return 0 where a rank holds in the end what it should."""
        held = msgspec.json.decode((self._folder / END / str(rank)).read_bytes())
        return int(held != msgspec.to_builtins(self._schedule.job.plan.reference(rank).held()))


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Promises:
    """What the next start must go on from, by what the ranks and the driver did before.

    Attributes:
        held: the newest step that processes cannot lose.
        copied: the newest one that a host cannot lose.
        durable: the newest one on the disk.
        lost: steps that each further start trains again.
    """

    def __init__(self) -> None:
        self.held = self.copied = self.durable = -1
        self.lost: list[int] = []
        self._trained = -1
        self._opened: set[int] = set()
        self._loaded: dict[int, int] = {}
        self._flipped: set[int] = set()
        self._is_harmed = False

    def take(self, rank: int, event: Any) -> None:
        """Take in what happened next: an event of a rank, or a fault and its step."""
        match event:
            case Opened():
                if self._loaded or rank in self._opened:  # all ranks have opened before one loads
                    self._opened, self._loaded = set(), {}
                self._opened.add(rank)
            case Loaded() if rank not in self._loaded:
                self._begin(rank, event.step)
            case StepDone():
                if rank not in self._loaded:
                    self._begin(rank, -1)
                self._trained = max(self._trained, event.step)
            case Committed() if not self._is_harmed and event.step not in self._flipped:
                self.held = max(self.held, event.step)
            case Replicated() if not self._is_harmed and event.step not in self._flipped:
                self.copied = max(self.copied, event.step)
            case Promoted():
                self.durable = max(self.durable, event.step)
            case Rewound():
                self.held, self.copied = min(self.held, event.step), min(self.copied, event.step)
                self.durable = min(self.durable, event.step)
                self._trained = event.step
            case (kind, step):
                self._be_harmed(kind, step)

    def _be_harmed(self, kind: Kind, step: int) -> None:
        """Take a fault in; *step* is that of a flipped bit."""
        if kind == "host":
            self.held = max(self.copied, self.durable)
            self.copied, self._is_harmed = self.durable, True
        elif kind == "flip":
            self._flipped.add(step)
            if step > self.copied:  # in the only copy, perhaps
                self.held = max(min(self.held, step - 1), self.durable)
            self.copied = max(min(self.copied, step - 1), self.durable)

    def _begin(self, rank: int, step: int) -> None:
        """Note that a rank goes on after *step*."""
        if not self._loaded:
            assert step >= self.held, f"a start goes on after step {step}, and {self.held} was promised"
            self.lost.append(max(self._trained - step, 0))
            self._trained, self._is_harmed, self._flipped = step, False, set()
            self.held, self.copied = step, min(self.copied, step)
        self._loaded[rank] = step
        assert len(set(self._loaded.values())) == 1, f"ranks go on after different steps: {self._loaded}"


def look(seed: int, folder: Path) -> Outcomes:
    """Run one case."""
    schedule = Schedule.draw(random.Random(seed))
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    memory = Path(tempfile.mkdtemp(prefix="aiockpt-faults-", dir=shm))
    (folder / FAULTS).mkdir()
    with store_apart() as port:
        hosts = Hosts(schedule, folder, memory, port)
        driver = Driver(schedule, folder, hosts)
        try:
            with noted(lambda: f"{schedule}\n{driver.tail()}"):
                driver.run()
                return Counter({driver.judge(): 1})
        finally:
            hosts.close()
            shutil.rmtree(memory, ignore_errors=True)


def prepare() -> Case:
    """Return the cases."""
    packages = [import_module(f"aiockpt.{name}") for name in PACKAGES]
    ours = [found.name for one in packages for found in walk_packages(one.__path__, f"{one.__name__}.")]
    for name in (*PRELOADED, *ours):
        import_module(name)
    return in_folders(look)


CAMPAIGN = Campaign(name="faults", counts="jobs", prepare=prepare, smoke_count=1, apart=True)
