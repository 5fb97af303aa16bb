"""Digests of tensors and values: by bits, dtype, shape and order of elements; strides and devices make no difference.

NaN equals NaN where the bits are equal, and 0.0 is not -0.0. For a tensor that is sharded over ranks, a digest covers this
rank's part; `box_sums` digests each part in a way that does not depend on how the tensor is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.rng import RNG
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import is_lazy
from aiockpt.format.names import join_name
from aiockpt.prove.records import View, sum_text
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG, Node, Path

TEXT = 60
"""Values whose text is longer are recorded by its digest."""
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def digest_bytes(data: bytes) -> str:
    """Return the digest of bytes; all digests of non-tensors are made of it."""
    return xxhash.xxh3_128(data).hexdigest()


def digest(tensor: torch.Tensor) -> str:
    hasher = xxhash.xxh3_128()
    _feed(hasher, tensor)
    return hasher.hexdigest()


def _feed(hasher: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        kind = tensor_kind(tensor)
        if kind.is_spread:
            hasher.update(f"spread {tuple(tensor.shape)}".encode())
            for local in kind.local_tensors(tensor):
                _feed(hasher, local)
        elif hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            hasher.update(f"{type(tensor).__name__} {context!r}".encode())
            for name in names:
                _feed(hasher, getattr(tensor, name))
        else:
            hasher.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
            hasher.update(_bytes(tensor))


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the elements of a dense tensor in their order, as bytes."""
    plain = tensor.detach()
    if plain.device.type == "meta":
        return repr(plain).encode()
    if plain.layout != torch.strided:  # not its `repr`, which leaves out most of a large one
        return b"".join(_bytes(part).tobytes() for part in _parts_of_sparse(plain))
    if is_lazy(plain):
        plain = plain.resolve_conj().resolve_neg()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors of which a sparse one consists."""
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return whole.indices(), whole.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def text_of(value: object) -> str:
    """Return a value as text: a tensor, or an object that has ``item()`` and one element, by its element's bits."""
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 and not tensor_kind(value).is_spread else digest(value)
    return shorten(_spell(value))


def _spell(value: object, depth: int = 8) -> str:
    """Return the `repr` of a value, with the digests of arrays and tensors in it: theirs leaves out most of a large one."""
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {value.shape} {digest_bytes(value.tobytes())}"
    if depth and isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_spell(item, depth - 1)}" for key, item in value.items()) + "}"
    if depth and isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_spell(item, depth - 1) for item in value)})"
    return repr(value)


def shorten(text: str) -> str:
    """Return *text*, or its digest where it is long."""
    return text if len(text) <= TEXT else digest_bytes(text.encode())


def tensors_in(value: object, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for key in value:
            yield from tensors_in(value[key], depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)


def digest_value(value: object) -> str:
    """Return the digest of a tensor, or of the tensors in a value; else its text."""
    if isinstance(value, torch.Tensor):
        return digest(value)
    return shorten(_spell(value))


def sum_of_rows(tensor: torch.Tensor) -> int:
    """Return the sum of the digests of the rows of a batch: equal for any order of the rows and any split over ranks."""
    if not tensor.dim() or tensor_kind(tensor).is_spread:
        return 0
    data = _bytes(tensor)
    width = len(data) // len(tensor) if len(tensor) else 0
    if not width:
        return 0
    rows = memoryview(data).cast("B")
    return sum(xxhash.xxh3_64_intdigest(rows[at : at + width]) for at in range(0, len(rows), width))


def random_states() -> dict[str, str]:
    """Return a digest of each random generator of this process."""
    found = RNG().state_dict().items()
    return {name: digest_bytes(msgspec.msgpack.encode(state)) for name, state in found if name != "cuda" or state}


def view_of(state: Mapping[str, Any], rank: int, *, spread: bool = False) -> View:
    """Return *state* as this rank holds it, by the names that a checkpoint gives to its leaves."""
    walked = StateWalker(rank=rank).walk(state)
    leaves: dict[str, str] = {}
    boxes: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    numbers: dict[str, str] = {}
    for shard in walked.tensors:
        # A rank may have several boxes of one tensor, each of which is a shard.
        name = shard.name if shard.name not in leaves else f"{shard.name}#{len(leaves)}"
        leaves[name] = digest(shard.data)
        if spread:
            _, found = boxes.setdefault(shard.name, (f"{shard.dtype} {shard.shape}", []))
            found.extend(box_sums(shard))
        if shard.shape == () and isinstance(shard.data, torch.Tensor) and shard.data.numel() == 1:
            numbers[shard.name] = repr(shard.data.item())
    leaves |= {other: leaves[name] for other, name in walked.alias.items()}
    parts: dict[str, str] = {}
    _walk_values(walked.values, (), leaves, parts)
    # A bare tensor without axes and a number load into each other: they are recorded alike, by their value.
    leaves |= {name: number for name, number in numbers.items() if parts.get(name) == "tensor"}
    for name, node in walked.per_rank.items():
        parts[name] = "per rank"
        leaves |= {leaf: text for leaf, text in _flatten(node, name).items() if text != "[]"}  # no device, no generator
    return View(leaves, parts, boxes, random_states())


def _walk_values(node: Node, path: Path, leaves: dict[str, str], parts: dict[str, str]) -> None:
    """Add the values below *node* to *leaves*, and the kinds of its objects to *parts*."""
    name = join_name(path) if path else ""
    if type(node) is not dict:
        parts[name], leaves[name] = "value", shorten(_text(node))
        return
    kind = node.get(TAG)
    if kind is None or kind == "dict":
        for key, child in node.items() if kind is None else node["items"]:
            _walk_values(child, (*path, key), leaves, parts)
    elif kind == "optimizer":
        parts[name] = kind
        for number, group in enumerate(node["groups"]):
            leaves |= {
                f"{name}.groups[{number}].{key}": shorten(_text(value)) for key, value in group["values"].items()
            }
        for owner, key, value in node["values"]:
            leaves[f"{name}.state.{owner}.{key}"] = shorten(_text(value))
    elif kind != "per_rank":
        parts[name] = kind
        leaves |= {} if kind == "tensor" else _flatten({key: node[key] for key in node if key != TAG}, name)


def _flatten(node: Node, name: str) -> dict[str, str]:
    """Return the text of each entry of a dict, or of the whole of another value."""
    if type(node) is dict and TAG not in node and node:
        found: dict[str, str] = {}
        for key, child in node.items():
            found |= _flatten(child, name if key == "value" else f"{name}.{key}")
        return found
    return {name: shorten(_text(node))} if node != {} else {}


def _text(node: Node) -> str:
    return msgspec.json.encode(node, order="sorted").decode()


def box_sums(shard: TensorShard) -> Iterator[tuple[str, str]]:
    """Yield (box, sum) for each box of a shard: the sum over its elements of a digest of element and global index.

    Boxes that tile a tensor have the same total, however it is cut.
    """
    if not shard.boxes or not shard.data.numel():
        return
    size = shard.data.element_size()
    data = np.frombuffer(_bytes(shard.data), np.uint8).reshape(-1, size)
    elements = np.zeros((len(data), -(-size // 8) * 8), np.uint8)
    elements[:, :size] = data
    words = elements.view(np.uint64)
    start = 0
    for box in shard.boxes:
        index = np.zeros(box.sizes, np.uint64)
        for axis, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            along = np.arange(offset, offset + length, dtype=np.uint64)
            along = along.reshape([-1 if other == axis else 1 for other in range(index.ndim)])
            index = index * np.uint64(shard.shape[axis]) + along
        flat = index.reshape(-1)
        total = 0
        for column in range(words.shape[1]):
            mixed = _mix(_mix(flat + np.uint64(column)) ^ words[start : start + flat.size, column])
            total += int(mixed.sum(dtype=np.uint64))
        yield f"{box.offsets}+{box.sizes}", sum_text(total)
        start += flat.size


def _mix(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return 64 well mixed bits of each value (the end of splitmix64, as Vigna published it)."""
    mixed = values + _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    return mixed ^ (mixed >> np.uint64(31))
