"""One small model that has the same names in every framework, its data, and what is known of each of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

WORDS, HIDDEN, INNER, LENGTH, BATCH = 16, 6, 12, 8, 4
STEPS = 2
"""Before a save."""
Known = dict[str, dict[str, Any]]
"""By parameter: its weights, what AdamW keeps of it, and the settings of its group; whole tensors."""
SETTINGS = ("lr", "weight_decay", "betas", "eps")


class Net(nn.Module):
    """Embedding, norm, two linear layers and a head: rows that four ranks do not share evenly, matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        add_layers(self)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return run_layers(self, words)


def add_layers(module: Any) -> None:
    """Give *module* the layers of the model."""
    module.embed = nn.Embedding(WORDS, HIDDEN)
    module.norm = nn.LayerNorm(HIDDEN)
    module.up = nn.Linear(HIDDEN, INNER)
    module.down = nn.Linear(INNER, HIDDEN)
    module.head = nn.Linear(HIDDEN, WORDS)


def run_layers(module: Any, words: torch.Tensor) -> torch.Tensor:
    """Return the logits of a batch."""
    found = module.embed(words)
    found = found + module.down(torch.tanh(module.up(module.norm(found))))
    logits: torch.Tensor = module.head(found)
    return logits


def is_matrix(name: str) -> bool:
    """Return whether a parameter is a matrix, which has weight decay; its shape here does not tell where it is flattened."""
    return not name.endswith("bias") and "norm" not in name


def groups_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Return two groups, as the trainers of frameworks make them: matrices, and the rest without weight decay."""
    trained = list(named)
    return [
        {"params": [one for name, one in trained if is_matrix(name)], "weight_decay": 0.1},
        {"params": [one for name, one in trained if not is_matrix(name)], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the words that a rank trains in a step."""
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the loss of guessing the next word."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group says of its parameters."""
    return {key: tuple(group[key]) if key == "betas" else float(group[key]) for key in SETTINGS}
