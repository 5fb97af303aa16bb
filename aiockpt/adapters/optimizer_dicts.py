"""How is the dict of an optimizer's state filled when the checkpoint has it in another form? Its node is written anew.

One of the same form is a plain value like any other, unless the two are of optimizers of different classes.

A program may save ``optimizer`` and load into ``optimizer.state_dict()``, or save that and load into what torch's
``get_optimizer_state_dict()`` gives. The node that `node_for` writes has the form of the dict that is here, refers to the
tensors that the checkpoint has, and is loaded like any other value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.optimizer_forms import (
    NAMES,
    Id,
    SavedOptimizer,
    has_numbers,
    is_form,
    pair_up,
    read_form,
    tensor_names,
)
from aiockpt.adapters.optimizer_groups import agreed_values, keys_misfit, state_keys
from aiockpt.format.names import split_name
from aiockpt.state.tree import TAG, Node, Path


class _Template(msgspec.Struct, frozen=True):
    """The dict that is here: what its groups say, their parameters, the keys of all state, and whether it is flat."""

    groups: list[Mapping[str, Any]]
    members: list[list[Id]]
    state_keys: set[str]
    flat: bool


def node_for(here: object, path: Path, matcher: Matcher) -> Node | None:
    """Return the node to fill *here* with, where it and the checkpoint have an optimizer in two forms; else None.

    What does not fit is noted; the node is ``UNSET`` where nothing can be taken.
    """
    found = matcher.find(path) if is_form(here) else None
    if found is None:
        return None
    saved, template = read_form(found.node, split_name(matcher.stored_name(path))), _read_template(here)
    if saved is None or template is None:
        return None
    same_form = _same_form(template, saved)
    pairs = {} if same_form else pair_up(template.members, saved, flat=template.flat)
    misfit = _class_misfit(template, saved) if same_form else _misfit(template, saved, pairs)
    if misfit is None and same_form:
        return None
    if misfit is not None:
        if matcher.selects(path):
            matcher.mismatch(path, misfit)
        return msgspec.UNSET
    for problem in _differences(template, saved, pairs) if matcher.selects(path) else ():
        matcher.mismatch(path, problem)
    groups = []
    for group, members in zip(template.groups, template.members, strict=True):
        values, refused = agreed_values(saved, [pairs[one] for one in members if one in pairs], matcher.same_tensor)
        for problem in refused:
            matcher.mismatch(path, problem)
        groups.append({**_own_values(group), **values})
    for name in tensor_names([list(group.values()) for group in saved.groups]):
        matcher.leave(name)
    states = {one: saved.state[there] for one, there in pairs.items() if there in saved.state}
    return (_write_flat if template.flat else _write)(template, groups, states)


def _read_template(here: Any) -> _Template | None:
    """Return what a dict says that `is_form`; None where it is none after all."""
    if here.keys() == {"state", "param_groups"}:
        groups = here["param_groups"]
        if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
            return None
        members = [list(group["params"]) for group in groups]
        return _Template(groups, members, state_keys(here["state"].values()), flat=False)
    flat: dict[Id, dict[str, Any]] = {}
    keys = set()
    for key, value in here.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "param_groups":
            flat.setdefault(name, {})[last] = value
        else:
            keys.add(last)
    return _Template(list(flat.values()), [[name] for name in flat], keys, flat=True)


def _same_form(template: _Template, saved: SavedOptimizer) -> bool:
    """Return whether the two are dicts of one form, so that nothing is to be written anew."""
    if not saved.is_dict or template.flat != saved.flat:
        return False
    return template.flat or has_numbers(template.members) == saved.by_numbers


def _misfit(template: _Template, saved: SavedOptimizer, pairs: Mapping[Id, Id]) -> str | None:
    """Return in words why nothing of *saved* can be taken, or None."""
    if not pairs and any(template.members):
        there, here = ([len(some) for some in members] for members in (saved.members, template.members))
        return f"groups of {here} parameters in the state, of {there} in the checkpoint, and no common names"
    return _class_misfit(template, saved)


def _class_misfit(template: _Template, saved: SavedOptimizer) -> str | None:
    """Return in words why the two are of optimizers that cannot go on from each other, or None."""
    own = {key for group in template.groups for key in group} - {*NAMES}
    return keys_misfit("the dict of an optimizer", own, own, template.state_keys, saved)


def _differences(template: _Template, saved: SavedOptimizer, pairs: Mapping[Id, Id]) -> Iterator[str]:
    for one in (one for some in template.members for one in some if one not in pairs):
        yield f"the optimizer of the checkpoint has no parameter {one}"
    for one in sorted(map(str, saved.group_of().keys() - set(pairs.values()))):
        yield f"the optimizer of the state has no parameter {one}"


def _own_values(group: Mapping[str, Any]) -> dict[str, Node]:
    """Return what a group here keeps where the checkpoint says nothing: how a step is computed, and plain values."""
    return {key: value for key, value in group.items() if type(value) in (type(None), bool, int, float, str)}


def _write(template: _Template, groups: list[dict[str, Node]], states: Mapping[Id, Mapping[Id, Node]]) -> Node:
    named = [
        {**group, **{key: list(own[key]) for key in NAMES if key in own}}
        for group, own in zip(groups, template.groups, strict=True)
    ]
    return {"state": _write_dict({one: _write_dict(entry) for one, entry in states.items()}), "param_groups": named}


def _write_flat(template: _Template, groups: list[dict[str, Node]], states: Mapping[Id, Mapping[Id, Node]]) -> Node:
    state: dict[Id, Node] = {f"state.{one}.{key}": node for one, entry in states.items() for key, node in entry.items()}
    said: dict[Id, Node] = {
        f"param_groups.{one}.{key}": node
        for (one,), group in zip(template.members, groups, strict=True)
        for key, node in group.items()
    }
    return _write_dict({**state, **said})


def _write_dict(items: Mapping[Id, Node]) -> Node:
    if TAG not in items and all(type(key) is str for key in items):
        return dict(items)
    return {TAG: "dict", "items": [[key, node] for key, node in items.items()]}
