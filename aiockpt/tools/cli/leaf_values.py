"""Plain values of a checkpoint for people: one name and one short text for each leaf."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import TensorRef, read_tree
from aiockpt.format.names import join_name
from aiockpt.state.tree import Opaque, Path

SHORT_ITEMS = 8


def read_values(stored: Stored) -> dict[str, Any]:
    """Return the leaves of the values of a step by name, as one rank had them; tensors are left out.

    Lists and tuples of plain values are leaves.
    """
    leaves = _leaves((), read_tree(stored))
    return {join_name(path): value for path, value in leaves if not isinstance(value, TensorRef)}


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    parts: list[tuple[str | int, Any]]
    if isinstance(value, Opaque):
        parts = [(value.codec, value.value)]
    elif isinstance(value, Mapping):
        parts = [(key if isinstance(key, str | int) else repr(key), inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple | deque) and not _is_plain(value):
        parts = list(enumerate(value))
    else:
        yield path, value
        return
    for part, inner in parts:
        yield from _leaves((*path, part), inner)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | deque):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, Mapping | Opaque | TensorRef)


def shorten(value: Any, width: int = 60) -> str:
    """Return *value* in at most *width* characters."""
    if isinstance(value, bytes | bytearray):
        text = repr(value) if len(value) <= SHORT_ITEMS else f"{len(value)} bytes, crc32 {crc32(value):08x}"
    elif isinstance(value, list | tuple) and len(value) > SHORT_ITEMS:
        first = ", ".join(shorten(item, width) for item in value[:3])
        text = f"{len(value)} items: {first}, …"
    else:
        text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
