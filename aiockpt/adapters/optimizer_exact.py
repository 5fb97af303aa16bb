"""The short way of an optimizer that is as it was saved: class, groups, names, state, all of them plain; or without state.

`load_exactly` compares first and requests nothing where anything differs: `aiockpt.adapters.optimizer_target` then finds
out what, and what of it fits. Guarantee: what it loads is what the long way would load.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import HOW_TO_STEP, innermost
from aiockpt.adapters.matcher import MakeUp, Matcher
from aiockpt.adapters.optimizer import is_plain, keeper_of
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.tensor_kinds import ORDINARY
from aiockpt.adapters.tensors import facts_of, new_tensor, torch_dtype
from aiockpt.format.names import join_name, name_within
from aiockpt.format.optimizers import OptimizerNode, read_optimizer
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import Path, are_alike, plain_value

Values = list[dict[str, Any]]
"""The values of each group."""
States = list[tuple[torch.Tensor, Any, str, torch.Tensor]]
"""A parameter, the key of a state tensor of it, the name of that in the checkpoint, and the tensor."""


def load_exactly(optimizer: Optimizer, path: Path, index: Index, matcher: Matcher) -> bool:
    """Request all of an optimizer if it is as it was saved; return whether it is."""
    node = matcher.find_tagged(path, "optimizer") if matcher.asks_for_all and not index.slices else None
    if node is None or keeper_of(optimizer) is not optimizer or not is_plain(optimizer):
        return False
    saved = read_optimizer(node)
    if saved is None or saved.values or saved.rest is not msgspec.UNSET:
        return False
    values = _read_groups(optimizer, saved)
    if values is None or saved.class_name != class_name(type(innermost(optimizer))):
        return False
    is_fresh, state = not optimizer.state, _pair_states(optimizer, saved, path, index, matcher.stored)
    if state is None:
        return False
    names, tensors = [name for _, _, name, _ in state], [tensor for *_, tensor in state]
    if not matcher.are_plain(names, tensors):
        return False
    matcher.claim(path)
    (matcher.fill_plain if is_fresh else matcher.want_plain)(names, tensors)
    for number, group in enumerate(values):
        for key in group:
            matcher.rewrites((*path, "groups", number, key))
    if index.schedulers_of(optimizer):
        goes_on = [number for number, group in enumerate(values) if "lr" in group]
        matcher.make_ups[id(innermost(optimizer))] = MakeUp(lined_up=True, goes_on=goes_on)
    matcher.later(partial(_apply, optimizer, values, state if is_fresh else []))
    return True


def _read_groups(optimizer: Optimizer, saved: OptimizerNode) -> Values | None:
    """Return the saved values of each group; None where one is not plain, or of another type than the present one."""
    if [len(group["params"]) for group in optimizer.param_groups] != [len(there.params) for there in saved.groups]:
        return None
    groups: Values = []
    for group, there in zip(optimizer.param_groups, saved.groups, strict=True):
        values = {key: plain_value(node) for key, node in there.values.items() if key not in HOW_TO_STEP}
        if not all(are_alike(group.get(key, optimizer), value) for key, value in values.items()):
            return None
        groups.append(values)
    return groups


def _pair_states(optimizer: Optimizer, saved: OptimizerNode, path: Path, index: Index, stored: Stored) -> States | None:
    """Return the present tensors of all state, new ones where the optimizer has no state at all; None if it differs."""
    rows, places, state = saved.rows(), join_name((*path, "state")), optimizer.state
    parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in saved.groups for name in group.params]
    if len(set(names)) != len(names) or (state and sum(map(bool, state.values())) != len(rows)):
        return None
    found: States = []
    for (group, parameter), owner in zip(parameters, names, strict=True):
        live: Mapping[Any, Any] = state.get(parameter, {})
        keys = rows[owner].keys if owner in rows else []
        if not _is_saved(parameter, owner, index, stored) or (state and live.keys() != set(keys)):
            return None
        root = f"{places}{owner}" if owner.startswith("[") else f"{places}.{owner}"
        for key in keys:
            name = name_within(root, key)
            tensor = live.get(key) if state else _make(stored, name, device_for(parameter, key, group))
            if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
                return None
            found.append((parameter, key, name, tensor))
    return found


def _is_saved(parameter: torch.Tensor, name: str, index: Index, stored: Stored) -> bool:
    """Return whether a parameter is an ordinary one that is called *name*, and was saved with its dtype and shape."""
    own = index.paths.get(id(parameter))
    is_called_so = own is not None and join_name(own) == name
    return is_called_so and type(parameter) in ORDINARY and facts_of(parameter) == stored.tensors.get(name)


def _make(stored: Stored, name: str, like: torch.Tensor | torch.device) -> torch.Tensor | None:
    """Return a tensor for the state *name*, as `Matcher.fill` makes it; None where there is no such tensor."""
    facts = stored.tensors.get(name)
    return None if facts is None else new_tensor(facts[1], torch_dtype(facts[0]), like, None, stored.axes_of(name))


def device_for(parameter: torch.Tensor, key: Any, group: Mapping[str, Any]) -> torch.Tensor | torch.device:
    """Return the tensor or device that new state is like: a step counter is on the CPU unless a kernel reads it."""
    if key != "step":
        return parameter
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _apply(optimizer: Optimizer, values: Values, new_state: States) -> None:
    for parameter, key, _, tensor in new_state:
        optimizer.state[parameter][key] = tensor
    for group, new in zip(optimizer.param_groups, values, strict=True):
        group.update(new)
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
