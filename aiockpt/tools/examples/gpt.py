"""A small byte-level GPT, its text, its optimizer and its schedule: an ordinary PyTorch program without checkpoints.

Two things make its resume a good test: dropout draws from torch's random state in every step, and the output layer shares
its weight with the embedding. The text is the source of the standard library, which is always there. The order of batches is
a function of the seed and of the loader's own state, so a restored loader continues with exactly the next batch.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

VOCABULARY = 256  # the model reads bytes


def library_text() -> Tensor:
    """Return the modules of the standard library, one after the other by name, as a (bytes,) uint8 tensor."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


class Batches:
    """Windows of a text in an order that is shuffled anew each epoch: an endless loader with a position."""

    def __init__(self, text: Tensor, *, window: int, batch: int, seed: int = 0) -> None:
        self._text = text
        self._window = window
        self._batch = batch
        self._seed = seed
        self._windows = (len(text) - 1) // window
        self._start_epoch(0)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (batch, window) int64; the targets are one byte ahead."""
        if self._position + self._batch > self._windows:
            self._start_epoch(self._epoch + 1)
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        places = chosen[:, None] * self._window + torch.arange(self._window + 1)
        rows = self._text[places].long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return the position of the loader; its order follows from that."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move to the position of another loader of the same text."""
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = torch.randperm(self._windows, generator=torch.Generator().manual_seed(self._seed + epoch))


class GPTSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the model and its batches. The default has 3.3 million parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 8
    dropout: float = 0.1


DEFAULT_SIZE = GPTSize()


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, size.dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: saved once, tied again after loading

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) bytes to (batch, time, 256) logits of the byte that follows each."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(size: GPTSize, steps: int) -> tuple[GPT, torch.optim.AdamW, OneCycleLR, Batches]:
    """Return model, optimizer, scheduler and data for a run of *steps* steps, always the same ones."""
    torch.manual_seed(0)
    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps + 1, pct_start=0.1)
    return model, optimizer, scheduler, Batches(library_text(), window=size.context, batch=size.batch)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, scheduler: OneCycleLR, batches: Batches) -> float:
    """Take one optimizer step on the next batch and return its loss, in nats a byte."""
    inputs, targets = next(batches)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    optimizer.step()
    scheduler.step()
    return loss.item()
