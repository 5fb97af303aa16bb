"""The union of the nodes that all ranks wrote of one optimizer: by the names of its parameters.

Ranks may have other parameters (stages of a pipeline, groups of experts) and so other groups. Guarantees:

- The options of a group (learning rate, …) belong to its parameters. Groups with equal options in the same place stay one
  group, as in one process; where ranks have other groups, each parameter keeps the options of its own group.
- A parameter that several ranks have must have the same options on all of them; else it is named with two ranks.
- State belongs to parameters: the result is the union of the ranks' states.

Pure, and linear in the size of all nodes. A node without the form of an optimizer is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from aiockpt.format.document import described

TAG = "$"
Votes = Sequence[tuple[int, Any]]
"""The ranks' nodes at one place of the tree: (rank, node)."""


class Conflict(msgspec.Struct, frozen=True):
    """A place at which two ranks differ; *path* is empty for the whole tree."""

    path: str
    first: int
    other: int
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        """Return the place, the ranks and the difference, in short."""
        where = self.path or "everything"
        return f"{where} ({self.ours!r:.40} on rank {self.first}, {self.theirs!r:.40} on rank {self.other})"


Unite = Callable[[Votes, str, list[Conflict]], Any]
"""Returns the union of some nodes that are at a path, and adds their conflicts to a list."""


class OptimizerRow(msgspec.Struct, omit_defaults=True):
    """Which parameters, by their numbers in the groups, have which tensors.

    Attributes:
        part: keys whose tensors are plain ones in the program, on each rank for its own part of the parameter.
        whole: keys whose tensors are equal on all ranks, although the parameter is spread over them.
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
    """The node of an optimizer in a checkpoint.

    Attributes:
        groups: as above.
        state: which parameters have which tensors; those are tensors of the checkpoint.
        values: (parameter, key, node) of the state that is no tensor.
        class_name: the class that saved it, with its module. Checkpoints of older versions lack it.
        keys: those that its groups have by default.
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
            IndexError: a row names a parameter number that does not exist.
        """
        names = [name for group in self.groups for name in group.params]
        return {names[number]: row for row in self.state for number in row.params}


Nodes = Sequence[tuple[int, OptimizerNode]]


def read_optimizer(node: dict[str, Any]) -> OptimizerNode | None:
    """Return *node* decoded; None where it does not have the form of an optimizer."""
    if node.get(TAG) != "optimizer":
        return None
    try:
        optimizer = msgspec.convert(node, described(OptimizerNode))
        optimizer.rows()
    except (msgspec.ValidationError, IndexError):
        return None
    return optimizer


def unite_optimizers(votes: Nodes, path: str, unite: Unite, conflicts: list[Conflict]) -> dict[str, Any]:
    """Return the union of all ranks' nodes; in a conflict the value of the first one is used."""
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
    """Return the digests of all tensors that should be equal on all ranks; one that differs is a conflict."""
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
    """Return the groups where those of all ranks are equal, except for their parameters; else None."""
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
    """Return groups in which every parameter has the options that its own ranks have for it."""
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
    """Return a conflict for each option of one parameter that differs between two ranks, or that one of them lacks."""
    if ours is theirs or _encoded(ours) == _encoded(theirs):
        return []
    return [
        Conflict(f"{path}: {key} of {name}", first, rank, ours.get(key), theirs.get(key))
        for key in {**ours, **theirs}
        if key not in ours or key not in theirs or _encoded(ours[key]) != _encoded(theirs[key])
    ]


def _encoded(node: Any) -> bytes:
    """Return bytes that are equal for equal nodes only, type included (1, 1.0 and True are three values)."""
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
    """Return the union of two ranks' rows of one parameter."""
    return OptimizerRow(
        list(dict.fromkeys((*one.keys, *other.keys))),
        [],
        list(dict.fromkeys((*one.part, *other.part))),
        list(dict.fromkeys((*one.whole, *other.whole))),
        list({**dict(other.spread), **dict(one.spread)}.items()),
    )
