"""Conversion of DCP's flat items to a state of ours: a nested dict of tensors, shards and values, and DCP's names.

DCP flattens a nested state dict into items with dotted names, and keeps the path of each. In the checkpoint they are nested
again, so that ``Checkpointer.load({"model": model, …})`` fills modules and optimizers from it. Items that DCP would pickle
are written as plain values where possible; only the others stay pickles, and are marked as such.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from aiockpt.convert.foreign.to_dcp import DCP_NOTE
from aiockpt.errors import CorruptionError
from aiockpt.format.document import described

Parts = tuple[str | int, ...]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class ItemNote(msgspec.Struct, frozen=True):
    """DCP's description of its items.

    Attributes:
        paths: the path of each item, by its name; list positions are integers.
        pickled: names of items that are pickles.
        flattened: whether DCP's planner had the paths, and needs them again.
    """

    paths: dict[str, list[str | int]]
    pickled: dict[str, bool] = {}
    flattened: bool = True


def read_note(values: object) -> ItemNote | None:
    """Return the note in the values of a checkpoint, or None where it was not saved through DCP.

    Raises:
        CorruptionError: the note is not as this library writes it.
    """
    found = values.get(DCP_NOTE) if isinstance(values, Mapping) else None
    if found is None:
        return None
    try:
        return msgspec.convert(found, described(ItemNote))
    except msgspec.ValidationError as error:
        raise CorruptionError(f"the note of DCP's names is damaged: {error}") from error


def with_lists(state: dict[Any, Any], paths: Iterable[Parts], *, alone: bool) -> dict[Any, Any]:
    """Return *state* with lists where DCP found some; `nested.put` made dicts with numbers for keys of them.

    After de-duplication, ranks have different items of one list, and lists are merged by position. So a list of containers
    is written as a list, with empty dicts where a rank has nothing. A list that has items itself stays a dict, unless the
    rank saves *alone*.

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
    """Return whether the result of ``torch.save`` is a plain value, and the value."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001  any error of torch means that it is not plain
        return False, None
    return is_plain(value), value


def is_plain(value: object) -> bool:
    """Return whether a value loads unchanged without a pickle: it is of these classes, not of a subclass."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    return False


def pickled(value: object) -> io.BytesIO:
    """Return the result of ``torch.save`` for a value, positioned at its beginning."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
