"""A training loop that saves with ``dcp.save`` on our storage, and goes on where it was killed.

``python -m tests.frameworks.dcp_script``, or with ``torchrun`` under FSDP2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aiockpt
from aiockpt.integrations.dcp import AiockptReader, AiockptWriter

dcp: Any = import_module("torch.distributed.checkpoint")
PLACE = "runs/dcp"
STEPS, EVERY = 24, 2


class Batches:
    """Shuffled batches without an end, of each rank its own, that know where they are."""

    def __init__(self) -> None:
        self.words = torch.randint(0, 12, (40, 8), generator=torch.Generator().manual_seed(5))
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.order = torch.randperm(40, generator=self.generator)
        self.place = 0

    def __next__(self) -> torch.Tensor:
        if self.place == 40:
            self.order, self.place = torch.randperm(40, generator=self.generator), 0
        self.place += 4
        return self.words[self.order[self.place - 4 : self.place]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"].clone(), state["place"]
        self.generator.set_state(state["generator"])


class Application:
    """All that training goes on from, as DCP's own recipe has it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.batches = Batches()
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            # A name for each rank: what ranks have under one name is taken to be the same.
            f"rank {dist.get_rank()}": {"batches": self.batches.state_dict(), "random": torch.get_rng_state()},
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        own = state[f"rank {dist.get_rank()}"]
        self.batches.load_state_dict(own["batches"])
        torch.set_rng_state(own["random"])
        self.step = state["step"]

    def train(self, words: torch.Tensor) -> None:
        logits = self.model(words)
        nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(1, 1).flatten()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1


def make_model() -> nn.Module:
    """Return a model that draws random numbers, always with the same weights."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 12))


def go_on(model: nn.Module, place: str, until: int, every: int, step: int | None = None) -> int:
    """Train from the newest step, or from *step*; return where it began."""
    run = Application(model)
    run.state_dict()  # makes the optimizer's state by a step with a rate of 0, which a load does, too
    writer = AiockptWriter(place)
    with aiockpt.Checkpointer(place) as ckpt:
        there = ckpt.steps().result()
    if there:
        dcp.load({"run": run}, storage_reader=AiockptReader(place, step=step))
    begun_at = run.step
    while run.step < until:
        run.train(next(run.batches))
        if run.step % every == 0:
            writer.step = run.step
            dcp.save({"run": run}, storage_writer=writer)
    writer.close()
    return begun_at


@contextmanager
def alone() -> Iterator[None]:
    """Have a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Train, and save."""
    torch.set_num_threads(1)
    model = make_model()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        go_on(model, PLACE, STEPS, EVERY)
        dist.destroy_process_group()
        return
    with alone():
        go_on(model, PLACE, STEPS, EVERY)


if __name__ == "__main__":
    main()
