"""The union of the plain values of all ranks: their trees become one, or the differences are named.

Ranks of one job may see different parts of it: stages of a pipeline and groups of experts have other modules, and their
optimizers other parameters. So a tree is the union of all:

- objects (dicts of any keys, modules) by key, lists of one length by place;
- optimizers (``{"$":"optimizer"}``) by parameter name (`aiockpt.format.optimizers`);
- anything else must be equal wherever two ranks have it, type included.

Pure, and linear in the size of all trees; for any JSON it either unites or finds conflicts. What has not the form of
an optimizer is compared as it is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aiockpt.format.optimizers import TAG, Conflict, Votes, read_optimizer, unite_optimizers

_OPEN = (None, "module")
"""Objects of which one rank may have members that another lacks."""
_PAIRED = ("dict", "OrderedDict", "defaultdict")
"""Objects whose ``items`` are pairs of a key and a value, because the keys are not all text."""
_APART = ("items", "metadata")


def unite(votes: Votes) -> tuple[Any, list[Conflict]]:
    """Return the union of the trees of some ranks, and where they contradict each other.

    Args:
        votes: (rank, tree), at least one; where there is a conflict the first one's value stands.
    """
    conflicts: list[Conflict] = []
    return _unite(votes, "", conflicts), conflicts


def _unite(votes: Votes, path: str, conflicts: list[Conflict]) -> Any:
    if len(votes) == 1:
        return votes[0][1]
    nodes = [node for _, node in votes]
    if all(type(node) is dict and node.get(TAG) == nodes[0].get(TAG) for node in nodes):
        return _unite_tagged(votes, nodes[0].get(TAG), path, conflicts)
    if all(type(node) is list and len(node) == len(nodes[0]) for node in nodes):
        return [
            _unite([(rank, node[place]) for rank, node in votes], f"{path}[{place}]", conflicts)
            for place in range(len(nodes[0]))
        ]
    return _agree(votes, path, conflicts)


def _unite_tagged(votes: Votes, tag: Any, path: str, conflicts: list[Conflict]) -> Any:
    if tag == "optimizer":
        optimizers = [(rank, found) for rank, node in votes if (found := read_optimizer(node))]
        if len(optimizers) == len(votes):
            return unite_optimizers(optimizers, path, _unite, conflicts)
    elif tag in _PAIRED and all(_is_paired(node) for _, node in votes):
        return _unite_pairs(votes, path, conflicts)
    if tag in _OPEN or all(node.keys() == votes[0][1].keys() for _, node in votes):
        return _unite_objects(votes, path, conflicts)
    return _agree(votes, path, conflicts)


def _agree(votes: Votes, path: str, conflicts: list[Conflict]) -> Any:
    """Return the first rank's node; the first rank that says otherwise is a conflict."""
    first, ours = votes[0]
    for rank, theirs in votes[1:]:
        if type(theirs) is not type(ours) or theirs != ours:
            conflicts.append(Conflict(path, first, rank, ours, theirs))
            break
    return ours


def _unite_objects(votes: Votes, path: str, conflicts: list[Conflict]) -> dict[str, Any]:
    said: dict[str, list[tuple[int, Any]]] = {}
    for rank, node in votes:
        for key, value in node.items():
            said.setdefault(key, []).append((rank, value))
    return {key: _unite(some, f"{path}.{key}" if path else key, conflicts) for key, some in said.items()}


def _is_paired(node: dict[str, Any]) -> bool:
    items = node.get("items")
    return type(items) is list and all(type(pair) is list and len(pair) == 2 for pair in items)


def _unite_pairs(votes: Votes, path: str, conflicts: list[Conflict]) -> dict[str, Any]:
    said: dict[bytes, tuple[Any, list[tuple[int, Any]]]] = {}
    for rank, node in votes:
        for key, value in node["items"]:
            said.setdefault(msgspec.json.encode(key), (key, []))[1].append((rank, value))
    rest = [(rank, {name: value for name, value in node.items() if name not in _APART}) for rank, node in votes]
    items = [[key, _unite(some, f"{path}[{key!r:.40}]", conflicts)] for key, some in said.values()]
    node = {**_unite_objects(rest, path, conflicts), "items": items}
    told = [(rank, node["metadata"]) for rank, node in votes if "metadata" in node]
    # Classes put the device of their rank into it, which is no contradiction.
    return {**node, "metadata": _unite(told, path, [])} if told else node
