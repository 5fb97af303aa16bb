"""A training loop for machines that fail: each step is kept in the memory of all hosts, and a bad one is taken back.

    aiockpt run --nnodes 2:4 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HEAD:29400 \\
        -m aiockpt.tools.examples.train_recovering /data/run-7

A process that dies or hangs is started again by the launcher, and goes on after the last step. So does a host: what it
held has a copy in another one's memory. A loss that is not finite sets all ranks back to the step before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.events import Observer
from aiockpt.tools.examples.gpt import GPT, GPTSize, library_text

SIZE = GPTSize(layers=2, width=64, context=64, batch=2, dropout=0.0)
SAMPLES = 1024


def make_loader(size: GPTSize, samples: int) -> aiockpt.Loader[list[Tensor]]:
    """Return the loader of this rank: windows of the text, dealt out anew in each epoch."""
    windows = library_text()[: samples * (size.context + 1)].view(samples, -1).long()
    return aiockpt.Loader(DataLoader(TensorDataset(windows), batch_sampler=aiockpt.ShardedSampler(samples, size.batch)))


def compute_loss(model: GPT, rows: Tensor) -> Tensor:
    """Return the loss of (batch, context + 1) bytes, each of which but the first is to be predicted."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(
    tiers: Sequence[Any],
    *,
    epochs: int = 2,
    size: GPTSize = SIZE,
    samples: int = SAMPLES,
    rewind: aiockpt.Rewind = aiockpt.Rewind(),  # noqa: B008  it is frozen
    compute_loss: Callable[[GPT, Tensor], Tensor] = compute_loss,
    on_step: Callable[[int, float], object] = print,
    observers: Sequence[Observer] = (),
) -> None:
    """Train from the newest step in *tiers* to the end, on however many ranks there are now."""
    torch.manual_seed(0)
    model = GPT(size)
    for module in (*model.blocks, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(size, samples)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": aiockpt.RNG()}
    # A disk without room, or a store that is away, is no reason to stop: the steps are in memory.
    with aiockpt.Checkpointer(tiers, every=1, rewind=rewind, on_error="warn", observers=observers) as ckpt:
        step = ckpt.resume(state)
        while loader.epoch < epochs:
            for (rows,) in loader:
                loss = compute_loss(model, rows)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
                optimizer.step()
                on_step(step, loss.item())
                step = ckpt.advance(step, state, metrics={"loss": loss})


def main() -> None:
    """Train by the command line's options; started by ``aiockpt run``, once for each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="on a disk that all hosts see; a URL will do")
    parser.add_argument("--name", default="recovering", help="of the run, in the memory of the hosts")
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    train([aiockpt.Tier(f"peer://{arguments.name}"), aiockpt.Tier(arguments.folder, every=50)])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
