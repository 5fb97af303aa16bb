"""How is one tensor read, or a slice of it, without loading the rest? By the same plan and the same checks as a load."""

from __future__ import annotations

import difflib

import torch

from aiockpt.adapters.plain_values import objects_in
from aiockpt.adapters.stored import find_node
from aiockpt.engine.destination import Destination
from aiockpt.engine.find import find_manifest
from aiockpt.engine.load import fill_tensors
from aiockpt.errors import StateMismatchError, UsageError
from aiockpt.format.dtypes import torch_name
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import prefixes, split_name
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG, Node


async def read(destination: Destination, step: int | None, name: str, rows: slice | None) -> torch.Tensor:
    """Return tensor *name* of a step (the newest valid one for None), or the *rows* of its first axis, on the host."""
    found = await find_manifest(destination, step)
    place, manifest = found.place, found.manifest
    stored = _stored_name(manifest, name)
    entry = manifest.tensors[stored]
    box = _rows(name, entry.shape, rows)
    tensor = torch.empty(box.sizes, dtype=getattr(torch, torch_name(entry.dtype)))
    shard = TensorShard(name=stored, dtype=entry.dtype, shape=entry.shape, boxes=(box,), data=tensor)
    async with place.reading(manifest.id):
        await fill_tensors(place, manifest, [shard])
    return tensor


def _stored_name(manifest: Manifest, name: str) -> str:
    stored = manifest.alias.get(name, name)
    if stored in manifest.tensors:
        count = _count_of_numbers(manifest.state, stored) if len(manifest.tensors[stored].shape) == 1 else None
        if count is None:
            return stored
        advice = _advise_loading(manifest, name) or "Load it: load() into a state that has it."
        raise StateMismatchError(manifest.id, [f"{name}: {count:,} plain numbers, and read() is for tensors"], advice)
    raise StateMismatchError(manifest.id, *_tell_what_it_is(manifest, name))


def _tell_what_it_is(manifest: Manifest, name: str) -> tuple[list[str], str]:
    """Return what is stored under *name*, which is no tensor, and how to get it."""
    if name in (manifest.left_out or {}):
        return [
            f"{name}: left out when this step was saved (only= or exclude= of save())"
        ], "Take it from where it came."
    names = [*manifest.tensors, *manifest.alias]
    below = [other for other in names if name in prefixes(other)]
    if below:
        some = ", ".join(below[:3]) + (", …" if len(below) > 3 else "")
        return [f"{name}: not one tensor but {len(below)} ({some})"], "Read one of them, or load() all into a state."
    if (advice := _advise_loading(manifest, name)) is not None:
        return [f"{name}: a plain value, and read() is for tensors"], advice
    if name.partition(".")[0] in (manifest.state.get("global") or {}):
        advice = "describe() lists the names of tensors, `aiockpt inspect` shows the values too."
    else:
        advice = "describe() lists the names."
    close = difflib.get_close_matches(name, names, n=5)
    return [f"{name}: no such tensor is stored"], f"Did you mean {', '.join(close)}?" if close else advice


def _count_of_numbers(tree: Node, stored: str) -> int | None:
    """Return how many plain numbers the tensor *stored* stands for, which is longer than they are; None for a tensor."""
    if type(tree) is dict and tree.get(TAG) == "numbers":
        count: int | None = tree["count"] if tree["name"] == stored else None
        return count
    inside = tree.values() if type(tree) is dict else tree if type(tree) is list else ()
    counts = (_count_of_numbers(node, stored) for node in inside if type(node) in (dict, list))
    return next((count for count in counts if count is not None), None)


def _advise_loading(manifest: Manifest, name: str) -> str | None:
    """Return the line that loads a plain value alone, or None where it cannot be."""
    if (key := _key_of_value(manifest, name)) is None:
        return None
    return f"Load it: values = {{{key!r}: None}}; ckpt.load(values, {manifest.step}).result()"


def _key_of_value(manifest: Manifest, name: str) -> str | None:
    """Return the top-level key with which the plain value *name* can be loaded alone, or None where it cannot be."""
    try:
        path = split_name(name)
    except UsageError:
        return None
    values = manifest.state.get("global")
    if not path or find_node(values, path) is None:
        return None
    top = find_node(values, path[:1])
    return str(path[0]) if top is not None and not any(objects_in(top.node)) else None


def _rows(name: str, shape: tuple[int, ...], rows: slice | None) -> Box:
    if rows is None:
        return Box.whole(shape)
    if not shape:
        raise UsageError(f"{name} is a scalar: it has no rows")
    if not isinstance(rows, slice):
        raise UsageError(f"rows={rows!r}: give a slice, such as slice(0, 10)")
    if rows.step not in (None, 1):
        raise UsageError(f"rows={rows}: give a slice without a step")
    start, stop, _ = rows.indices(shape[0])
    return Box((start, *(0 for _ in shape[1:])), (max(stop - start, 0), *shape[1:]))
