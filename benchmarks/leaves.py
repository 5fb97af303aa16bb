"""The cost of one more tensor in a warm load: the same bytes as few tensors and as many, loaded in turns.

    python -m benchmarks.leaves                                          # this checkout
    PYTHONPATH=OTHER_CHECKOUT python /path/to/benchmarks/leaves.py       # another one

Prints the least processor and wall time of a load, and the difference per tensor: for parameters of a module, for those
with their optimizer, and for bare tensors.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import aiockpt
from benchmarks import pages

TOTAL_BYTES, FEW, MANY, ROUNDS = 64 << 20, 12, 1200, 15


def module_of(count: int, size: int) -> dict[str, Any]:
    """Return a state with a module of *count* parameters of *size* float32 elements, twelve in each part."""
    parts = [torch.nn.ParameterList([torch.randn(size) for _ in range(FEW)]) for _ in range(count // FEW)]
    return {"model": torch.nn.ModuleList(parts)}


def trained_of(count: int, size: int) -> dict[str, Any]:
    """Return a state with a module and its AdamW: a quarter of the *count* tensors are steps, of one element."""
    parts = [torch.nn.ParameterList([torch.randn(size) for _ in range(FEW // 4)]) for _ in range(count // FEW)]
    model = torch.nn.ModuleList(parts)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def tensors_of(count: int, size: int) -> dict[str, Any]:
    """Return a state with a dict of *count* bare tensors of *size* float32 elements."""
    return {"model": {f"layers.{n // FEW}.block.{n % FEW}.weight": torch.randn(size) for n in range(count)}}


def measure(
    make: Callable[[int, int], dict[str, Any]], total_bytes: int, rounds: int
) -> dict[int, tuple[float, float]]:
    """Return the least (processor, wall) seconds of a load, by how many tensors it has."""
    least = {count: (float("inf"), float("inf")) for count in (FEW, MANY)}
    with ExitStack() as stack:
        opened = {}
        for count in least:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="leaves-"))
            state = make(count, total_bytes // count // 4)
            with aiockpt.Checkpointer(place) as saver:  # its end waits for the clean-up, which writes and renames files
                saver.save(1, state).result()
            pages.warm(Path(place))  # it was written past the page cache, and would always be read so
            ckpt = stack.enter_context(aiockpt.Checkpointer(place))
            opened[count] = ckpt, state
        for _ in range(rounds + 2):  # the first two warm the process
            for count, (ckpt, state) in opened.items():
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                ckpt.load(state).result()
                cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
                least[count] = min(least[count][0], cpu_s), min(least[count][1], wall_s)
    return least


def main(total_bytes: int = TOTAL_BYTES, rounds: int = ROUNDS) -> None:
    """Measure the kinds of states, and print a line for each."""
    for what, make in (("module", module_of), ("module and its AdamW", trained_of), ("bare tensors", tensors_of)):
        least = measure(make, total_bytes, rounds)
        parts = []
        for place, kind in enumerate(("processor", "wall")):
            few, many = (least[count][place] for count in (FEW, MANY))
            each = (many - few) / (MANY - FEW)
            parts.append(f"{kind} {few * 1e3:.1f} → {many * 1e3:.1f} ms, {each * 1e6:.1f} µs a tensor")
        sys.stdout.write(f"{what}: {'; '.join(parts)}\n")


if __name__ == "__main__":
    main()
