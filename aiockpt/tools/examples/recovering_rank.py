"""One rank of the recovery demo: `train_recovering`, with faults on request, and each event as a line of a file.

A fault is a file of the folder `FAULTS`, made by the demo; its text is the number of a rank. The arithmetic is reproducible
bit by bit.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor, distributed

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.peer import PeerBackend
from aiockpt.errors import from_os_error
from aiockpt.events import Committed, Loaded, Opened, Promoted, PromotionFailed, Replicated, Rewound
from aiockpt.monitor.heartbeat import Heartbeat
from aiockpt.monitor.trace import TraceFile
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.tools.examples import train_recovering
from aiockpt.tools.examples.child import StepDone, StepReporter
from aiockpt.tools.examples.gpt import GPT, GPTSize

SIZE = GPTSize(layers=2, width=32, heads=2, context=32, batch=2, dropout=0.0)
RUN, EVENTS, FAULTS, DISK = "run", "events.jsonl", "faults", "disk"
WRITES = ("create", "put", "put_new", "upload.write")
RankEvent = StepDone | Opened | Loaded | Committed | Replicated | Promoted | PromotionFailed | Rewound


class RecoveryJob(msgspec.Struct, frozen=True):
    """The job of each rank of a host.

    Attributes:
        folder: of the demo.
        memory: of this host.
        host: its number, among all that there ever were.
        steps: of the optimizer.
    """

    folder: str
    memory: str
    host: int
    steps: int


def open_lines(path: Path, rank: int, host: int) -> StepReporter:
    """Return what appends the events of a rank to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return StepReporter(file, rank, host, kinds=get_args(RankEvent))


class FillingDisk(Forwarding):
    """*inner*, without room for more while *fault* is there."""

    def __init__(self, inner: LocalBackend, fault: Path) -> None:
        super().__init__(inner)
        self._fault = fault

    async def forward(self, call: BackendCall) -> Any:
        """Make *call*, or refuse it."""
        if call.verb in WRITES and self._fault.exists():
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.key)
            raise from_os_error(error, call.verb, call.key) from error
        return await call()


def main() -> None:
    """Train as one rank; its job is the argument."""
    job = msgspec.json.decode(sys.argv[1], type=RecoveryJob)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, folder = distributed.get_rank(), Path(job.folder)
    faults = folder / FAULTS
    lines = open_lines(folder / EVENTS, rank, job.host)
    disk = FillingDisk(LocalBackend(folder / RUN), faults / DISK)

    def compute_loss(model: GPT, rows: Tensor) -> Tensor:
        loss = train_recovering.compute_loss(model, rows)
        if _is_to_fail(faults / "hang", rank):
            time.sleep(1e6)
        return loss * float("nan") if _is_to_fail(faults / "gradient", rank) else loss

    train_recovering.train(
        [aiockpt.Tier(PeerBackend(RUN, mount=job.memory)), aiockpt.Tier(disk, every=10)],
        epochs=1,
        size=SIZE,
        samples=job.steps * SIZE.batch * distributed.get_world_size(),
        rewind=aiockpt.Rewind(spike=None, skip=None),  # the machine was at fault, not the data
        compute_loss=compute_loss,
        on_step=lines.on_step,
        observers=[lines, TraceFile(), Heartbeat(every_s=1.0)],
    )
    distributed.destroy_process_group()


def _is_to_fail(fault: Path, rank: int) -> bool:
    """Return whether this rank is to fail, once."""
    try:
        if fault.read_text() != str(rank):
            return False
        fault.unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
