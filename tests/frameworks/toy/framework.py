"""A made-up framework: a trainer with checkpoints of its own, which knows nothing of aiockpt."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

BATCHES = 6


class Trainer:
    """Trains a small model, and saves it by ``torch.save`` after each step."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = torch.randn(BATCHES, 5, 4, generator=torch.Generator().manual_seed(4))
        self.order = torch.randperm(BATCHES)
        self.done, self.ended = 0, False

    def fit(self, until: int) -> None:
        """Train up to a step."""
        while self.done < until:
            if self.done % BATCHES == 0:
                self.order = torch.randperm(BATCHES)
            loss = self.model(self.data[self.order[self.done % BATCHES]]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.done += 1
            self.save()

    def save(self) -> None:
        """Save weights, optimizer and the number of the step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        torch.save(state, self.folder / f"{self.done}.pt")

    def resume(self, step: int | None = None) -> None:
        """Load a step, or the newest one."""
        steps = sorted(int(path.stem) for path in self.folder.glob("*.pt"))
        if not steps:
            return
        state = torch.load(self.folder / f"{step or steps[-1]}.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]

    def end(self) -> None:
        """End the training."""
        self.ended = True
