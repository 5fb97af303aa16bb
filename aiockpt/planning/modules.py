"""The names of a state that are modules, by its tree of values; tensors below them are weights. Pure."""

from __future__ import annotations

from aiockpt.format.names import join_name
from aiockpt.state.tree import TAG, Node, Path


class Modules:
    """The modules in a tree of values.

    Args:
        values: the tree of a state.

    Attributes:
        roots: their names, in the order of the state.
        tree: the tree reduced to them; None where it has none.
        left_out: names of items beside modules in a list, which are null in *tree*.
    """

    def __init__(self, values: Node) -> None:
        self.roots: dict[str, None] = {}
        self.left_out: set[str] = set()
        self.tree = self._keep(values, ())

    def _keep(self, node: Node, path: Path) -> Node | None:
        if type(node) is list:
            return self._keep_items(node, path)
        if type(node) is not dict:
            return None
        kind = node.get(TAG)
        if kind == "module":
            self.roots[join_name(path)] = None
            return node
        if kind == "tuple":
            items = self._keep(node["items"], path)
            return None if items is None else {TAG: kind, "items": items}
        if kind not in (None, "dict", "OrderedDict"):
            return None
        children = node.items() if kind is None else node["items"]
        kept = [[key, found] for key, child in children if (found := self._keep(child, (*path, key))) is not None]
        if not kept:
            return None
        return dict(kept) if kind is None else {TAG: kind, "items": kept}

    def _keep_items(self, nodes: list[Node], path: Path) -> list[Node] | None:
        kept = [self._keep(node, (*path, place)) for place, node in enumerate(nodes)]
        if all(node is None for node in kept):
            return None
        # The nulls stay: the place of a module in its list is its name.
        self.left_out |= {join_name((*path, place)) for place, node in enumerate(kept) if node is None}
        return kept
