"""How is an optimizer read? By the names of its parameters, not by their numbers.

Names are those that the modules of the same state give: ``optimizer.state.model.layers.0.weight.exp_avg``. So the state
of a parameter finds it again when the order, the groups or the sharding changed.

- A plain ``torch.optim.Optimizer`` is read directly, its tensors in the memory they are in.
- One that overrides or hooks ``state_dict()`` goes the general way: what that returns, with numbers made names.
- State of the shape of a parameter that is spread over ranks is spread like it (`slice_of_state`).

`aiockpt.adapters.optimizer_target` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.dtensors import is_dtensor, local_of
from aiockpt.adapters.held import FlatRange
from aiockpt.adapters.index import Index
from aiockpt.adapters.run import Run
from aiockpt.adapters.watch import Watch
from aiockpt.errors import kind_in_words
from aiockpt.format.names import join_name
from aiockpt.state.tree import TAG, Node, Path, refuse

NOT_SAVED = ("params", "param_names")
Keep = Callable[[Path, torch.Tensor, FlatRange | None], None]
State = Mapping[Any, Any]


class View(msgspec.Struct, frozen=True):
    """An optimizer by names: its groups, the path of each parameter of each group, the state of each parameter that has
    some, and what else there is."""

    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Sequence[Path]]
    states: Sequence[tuple[Path, State]]
    rest: Mapping[Any, Any]


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether the optimizer leaves saving and loading to its ``state`` and ``param_groups``."""
    cls = type(optimizer)
    return (
        cls.state_dict is Optimizer.state_dict
        and cls.load_state_dict is Optimizer.load_state_dict
        and "state_dict" not in vars(optimizer)
        and "load_state_dict" not in vars(optimizer)
        and not any(_hooks(optimizer))
    )


def _hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    return (
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )


def name_members(optimizer: Optimizer, path: Path, index: Index) -> list[list[Path]]:
    """Return the path of each parameter of each group.

    Raises:
        UnsupportedStateError: a parameter belongs to no module and is no leaf of the state.
    """
    members = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in index.paths:
                refuse(
                    (*path, "groups", number, "params", place),
                    f"this parameter {tuple(parameter.shape)} is in no module of the state, so it has no name; "
                    "put its module (or the tensor) into the state too",
                )
        members.append([index.paths[id(parameter)] for parameter in group["params"]])
    return members


class OptimizerPart:
    """One optimizer of a walked state; see `aiockpt.adapters.native`."""

    def __init__(self, optimizer: Optimizer, path: Path, index: Index, watch: Watch, keep: Keep) -> None:
        self._optimizer = optimizer
        self._path = path
        self._members = name_members(optimizer, path, index)
        self._owners = {
            owner: (parameter, index.slice_of(parameter))
            for group, some in zip(optimizer.param_groups, self._members, strict=True)
            for parameter, owner in zip(group["params"], some, strict=True)
        }
        self._names = [list(map(join_name, some)) for some in self._members]
        self._plain = is_plain(optimizer)
        watch.attribute(attrgetter("__class__"), optimizer)
        watch.attribute(attrgetter("param_groups"), optimizer)
        watch.items(optimizer.param_groups)
        for group in optimizer.param_groups:
            watch.keys(group, ["params"])
            watch.items(group["params"])
        if self._plain:
            self._view = view_plain(optimizer, self._members)
            self._table = _table(self._view)
            self._values = [(owner, state, key) for owner, state in self._view.states for key in _value_keys(state)]
            self._watch_plain(watch)
            for owner, state in self._view.states:
                for key in _tensor_keys(state):
                    place = state_path(path, owner, key)
                    keep(place, state[key], slice_of_state(state[key], *self._owners[owner], place))

    def _watch_plain(self, watch: Watch) -> None:
        optimizer = self._optimizer
        watch.attribute(attrgetter("state"), optimizer)
        for hooks in _hooks(optimizer):
            watch.mapping(hooks)
        if self._view.rest:
            watch.keys(optimizer.state, [key for key in optimizer.state if isinstance(key, torch.Tensor)])
        else:
            watch.mapping(optimizer.state)
        for _, state in self._view.states:
            watch.keys(state, _tensor_keys(state)) if _value_keys(state) else watch.mapping(state)

    def refresh(self, value: object, run: Run) -> Node:
        """Return the node of the optimizer's values; the tensors of a plain one were kept by the walk."""
        run.same(value, self._optimizer)
        if self._plain:
            values = [
                [join_name(owner), key, run.encode(state[key], state_path(self._path, owner, key))]
                for owner, state, key in self._values
            ]
            rest = {key: self._optimizer.state[key] for key in self._view.rest}
            return self._node(msgspec.structs.replace(self._view, rest=rest), self._table, values, run)
        view = view_general(self._optimizer, self._members)
        if view is None:
            return {TAG: "stateful", "value": run.encode(self._optimizer.state_dict(), self._path)}
        values = []
        for owner, state in view.states:
            for key, item in state.items():
                place = state_path(self._path, owner, key)
                if isinstance(item, torch.Tensor):
                    run.put(place, item, slice_of_state(item, *self._owners[owner], place))
                else:
                    values.append([join_name(owner), key, run.encode(item, place)])
        return self._node(view, _table(view), values, run)

    def _node(self, view: View, table: list[dict[str, Any]], values: list[Any], run: Run) -> Node:
        groups = [
            {"params": names, "values": self._refresh_group(group, number, run)}
            for number, (group, names) in enumerate(zip(view.groups, self._names, strict=True))
        ]
        node = {TAG: "optimizer", "groups": groups, "state": table, "values": values}
        return {**node, "rest": run.encode(dict(view.rest), (*self._path, "rest"))} if view.rest else node

    def _refresh_group(self, group: Mapping[str, Any], number: int, run: Run) -> dict[str, Node]:
        saved = [key for key in group if key not in NOT_SAVED]
        return {key: run.encode(group[key], (*self._path, "groups", number, key)) for key in saved}


def view_plain(optimizer: Optimizer, members: Sequence[Sequence[Path]]) -> View:
    """Return the optimizer as it is; the mappings are its own."""
    owners = {
        id(parameter): owner
        for group, some in zip(optimizer.param_groups, members, strict=True)
        for parameter, owner in zip(group["params"], some, strict=True)
    }
    # The state of a parameter that has left the groups can no longer be reached; torch would refuse to save it.
    states = [(owners[id(key)], state) for key, state in optimizer.state.items() if id(key) in owners]
    for owner, state in states:
        if not isinstance(state, dict):
            refuse(owner, f"the optimizer's state of this parameter is {kind_in_words(state)}, not a dict")
    rest = {key: state for key, state in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return View(optimizer.param_groups, members, states, rest)


def view_general(optimizer: Optimizer, members: Sequence[Sequence[Path]]) -> View | None:
    """Return what ``state_dict()`` says, by names; None when it has another form than torch's."""
    state_dict = optimizer.state_dict()
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if set(state_dict) != {"state", "param_groups"} or not isinstance(groups, list) or not isinstance(states, dict):
        return None
    numbers = [group.get("params", ()) for group in groups]
    if [len(some) for some in members] != [len(some) for some in numbers]:
        return None
    owners = {
        number: owner
        for some, paths in zip(numbers, members, strict=True)
        for number, owner in zip(some, paths, strict=True)
    }
    if not all(isinstance(state, Mapping) for number, state in states.items() if number in owners):
        return None
    return View(
        groups,
        members,
        [(owners[number], state) for number, state in states.items() if number in owners],
        {key: state for key, state in states.items() if key not in owners},
    )


def slice_of_state(
    value: torch.Tensor, parameter: torch.Tensor, flat: FlatRange | None, path: Path
) -> FlatRange | None:
    """Return which elements *value*, at *path*, has of the state of a *parameter* that is itself slice *flat*, or whole.

    A tensor without axes, such as a step count, is the same on all ranks.

    Raises:
        UnsupportedStateError: it is this rank's part of something, and nothing says of what.
    """
    if flat is not None and value.dim() and value.shape == parameter.shape:
        return flat
    local = local_of(parameter) if is_dtensor(parameter) and not is_dtensor(value) else None
    if value.dim() and (flat is not None or (local is not None and value.shape == local.shape != parameter.shape)):
        refuse(
            path,
            f"a tensor of shape {tuple(value.shape)} as state of a parameter that is spread over ranks: it may be a "
            "part, and nothing says of what; keep such state as DTensors, or shaped like the parameter",
        )
    return None


def state_path(path: Path, owner: Path, key: str | int) -> Path:
    """Return the path of one entry of the state of the parameter at *owner*."""
    return (*path, "state", *owner, key)


def _tensor_keys(state: State) -> list[Any]:
    return [key for key, value in state.items() if isinstance(value, torch.Tensor)]


def _value_keys(state: State) -> list[Any]:
    return [key for key, value in state.items() if not isinstance(value, torch.Tensor)]


def _table(view: View) -> list[dict[str, Any]]:
    """Return which parameters have which tensors, by their numbers in the groups: most have the same."""
    numbers = {owner: number for number, owner in enumerate(owner for some in view.members for owner in some)}
    rows: dict[tuple[Any, ...], list[int]] = {}
    for owner, state in view.states:
        if not all(type(key) in (str, int) for key in state):
            refuse(owner, "the optimizer's state of this parameter has keys that are neither text nor integers")
        rows.setdefault(tuple(_tensor_keys(state)), []).append(numbers[owner])
    return [{"keys": list(keys), "params": some} for keys, some in rows.items()]
