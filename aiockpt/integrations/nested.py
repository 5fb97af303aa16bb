"""Nested dicts for the dotted names of frameworks: conversion between flat names and paths in a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiockpt


def put(state: dict[Any, Any], path: Sequence[str | int], value: object) -> None:
    """Put *value* at *path* of nested dicts.

    Raises:
        UsageError: another value is on the path, or at its end.
    """
    inner: Any = state
    for depth, part in enumerate(path[:-1], 1):
        inner = inner.setdefault(part, {})
        if type(inner) is not dict:
            raise aiockpt.UsageError(f"{_dotted(path[:depth])} is a tensor and a prefix of {_dotted(path)}; rename one")
    if path[-1] in inner:
        raise aiockpt.UsageError(f"{_dotted(path)} is a tensor and a prefix of other names; rename it")
    inner[path[-1]] = value


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def value_at(state: dict[str, Any], path: Sequence[str]) -> Any:
    """Return the value at *path* of nested dicts."""
    inner: Any = state
    for part in path:
        inner = inner[part]
    return inner


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat dict as nested dicts, so that its tensors have the same names as those of a module."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        put(state, name.split("."), value)
    return state


def flatten(state: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return the dict that `nest` received."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat |= flatten(value, f"{start}{name}.") if isinstance(value, dict) else {start + name: value}
    return flat
