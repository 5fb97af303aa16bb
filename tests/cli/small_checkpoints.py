"""Small checkpoints that an operator meets, and ways to damage them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import aiockpt
from tests.small_run import small_checkpointer

DAY_S = 86400.0
ATTEMPT = "a-00112233aabb"


class Outcome(msgspec.Struct, frozen=True):
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return msgspec.json.decode(self.out)


Command = Callable[..., Outcome]


def make_state(value: float) -> dict[str, Any]:
    """Return a state whose parts are functions of *value*; one tensor and one value never change."""
    weight = torch.full((40, 30), float(value))
    return {
        "layers": {str(index): {"weight": weight * index, "bias": torch.ones(3) * index} for index in (2, 10)},
        "tied": weight,
        "also tied": weight,
        "fixed": torch.arange(6),
        "lr": value / 10,
        "name": "a run",
        "shape": (1, [2, None]),
        "own": aiockpt.per_rank({"seed": 5}),
    }


def save(root: Path, steps: list[int], load: int | None = None) -> None:
    """Save *steps* as one run, that went on from *load*."""
    with small_checkpointer(root) as ckpt:
        if load is not None:
            ckpt.load(make_state(0), load).result()
        for step in steps:
            ckpt.save(step, make_state(step), metrics={"loss": 1 / step}, user={"git": "abc"}).result()


def make_older(folder: Path, days: float) -> None:
    """Date everything below *folder* so many days back."""
    then_s = time.time() - days * DAY_S
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then_s, then_s))


def save_aged(root: Path, ages: dict[int, float]) -> None:
    """Save steps that are so many days old."""
    save(root, list(ages))
    for step, days in ages.items():
        make_older(root / f"step-{step:08d}", days)


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def data_file(root: Path, step: int) -> Path:
    """Return the one data file of a step."""
    (found,) = (root / f"step-{step:08d}").glob("a-*/d/*")
    return found


def manifest(root: Path, step: int) -> Path:
    """Return the first manifest of a step."""
    return root / f"step-{step:08d}" / "MANIFEST-1.json"


def uncommit(root: Path, step: int) -> None:
    """Take a step back to the moment before its commit."""
    manifest(root, step).unlink()


def begin_attempt(root: Path, step: int) -> None:
    """Leave what a save leaves that died before its vote."""
    folder = root / f"step-{step:08d}" / ATTEMPT / "d"
    folder.mkdir(parents=True)
    (folder / "r00000-0000.safetensors").write_bytes(bytes(5000))


def save_partly(root: Path) -> None:
    """Save step 1 whole, and steps 2 and 3 without the base, the optimizer and the note."""
    model = nn.ModuleDict({"base": nn.Linear(3, 3, bias=False).requires_grad_(False), "lora": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model["lora"].parameters(), momentum=0.9)
    model["lora"](torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "note": "x"}
    with small_checkpointer(root) as ckpt:
        ckpt.save(1, state).result()
        for step in (2, 3):
            ckpt.save(step, state, only=aiockpt.trainable(), exclude=["optimizer", "note"]).result()


def snapshot_of(root: Path) -> dict[str, bytes]:
    """Return every file below *root*, and every folder."""
    return {str(path): b"" if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
