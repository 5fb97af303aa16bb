"""The job that every script of `benchmarks.same_job.scripts` trains: FSDP2 over gloo, AdamW, a schedule, no random numbers.

Batch *n* is made from *n*, and each rank takes its rows of it, so the position in the data is the step. `train` records
the data to judge a run, one JSON line a step: when the step began and ended (all processes of a machine share the clock)
and the digest of the whole state before the first step and after each. The job imports torch alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(os.environ.get("JOB_STEPS", "20"))
EVERY = int(os.environ.get("JOB_EVERY", "5"))
WIDTH = int(os.environ.get("JOB_WIDTH", "64"))
LAYERS = int(os.environ.get("JOB_LAYERS", "4"))
DIGESTS = os.environ.get("JOB_DIGESTS", "1") == "1"
NOTES = os.environ.get("JOB_NOTES", "")
BATCH = 12
_noted: list[dict[str, Any]] = []


def join() -> int:
    """Create the process group unless it exists; return its number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_world_size()


def build(model: Any = None) -> tuple[Any, Any, Any]:
    """Return a sharded model (*model* itself, if there is one), its optimizer and its scheduler."""
    join()
    model = make_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)


def make_model() -> Any:
    """Return the model, the same on every rank, sharded over all of them."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def batch(step: int) -> torch.Tensor:
    """Return this rank's rows of batch *step*."""
    rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any, step: int) -> Any:
    """Return the loss of this rank's rows."""
    rows = batch(step)
    return (model(rows) - rows.flip(-1)).square().mean()


def train(step: int, model: Any, optimizer: Any, scheduler: Any, lock: Any = None) -> None:
    """Take one step and record it; waiting for *lock*, if the way to save has one, counts as part of the save's pause."""
    begin(step, model, optimizer, scheduler)
    loss_of(model, step).backward()
    asked_s = time.monotonic()
    with lock or nullcontext():
        _noted[-1]["waited_s"] = time.monotonic() - asked_s
        optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    end(model, optimizer, scheduler)


def begin(step: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Record the begin of *step*; before the first of a process, also the state."""
    start_s = time.monotonic()
    before = "" if _noted else digest(model, optimizer, scheduler)
    _noted.append({"step": step, "start_s": start_s, "before": before, "waited_s": 0.0})


def end(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Record the end of the step, and the state after it."""
    _noted[-1]["after"] = digest(model, optimizer, scheduler)
    _noted[-1]["end_s"] = time.monotonic()
    if NOTES and dist.get_rank() == 0:
        with Path(NOTES).open("a") as file:
            file.write(json.dumps(_noted[-1]) + "\n")


def digest(model: Any, optimizer: Any, scheduler: Any) -> str:
    """Return a digest of all values of the state, equal on any number of ranks; empty where not requested."""
    if not DIGESTS:
        return ""
    found = hashlib.sha256(repr(scheduler.state_dict()["last_epoch"]).encode())
    for parameter in model.parameters():
        moments = optimizer.state.get(parameter, {})
        for value in (parameter, moments.get("exp_avg"), moments.get("exp_avg_sq"), moments.get("step")):
            if value is not None:
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
