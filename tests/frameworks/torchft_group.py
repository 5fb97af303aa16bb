"""One replica group of a torchft job, a process: ``python -m tests.frameworks.torchft_group '{"replica": 0, …}'``."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.integrations.torchft import PlaceTransport, ReplicaCheckpointer

torchft: Any = import_module("torchft")
distributed: Any = torch.distributed
TIMEOUT = timedelta(seconds=60)
SAMPLES, WIDTH = 60, 4


def train(given: dict[str, Any]) -> None:
    """Train until the job has made ``given["steps"]`` steps, and write the weights down."""
    torch.set_num_threads(1)
    replica = given["replica"]
    torch.manual_seed(replica)  # the groups begin with other weights, and get those of one of them
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    sampler = aiockpt.ShardedSampler(SAMPLES, batch_size=3, seed=2, rank=replica, size=2)
    loader = aiockpt.Loader(DataLoader(TensorDataset(data()), batch_sampler=sampler), rank=0, size=1)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        note(given, f"was given the state of {round(float(state['model']['0.weight'].sum()), 6)}")
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=given["least"],
        replica_id=f"group_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=given["lighthouse"],
        use_async_quorum=False,
        timeout=TIMEOUT,
        checkpoint_transport=PlaceTransport(given["heal"]),
    )
    optimizer = torchft.Optimizer(manager, inner)
    wrapped = torchft.DistributedDataParallel(manager, model)
    state = {"model": model, "optimizer": inner}
    with ReplicaCheckpointer(
        manager, given["place"], replica=str(replica), loader=loader, every=3, retention=aiockpt.Retention(last=2)
    ) as ckpt:
        note(given, f"begins at {ckpt.resume(state)}")
        while manager.current_step() < last_step(given):
            for (batch,) in loader:
                optimizer.zero_grad()
                wrapped(batch).square().mean().backward()
                die(given, manager.current_step())
                optimizer.step()
                ckpt.step(state)
                if given.get("waits"):
                    ckpt.wait()
                if "steps" not in given and has_died(given).exists():
                    Path(given["notes"] + ".last").write_text(str(manager.current_step() + 5))
                    given["steps"] = manager.current_step() + 5
                if manager.current_step() >= last_step(given):
                    break
    note(given, "ends")
    torch.save(model.state_dict(), f"{given['notes']}.{replica}.weights")
    manager.shutdown()


def last_step(given: dict[str, Any]) -> int:
    """Return at which step the job ends: the one that is given, or five after that in which a killed group was back."""
    told = Path(given["notes"] + ".last")
    return int(given.get("steps") or (told.read_text() if told.exists() else 1 << 30) or 1 << 30)


def has_died(given: dict[str, Any]) -> Path:
    """Return the file that is there when this group was killed once."""
    return Path(f"{given['notes']}.{given['replica']}.died")


def data() -> torch.Tensor:
    """Return the samples, (60, 4), always the same."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(9))


def die(given: dict[str, Any], step: int) -> None:
    """Kill this process by SIGKILL, once, at the step that is given."""
    marker = has_died(given)
    if step == given.get("dies_at") and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def note(given: dict[str, Any], line: str) -> None:
    """Append a line to what the test reads."""
    with open(f"{given['notes']}.{given['replica']}", "a") as notes:
        notes.write(line + "\n")


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
