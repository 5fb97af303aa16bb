"""A training script of torchft with the switch, alone in its job: ``python -m tests.frameworks.torchft_script``.

One replica group of one process, with a lighthouse of its own. Started again, it goes on where the run of ``runs/ft`` ends.
"""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.integrations.torchft import PlaceTransport, ReplicaCheckpointer

torchft: Any = import_module("torchft")
coordination: Any = import_module("torchft.coordination")
distributed: Any = torch.distributed
STEPS, EVERY = 24, 2
TIMEOUT = timedelta(seconds=60)


def go_on(place: str, until: int, every: int) -> int:
    """Train from the newest step, and save in the background; return where it began."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS)
    samples = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(9)))
    sampler = aiockpt.ShardedSampler(len(samples), batch_size=4, seed=2, rank=0, size=1)
    loader = aiockpt.Loader(DataLoader(samples, batch_sampler=sampler), rank=0, size=1)
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        replica_id="group_0",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
        use_async_quorum=False,
        timeout=TIMEOUT,
        checkpoint_transport=PlaceTransport("runs/heal"),
    )
    optimizer = torchft.Optimizer(manager, inner)
    wrapped = torchft.DistributedDataParallel(manager, model)
    state = {"model": model, "optimizer": inner, "schedule": schedule, "rng": aiockpt.RNG()}
    try:
        return _train(manager, wrapped, optimizer, schedule, state, loader, place, until, every)
    finally:
        manager.shutdown()
        lighthouse.shutdown()


def _train(
    manager: Any,
    wrapped: Any,
    optimizer: Any,
    schedule: Any,
    state: Any,
    loader: Any,
    place: str,
    until: int,
    every: int,
) -> int:
    with ReplicaCheckpointer(manager, place, replica="0", loader=loader, every=every) as ckpt:
        begun_at = ckpt.resume(state)
        while manager.current_step() < until:
            for (batch,) in loader:
                optimizer.zero_grad()
                wrapped(batch).square().mean().backward()
                optimizer.step()
                schedule.step()
                ckpt.step(state)
                if manager.current_step() == until:
                    break
    return begun_at


if __name__ == "__main__":
    torch.set_num_threads(1)
    go_on("runs/ft", STEPS, EVERY)
