"""Content of a checkpoint as a loading rank reads it: tensors by name, and values as a tree with lookups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from aiockpt.format.names import Names, name_within, prefixes
from aiockpt.state.tree import METADATA, TAG, Node, Path

_PAIRED = ("dict", "OrderedDict")
"""Kinds of dicts that are written as pairs of a key and a value, whose values have names of their own."""
_OF_A_RANK = re.compile(r"@rank\d+\Z")


class Stored(msgspec.Struct, frozen=True):
    """The content of a checkpoint for one rank.

    Attributes:
        tensors: name → (dtype code, global shape).
        alias: other names of a tensor → its name.
        values, per_rank: the trees of `ShardedState`; *per_rank* is this rank's own, None when it has none.
        axes: name → the order of its axes in memory, slowest first, of the tensors that are not row-major.
        left_out: the names that the save was configured to omit: for a tensor, its dtype code and shape; for others,
            None.
        where: the name of the checkpoint in messages.
        step: of the checkpoint.
        rank, world_size: this rank, and the number of ranks that load.
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
    left_out: Mapping[str, tuple[str, tuple[int, ...]] | None] = {}
    axes: Mapping[str, tuple[int, ...]] = {}

    def facts(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return (dtype code, global shape) of the tensor *name*, or None."""
        return self.tensors.get(self.alias.get(name, name))

    def same_tensor(self, name: str) -> str:
        """Return the one name that stands for all names of a tensor."""
        return self.alias.get(name, name)

    def axes_of(self, name: str) -> tuple[int, ...] | None:
        """Return the saved order in memory of the axes of tensor *name*; None where no order but row-major is recorded."""
        return self.axes.get(self.alias.get(name, name))

    @property
    def world_changed(self) -> str | None:
        """How the number of ranks changed, in words; None where it is the same."""
        saved, here = self.saved_world_size, self.world_size
        return None if saved == here else f"saved by {saved} ranks, and here are {here}"

    def leaves_out(self, name: str) -> bool:
        """Return whether the save left out *name*, or an object that contains it."""
        if not self.left_out:
            return False
        return name in self.left_out or any(prefix in self.left_out for prefix in prefixes(name))

    def names(self) -> set[str]:
        """Return the name of every tensor and of every value."""
        return {*self.tensors, *self.alias, *self.left_out, *_value_names(self.values, "")}

    def unused(self, used: set[str], passed_over: set[str], known: Names) -> Iterator[str]:
        """Yield the names that are not *used*; for a part without *known* names, only that of the part.

        Args:
            passed_over: parts whose unused rest is ignored.
            known: both, and parts that belong to the state, whose unused names are reported one by one.
        """
        # What was left out of a list has a null there, so that the items behind it keep their places.
        roots = set(_unknown_values(self.values, "", known, used | passed_over | self.left_out.keys()))
        yield from sorted(roots)
        notes = roots | passed_over
        for name in sorted({*self.tensors, *self.alias} - used):
            # The tensors of single ranks are no difference: those of all other ranks are in the checkpoint, too.
            if not _OF_A_RANK.search(name) and not any(prefix in notes for prefix in prefixes(name)):
                yield name


class FoundNode(msgspec.Struct, frozen=True):
    """A node that was found; it may be null."""

    node: Node


def find_node(tree: Node, parts: Path) -> FoundNode | None:
    """Return the node at a path of a tree of containers, or None."""
    for part in parts:
        inside = members_of(tree)
        if part not in inside:
            return None
        tree = inside[part]
    return FoundNode(tree)


def find_flat(tree: Node, name: str) -> FoundNode | None:
    """Return the node called *name* of a rank's own tree, which has one level, or None."""
    return FoundNode(tree[name]) if isinstance(tree, Mapping) and name in tree else None


def is_tensor_node(node: Node) -> bool:
    """Return whether a node stands for a tensor that is not composite."""
    return type(node) is dict and node.get(TAG) == "tensor"


def is_leaf(node: Node) -> bool:
    """Return whether a node has no members for certain: it is the node of a module or of an optimizer."""
    return type(node) is dict and node.get(TAG) in ("module", "optimizer")


def members_of(node: Node) -> Mapping[Any, Node]:
    """Return the items of a container by parts of names (text keys, integer keys, positions); nothing for a leaf."""
    if type(node) is dict and TAG not in node:
        return node
    items = node.get("items") if type(node) is dict and node[TAG] == "tuple" else node
    if type(items) is list:
        return dict(enumerate(items))
    return {key: child for key, child in _pairs_of(node) if type(key) in (str, int)}


def show_value(node: Node) -> str:
    """Return a plain value of a group as text for a message."""
    if type(node) is dict and node.get(TAG) == "tuple":
        return f"({', '.join(map(show_value, members_of(node).values()))})"
    return "a tensor" if is_tensor_node(node) else f"{node!r:.40}"


def metadata_in(node: Node) -> Node | None:
    """Return the node of a dict's ``_metadata`` within the dict's node, or None."""
    return node.get(METADATA) if type(node) is dict and TAG in node else None


def _pairs_of(node: Node) -> Iterator[tuple[Any, Node]]:
    """Yield (node of the key, node) of a dict that is written as pairs."""
    items = node.get("items") if type(node) is dict and node.get(TAG) in _PAIRED else None
    for pair in items if type(items) is list else ():
        if type(pair) is list and len(pair) == 2:
            yield pair[0], pair[1]


def _unknown_values(node: Node, name: str, known: Names, done: set[str]) -> Iterator[str]:
    """Yield the name of each part that *known* does not reach; parts in *done* were used or skipped as a whole."""
    if name and not known.reach(name):
        yield name
        return
    for key, child in members_of(node).items():
        if (inner := name_within(name, key)) not in done:
            yield from _unknown_values(child, inner, known, done)


def _value_names(node: Node, name: str) -> Iterator[str]:
    if name:
        yield name
    for key, child in members_of(node).items():
        if type(key) is str or type(child) in (dict, list):
            yield from _value_names(child, name_within(name, key))
