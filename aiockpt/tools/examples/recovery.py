"""Demo of a run that recovers by itself: a number, a disk, a process, a thread and a host go bad, one after the other.

    aiockpt demo --recovery

Several "hosts", each with a memory and a launcher (``aiockpt run``) of its own, train one model on this machine, and save
each step into each other's memory. The *reference* is the same job without faults: in the end every loss must be its, bit by
bit. Read `train_recovering` to see the training loop; this module starts it, breaks things, and measures.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from aiockpt.events import Event, Loaded, Opened, Promoted, PromotionFailed, Rewound
from aiockpt.launch.history import read_launches
from aiockpt.tools.examples.child import StepDone
from aiockpt.tools.examples.demo import DIFFERENT, EXACT
from aiockpt.tools.examples.phases import DemoError
from aiockpt.tools.examples.recovering_rank import DISK, EVENTS, FAULTS, RUN, RankEvent, RecoveryJob

HANG_S = 10.0
"""After which the launchers of the demo take a rank that stands still for hung; by itself it is a minute at least."""
CALM_STEPS, STEPS_OF_A_FAULT = 8, 15
"""Between two faults, and with what is trained while one is noticed."""
DEADLINE_S = 600.0
"""For the run to do what a fault is followed by."""
KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=10"
"""After less, launchers that a busy machine holds up take each other for dead; a new host needs as long to start."""
POLL_S = 0.05
LAUNCH, DRILL = Path("launch", "demo"), "drill"
Say = Callable[[str], object]
T = TypeVar("T")
E = TypeVar("E", bound=Event)


class RecoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """*hosts*, each with so many *ranks*, the *steps* of training, the *faults* in their order; the rest as of `Demo`."""

    hosts: int = 4
    ranks: int = 2
    steps: int = 120
    faults: tuple[str, ...] = ("gradient", "disk", "process", "hang", "host")
    dir: Path | None = None
    json: bool = False
    is_kept: ClassVar[bool] = True
    look: ClassVar[str] = f"aiockpt report {{}}/{DRILL}/{RUN}"

    def check(self) -> None:
        """Raise DemoError where there is no room for all faults."""
        if self.hosts < 2 or self.ranks < 1:
            raise DemoError(
                "--hosts must be 2 or more, and --ranks 1 or more: a host is to hold what another one loses"
            )
        if self.steps < (enough := (len(self.faults) + 1) * STEPS_OF_A_FAULT):
            raise DemoError(f"{self.steps} steps are too few for {len(self.faults)} faults: take {enough} or more")

    def run(self, folder: Path, say: Say) -> int:
        """Run it, and print the result."""
        result = run_recovery(self, folder.resolve(), say)
        if self.json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return DIFFERENT if result.different else EXACT


class Recovery(msgspec.Struct, frozen=True):
    """What followed a fault.

    Attributes:
        fault: in words, at *step*.
        noticed_s: until the launcher, or the trainers, knew; *training_s*: until the next new step was done.
        from_step: the first one that was trained then; *lost_steps*: how many were trained again.
        copied_step: of a disk: the first one that came there when it had room again.
    """

    fault: str
    step: int
    noticed_s: float
    training_s: float
    from_step: int
    lost_steps: int
    copied_step: int | None = None

    def __str__(self) -> str:
        lost = self.lost_steps
        again = f"{lost} step{'s' * (lost > 1)} trained again" if lost else "no step lost"
        then = f"next step done after {self.training_s:.1f} s: step {self.from_step}, {again}"
        if self.copied_step is not None:
            then = f"training went on; step {self.copied_step} is on the disk again"
        return f"step {self.step:>3}  {self.fault}\n          noticed after {self.noticed_s:.1f} s; {then}"


class Log:
    """The events of all ranks of one job, in the order in which they were written: each with its rank and host."""

    def __init__(self, folder: Path) -> None:
        self._path, self._offset = folder / EVENTS, 0
        self._decoder = msgspec.json.Decoder(tuple[int, int, RankEvent])
        self.events: list[tuple[int, int, RankEvent]] = []

    def read(self) -> None:
        """Read what is new; a kill may cut a line."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            new, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(new) + len(newline)
            for line in new.splitlines():
                with suppress(msgspec.DecodeError):
                    self.events.append(self._decoder.decode(line))

    def losses(self) -> dict[int, float]:
        """Return the loss of rank 0 by step; of one that was trained twice the last."""
        return {one.step: one.loss for rank, _, one in self.events if rank == 0 and isinstance(one, StepDone)}

    def last_step(self) -> int:
        """Return the last step that rank 0 has done; -1 before the first."""
        return max((one.step for rank, _, one in self.events if rank == 0 and isinstance(one, StepDone)), default=-1)

    def processes(self) -> dict[int, Opened]:
        """Return for each rank the process that is it now."""
        return {rank: one for rank, _, one in self.events if isinstance(one, Opened)}

    def host_of(self, rank: int) -> int:
        return next(host for one, host, event in reversed(self.events) if one == rank and isinstance(event, Opened))

    def after(self, since_ns: int, kind: type[E]) -> E | None:
        """Return the first event of *kind* after a time of the monotonic clock."""
        return next((one for _, _, one in self.events if isinstance(one, kind) and one.at_ns > since_ns), None)


class Cluster:
    """The hosts of one job: folders for their memories, and a launcher for each, which starts its ranks.

    Args:
        folder: of the job; *memory* is where the hosts have theirs.
    """

    def __init__(self, options: RecoveryOptions, folder: Path, memory: Path) -> None:
        self._options, self._folder, self._memory = options, folder, memory
        (folder / FAULTS).mkdir(parents=True)
        memory.mkdir(mode=0o700)
        self.log = Log(folder)
        self._port = _free_port()
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._count = 0
        for _ in range(options.hosts):
            self.add_host()

    def add_host(self) -> None:
        """Boot a host with an empty memory; the first one meets the others."""
        number, self._count = self._count, self._count + 1
        memory = self._memory / f"host-{number}"
        memory.mkdir(mode=0o700)
        job = RecoveryJob(folder=str(self._folder), memory=str(memory), host=number, steps=self._options.steps)
        conf = f"is_host={not number},{KEEP_ALIVE}"
        command = [sys.executable, "-m", "aiockpt.tools.cli.main", "run"]
        command += [
            f"--hang-s={HANG_S:g}",
            "--max-restarts=100",
            f"--log-dir={LAUNCH.parent}",
            f"--rdzv-id={LAUNCH.name}",
        ]
        command += [f"--nnodes={self._options.hosts}", f"--nproc-per-node={self._options.ranks}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}"]
        command += ["-m", "aiockpt.tools.examples.recovering_rank", msgspec.json.encode(job).decode()]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self._folder / "launchers.log").open("ab") as log:
            self._hosts[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=self._folder
            )

    def lose_host(self, number: int) -> None:
        """Kill all of a host at once, and forget its memory."""
        launcher = self._hosts.pop(number)
        launcher.kill()
        launcher.wait()
        for rank, process in self.log.processes().items():
            if self.log.host_of(rank) == number:
                _kill(process.pid)
        shutil.rmtree(self._memory / f"host-{number}")

    def fault(self, name: str) -> Path:
        """Return the file by which the ranks are told to fail."""
        return self._folder / FAULTS / name

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        """Return what *condition* returns as soon as that is something.

        Raises:
            DemoError: it does not come, or the launchers have ended before.
        """
        ends_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends_s:
            self.log.read()
            if (found := condition()) is not None:
                return found
            if any(child.poll() for child in self._hosts.values()):
                raise DemoError(f"a launcher failed before {what}; see {self._folder / 'launchers.log'}")
            time.sleep(POLL_S)
        raise DemoError(f"{what}: not within {DEADLINE_S:g} s; see {self._folder / 'launchers.log'}")

    def noticed_after_s(self, since_s: float) -> float:
        """Return the seconds until the first launcher had noticed what went wrong after a time, in seconds since 1970."""
        launches = read_launches(self._folder / LAUNCH)
        stalls = [stall.at_s for launch in launches for stall in launch.stalls]
        ends = [one.began_s + one.lasted_s for launch in launches for one in launch.attempts]
        return min((at_s - since_s for at_s in (*stalls, *ends) if at_s > since_s), default=math.nan)

    def wait_for_end(self) -> None:
        """Wait until all launchers have ended well."""
        self.wait(lambda: all(child.poll() == 0 for child in self._hosts.values()) or None, "the end")

    def close(self) -> None:
        """End what runs."""
        for child in self._hosts.values():
            child.terminate()
        for child in self._hosts.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(30)
            child.kill()
            child.wait()


class Drill:
    """The faults, one after the other, and what follows each.

    Args:
        cluster: in which the job trains.
        say: takes lines for people.
        recoveries: gets what followed each.
    """

    def __init__(self, cluster: Cluster, say: Say, recoveries: list[Recovery]) -> None:
        self._cluster, self._log, self._say, self._recoveries = cluster, cluster.log, say, recoveries

    def run(self, options: RecoveryOptions) -> None:
        """Have everything go wrong once."""
        last = options.hosts * options.ranks - 1
        faults: dict[str, Callable[[], object]] = {
            "gradient": lambda: self._break(
                f"rank {last} computes NaN", lambda: self._request("gradient", last), Rewound
            ),
            "disk": self._fill_disk,
            "process": lambda: self._break(
                "rank 1 is killed (SIGKILL)", lambda: _kill(self._log.processes()[1].pid), Loaded
            ),
            "hang": lambda: self._break(f"rank {last} hangs", lambda: self._request("hang", last), Loaded),
            "host": lambda: self._break("a host is lost with its memory, a new one comes", self._replace_host, Loaded),
        }
        for name in options.faults:
            faults[name]()

    def _break(self, fault: str, begin: Callable[[], object], back: type[Rewound | Loaded]) -> None:
        """Cause a fault, and measure until the next step is done; *back* is the event of a run that goes on."""
        self._calm()
        step, begun_ns, begun_s = self._log.last_step(), time.monotonic_ns(), time.time()
        begin()
        event = self._cluster.wait(lambda: self._log.after(begun_ns, back), f"the run went on after: {fault}")
        before = max(
            one.step for _, _, one in self._log.events if isinstance(one, StepDone) and one.at_ns < event.at_ns
        )
        new = self._cluster.wait(lambda: self._log.after(event.at_ns, StepDone), f"a step came after: {fault}")
        noticed_s = (event.at_ns - begun_ns) / 1e9 if back is Rewound else self._cluster.noticed_after_s(begun_s)
        training_s = (new.at_ns - begun_ns) / 1e9
        self._report(Recovery(fault, step, noticed_s, training_s, new.step, max(before - new.step + 1, 0)))

    def _fill_disk(self) -> None:
        """Have a disk without room, and empty it again."""
        self._calm()
        step, begun_ns = self._log.last_step(), time.monotonic_ns()
        self._request(DISK, 0)
        failed = self._cluster.wait(
            lambda: self._log.after(begun_ns, PromotionFailed), "a copy failed on the full disk"
        )
        self._cluster.fault(DISK).unlink()
        emptied_ns = time.monotonic_ns()
        new = self._log.last_step() + 1
        copied = self._cluster.wait(lambda: self._log.after(emptied_ns, Promoted), "a copy came to the emptied disk")
        noticed_s = (failed.at_ns - begun_ns) / 1e9
        self._report(Recovery("the disk is full, and later it is not", step, noticed_s, 0.0, new, 0, copied.step))

    def _replace_host(self) -> None:
        self._cluster.lose_host(self._log.host_of(max(self._log.processes())))
        self._cluster.add_host()

    def _request(self, name: str, rank: int) -> None:
        self._cluster.fault(name).write_text(str(rank))

    def _calm(self) -> None:
        until = self._log.last_step() + CALM_STEPS
        self._cluster.wait(lambda: self._log.last_step() >= until or None, f"step {until}")

    def _report(self, recovery: Recovery) -> None:
        self._recoveries.append(recovery)
        self._say(str(recovery))


class RecoveryResult(msgspec.Struct, frozen=True):
    """What the demo showed.

    Attributes:
        run: the folder of the run that recovered.
        different: steps whose loss is another than the reference's.
        ettr: the time of steps that count ÷ all time.
    """

    run: str
    recoveries: list[Recovery]
    different: list[int]
    ettr: float


def run_recovery(options: RecoveryOptions, folder: Path, say: Say) -> RecoveryResult:
    """Run the reference and the drill below *folder*.

    Raises:
        DemoError: the run did not go on.
    """
    shared = Path(tempfile.mkdtemp(prefix="aiockpt-demo-", dir="/dev/shm" if os.path.isdir("/dev/shm") else folder))
    say(
        f"{options.hosts} hosts of {options.ranks} ranks train a byte-level GPT for {options.steps} steps and save each."
    )
    recoveries: list[Recovery] = []
    try:
        reference = run_job(options, folder / "reference", shared / "reference", lambda cluster: None)
        say(f"reference: all {len(reference)} steps without a fault")
        losses = run_job(
            options, folder / DRILL, shared / DRILL, lambda cluster: Drill(cluster, say, recoveries).run(options)
        )
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    different = [step for step in sorted({*reference, *losses}) if reference.get(step) != losses.get(step)]
    if different:
        say(f"THE LOSSES DIFFER from the reference's in {len(different)} steps, from step {different[0]} on.")
    else:
        say(f"All {len(losses)} losses are those of the reference, bit by bit.")
    ettr = max((launch.ettr for launch in read_launches(folder / DRILL / LAUNCH)), default=0.0)
    return RecoveryResult(str(folder / DRILL / RUN), recoveries, different, ettr)


def run_job(
    options: RecoveryOptions, folder: Path, memory: Path, drill: Callable[[Cluster], object]
) -> dict[int, float]:
    """Run one job to its end, with *drill* meanwhile; return the losses of rank 0."""
    cluster = Cluster(options, folder, memory)
    try:
        drill(cluster)
        cluster.wait_for_end()
    finally:
        cluster.close()
    cluster.log.read()
    return cluster.log.losses()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
