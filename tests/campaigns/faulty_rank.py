"""One rank of the campaign `faults`: it trains as one of `tests.rewind.jobs`, and stalls, or computes NaN, on request."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.peer import PeerBackend
from aiockpt.errors import from_os_error
from aiockpt.events import Event, Replicated
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.tools.examples.recovering_rank import DISK, EVENTS, FAULTS, RUN, WRITES, open_lines
from tests.inline_process import TINY
from tests.launch.trainer import FOREVER_S, Slow
from tests.rewind.jobs import Plan, Trainee

PLACES = ("loader", "backward", "collective", "save", "advance")
WAIT_S = 2.0
"""For a copy: far less than a rank may stand."""
END = "end"
"""The folder of what each rank holds in the end."""


class StallRequest(msgspec.Struct, frozen=True):
    """A stall for ever of a rank at a place, in its first step from *step* on; once."""

    place: str
    rank: int
    step: int


class FaultyJob(msgspec.Struct, frozen=True):
    """What all ranks do.

    Attributes:
        every: steps between two copies on the disk.
        waits: whether a step goes on only when the one before it is *replicated*.
        disk: how it fails while the file `DISK` is there: the writes alone, or all calls.
    """

    plan: Plan
    stalls: tuple[StallRequest, ...]
    every: int
    step_s: float
    waits: bool
    disk: Literal["full", "away"]


class FailingDisk(Forwarding):
    """*inner*, which is full or away while *fault* is there."""

    def __init__(self, inner: LocalBackend, fault: Path, how: Literal["full", "away"]) -> None:
        super().__init__(inner)
        self._fault, self._how = fault, how

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*, or refuse it."""
        if (self._how == "away" or call.verb in WRITES) and self._fault.exists():
            number = errno.ENOSPC if self._how == "full" else errno.EIO
            error = OSError(number, os.strerror(number), call.key)
            raise from_os_error(error, call.verb, call.key) from error
        return await call()


class Stalls:
    """The stalls of this rank, and *step*, where it is."""

    def __init__(self, requests: tuple[StallRequest, ...], rank: int, marks: Path) -> None:
        self._requests, self._marks, self.step = [one for one in requests if one.rank == rank], marks, -1

    def at(self, place: str) -> None:
        """Stall here, if that is wanted."""
        for request in self._requests:
            if (
                request.place == place
                and request.step <= self.step
                and first_time(self._marks / f"stall-{request.step}")
            ):
                time.sleep(FOREVER_S)


class Count:
    """A part of the state that may stall while it is saved."""

    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls

    def state_dict(self) -> dict[str, int]:
        self._stalls.at("save")
        return {"step": self._stalls.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._stalls.step = state["step"]


class Copies:
    """The last step that is *replicated*, for a rank that waits for it."""

    def __init__(self) -> None:
        self._last, self._changed = -1, threading.Condition()

    def on_event(self, event: Event) -> None:
        """Note a step."""
        if isinstance(event, Replicated):
            with self._changed:
                self._last = event.step
                self._changed.notify()

    def wait(self, step: int) -> None:
        """Wait until *step* is there, or until it takes too long: its host may be gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._last == step, WAIT_S)


def first_time(mark: Path) -> bool:
    """Return whether nobody has left this mark before, and leave it."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def be_rank(job: FaultyJob, folder: Path, memory: Path, host: int) -> None:
    """Train to the end, in a process that the launcher has forked; end as a program would."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        _train(job, folder, memory, host)
    except aiockpt.Preempted as ended:
        with (folder / "preempted").open("a") as file:
            file.write(f"{ended.code} {ended.step}\n")
        os._exit(int(ended.code or 0))
    except BaseException:  # noqa: BLE001  whatever ends it
        with (folder / "errors").open("a") as file:
            file.write(f"host {host}, {os.environ['RANK']}: {traceback.format_exc()}\n")
        os._exit(1)


def _train(job: FaultyJob, folder: Path, memory: Path, host: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, plan = dist.get_rank(), job.plan
    faults = folder / FAULTS
    stalls, lines, copies = Stalls(job.stalls, rank, faults), open_lines(folder / EVENTS, rank, host), Copies()
    trainee, loader = Trainee(rank), plan.loader(rank)
    disk = FailingDisk(LocalBackend(folder / RUN), faults / DISK, job.disk)
    tiers = [
        aiockpt.Tier(PeerBackend(RUN, mount=str(memory)), network="127.0.0.1"),
        aiockpt.Tier(disk, every=job.every),
    ]
    state = {**trainee.state, f"count-{rank}": Count(stalls), "loader": loader}
    rewind = aiockpt.Rewind(skip=plan.skip, window=8, most=100)
    with aiockpt.Checkpointer(
        tiers,
        every=1,
        rewind=rewind,
        on_error="warn",
        on_preempt="save",
        observers=[lines, copies],
        limits=aiockpt.Limits(io=TINY),
    ) as ckpt:
        step = ckpt.resume(state)
        while loader.epoch < plan.epochs:
            for batch in loader:
                stalls.step = step
                stalls.at("loader")
                time.sleep(job.step_s)
                trainee.train(batch)
                Slow.apply(torch.ones(1, requires_grad=True), stalls).backward()  # type: ignore[no-untyped-call]
                stalls.at("collective")
                dist.all_reduce(torch.ones(1))
                loss = _loss(plan, rank, loader.position - 1, faults)
                lines.on_step(step, loss)
                stalls.at("advance")
                last, step = step, ckpt.advance(step, state, metrics={"loss": loss})
                if job.waits and step > last:
                    copies.wait(last)
    (folder / END).mkdir(exist_ok=True)
    (folder / END / str(rank)).write_bytes(msgspec.json.encode(trainee.held()))
    dist.destroy_process_group()


def _loss(plan: Plan, rank: int, position: int, marks: Path) -> float:
    """Return the loss that is told; where a bad batch is trained again, it is bad once."""
    bad = plan.bad.get(position)
    if bad is None or rank not in bad.ranks or (plan.skip is None and not first_time(marks / f"bad-{rank}-{position}")):
        return 1.0 + 0.001 * (position % 3)
    return float("nan") if bad.sign == "nan" else 1e6
