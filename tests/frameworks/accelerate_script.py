"""A loop as users of accelerate write it, with the line that switches it.

python accelerate_script.py FOLDER [KIND]     KIND is a key of `KINDS`
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import (  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]
    Accelerator,
    DataLoaderConfiguration,
)
from accelerate.utils import (  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]
    ProjectConfiguration,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from aiockpt.integrations.huggingface import attach

EPOCHS = 3


class Rows(Dataset[torch.Tensor]):
    """Rows with noise, so that a batch read with other random numbers is another batch."""

    def __init__(self, count: int = 26) -> None:
        self.rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            return self.rows[index]
        return self.rows[index] + 0.1 * torch.randn(4) + 0.1 * random.random()


class Stream(IterableDataset[torch.Tensor]):
    """The same from front to back, in another order for each epoch."""

    def __init__(self) -> None:
        self.rows, self.epoch = Rows().rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch)).tolist():
            yield self.rows[index]


class StatefulStream(Stream):
    """A stream that says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.given = self.skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        skip, self.skip = self.skip, 0
        for self.given, row in enumerate(super().__iter__(), 1):
            if self.given > skip:
                yield row


class OwnStream(Stream):
    """A stream in an order of its own, of which each epoch draws the next."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(len(self.rows), generator=self.generator).tolist():
            yield self.rows[index]


class OwnOrder(Sampler[int]):
    """An order of its own, of which each epoch draws the next."""

    def __init__(self) -> None:
        self.dice = random.Random(5)

    def __len__(self) -> int:
        return len(Rows())

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self)))
        self.dice.shuffle(order)
        yield from order


KINDS: dict[str, tuple[dict[str, Any], Callable[[], Any], dict[str, Any]]] = {
    "plain": ({}, Rows, {"shuffle": True}),
    "workers": ({}, Rows, {"shuffle": True, "num_workers": 2}),
    "seedable": ({"use_seedable_sampler": True}, Rows, {"shuffle": True}),
    "stream": ({"dispatch_batches": False}, Stream, {}),
    "dispatched": ({"dispatch_batches": True}, Rows, {"shuffle": True}),
    "stateful": ({"use_stateful_dataloader": True}, Rows, {"shuffle": True}),
    "stateful stream": ({"use_stateful_dataloader": True, "dispatch_batches": False}, StatefulStream, {}),
    "two batches a step": ({}, Rows, {"shuffle": True}),
    "skips by itself": ({}, Rows, {"shuffle": True}),
    "named folders": ({}, Rows, {"shuffle": True}),
    "skips a stream by itself": ({"dispatch_batches": False}, Stream, {}),
    "skips by itself, seedable": ({"use_seedable_sampler": True}, Rows, {"shuffle": True}),
    "stream of its own": ({"dispatch_batches": False}, OwnStream, {}),
    "generator": ({}, Rows, {"shuffle": True}),
    "order of its own": ({}, Rows, {}),
    "hook on the first rank": ({}, Rows, {"shuffle": True}),
}


class Progress:
    """What the loop keeps of itself."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Run:
    """What a user's script prepares."""

    def __init__(self, folder: Any, kind: str = "plain", *, batch_size: int = 4, **named: Any) -> None:
        set_seed(3)
        loading, data, loader = KINDS[kind]
        naming = {"automatic_checkpoint_naming": kind != "named folders", "total_limit": 3, **named}
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2 if kind == "two batches a step" else 1,
            dataloader_config=DataLoaderConfiguration(**loading),
            project_config=ProjectConfiguration(folder and str(folder), **naming),
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        self.kind, self.folder, self.progress = kind, Path(folder or "."), Progress()
        if kind == "generator":
            loader = {**loader, "generator": torch.Generator().manual_seed(5)}
        if kind == "order of its own":
            loader = dict[str, Any](sampler=OwnOrder())
        batches: Any = DataLoader(data(), batch_size=batch_size, **loader)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, batches
        )
        self.accelerator.register_for_checkpointing(self.progress)
        self.losses: list[float] = []
        if kind == "hook on the first rank":
            self.accelerator.register_save_state_pre_hook(self.take_out)

    def take_out(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Write the weights as users do who have a format of their own for them."""
        if self.accelerator.is_main_process:
            torch.save(weights.pop(), Path(folder) / "of_the_hook.pt")

    def train(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def save_and_end(self, folder: Any = None) -> None:
        self.accelerator.save_state(folder)
        self.accelerator.end_training()

    def loop(self, stop: int | None = None, every: int = 3) -> None:
        """Train all epochs, or up to that many batches; save after every third one."""
        per_epoch = 7 if self.kind.startswith("skips") else 0
        first, passed = divmod(self.progress.batches, per_epoch) if per_epoch else (self.loader.iteration, 0)
        for epoch in range(first, EPOCHS):
            skips = per_epoch and epoch == first
            for batch in self.accelerator.skip_first_batches(self.loader, passed) if skips else self.loader:
                self.train(batch)
                self.progress.batches += 1
                if self.progress.batches % every == 0:
                    named = self.kind == "named folders"
                    self.accelerator.save_state(self.folder / f"step_{self.progress.batches}" if named else None)
                if self.progress.batches == stop:
                    return


if __name__ == "__main__":
    run = Run(*sys.argv[1:])
    attach(run.accelerator)
    run.accelerator.load_state()
    run.loop()
    run.accelerator.end_training()
