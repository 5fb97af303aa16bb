"""How is one tensor read, or a slice of it, without loading the rest? By the same plan and the same checks as a load."""

from __future__ import annotations

import difflib

import torch

from aiockpt.engine.context import Engine
from aiockpt.engine.find import find_manifest
from aiockpt.engine.load import fill_tensors
from aiockpt.errors import StateMismatchError, UsageError
from aiockpt.format.dtypes import torch_name
from aiockpt.format.manifest import Manifest
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard


async def read(engine: Engine, step: int | None, name: str, rows: slice | None) -> torch.Tensor:
    """Return tensor *name* of a step (the newest valid one for None), or the *rows* of its first axis, on the host."""
    found = await find_manifest(engine, step)
    engine, manifest = found.engine, found.manifest
    stored = _stored_name(manifest, name)
    entry = manifest.tensors[stored]
    box = _rows(name, entry.shape, rows)
    tensor = torch.empty(box.sizes, dtype=getattr(torch, torch_name(entry.dtype)))
    shard = TensorShard(name=stored, dtype=entry.dtype, shape=entry.shape, boxes=(box,), data=tensor)
    async with engine.reading(manifest.id):
        await fill_tensors(engine, manifest, [shard])
    return tensor


def _stored_name(manifest: Manifest, name: str) -> str:
    stored = manifest.alias.get(name, name)
    if stored in manifest.tensors:
        return stored
    close = difflib.get_close_matches(name, [*manifest.tensors, *manifest.alias], n=5)
    advice = f"Did you mean {', '.join(close)}?" if close else "describe() lists the names."
    raise StateMismatchError(manifest.id, [f"{name}: no such tensor is stored"], advice)


def _rows(name: str, shape: tuple[int, ...], rows: slice | None) -> Box:
    if rows is None:
        return Box.whole(shape)
    if not shape:
        raise UsageError(f"{name} is a scalar: it has no rows")
    if rows.step not in (None, 1):
        raise UsageError(f"rows={rows}: give a slice without a step")
    start, stop, _ = rows.indices(shape[0])
    return Box((start, *(0 for _ in shape[1:])), (max(stop - start, 0), *shape[1:]))
