"""The state that is saved: that of an LLM training job, with bf16 parameters, fp32 masters and Adam moments.

Guarantees:

- Building one needs no memory beyond its tensors, so that peak memory later is the contender's alone.
- The same size gives the same names, shapes and bytes in every process and every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

State = dict[str, Any]
"""Nested dicts with tensors as leaves: ``{"model": {name: tensor}, "master": …, "optimizer": {…}, "step": tensor}``."""

LAYERS = 12
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4
_EMBEDDING_ROWS_PER_WIDTH = 16


def parameter_shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return name → shape of a decoder whose whole state is *size_bytes*, to within one row of the embedding."""
    parameters = size_bytes / BYTES_PER_PARAMETER
    width = max(8, int(math.sqrt(parameters / (12 * LAYERS + _EMBEDDING_ROWS_PER_WIDTH))))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.attention.norm.weight"] = (width,)
        shapes[f"layers.{layer}.attention.qkv.weight"] = (3 * width, width)
        shapes[f"layers.{layer}.attention.out.weight"] = (width, width)
        shapes[f"layers.{layer}.mlp.norm.weight"] = (width,)
        shapes[f"layers.{layer}.mlp.up.weight"] = (4 * width, width)
        shapes[f"layers.{layer}.mlp.down.weight"] = (width, 4 * width)
    used = sum(math.prod(shape) for shape in shapes.values())
    return {"embedding.weight": (max(1, int((parameters - used) / width)), width), **shapes}


def build(size_bytes: int, seed: int = 0) -> State:
    """Return a state of about *size_bytes*, filled with reproducible values."""
    shapes = parameter_shapes(size_bytes)
    random = torch.Generator().manual_seed(seed)

    def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=random) for name, shape in shapes.items()
        }

    return {
        "model": tensors(torch.bfloat16),
        "master": tensors(torch.float32),
        "optimizer": {"exp_avg": tensors(torch.float32), "exp_avg_sq": tensors(torch.float32)},
        "step": torch.zeros((), dtype=torch.int64),
    }


def leaves(state: State, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each leaf; the name joins the path with ``/``."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield prefix + key, value
        else:
            yield from leaves(value, f"{prefix}{key}/")


def size_bytes(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for _, tensor in leaves(state))


def stamp(state: State, step: int) -> None:
    """Change every tensor a little, as an optimizer step would, so that no two saves hold the same bytes."""
    for _, tensor in leaves(state):
        tensor.view(-1)[0] = step


def clear(state: State) -> None:
    """Zero every tensor in place, so that a load that does nothing cannot pass for one that does."""
    for _, tensor in leaves(state):
        tensor.zero_()


def fill(state: State, loaded: State) -> None:
    """Copy *loaded* into the tensors of *state*, as ``load_state_dict`` does."""
    for key, target in state.items():
        if isinstance(target, torch.Tensor):
            target.copy_(loaded[key])
        else:
            fill(target, loaded[key])


def digests(state: State) -> dict[str, str]:
    """Return a digest of the bytes of each leaf, to compare a loaded state with the saved one without a second copy."""
    return {name: xxhash.xxh3_64_hexdigest(_memory(tensor)) for name, tensor in leaves(state)}


def compare(state: State, expected: dict[str, str]) -> None:
    """Raise RuntimeError unless the digests of *state* are those *expected*."""
    found = digests(state)
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(expected)} tensors differ from what was saved, {wrong[0]!r} first")


def _memory(tensor: torch.Tensor) -> memoryview:
    buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(buffer)
