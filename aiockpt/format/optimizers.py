"""The union of the nodes that all ranks wrote of one optimizer: by the names of its parameters.

Ranks may have other parameters (stages of a pipeline, groups of experts) and so other groups. Guarantees:

- What a group says (learning rate, …) belongs to its parameters. Groups that say the same in the same place stay one
  group, as one process would have it; where ranks have other groups, each parameter keeps what its own group says.
- A parameter that several ranks have must have the same values on all of them, or it is named with two ranks.
- State belongs to parameters: the union of what the ranks have of it.

Pure, and linear in the size of all nodes. What has not the form of an optimizer is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

TAG = "$"
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
        """Say the place, the ranks and the difference, in short."""
        where = self.path or "everything"
        return f"{where} ({self.ours!r:.40} on rank {self.first}, {self.theirs!r:.40} on rank {self.other})"


Unite = Callable[[Votes, str, list[Conflict]], Any]
"""Returns the union of some nodes that are at a path, and adds where they contradict each other."""


class OptimizerRow(msgspec.Struct, omit_defaults=True):
    """Which parameters, by their numbers in the groups, have which tensors.

    Attributes:
        part: keys whose tensors the program has as plain ones, each rank the part of its part of the parameter.
        whole: keys whose tensors all ranks have alike, although the parameter is spread over them.
        spread: keys whose tensors are spread over ranks in another way than the parameter: "R" (replicated) or "S" and the
            axis, for each axis of the mesh.
    """

    keys: list[str | int]
    params: list[int]
    part: list[str | int] = []
    whole: list[str | int] = []
    spread: list[tuple[str | int, list[str]]] = []


class OptimizerGroup(msgspec.Struct, forbid_unknown_fields=True):
    """One group: the names of its parameters, and what holds for all of them."""

    params: list[str]
    values: dict[str, Any]


class OptimizerNode(
    msgspec.Struct, tag_field=TAG, tag="optimizer", forbid_unknown_fields=True, rename={"class_name": "class"}
):
    """What a checkpoint says of an optimizer.

    Attributes:
        groups: as above.
        state: which parameters have which tensors; those are tensors of the checkpoint.
        values: (parameter, key, node) of the state that is no tensor.
        class_name: the class that saved it, with its module. Checkpoints of older versions do not say it.
        keys: what its groups have by default.
        rest: state that belongs to no parameter.
        digests: of tensors that must be the same on all ranks, by their names within the optimizer.
    """

    groups: list[OptimizerGroup]
    state: list[OptimizerRow]
    values: list[tuple[str, str | int, Any]]
    class_name: str | msgspec.UnsetType = msgspec.UNSET
    keys: list[str] | msgspec.UnsetType = msgspec.UNSET
    rest: Any = msgspec.UNSET
    digests: dict[str, str] = {}

    def rows(self) -> dict[str, OptimizerRow]:
        """Return which tensors each parameter has, by the parameter's name.

        Raises:
            IndexError: there is no parameter of some number.
        """
        names = [name for group in self.groups for name in group.params]
        return {names[number]: row for row in self.state for number in row.params}


Nodes = Sequence[tuple[int, OptimizerNode]]


def read_optimizer(node: dict[str, Any]) -> OptimizerNode | None:
    """Return what *node* says; None where it has not the form of an optimizer."""
    if node.get(TAG) != "optimizer":
        return None
    try:
        optimizer = msgspec.convert(node, OptimizerNode)
        optimizer.rows()
    except (msgspec.ValidationError, IndexError):
        return None
    return optimizer


def unite_optimizers(votes: Nodes, path: str, unite: Unite, conflicts: list[Conflict]) -> dict[str, Any]:
    """Return the node that all ranks wrote together; where they contradict each other the first one's value stands."""
    node: dict[str, Any] = {TAG: "optimizer"}
    for name, attribute in (("class", "class_name"), ("keys", "keys"), ("rest", "rest")):
        said = [(rank, found) for rank, one in votes if (found := getattr(one, attribute)) is not msgspec.UNSET]
        if said:
            node[name] = unite(said, f"{path}.{name}", conflicts)
    values: dict[tuple[str, str | int], list[tuple[int, Any]]] = {}
    for rank, one in votes:
        for owner, key, value in one.values:
            values.setdefault((owner, key), []).append((rank, value))
    digests = _unite_digests(votes, path, conflicts)
    if digests:
        node["digests"] = digests
    groups = _unite_by_place(votes, path, unite)
    if groups is None:
        groups = _unite_by_name(votes, path, conflicts)
    return {
        **node,
        "groups": groups,
        "state": _unite_tables([one for _, one in votes], groups),
        "values": [
            [owner, key, unite(some, f"{path}.state.{owner}.{key}", conflicts)] for (owner, key), some in values.items()
        ],
    }


def _unite_digests(votes: Nodes, path: str, conflicts: list[Conflict]) -> dict[str, str]:
    """Return the digests of all tensors that the ranks should have alike; one that differs is a conflict."""
    known: dict[str, tuple[int, str]] = {}
    refused = set()
    for rank, one in votes:
        for name, digest in one.digests.items():
            first, expected = known.setdefault(name, (rank, digest))
            if digest != expected and name not in refused:
                refused.add(name)
                conflicts.append(Conflict(f"{path}.{name}: the elements of a tensor", first, rank, expected, digest))
    return {name: digest for name, (_, digest) in known.items()}


def _unite_by_place(votes: Nodes, path: str, unite: Unite) -> list[dict[str, Any]] | None:
    """Return the groups where all ranks have the same ones, but for the parameters in them; else None."""
    count = len(votes[0][1].groups)
    homes: dict[str, int] = {}
    for _, one in votes:
        if len(one.groups) != count:
            return None
        for number, group in enumerate(one.groups):
            if any(homes.setdefault(name, number) != number for name in group.params):
                return None
    found: list[Conflict] = []
    groups = []
    for number in range(count):
        some = [(rank, one.groups[number]) for rank, one in votes]
        params = list(dict.fromkeys(name for _, group in some for name in group.params))
        values = unite([(rank, group.values) for rank, group in some], f"{path}.groups[{number}]", found)
        groups.append({"params": params, "values": values})
    return None if found else groups


def _unite_by_name(votes: Nodes, path: str, conflicts: list[Conflict]) -> list[dict[str, Any]]:
    """Return groups in which every parameter has the values that its own ranks give it."""
    groups: dict[bytes, dict[str, Any]] = {}
    homes: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, one in votes:
        for group in one.groups:
            fresh = [name for name in group.params if name not in homes]
            for name in group.params:
                if name in homes:
                    first, values = homes[name]
                    conflicts += _differences(name, first, values, rank, group.values, path)
            if fresh:
                home = groups.setdefault(_encoded(group.values), {"params": [], "values": group.values})
                home["params"] += dict.fromkeys(fresh)
                homes |= dict.fromkeys(fresh, (rank, group.values))
    return list(groups.values())


def _differences(
    name: str, first: int, ours: dict[str, Any], rank: int, theirs: dict[str, Any], path: str
) -> list[Conflict]:
    """Return each value that two ranks give one parameter differently; one that only one of them has, too."""
    if ours is theirs or _encoded(ours) == _encoded(theirs):
        return []
    return [
        Conflict(f"{path}: {key} of {name}", first, rank, ours.get(key), theirs.get(key))
        for key in {**ours, **theirs}
        if key not in ours or key not in theirs or _encoded(ours[key]) != _encoded(theirs[key])
    ]


def _encoded(node: Any) -> bytes:
    """Return what is equal for equal nodes only, type included (1, 1.0 and True are three values)."""
    return msgspec.json.encode(node, order="sorted")


def _unite_tables(optimizers: Sequence[OptimizerNode], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return which parameters have which tensors, by their numbers in the united groups."""
    said: dict[str, OptimizerRow] = {}
    for optimizer in optimizers:
        for name, row in optimizer.rows().items():
            known = said.get(name)
            said[name] = row if known is None or known == row else _unite_rows(known, row)
    rows: dict[bytes, OptimizerRow] = {}
    for number, name in enumerate(name for group in groups for name in group["params"]):
        if name in said:
            row = msgspec.structs.replace(said[name], params=[])
            rows.setdefault(msgspec.json.encode(row), row).params.append(number)
    return [msgspec.to_builtins(row) for row in rows.values()]


def _unite_rows(one: OptimizerRow, other: OptimizerRow) -> OptimizerRow:
    """Return what two ranks have of one parameter."""
    return OptimizerRow(
        list(dict.fromkeys((*one.keys, *other.keys))),
        [],
        list(dict.fromkeys((*one.part, *other.part))),
        list(dict.fromkeys((*one.whole, *other.whole))),
        list({**dict(other.spread), **dict(one.spread)}.items()),
    )
