"""A step as nested state dicts, with the names that ``get_state_dict`` of torch returns.

A module becomes a dict of its dotted names, an optimizer ``{"state": {parameter: …}, "param_groups": […]}`` with the
module's names of the parameters. Everything else stays as it was. In place of each tensor is its name in the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiockpt.adapters.native import Stored, read_tree
from aiockpt.adapters.stored import members_of
from aiockpt.adapters.target import TensorRef
from aiockpt.format.names import join_name, split_name
from aiockpt.state.tree import TAG, Node, Path

DCP_NOTE = "__dcp__"
"""The key under which `aiockpt.integrations.dcp` notes DCP's names in a state: of no use elsewhere."""


def as_state_dicts(stored: Stored) -> dict[str, Any]:
    """Return the state of a checkpoint as state dicts, with a `TensorRef` for each tensor.

    Values of single ranks are left out: random generators, loaders.
    """
    tree = read_tree(stored)
    names = [(name, split_name(name)) for name in (*stored.tensors, *stored.alias)]
    modules: list[Path] = []
    for path, kind in sorted(_objects(stored.values, ()), key=lambda found: found[1] == "optimizer"):
        inside = {name: parts[len(path) :] for name, parts in names if parts[: len(path)] == path}
        if kind == "module":
            modules.append(path)
            _at(tree, path).update({".".join(map(str, parts)): TensorRef(name) for name, parts in inside.items()})
        elif kind == "optimizer":
            _put(tree, path, _optimizer(_at(tree, path), path, inside, modules))
        else:
            _put(tree, path, None)
    return {key: value for key, value in tree.items() if key != DCP_NOTE and value is not None}


def _objects(node: Node, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield where there are objects, and their kinds."""
    kind = node.get(TAG) if type(node) is dict else None
    if kind in ("module", "optimizer", "loader", "per_rank"):
        yield path, str(kind)
        return
    for key, child in members_of(node).items():
        yield from _objects(child, (*path, key))


def _optimizer(plain: Mapping[str, Any], path: Path, inside: Mapping[str, Path], modules: list[Path]) -> dict[str, Any]:
    """Return an optimizer's state dict; *inside* has its tensors: ``state``, the parameter's parts, the slot."""
    state: dict[str, dict[str, Any]] = {
        _relative(owner, modules): dict(values) for owner, values in plain["state"].items()
    }
    for name, parts in inside.items():
        if parts[:1] == ("state",) and len(parts) > 2:
            owner = _relative(join_name(parts[1:-1]), modules)
            state.setdefault(owner, {})[str(parts[-1])] = TensorRef(name)
    groups = [
        {**group, "params": [_relative(member, modules) for member in group["params"]]} for group in plain["groups"]
    ]
    return {"state": state, "param_groups": groups}


def _relative(name: str, modules: list[Path]) -> str:
    """Return the name of a parameter in its module."""
    parts = split_name(name)
    for module in modules:
        if parts[: len(module)] == module:
            return ".".join(map(str, parts[len(module) :]))
    return ".".join(map(str, parts))


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _put(tree: Any, path: Path, value: Any) -> None:
    _at(tree, path[:-1])[path[-1]] = value
