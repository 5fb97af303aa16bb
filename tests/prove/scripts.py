"""A small training script with every resume bug that well-known trainers shipped, one at a time.

    python -m tests.prove.scripts NAME_OF_THE_BUG FOLDER

"" is the script without a bug. Each bug is one that a real project shipped, and that nobody noticed for a while.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.prove import record

SAMPLES, BATCH, EVERY, STEPS = 48, 4, 4, 30
BATCHES_OF_EPOCH = SAMPLES // BATCH

BUGS = {
    "order of epoch 0": "data",
    "replays the tail": "data",
    "moments dropped": "optimizer step",
    "scheduler advanced twice": "settings",
    "scheduler dropped": "scheduler",
    "random dropped": "random torch",
    "starts anew": "resume",
    "another place": "resume",
    "data one ahead": "data",
    "counts what was prefetched": "data",
    "off by one": "steps",
    "average dropped": "ema",
    "buffers dropped": "model",
}
"""Name of the bug → the row that `aiockpt prove` has to name first."""


class Epochs:
    """An own sampler, as scripts have them: shuffled by seed and epoch."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.epoch = self.at = self.ahead = 0
        self.resumed_in = -1

    def order(self) -> list[int]:
        epoch = self.epoch
        if self.bug == "order of epoch 0" and epoch == self.resumed_in:
            epoch = 0
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()

    def batches(self) -> Iterator[list[int]]:
        """Yield the batches of all epochs to come."""
        tail = self.at % BATCHES_OF_EPOCH if self.bug == "replays the tail" else 0
        while True:
            order = self.order()
            while self.at < BATCHES_OF_EPOCH:
                self.at += 1
                place = (self.at - 1 + self.ahead) % BATCHES_OF_EPOCH
                yield order[place * BATCH : (place + 1) * BATCH]
            self.epoch, self.at = self.epoch + 1, tail

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]
        self.resumed_in = self.epoch
        self.ahead = self.bug == "data one ahead"


class Prefetching:
    """Draws batches ahead of training, and counts those as trained."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def batches(self) -> Iterator[list[int]]:
        ahead: deque[list[int]] = deque()
        for batch in self.epochs.batches():
            ahead.append(batch)
            if len(ahead) > 2:
                yield ahead.popleft()


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def spoil(
    bug: str,
    start: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.StepLR,
    buffers: dict[str, torch.Tensor],
) -> int:
    """Do what the *bug* does after a load that went on at *start*; return where training goes on."""
    if not start:
        return 0
    if bug == "scheduler advanced twice":
        scheduler.step()
    if bug == "fails at resume":
        raise KeyError("what it kept elsewhere")
    if bug == "moments dropped":
        optimizer.state.clear()
    if bug == "buffers dropped":
        model.load_state_dict(buffers, strict=False)
    return start - (bug == "off by one")


def train(
    bug: str = "",
    folder: str = "run",
    *,
    steps: int = STEPS,
    noise: bool = False,
    clock: bool = False,
    told: str = "",
    beside: aiockpt.Checkpointer | None = None,
) -> None:
    """Train to the end, from the newest checkpoint below *folder*.

    Args:
        noise: add a little that no two runs agree on to each loss.
        clock: give a metric that no two runs agree on.
        beside: saves the weights alone, every now and then.
        told: a name by which to record the first feature of each batch.
    """
    if bug == "no such file":
        Path("no such file").read_text()
    features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(features, features.sum(1, keepdim=True))
    model = make_model()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    epochs = Epochs(bug)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": average,
        "epochs": epochs,
        "rng": aiockpt.RNG(),
    }
    to_load = dict(state)
    left_out = {
        "scheduler dropped": "scheduler", "random dropped": "rng", "average dropped": "ema"
    }  # fmt: skip
    if bug in left_out:
        del to_load[left_out[bug]]
    if bug == "another place":
        folder = f"{folder}-{id(object())}-{torch.seed()}"
        torch.manual_seed(2)
    with aiockpt.Checkpointer(folder, every=EVERY) as ckpt:
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        torch.manual_seed(3)
        start = 0 if bug == "starts anew" else ckpt.resume(to_load)
        start = spoil(bug, start, model, optimizer, scheduler, buffers)
        feed = (Prefetching(epochs) if bug == "counts what was prefetched" else epochs).batches()
        for step in range(start, steps):
            features, targets = (torch.stack(part) for part in zip(*(data[at] for at in next(feed)), strict=True))
            loss = nn.functional.mse_loss(model(features), targets)
            if noise:
                loss = loss * (1 + 1e-3 * SystemRandom().random())  # of ten thousand values in float32
            if told:
                record(told, features[0, 0])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    average[name].copy_(value if value.dtype == torch.int64 else 0.9 * average[name] + 0.1 * value)
            if beside is not None and step % 3 == 0:
                beside.save(step, {"model": model})
            metrics = {"loss": loss.item()}
            ckpt.step(step, state, metrics={**metrics, "tokens_per_s": time.perf_counter()} if clock else metrics)


def train_nothing(folder: str = "run", *, at_odd_times: bool = False) -> None:
    """Save what a fresh start has anyway; at the same steps each time, or at others, as a clock may decide."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with aiockpt.Checkpointer(folder, every=EVERY) as ckpt:
        for step in range(ckpt.resume({"weight": model[0].weight}), STEPS):
            model[0](torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not at_odd_times:
                ckpt.step(step, {"weight": model[0].weight})
            elif step < 2 or SystemRandom().random() < 0.3:
                ckpt.save(step, {"weight": model[0].weight})


def train_plainly(folder: str = "run") -> None:
    """Train with aiockpt's own loader, in epochs."""
    torch.manual_seed(1)
    features = torch.randn(SAMPLES, 6)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = aiockpt.Loader(DataLoader(data, batch_sampler=aiockpt.ShardedSampler(SAMPLES, BATCH)))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": aiockpt.RNG()}
    with aiockpt.Checkpointer(folder, every=EVERY) as ckpt:
        step = ckpt.resume(state)
        while step < STEPS:
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
                optimizer.step()
                ckpt.step(step, state, metrics={"loss": loss.item()})
                step += 1


if __name__ == "__main__":
    train(*sys.argv[1:])
