"""A sharded training loop that saves and loads like any other: the parallelism is in the tensors, not in the call.

    torchrun --nproc-per-node 2 -m aiockpt.tools.examples.train_elastic /data/run-7
    torchrun --nproc-per-node 4 -m aiockpt.tools.examples.train_elastic /data/run-7 --tensor-parallel 2

Stop it, and start it again with another number of ranks or another parallelism: each rank reads the parts that it now
needs. One rank holds the whole model, two shard it (FSDP2), more may split its matrices too (tensor parallel).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aiockpt
from aiockpt.events import Observer
from aiockpt.tools.examples.gpt import GPT, GPTSize, build

SMALL_SIZE = GPTSize(layers=2, width=128, context=64, batch=8, dropout=0.0)
"""Without dropout: each rank draws its own random numbers, so another number of ranks would change them."""


def make_mesh(tensor_parallel: int) -> DeviceMesh:
    """Return the mesh of all ranks: data parallel × tensor parallel."""
    shape = (distributed.get_world_size() // tensor_parallel, tensor_parallel)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Split the matrices of each block over the ranks of *mesh*'s "tensor" axis, and shard all of it over "data"."""
    if mesh["tensor"].size() > 1:
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["data"])


def train(
    url: str,
    *,
    tensor_parallel: int = 1,
    size: GPTSize = SMALL_SIZE,
    steps: int = 60,
    every: int | None = 5,
    on_step: Callable[[int, float], object] = print,
    observers: Sequence[Observer] = (),
) -> None:
    """Train from the newest checkpoint below *url* up to *steps*, on however many ranks there are now."""
    mesh = make_mesh(tensor_parallel)
    model, _, _, batches = build(size, steps)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "batches": batches, "rng": aiockpt.RNG()}
    with aiockpt.Checkpointer(url, observers=observers) as ckpt:
        loaded = ckpt.load(state).result()  # each rank loads its part, from any number of writers
        for step in range(0 if loaded is None else loaded.step + 1, steps):
            loss = train_step(model, optimizer, next(batches), mesh["data"])
            on_step(step, loss)
            if every and step % every == 0:
                ckpt.save(step, state)  # each rank saves its part; on every rank, in the same order


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], data: DeviceMesh
) -> float:
    """Take one optimizer step, each rank on its slice of the batch; return the loss of the whole batch."""
    inputs, targets = (part.chunk(data.size())[data.get_local_rank()] for part in batch)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    optimizer.step()
    total = loss.detach()
    distributed.all_reduce(total, group=data.get_group())
    return total.item() / data.size()


def main() -> None:
    """Train by the command line's options; started by torchrun, once for each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    train(arguments.url, tensor_parallel=arguments.tensor_parallel)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
