"""How is an optimizer filled? By the names of its parameters, bit-exactly.

- A plain ``torch.optim.Optimizer`` is filled directly: state tensors that are there in place, others are made.
  ``Optimizer.load_state_dict()`` is not used, because it casts fp32 moments to the dtype of bf16 parameters.
- One that overrides or hooks ``state_dict()`` is given a state dict with torch's numbers.

How a step is computed (``foreach``, ``fused``, ``capturable``, ``differentiable``) is a property of the job: the running
optimizer keeps its own. So a checkpoint of a fused optimizer loads into any other, and goes on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.held import FlatRange
from aiockpt.adapters.index import Index
from aiockpt.adapters.intake import Intake
from aiockpt.adapters.optimizer import is_plain, name_members, state_path, view_plain
from aiockpt.adapters.tensors import may_spread
from aiockpt.format.names import join_name, split_name
from aiockpt.state.tree import Node, Path, damaged

HOW_TO_STEP = ("foreach", "fused", "capturable", "differentiable")
Thunks = dict[Any, Callable[[], Any]]
"""What will give the values, by key, once all tensors are filled."""


class Saved(msgspec.Struct, frozen=True):
    """The node of an optimizer, read: its groups' values, their parameters, and the state of each parameter by name."""

    groups: list[dict[str, Node]]
    members: list[list[str]]
    tensors: dict[str, list[str | int]]
    values: dict[str, dict[str | int, Node]]
    rest: Node


class _Row(msgspec.Struct, frozen=True):
    keys: list[str | int]
    params: list[int]


class _Group(msgspec.Struct, frozen=True):
    params: list[str]
    values: dict[str, Any]


class _Wire(msgspec.Struct, frozen=True):
    groups: list[_Group]
    state: list[_Row]
    values: list[tuple[str, str | int, Any]]
    rest: Any = None


def read_node(node: Mapping[str, Any], path: Path) -> Saved:
    """Return what an optimizer's node says.

    Raises:
        ManifestError: it was not written by `OptimizerPart`.
    """
    try:
        wire = msgspec.convert(node, _Wire)
        params = [name for group in wire.groups for name in group.params]
        tensors = {params[number]: list(row.keys) for row in wire.state for number in row.params}
    except (msgspec.ValidationError, IndexError) as error:
        raise damaged(path, f"is not an optimizer that was ever saved ({error})") from error
    values: dict[str, dict[str | int, Node]] = {}
    for owner, key, value in wire.values:
        values.setdefault(owner, {})[key] = value
    return Saved(
        [group.values for group in wire.groups], [group.params for group in wire.groups], tensors, values, wire.rest
    )


def load_optimizer(optimizer: Optimizer, path: Path, index: Index, intake: Intake) -> None:
    """Ask *intake* for all that an optimizer holds."""
    intake.claim(path)
    node = intake.find_tagged(path, "optimizer")
    if node is None:
        _load_own_form(optimizer, path, intake)
        return
    saved = read_node(node, path)
    members = name_members(optimizer, path, index)
    plain = is_plain(optimizer)
    if not plain and not intake.selects_whole(path, "it has its own load_state_dict()"):
        return
    wanted = _want_groups(optimizer, path, members, saved, intake)
    states = _want_states(optimizer, path, members, saved, index, intake)
    rest = None if saved.rest is None else intake.value((*path, "rest"), saved.rest)
    if plain:
        whole = intake.selects(path)
        if whole:
            _note_rewritten(optimizer, path, members, intake)
        intake.later(lambda: _apply_plain(optimizer, wanted, states, rest, whole=whole))
    else:
        intake.later(lambda: _apply_general(optimizer, wanted, states, rest))


def _note_rewritten(optimizer: Optimizer, path: Path, members: Sequence[Sequence[Path]], intake: Intake) -> None:
    """All the state that is there is filled or dropped, also what the checkpoint does not have."""
    intake.rewrites(path)
    for owner, state in view_plain(optimizer, members).states:
        for key in state:
            intake.rewrites(state_path(path, owner, key))


def _load_own_form(optimizer: Optimizer, path: Path, intake: Intake) -> None:
    """Load an optimizer whose ``state_dict()`` had a form of its own."""
    node = intake.find_tagged(path, "stateful")
    if node is None:
        intake.miss(path)
    elif intake.selects_whole(path, "it has its own load_state_dict()"):
        template = optimizer.state_dict() if may_spread() else None
        value = intake.value(path, node.get("value"), template, fresh=True)
        intake.later(lambda: optimizer.load_state_dict(value()))


def _want_groups(
    optimizer: Optimizer, path: Path, members: Sequence[Sequence[Path]], saved: Saved, intake: Intake
) -> list[Thunks]:
    """Return what will set each group's values."""
    if len(saved.groups) != len(members):
        intake.problem(
            f"{join_name(path)}: the checkpoint has {len(saved.groups)} parameter groups, the state {len(members)}"
        )
    wanted: list[Thunks] = []
    for number, (group, values) in enumerate(zip(optimizer.param_groups, saved.groups, strict=False)):
        thunks: Thunks = {}
        for key, node in values.items():
            place = (*path, "groups", number, key)
            if key not in HOW_TO_STEP and intake.selects(place):
                thunks[key] = intake.value(place, node, group.get(key))
        wanted.append(thunks)
    return wanted


def _want_states(
    optimizer: Optimizer,
    path: Path,
    members: Sequence[Sequence[Path]],
    saved: Saved,
    index: Index,
    intake: Intake,
) -> list[tuple[torch.Tensor, Thunks]]:
    """Return what will set each parameter's state; tensors that are there are filled in place, others are made."""
    stored_members = {name for some in saved.members for name in some}
    found = []
    for group, owners in zip(optimizer.param_groups, members, strict=True):
        for parameter, owner in zip(group["params"], owners, strict=True):
            name = intake.stored_name(owner)
            if name not in stored_members:
                intake.miss((*path, "state", *owner), f"the optimizer of the checkpoint has no parameter {name}")
                continue
            flat = index.slice_of(parameter)
            if flat is not None and flat.start == flat.end:  # state would only go stale: no step ever reaches it here
                for key in saved.tensors.get(name, ()):
                    intake.leave(_stored_as(path, name, key, intake))
                thunks: Thunks = {}
            else:
                thunks = _want_state(optimizer, path, owner, parameter, flat, group, saved, intake)
            found.append((parameter, thunks))
    return found


def _want_state(
    optimizer: Optimizer,
    path: Path,
    owner: Path,
    parameter: torch.Tensor,
    flat: FlatRange | None,
    group: Mapping[str, Any],
    saved: Saved,
    intake: Intake,
) -> Thunks:
    name = intake.stored_name(owner)
    live = optimizer.state.get(parameter, {})
    thunks: Thunks = {}
    for key in saved.tensors.get(name, ()):
        place = state_path(path, owner, key)
        stored = _stored_as(path, name, key, intake)
        tensor = intake.fill(place, stored, live.get(key), device_for(parameter, key, group), flat)
        if tensor is not None:
            thunks[key] = _returning(tensor)
    for key, node in saved.values.get(name, {}).items():
        place = state_path(path, owner, key)
        if intake.selects(place):
            thunks[key] = intake.value(place, node, live.get(key))
    return thunks


def _stored_as(path: Path, name: str, key: str | int, intake: Intake) -> str:
    """Return the name in the checkpoint of one state tensor of the parameter called *name* there."""
    return join_name((*split_name(intake.stored_name(path)), "state", *split_name(name), key))


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def device_for(parameter: torch.Tensor, key: Any, group: Mapping[str, Any]) -> torch.Tensor | torch.device:
    """Return what a new state tensor is like: a step counter lives on the CPU unless a kernel reads it (torch's rule)."""
    if key != "step":
        return parameter
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _apply_plain(
    optimizer: Optimizer,
    groups: Iterable[Thunks],
    states: Iterable[tuple[torch.Tensor, Thunks]],
    rest: Callable[[], Any] | None,
    *,
    whole: bool,
) -> None:
    for group, thunks in zip(optimizer.param_groups, groups, strict=False):
        for key, value in thunks.items():
            set_value(group, key, value())
    for parameter, thunks in states:
        if whole:
            optimizer.state.pop(parameter, None)
        if thunks:
            optimizer.state[parameter].update({key: value() for key, value in thunks.items()})
    if rest is not None:
        optimizer.state.update(rest())


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
