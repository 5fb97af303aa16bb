"""What do all ranks together say of the plain values? The trees of all ranks become one, or the differences are named.

Ranks of one job may see different parts of it: stages of a pipeline and groups of experts have other modules, and their
optimizers other parameters. So a tree is the union of all:

- objects (dicts of any keys, modules) by key, lists of one length by place;
- optimizers (``{"$":"optimizer"}``, `aiockpt.adapters.optimizer`) group by group, and in them by parameter name;
- anything else must be equal wherever two ranks have it, type included.

Pure, and linear in the size of all trees; for any JSON it either unites or finds conflicts. What has not the form of
an optimizer is compared as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

TAG = "$"
_OPEN = (None, "module")
"""Objects of which one rank may have members that another lacks."""
_PAIRED = ("dict", "defaultdict")
"""Objects whose ``items`` are pairs of a key and a value, because the keys are not all text."""
Votes = Sequence[tuple[int, Any]]
"""What ranks say of one place of the tree: (rank, node)."""


class Conflict(msgspec.Struct, frozen=True):
    """Two ranks say different things of one place; *path* is empty for the whole tree."""

    path: str
    first: int
    other: int
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        """Say where, who and what, short."""
        where = self.path or "everything"
        return f"{where} ({self.ours!r:.40} on rank {self.first}, {self.theirs!r:.40} on rank {self.other})"


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
        optimizers = [(rank, found) for rank, node in votes if (found := _read_optimizer(node))]
        if len(optimizers) == len(votes):
            return _unite_optimizers(optimizers, path, conflicts)
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
    rest = [(rank, {name: value for name, value in node.items() if name != "items"}) for rank, node in votes]
    items = [[key, _unite(some, f"{path}[{key!r:.40}]", conflicts)] for key, some in said.values()]
    return {**_unite_objects(rest, path, conflicts), "items": items}


class _Row(msgspec.Struct):
    keys: list[str | int]
    params: list[int]


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    params: list[str]
    values: dict[str, Any]


class _Optimizer(msgspec.Struct, tag_field=TAG, tag="optimizer", forbid_unknown_fields=True):
    groups: list[_Group]
    state: list[_Row]
    values: list[tuple[str, str | int, Any]]
    rest: Any = msgspec.UNSET

    def tables(self) -> dict[str, tuple[str | int, ...]]:
        """Return the keys of each parameter's tensors, by the parameter's name."""
        names = [name for group in self.groups for name in group.params]
        return {names[number]: tuple(row.keys) for row in self.state for number in row.params}


def _read_optimizer(node: dict[str, Any]) -> _Optimizer | None:
    if node.get(TAG) != "optimizer":
        return None
    try:
        optimizer = msgspec.convert(node, _Optimizer)
        optimizer.tables()
    except (msgspec.ValidationError, IndexError):
        return None
    return optimizer


def _unite_optimizers(
    votes: Sequence[tuple[int, _Optimizer]], path: str, conflicts: list[Conflict]
) -> dict[str, Any] | None:
    first, ours = votes[0]
    for rank, theirs in votes[1:]:
        if len(theirs.groups) != len(ours.groups):
            conflicts.append(
                Conflict(f"{path}.groups", first, rank, f"{len(ours.groups)} groups", f"{len(theirs.groups)} groups")
            )
            return None
    groups = [
        _unite_groups([(rank, one.groups[n]) for rank, one in votes], f"{path}.groups[{n}]", conflicts)
        for n in range(len(ours.groups))
    ]
    _check_memberships(votes, path, conflicts)
    said: dict[tuple[str, str | int], list[tuple[int, Any]]] = {}
    for rank, one in votes:
        for owner, key, value in one.values:
            said.setdefault((owner, key), []).append((rank, value))
    node: dict[str, Any] = {
        TAG: "optimizer",
        "groups": groups,
        "state": _unite_tables([one for _, one in votes], groups),
        "values": [
            [owner, key, _unite(some, f"{path}.state.{owner}.{key}", conflicts)] for (owner, key), some in said.items()
        ],
    }
    rests = [(rank, one.rest) for rank, one in votes if one.rest is not msgspec.UNSET]
    if rests:
        node["rest"] = _unite(rests, f"{path}.rest", conflicts)
    return node


def _unite_groups(votes: Sequence[tuple[int, _Group]], path: str, conflicts: list[Conflict]) -> dict[str, Any]:
    params = dict.fromkeys(name for _, group in votes for name in group.params)
    values = _unite([(rank, group.values) for rank, group in votes], path, conflicts)
    return {"params": list(params), "values": values}


def _check_memberships(votes: Sequence[tuple[int, _Optimizer]], path: str, conflicts: list[Conflict]) -> None:
    """A parameter is in one group only, the same on all ranks that have it."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, optimizer in votes:
        for number, group in enumerate(optimizer.groups):
            for name in group.params:
                first, known = seen.setdefault(name, (rank, number))
                if known != number:
                    conflicts.append(Conflict(f"{path}: the group of {name}", first, rank, known, number))


def _unite_tables(optimizers: Sequence[_Optimizer], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return which parameters have which tensors, by their numbers in the united groups."""
    keys: dict[str, dict[str | int, None]] = {}
    for optimizer in optimizers:
        for name, some in optimizer.tables().items():
            keys.setdefault(name, {}).update(dict.fromkeys(some))
    rows: dict[tuple[str | int, ...], list[int]] = {}
    for number, name in enumerate(name for group in groups for name in group["params"]):
        if name in keys:
            rows.setdefault(tuple(keys[name]), []).append(number)
    return [{"keys": list(some), "params": numbers} for some, numbers in rows.items()]
