"""A small training run to save and load, and options small enough to see windows, blocks and slabs at work."""

import hashlib
from typing import Any

import torch

import aiockpt

SMALL = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384)


def small_checkpointer(place: Any, **options: Any) -> aiockpt.Checkpointer:
    """Open a checkpointer on one place or several tiers, with `SMALL`."""
    return aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=SMALL), **options)


def steps(place: Any) -> list[int]:
    """Return the steps that are committed in *place*, the newest first."""
    with small_checkpointer(place) as ckpt:
        return [info.step for info in ckpt.steps().result()]


class Run:
    """A model, an optimizer, a scheduler and what else a training loop holds."""

    def __init__(self, seed: int = 0, fused: bool = False, width: int = 33) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 7)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.width = width
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": aiockpt.RNG(),
            "step": 0,
            "extra": {"ema": torch.randn(5, 3), "note": "a", "nested": [1, (2.5, None)]},
        }

    def train(self, steps: int = 1) -> float:
        """Do some steps on random batches; return the last loss."""
        loss = torch.zeros(())
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, self.width)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state["step"] += 1
        return loss.item()

    def digest(self) -> str:
        """Return a digest of every tensor and value, to compare runs bit by bit."""
        seen = hashlib.sha256()
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        _feed(seen, [*parts, self.state["extra"], self.state["step"], torch.get_rng_state()])
        return seen.hexdigest()


class OneLayer:
    """A linear layer of *width* by *width* and its AdamW: three tensors of one size each, beside those of the bias."""

    def __init__(self, width: int, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(width, width, bias=bias)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Do a step, the same each time."""
        self.optimizer.zero_grad()
        self.model(torch.ones(2, self.model.in_features)).square().mean().backward()
        self.optimizer.step()


def _feed(seen: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        seen.update(str((value.dtype, tuple(value.shape))).encode())
        seen.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            seen.update(repr(key).encode())
            _feed(seen, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(seen, one)
    else:
        seen.update(repr(value).encode())
