"""Nested dicts by the dotted names of frameworks: where each tensor of a state lies, whatever it is called there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiockpt


def put(state: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Put *value* at *path* of nested dicts.

    Raises:
        UsageError: something else is in its way.
    """
    inner: Any = state
    for depth, part in enumerate(path[:-1], 1):
        inner = inner.setdefault(part, {})
        if type(inner) is not dict:
            raise aiockpt.UsageError(f"{'.'.join(path[:depth])} is a tensor, and what {'.'.join(path)} lies in")
    if path[-1] in inner:
        raise aiockpt.UsageError(f"{'.'.join(path)} is a tensor, and what others lie in")
    inner[path[-1]] = value


def take(state: dict[str, Any], path: Sequence[str]) -> Any:
    """Return what lies at *path* of nested dicts."""
    inner: Any = state
    for part in path:
        inner = inner[part]
    return inner
