"""What does a checkpoint offer to a rank that loads? Its tensors by name, and its values as a tree to look things up in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from aiockpt.format.names import join_name, prefixes
from aiockpt.state.tree import TAG, Node, Path

_OF_A_RANK = re.compile(r"@rank\d+\Z")


class Stored(msgspec.Struct, frozen=True):
    """What a checkpoint offers to one rank.

    Attributes:
        tensors: name → (dtype code, global shape).
        alias: other names of a tensor → its name.
        values, per_rank: the trees of `ShardedState`; *per_rank* is this rank's own, None when it has none.
        where: what to call the checkpoint in messages.
        step: of the checkpoint.
        rank, world_size: this rank, out of how many that load.
        every_rank: the *per_rank* trees of all ranks that saved, by rank in decimal; needed where their number changed.
        saved_world_size: how many ranks saved.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    alias: Mapping[str, str]
    values: Any
    per_rank: Any = None
    where: str = "the checkpoint"
    step: int = 0
    rank: int = 0
    world_size: int = 1
    every_rank: Mapping[str, Any] = {}
    saved_world_size: int = 1

    def facts(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return (dtype code, global shape) of the tensor *name*, or None."""
        return self.tensors.get(self.alias.get(name, name))

    def names(self) -> set[str]:
        """Return the name of every tensor and of every value."""
        return {*self.tensors, *self.alias, *_value_names(self.values, ())}

    def unused(self, used: set[str], claimed: set[str], passed_over: set[str]) -> Iterator[str]:
        """Yield the names that are not *used*; a part of which nothing was, once.

        Args:
            claimed: parts that belong to something of the state, so that each unused name in them is told.
            passed_over: parts whose rest does not count.
        """
        met = {prefix for name in used | claimed | passed_over for prefix in prefixes(name)}
        roots = set(_unmet_values(self.values, (), met))
        yield from sorted(roots)
        told = roots | passed_over
        for name in sorted({*self.tensors, *self.alias} - used):
            if not _OF_A_RANK.search(name) and not any(prefix in told for prefix in prefixes(name)):
                yield name


class Found(msgspec.Struct, frozen=True):
    """A node that was found; it may be null."""

    node: Node


def find_node(tree: Node, parts: Path) -> Found | None:
    """Return the node at a path of a tree of containers, or None."""
    for part in parts:
        if type(tree) is not dict:
            return None
        children = tree if TAG not in tree else dict(tree["items"]) if tree[TAG] == "dict" else {}
        if part not in children:
            return None
        tree = children[part]
    return Found(tree)


def find_flat(tree: Node, name: str) -> Found | None:
    """Return the node called *name* of a rank's own tree, which has one level, or None."""
    return Found(tree[name]) if isinstance(tree, Mapping) and name in tree else None


def _unmet_values(node: Node, path: Path, met: set[str]) -> Iterator[str]:
    if path and join_name(path) not in met:
        yield join_name(path)
    elif type(node) is dict and TAG not in node:
        for key, child in node.items():
            yield from _unmet_values(child, (*path, key), met)


def _value_names(node: Node, path: Path) -> Iterator[str]:
    if path:
        yield join_name(path)
    if type(node) is dict and TAG not in node:
        for key, child in node.items():
            yield from _value_names(child, (*path, key))
