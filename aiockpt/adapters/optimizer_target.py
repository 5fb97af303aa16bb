"""Loading of optimizers: by the names of their parameters, bit-exactly.

- A plain ``torch.optim.Optimizer`` is filled directly: state tensors that are there in place, others are made.
  ``Optimizer.load_state_dict()`` is not used, because it casts fp32 moments to the dtype of bf16 parameters; its last
  call, ``__setstate__()``, is made, in which classes adapt what an older or a related one has saved.
- One that overrides or hooks ``state_dict()`` gets a state dict with torch's numbers.
- The checkpoint may have it in any form. For the forms, what its groups become and which other classes fit, see
  `aiockpt.adapters.optimizer_forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.composite_target import ask_value
from aiockpt.adapters.dtensors import as_dtensor, dtensor_placed, is_dtensor, local_of
from aiockpt.adapters.index import Index
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.optimizer import (
    Form,
    Owner,
    form_of,
    is_plain,
    keeper_of,
    name_members,
    own_parameters,
    state_path,
    view_plain,
)
from aiockpt.adapters.optimizer_forms import (
    NAMES,
    Id,
    SavedOptimizer,
    agreed_values,
    class_misfit,
    groups_without_parameters,
    has_numbers,
    is_form,
    keys_misfit,
    pair_up,
    read_form,
    state_keys,
    tensor_names,
)
from aiockpt.adapters.saved_names import SavedNames
from aiockpt.adapters.stored import is_tensor_node
from aiockpt.adapters.tensors import facts_of, may_spread
from aiockpt.format.dtypes import torch_name
from aiockpt.format.names import join_name, split_name
from aiockpt.state.tree import TAG, Node, Path

# Dicts of an optimizer's state that the checkpoint has in another form: their node is written anew.
#
# One of the same form is a plain value like any other, unless the two are of optimizers of different classes.
#
# A program may save ``optimizer`` and load into ``optimizer.state_dict()``, or save that and load into what torch's
# ``get_optimizer_state_dict()`` returns. The node that `node_for` writes has the form of the dict that is here, refers to
# the tensors that the checkpoint has, and is loaded like any other value.


class _Template(msgspec.Struct, frozen=True):
    """The dict that is here: the values of its groups, their parameters, the keys of all state, and whether it is flat."""

    groups: list[Mapping[str, Any]]
    members: list[list[Id]]
    state_keys: set[str]
    flat: bool


def node_for(here: object, path: Path, matcher: Matcher) -> Node | None:
    """Return the node to fill *here* with, where it and the checkpoint have an optimizer in two forms; else None.

    What does not fit is noted; the node is ``UNSET`` where nothing can be loaded.
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
    """Return the content of a dict that `is_form`; None where it turns out to have another form."""
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
    """Return the reason why nothing of *saved* can be loaded, or None."""
    if not pairs and any(template.members):
        there, here = ([len(some) for some in members] for members in (saved.members, template.members))
        return f"groups of {here} parameters in the state, of {there} in the checkpoint, and no common names"
    return _class_misfit(template, saved)


def _class_misfit(template: _Template, saved: SavedOptimizer) -> str | None:
    """Return the reason why the two are of optimizers that cannot continue from each other, or None."""
    own = {key for group in template.groups for key in group} - {*NAMES}
    return keys_misfit("the dict of an optimizer", own, own, template.state_keys, saved)


def _differences(template: _Template, saved: SavedOptimizer, pairs: Mapping[Id, Id]) -> Iterator[str]:
    for one in (one for some in template.members for one in some if one not in pairs):
        yield f"the optimizer of the checkpoint has no parameter {one}"
    for one in sorted(map(str, saved.group_of().keys() - set(pairs.values()))):
        yield f"the optimizer of the state has no parameter {one}"


def _own_values(group: Mapping[str, Any]) -> dict[str, Node]:
    """Return what a group here keeps where the checkpoint has no value: how a step is computed, and plain values."""
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


Thunks = dict[Any, Callable[[], Any]]
"""What will give the values, by key, once all tensors are filled."""


class OptimizerMatch:
    """An optimizer here, one of a checkpoint, and which parameter is which."""

    def __init__(self, optimizer: Optimizer, path: Path, index: Index, saved: SavedOptimizer, matcher: Matcher) -> None:
        self.optimizer = optimizer
        self.keeper = keeper_of(optimizer, path)
        self.path = path
        self.index = index
        self.saved = saved
        self.matcher = matcher
        self.members = name_members(optimizer, path, index)
        self.names = SavedNames(index.holders, matcher)
        names = [[".".join(map(str, split_name(self.names.name_of(owner)))) for owner in some] for some in self.members]
        ids = pair_up(names, saved)
        self.ids: dict[Path, Id] = {
            owner: ids[name]
            for some, called in zip(self.members, names, strict=True)
            for owner, name in zip(some, called, strict=True)
            if name in ids
        }


def load_optimizer(optimizer: Optimizer, path: Path, index: Index, matcher: Matcher) -> None:
    """Request from *matcher* all that an optimizer holds."""
    matcher.claim(path)
    matcher.note_optimizer(path)
    found = matcher.find(path)
    saved = None if found is None else read_form(found.node, split_name(matcher.stored_name(path)))
    if saved is None:
        _load_own_form(optimizer, path, matcher)
        return
    match = OptimizerMatch(optimizer, path, index, saved, matcher)
    plain = is_plain(optimizer)
    if not plain and not matcher.selects_whole(path, "it has its own load_state_dict()"):
        return
    for owner, parameter in own_parameters(optimizer, match.members, index):
        matcher.want(owner, parameter, index.slice_of(parameter))
    misfit = class_misfit(match.keeper, saved) if matcher.touches(path) else None
    if misfit is not None:
        for place in _places(match):  # what ``only`` names is there, though nothing of it is loaded
            matcher.selects(place)
        matcher.mismatch(path, misfit)
        return
    groups, states = _want_groups(match), _want_states_of_all(match)
    rest = None if saved.rest is None else matcher.value((*path, "rest"), saved.rest, fresh=True)
    apply_later(match, groups, states, rest)


def apply_later(
    match: OptimizerMatch,
    groups: Sequence[Thunks],
    states: Sequence[tuple[torch.Tensor, Thunks]],
    rest: Callable[[], Any] | None,
) -> None:
    """Have the optimizer here get what was requested: the values of its groups, the state of parameters, and the rest."""
    matcher, path = match.matcher, match.path
    if is_plain(match.optimizer):
        whole = matcher.selects(path)
        if whole:  # all the state that is there is filled or dropped, also what the checkpoint does not have
            for place in (path, *_state_places(match)):
                matcher.rewrites(place)
        matcher.later(lambda: _apply_plain(match, groups, states, rest, whole=whole))
    else:
        matcher.later(lambda: _apply_general(match.optimizer, groups, states, rest))


def _state_places(match: OptimizerMatch) -> Iterator[Path]:
    for owner, state in view_plain(match.optimizer, match.members).states:
        for key in state:
            yield state_path(match.path, owner, key)


def _places(match: OptimizerMatch) -> Iterator[Path]:
    """Yield the path of all that an optimizer holds."""
    yield match.path
    for number, group in enumerate(match.optimizer.param_groups):
        yield from ((*match.path, "groups", number, key) for key in group)
    for some in match.members:
        yield from ((*match.path, "state", *owner) for owner in some)
    yield from _state_places(match)


def _load_own_form(optimizer: Optimizer, path: Path, matcher: Matcher) -> None:
    """Load an optimizer whose ``state_dict()`` had a form of its own."""
    found = matcher.find(path)
    node = None if found is None else found.node
    if type(node) is not dict:
        matcher.miss(path)
    elif matcher.selects_whole(path, "it has its own load_state_dict()"):
        if is_plain(optimizer):
            matcher.mismatch(path, "an optimizer in the state, something else in the checkpoint")
            return
        template = optimizer.state_dict() if may_spread() else None
        value = matcher.value(path, node.get("value") if node.get(TAG) == "stateful" else node, template, fresh=True)
        matcher.later(lambda: optimizer.load_state_dict(value()))


def _want_groups(match: OptimizerMatch) -> list[Thunks]:
    """Return what will set each group's values."""
    matcher, saved = match.matcher, match.saved
    _leave_groups(match)
    without_parameters = groups_without_parameters(saved)
    wanted: list[Thunks] = []
    for number, (group, owners) in enumerate(zip(match.optimizer.param_groups, match.members, strict=True)):
        place = (*match.path, "groups", number)
        ids = [match.ids[owner] for owner in owners if owner in match.ids]
        values, refused = agreed_values(saved, ids, matcher.same_tensor)
        if not owners:
            values = next(without_parameters, {})
        if refused and matcher.touches(place):
            for problem in refused:
                matcher.problem(join_name(place), problem)
        wanted.append(
            {
                key: matcher.value((*place, key), node, group.get(key))
                for key, node in values.items()
                if matcher.selects((*place, key))
            }
        )
    return wanted


def _leave_groups(match: OptimizerMatch) -> None:
    """Mark as known the values of the checkpoint's groups, whether a group here gets them or not, and the paired state."""
    matcher, saved = match.matcher, match.saved
    for name in tensor_names([list(group.values()) for group in saved.groups]):
        matcher.leave(name)
    stored = split_name(matcher.stored_name(match.path))
    for place in saved.value_names(match.ids.values()):
        matcher.leave(join_name((*stored, *place)))


def _want_states_of_all(match: OptimizerMatch) -> list[tuple[torch.Tensor, Thunks]]:
    """Return what will set each parameter's state; what the optimizer of the checkpoint lacks is a difference."""
    if match.saved.by_numbers and not match.ids:
        match.matcher.problem(join_name(match.path), numbers_misfit(match))
        return []
    for owner in (owner for some in match.members for owner in some if owner not in match.ids):
        why = f"the optimizer of the checkpoint has no parameter {match.names.name_of(owner)}"
        match.matcher.miss((*match.path, "state", *owner), why)
    return want_states(match, lambda owner, why: match.matcher.problem(join_name((*match.path, "state", *owner)), why))


def want_states(match: OptimizerMatch, refuse: Callable[[Path, str], object]) -> list[tuple[torch.Tensor, Thunks]]:
    """Return what will set the state of each parameter that is paired; tensors that are there are filled in place.

    Args:
        refuse: called with a parameter that is another than the one that was saved, and why.
    """
    found = []
    kept = {id(parameter) for group in match.keeper.param_groups for parameter in group["params"]}
    for group, owners in zip(match.optimizer.param_groups, match.members, strict=True):
        for parameter, owner in zip(group["params"], owners, strict=True):
            if owner not in match.ids:
                continue
            flat = match.index.slice_of(parameter)
            if (problem := _parameter_misfit(match, owner, parameter, flat)) is not None:
                refuse(owner, problem)
                _leave_state(match, owner)
            elif id(parameter) not in kept or (flat is not None and flat.start == flat.end):
                _leave_state(match, owner)  # what is here stays as it is: optimizer steps never reach it
            else:
                found.append((parameter, _want_state(match, owner, Owner(parameter, flat), group)))
    return found


def _leave_state(match: OptimizerMatch, owner: Path) -> None:
    for name in tensor_names(match.saved.state.get(match.ids[owner], {})):
        match.matcher.leave(name)


def _parameter_misfit(
    match: OptimizerMatch, owner: Path, parameter: torch.Tensor, flat: FlatRange | None
) -> str | None:
    """Return the reason why the state belongs to another parameter than the one here, or None.

    A parameter that does not fit stays as it is. With moments of the one that was saved the next step would fail, or
    move it by what another tensor has learnt. (A parameter that is not requested may have another dtype.)
    """
    if not match.saved.state.get(match.ids[owner]) or not match.matcher.touches((*match.path, "state", *owner)):
        return None
    here, there = facts_of(parameter, flat), match.matcher.stored.facts(match.names.name_of(owner))
    if here is None or there is None or here == there or match.index.loads_itself(parameter):
        return None
    if here[1] != there[1]:
        return f"of a parameter of shape {here[1]} in the state, of {there[1]} in the checkpoint"
    if match.matcher.selects(owner):
        return f"of a parameter of torch.{torch_name(here[0])} in the state, torch.{torch_name(there[0])} in the checkpoint"
    return None


def numbers_misfit(match: OptimizerMatch) -> str:
    """Return the reason why the numbers of the checkpoint cannot be those of the parameters here."""
    there, here = ([len(some) for some in members] for members in (match.saved.members, match.members))
    return (
        f"groups of {here} parameters in the state, of {there} in the checkpoint, which has an optimizer's state_dict(): "
        "that knows parameters by their numbers only; make the optimizer as it was, or save the optimizer itself"
    )


def _want_state(match: OptimizerMatch, path: Path, owner: Owner, group: Mapping[str, Any]) -> Thunks:
    matcher, live = match.matcher, match.keeper.state.get(owner.parameter, {})
    thunks: Thunks = {}
    for key, node in match.saved.state.get(match.ids[path], {}).items():
        place = state_path(match.path, path, key)
        if not matcher.selects(place):
            continue
        if is_tensor_node(node):
            like = device_for(owner.parameter, key, group)
            beside = match.names.name_of(path)
            tensor = _want_tensor(match, owner, match.ids[path], key, node["name"], place, live.get(key), like, beside)
            thunks[key] = _returning(tensor)
        else:
            thunks[key] = ask_value(place, live.get(key), node, matcher, owner.parameter)
    return thunks


def _want_tensor(
    match: OptimizerMatch,
    owner: Owner,
    one: Id,
    key: Id,
    name: str,
    place: Path,
    live: Any,
    like: torch.Tensor | torch.device,
    beside: str,
) -> torch.Tensor:
    """Request one state tensor, of the parameter that the optimizer there calls *one*; see `Matcher.fill`."""
    matcher, saved, parameter = match.matcher, match.saved, owner.parameter
    facts = matcher.stored.facts(name)
    if facts is None or not owner.is_spread:
        return matcher.fill(place, name, live, like, beside=beside)
    form: Form = "part" if key in saved.part.get(one, ()) else "whole" if key in saved.whole.get(one, ()) else "like"
    match form_of(owner, live, form, facts[1]):
        case "part":
            spread = None if live is None else as_dtensor(live.detach(), parameter)
            tensor = matcher.fill(place, name, spread, parameter, beside=beside)
            if isinstance(live, torch.Tensor) and tensor is spread:
                return live
            return local_of(tensor) if is_dtensor(tensor) else tensor
        case "whole":
            return matcher.fill(place, name, live, parameter.device)
    placements = saved.spread.get(one, {}).get(key)
    if live is None and placements is not None and is_dtensor(parameter):
        dtype = getattr(torch, torch_name(facts[0]))
        live = dtensor_placed(placements, parameter, facts[1], dtype, matcher.stored.axes_of(name))
    return matcher.fill(place, name, live, like, owner.flat, beside=beside)


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def device_for(parameter: torch.Tensor, key: Any, group: Mapping[str, Any]) -> torch.Tensor | torch.device:
    """Return what a new state tensor is like: a step counter lives on the CPU unless a kernel reads it (torch's rule)."""
    if key != "step":
        return parameter
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _apply_plain(
    match: OptimizerMatch,
    groups: Iterable[Thunks],
    states: Iterable[tuple[torch.Tensor, Thunks]],
    rest: Callable[[], Any] | None,
    *,
    whole: bool,
) -> None:
    optimizer = match.keeper
    for group, thunks in zip(match.optimizer.param_groups, groups, strict=True):
        for key, value in thunks.items():
            set_value(group, key, value())
    for parameter, thunks in states:
        if whole:
            optimizer.state.pop(parameter, None)
        if thunks:
            optimizer.state[parameter].update({key: value() for key, value in thunks.items()})
    if rest is not None:
        optimizer.state.update(rest())
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one value of a group; a tensor that is there (a capturable learning rate) is filled, not replaced."""
    here = group.get(key)
    if isinstance(here, torch.Tensor) and isinstance(value, float | int):
        here.detach().fill_(value)
    else:
        group[key] = value


def _apply_general(
    optimizer: Optimizer,
    groups: Sequence[Thunks],
    states: Sequence[tuple[torch.Tensor, Thunks]],
    rest: Callable[[], Any] | None,
) -> None:
    """Hand a state dict with torch's numbers to the optimizer's own ``load_state_dict()``."""
    numbers: dict[int, int] = {}
    packed = []
    for group, thunks in zip(optimizer.param_groups, groups, strict=False):
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
        values = {key: value for key, value in group.items() if key != "params"}
        values |= {key: value() for key, value in thunks.items()}
        packed.append({**values, "params": [numbers[id(parameter)] for parameter in group["params"]]})
    state = {
        numbers[id(parameter)]: {key: value() for key, value in thunks.items()}
        for parameter, thunks in states
        if thunks
    }
    optimizer.load_state_dict({"state": {**state, **(rest() if rest is not None else {})}, "param_groups": packed})
