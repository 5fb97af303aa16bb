"""The names of a state that are modules, by its tree of values; tensors below them are weights. Pure."""

from __future__ import annotations

from aiockpt.format.names import join_name
from aiockpt.state.tree import TAG, Node, Path


def keep_modules(node: Node, path: Path, roots: set[str]) -> Node | None:
    """Return a tree of values reduced to its modules, and add their names to *roots*; None where it has none."""
    if type(node) is not dict:
        return None
    kind = node.get(TAG)
    if kind == "module":
        roots.add(join_name(path))
        return node
    if kind not in (None, "dict"):
        return None
    children = node.items() if kind is None else node["items"]
    kept = {key: found for key, child in children if (found := keep_modules(child, (*path, key), roots)) is not None}
    if kind is None or not kept:
        return kept or None
    return {TAG: "dict", "items": list(map(list, kept.items()))}


def find_modules(values: Node) -> set[str]:
    """Return the names of the modules in a tree of values."""
    roots: set[str] = set()
    keep_modules(values, (), roots)
    return roots
