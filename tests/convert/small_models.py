"""Small models with what makes a conversion hard, and ways to compare what comes out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from aiockpt.convert import Converted, from_hugging_face, to_hugging_face
from tests.small_run import small_checkpointer

DEADLINE_S = 250


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a scalar, an empty tensor, integers and half precision."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(301, 20)
        self.norm = nn.LayerNorm(20)
        self.small = nn.Parameter(torch.randn(7, 9).half())
        self.scale = nn.Parameter(torch.tensor(float(seed)))
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.head = nn.Linear(20, 301, bias=False)
        self.head.weight = self.embed.weight


def save_state(root: Path | str, state: dict[str, Any], step: int = 1) -> None:
    with small_checkpointer(root) as ckpt:
        ckpt.save(step, state).result(DEADLINE_S)


def save_model(root: Path | str, step: int, seed: int = 1) -> Tied:
    """Save a model beside an optimizer and values; return it."""
    model = Tied(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.dtype == torch.float32])
    save_state(root, {"model": model, "optimizer": optimizer, "epoch": 3}, step)
    return model


def load_model(root: Path | str) -> Tied:
    """Return a model that was filled from the newest step."""
    model = Tied(seed=9)
    with small_checkpointer(root) as ckpt:
        ckpt.load({"model": model}).result(DEADLINE_S)
    return model


def export(root: Path | str, folder: Any, **options: Any) -> Converted:
    """Convert a step to a folder, through windows of 32 KiB."""
    with small_checkpointer(root) as ckpt:
        return to_hugging_face(ckpt, folder, **options).result(DEADLINE_S)


def take_in(root: Path | str, folder: Any, **options: Any) -> Converted:
    """Convert a folder to a step, through windows of 16 KiB."""
    with small_checkpointer(root) as ckpt:
        return from_hugging_face(ckpt, folder, **options).result(DEADLINE_S)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a folder, by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file, by the safetensors library."""
    with safe_open(path, "pt") as opened:
        found: dict[str, str] = opened.metadata()
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors have one dtype, one shape and the same bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def all_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Say whether two sets of tensors are equal, bit by bit."""
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
