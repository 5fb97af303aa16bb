"""How is an optimizer read? By the names of its parameters, not by their numbers.

Names are those that the modules of the same state give: ``optimizer.state.model.layers.0.weight.exp_avg``. So the state
of a parameter finds it again when the order, the groups or the sharding changed.

- A plain ``torch.optim.Optimizer`` is read directly, its tensors in the memory they are in.
- One that overrides or hooks ``state_dict()`` goes the general way: what that returns, with numbers made names.
- What it has beside a parameter that is spread over ranks: `aiockpt.adapters.optimizer_parts`.

`aiockpt.adapters.optimizer_target` is the way back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.composites import has_own_bytes
from aiockpt.adapters.index import Index
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.optimizer_forms import NAMES
from aiockpt.adapters.optimizer_groups import default_keys, innermost
from aiockpt.adapters.optimizer_parts import Form, Owner, Placed, StateParts, digest_of
from aiockpt.adapters.run import Run
from aiockpt.adapters.tensors import is_spread
from aiockpt.adapters.watch import Watch
from aiockpt.adapters.zero import keeper_of
from aiockpt.errors import kind_in_words
from aiockpt.format.names import join_name, split_name
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import TAG, Node, Path, refuse

logger = logging.getLogger("aiockpt")

Keep = Callable[[Path, torch.Tensor, FlatRange | None], None]
State = Mapping[Any, Any]
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose own parameters were told of."""


class OptimizerView(msgspec.Struct, frozen=True):
    """An optimizer by names: its groups, the path of each parameter of each group, the state of each parameter that has
    some, and what else there is."""

    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Sequence[Path]]
    states: Sequence[tuple[Path, State]]
    rest: Mapping[Any, Any]


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether the optimizer leaves saving and loading to its ``state`` and ``param_groups``."""
    if (keeper := keeper_of(optimizer)) is not optimizer:
        return is_plain(keeper)
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

    One that is in no module and no tensor of the state (the temperature of a loss) is a part of the optimizer, by its
    group and its place there: ``optimizer.parameters[0][3]``.

    Raises:
        UnsupportedStateError: the state has no module and no tensor at all, so that a model was forgotten.
    """
    for number, group in enumerate(optimizer.param_groups if not index.paths else ()):
        for place, parameter in enumerate(group["params"]):
            refuse(
                (*path, "groups", number, "params", place),
                f"this parameter {tuple(parameter.shape)} is in no module of the state, which has none, so it has no name; "
                "put its module (or the tensor) into the state too",
            )
    return [
        [
            (*path, "parameters", number, place) if (found := index.path_of(parameter)) is None else found
            for place, parameter in enumerate(group["params"])
        ]
        for number, group in enumerate(optimizer.param_groups)
    ]


def own_parameters(
    optimizer: Optimizer, members: Sequence[Sequence[Path]], index: Index
) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the parameters that are parts of the optimizer, each with its path."""
    for group, some in zip(optimizer.param_groups, members, strict=True):
        for parameter, owner in zip(group["params"], some, strict=True):
            if index.path_of(parameter) is None:
                yield owner, parameter


def _tell(optimizer: Optimizer, path: Path, own: Mapping[Path, torch.Tensor]) -> None:
    """Say once which parameters are saved with the optimizer for want of a name."""
    if own and optimizer not in _told:
        _told.add(optimizer)
        logger.warning(
            "%s: parameters that are in no module of the state are saved with the optimizer, by group and place: %s; put "
            "their module into the state to have names, and its buffers too",
            join_name(path),
            ", ".join(f"{join_name(owner)} {tuple(parameter.shape)}" for owner, parameter in own.items()),
        )


class OptimizerPart:
    """One optimizer of a walked state; see `aiockpt.adapters.native`."""

    def __init__(self, optimizer: Optimizer, path: Path, index: Index, watch: Watch, keep: Keep) -> None:
        self._optimizer = optimizer
        self._keeper = keeper_of(optimizer, path)
        self._path = path
        self._members = name_members(optimizer, path, index)
        self._owners = {
            owner: Owner(parameter, index.slice_of(parameter))
            for group, some in zip(optimizer.param_groups, self._members, strict=True)
            for parameter, owner in zip(group["params"], some, strict=True)
        }
        self._names = [list(map(join_name, some)) for some in self._members]
        self._plain = is_plain(optimizer)
        own = dict(own_parameters(optimizer, self._members, index))
        for owner, parameter in own.items():
            keep(owner, parameter, index.slice_of(parameter))
        _tell(optimizer, path, own)
        watch.attribute(attrgetter("__class__"), optimizer)
        if self._keeper is not optimizer:
            watch.attribute(attrgetter("optim"), optimizer)
        watch.attribute(attrgetter("param_groups"), optimizer)
        watch.items(optimizer.param_groups)
        for group in optimizer.param_groups:
            watch.keys(group, ["params"])
            watch.items(group["params"])
        if self._plain:
            self._view = view_plain(optimizer, self._members)
            self._watch_plain(watch)
            self._content = self._sort(self._view)
            for place, placed in self._content.tensors:
                keep(place, placed.tensor, placed.flat)
                if placed.form == "part":  # the walk has a DTensor in its memory, which does not follow if it moves
                    watch.tensor(placed.source)

    def _sort(self, view: OptimizerView) -> _SavedState:
        """Say what of a view this rank saves, and how."""
        parts = StateParts(self._owners, view.states)
        content = _SavedState(parts)
        for owner, state in view.states:
            forms: dict[Any, Placed] = {}
            for key, value in state.items():
                if not has_own_bytes(value):
                    if parts.saves_values(owner):
                        content.values.append((owner, state, key))
                elif (placed := parts.place(owner, key, value)) is not None:
                    forms[key] = placed
                    content.tensors.append((state_path(self._path, owner, key), placed))
            content.rows.append((owner, forms))
        return content

    def _watch_plain(self, watch: Watch) -> None:
        optimizer = self._keeper
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
            rest = {key: self._keeper.state[key] for key in self._view.rest}
            return self._node(msgspec.structs.replace(self._view, rest=rest), self._content, run)
        view = view_general(self._optimizer, self._members)
        if view is None:
            return {TAG: "stateful", "value": run.encode(self._optimizer.state_dict(), self._path)}
        content = self._sort(view)
        for place, placed in content.tensors:
            run.put(place, placed.tensor, placed.flat)
        return self._node(view, content, run)

    def _node(self, view: OptimizerView, content: _SavedState, run: Run) -> Node:
        digests = {
            join_name(place[len(self._path) :]): digest_of(placed.tensor)
            for place, placed in content.tensors
            if placed.form == "own"
        }
        node = {
            TAG: "optimizer",
            "class": class_name(type(innermost(self._keeper))),
            "keys": default_keys(self._keeper),
            "groups": [
                {"params": names, "values": self._refresh_group(group, number, run, digests)}
                for number, (group, names) in enumerate(zip(view.groups, self._names, strict=True))
            ],
            "state": content.table(self._members),
            "values": [
                [join_name(owner), key, self._encode(state[key], state_path(self._path, owner, key), run, alike)]
                for owner, state, key in content.values
                for alike in (digests if content.parts.must_agree(owner) else None,)
            ],
        }
        if view.rest:
            alike = digests if any(owner.is_spread for owner in self._owners.values()) else None
            node["rest"] = self._encode(dict(view.rest), (*self._path, "rest"), run, alike)
        return {**node, "digests": digests} if digests else node

    def _refresh_group(
        self, group: Mapping[str, Any], number: int, run: Run, digests: dict[str, str]
    ) -> dict[str, Node]:
        nodes = {}
        for key, value in group.items():
            if key not in NAMES:
                # Reading one on a device would wait for all that computes there.
                alike = digests if isinstance(value, torch.Tensor) and value.device.type == "cpu" else None
                nodes[key] = self._encode(value, (*self._path, "groups", number, key), run, alike)
        return nodes

    def _encode(self, value: Any, place: Path, run: Run, digests: dict[str, str] | None) -> Node:
        """Return the node of a value; the digests of plain tensors in it are added to *digests*."""
        first = len(run.leaves)
        node = run.encode(value, place)
        if digests is not None:
            for leaf in run.leaves[first:]:
                if not is_spread(leaf.owner):
                    digests[join_name(split_name(leaf.name)[len(self._path) :])] = digest_of(leaf.owner)
        return node


class _SavedState:
    """What one rank saves of the state of its parameters.

    Attributes:
        parts: how tensors lie beside their parameters.
        tensors: with their paths.
        values: (parameter, its state, key) of what is no tensor.
        rows: the keys of each parameter's tensors.
    """

    def __init__(self, parts: StateParts) -> None:
        self.parts = parts
        self.tensors: list[tuple[Path, Placed]] = []
        self.values: list[tuple[Path, State, Any]] = []
        self.rows: list[tuple[Path, dict[Any, Placed]]] = []
        self._table: list[dict[str, Any]] | None = None

    def table(self, members: Sequence[Sequence[Path]]) -> list[dict[str, Any]]:
        """Return which parameters have which tensors, by their numbers in the groups: most have the same."""
        if self._table is None:
            self._table = self._make_table(members)
        return self._table

    def _make_table(self, members: Sequence[Sequence[Path]]) -> list[dict[str, Any]]:
        numbers = {owner: number for number, owner in enumerate(owner for some in members for owner in some)}
        rows: dict[tuple[tuple[Any, Form, tuple[str, ...]], ...], list[int]] = {}
        for owner, forms in self.rows:
            if not all(type(key) in (str, int) for key in forms):
                refuse(owner, "the optimizer's state of this parameter has keys that are neither text nor integers")
            said: tuple[tuple[Any, Form, tuple[str, ...]], ...]
            said = tuple((key, placed.form, placed.placements) for key, placed in forms.items())
            rows.setdefault(said, []).append(numbers[owner])
        return [_write_row(said, some) for said, some in rows.items()]


def _write_row(said: Sequence[tuple[Any, Form, tuple[str, ...]]], params: list[int]) -> dict[str, Any]:
    row = {
        "keys": [key for key, _, _ in said],
        "params": params,
        "part": [key for key, form, _ in said if form == "part"],
        "whole": [key for key, form, _ in said if form in ("whole", "own")],
        "spread": [[key, list(placements)] for key, _, placements in said if placements],
    }
    return {key: value for key, value in row.items() if value or key in ("keys", "params")}


def view_plain(optimizer: Optimizer, members: Sequence[Sequence[Path]]) -> OptimizerView:
    """Return the optimizer as it is; the mappings are its own."""
    owners = {
        id(parameter): owner
        for group, some in zip(optimizer.param_groups, members, strict=True)
        for parameter, owner in zip(group["params"], some, strict=True)
    }
    # The state of a parameter that has left the groups can no longer be reached; torch would refuse to save it.
    kept = keeper_of(optimizer).state
    states = [(owners[id(key)], state) for key, state in kept.items() if id(key) in owners]
    for owner, state in states:
        if not isinstance(state, dict):
            refuse(owner, f"the optimizer's state of this parameter is {kind_in_words(state)}, not a dict")
    rest = {key: state for key, state in kept.items() if not isinstance(key, torch.Tensor)}
    return OptimizerView(optimizer.param_groups, members, states, rest)


def view_general(optimizer: Optimizer, members: Sequence[Sequence[Path]]) -> OptimizerView | None:
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
    return OptimizerView(
        groups,
        members,
        [(owners[number], state) for number, state in states.items() if number in owners],
        {key: state for key, state in states.items() if key not in owners},
    )


def state_path(path: Path, owner: Path, key: str | int) -> Path:
    """Return the path of one entry of the state of the parameter at *owner*."""
    return (*path, "state", *owner, key)


def _tensor_keys(state: State) -> list[Any]:
    return [key for key, value in state.items() if has_own_bytes(value)]


def _value_keys(state: State) -> list[Any]:
    return [key for key, value in state.items() if not has_own_bytes(value)]
