"""Conversion of DCP's flat items to a state of ours: a nested dict of tensors, shards and values, and DCP's names.

DCP flattens a nested state dict into items with dotted names, and keeps the path of each. In the checkpoint they lie nested
again, so that ``Checkpointer.load({"model": model, …})`` fills modules and optimizers from it. What DCP would pickle is
written as a plain value where it is one; only what is not stays a pickle, and is noted as such.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from aiockpt.convert.foreign.to_dcp import DCP_NOTE
from aiockpt.errors import CorruptionError

Parts = tuple[str | int, ...]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class ItemNote(msgspec.Struct, frozen=True):
    """DCP's description of its items.

    Attributes:
        paths: of each item, by its name; the part of a list is its number.
        pickled: names of items that are pickles.
        flattened: whether DCP's planner knew the paths, and needs them back.
    """

    paths: dict[str, list[str | int]]
    pickled: dict[str, bool] = {}
    flattened: bool = True

    def as_value(self) -> dict[str, Any]:
        """Return it as a plain value."""
        return {"paths": self.paths, "pickled": self.pickled, "flattened": self.flattened}


def read_note(values: object) -> ItemNote | None:
    """Return the note in the values of a checkpoint, or None where it was not saved through DCP.

    Raises:
        CorruptionError: this library did not write it.
    """
    found = values.get(DCP_NOTE) if isinstance(values, Mapping) else None
    if found is None:
        return None
    try:
        return msgspec.convert(found, ItemNote)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"the note of DCP's names is damaged: {error}") from error


def with_lists(state: dict[Any, Any], paths: Iterable[Parts], *, alone: bool) -> dict[Any, Any]:
    """Return *state* with lists where DCP found some; `nested.put` made dicts with numbers for keys of them.

    Ranks have different items of one list after de-duplication, and lists are united by place. So a list of containers is
    written as one, with empty dicts where a rank has nothing; one that has items itself stays a dict, but for a rank that
    saves *alone*.

    Args:
        paths: of all items of this rank before de-duplication: they give the length of each list.
    """
    lengths: dict[Parts, int] = {}
    with_items: set[Parts] = set()
    for path in paths:
        for depth, part in enumerate(path):
            if type(part) is int:
                lengths[path[:depth]] = max(lengths.get(path[:depth], 0), part + 1)
        if type(path[-1]) is int:
            with_items.add(path[:-1])

    def convert(node: Any, path: Parts) -> Any:
        if type(node) is not dict:
            return node
        inside = {key: convert(child, (*path, key)) for key, child in node.items()}
        length = lengths.get(path, 0)
        if not length or not all(type(key) is int for key in inside) or (path in with_items and not alone):
            return inside
        return [inside.get(place, {}) for place in range(length)]

    return {key: convert(child, (key,)) for key, child in state.items()}


def unpickled(data: bytes) -> tuple[bool, Any]:
    """Return whether what ``torch.save`` wrote is a plain value, and the value."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001  whatever torch says of it, it is not plain
        return False, None
    return is_plain(value), value


def is_plain(value: object) -> bool:
    """Return whether a value is one that comes back as it was without a pickle: of these classes, and no subclass."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    return False


def pickled(value: object) -> io.BytesIO:
    """Return what ``torch.save`` writes of a value, to be read from its beginning."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
