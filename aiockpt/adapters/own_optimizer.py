"""State of ``aiockpt.per_rank(optimizer)``: all that an optimizer holds on this rank, as it lies, for this rank alone.

For state that ranks rightly have differently (preconditioners of their own, other values of groups for one parameter). It
comes back on the same number of ranks, for the same parameters spread in the same way: nothing of it can be resharded.
A DTensor is saved as the part that this rank has of it, and made again on the mesh of its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from aiockpt.adapters.dtensors import dtensor_placed, is_dtensor, local_of, placements_of
from aiockpt.adapters.index import Index
from aiockpt.adapters.optimizer import is_plain, keeper_of
from aiockpt.adapters.optimizer_forms import HOW_TO_STEP, NAMES, innermost
from aiockpt.adapters.optimizer_target import set_value
from aiockpt.adapters.rng import PerRank
from aiockpt.state.codecs import class_name
from aiockpt.state.layout import axes_in_memory
from aiockpt.state.tree import refuse

_PLACED, _SHAPE, _LOCAL = "dtensor placed", "of shape", "local"
"""Keys of what stands for a DTensor."""


def of_this_rank(value: Any, index: Index) -> Any:
    """Return what belongs to this rank: an object, or what `per_rank` wraps; an optimizer as `OwnOptimizer`."""
    held = value.value if isinstance(value, PerRank) else value
    return OwnOptimizer(held, index) if isinstance(held, Optimizer) else held


class OwnOptimizer:
    """An optimizer as an object with a state of this rank; its parameters that *index* does not find are part of that."""

    def __init__(self, optimizer: Optimizer, index: Index) -> None:
        self._optimizer = optimizer
        self._index = index
        self._keeper = keeper_of(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the local parts of DTensors, outside autograd."""
        said = self._keeper.state_dict()
        return {
            "class": class_name(type(innermost(self._keeper))),
            "shapes": self._shapes(),
            "groups": [{key: group[key] for key in group if key not in NAMES} for group in said["param_groups"]],
            "state": {number: _take_apart(entry) for number, entry in said["state"].items()},
            "parameters": {number: local.detach() for number, local in self._loose()},
        }

    def _loose(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and the local part of each parameter that no module of the state holds, where it has some."""
        if not self._index.paths:  # the weights are kept elsewhere, and only what was learnt of them is meant
            return
        parameters = [parameter for group in self._keeper.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if self._index.path_of(parameter) is None:
                yield number, local_of(parameter) if is_dtensor(parameter) else parameter

    def _shapes(self) -> list[list[list[int]]]:
        """Return the shape of what this rank has of each parameter of each group."""
        groups = (
            [local_of(one) if is_dtensor(one) else one for one in group["params"]]
            for group in self._keeper.param_groups
        )
        return [[list(one.shape) for one in some] for some in groups]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load such a state.

        Raises:
            ValueError: it is not that of this optimizer, or its parameters are spread in another way here.
        """
        keeper, here = self._keeper, self._shapes()
        own = {class_name(type(keeper)), class_name(type(innermost(keeper)))}  # 0.1.0 has written that of the wrapper
        if saved["class"] not in own or saved["shapes"] != here:
            raise ValueError(
                f"it was saved for a {saved['class']} with parts of shapes {saved['shapes']}, and here is a "
                f"{class_name(type(keeper))} with parts of shapes {here}; what belongs to one rank is not resharded"
            )
        loose = saved.get("parameters", {})  # 0.1.0 has not written them
        with torch.no_grad():
            for number, local in self._loose():
                if number in loose:
                    local.copy_(loose[number])
        parameters = [parameter for group in keeper.param_groups for parameter in group["params"]]
        state = {number: _put_together(entry, parameters[number]) for number, entry in saved["state"].items()}
        if not is_plain(keeper):
            numbers = keeper.state_dict()["param_groups"]
            groups = [{**own, **group} for own, group in zip(numbers, saved["groups"], strict=True)]
            keeper.load_state_dict({"state": state, "param_groups": groups})
            return
        for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            for key, value in values.items():
                if key not in HOW_TO_STEP:
                    set_value(group, key, value)
        for number, parameter in enumerate(parameters):
            keeper.state.pop(parameter, None)
            if number in state:
                keeper.state[parameter] = state[number]
        keeper.__setstate__({"state": keeper.state, "param_groups": keeper.param_groups})


def _take_apart(value: Any) -> Any:
    """Return a value of the state in which each DTensor is what it is made of."""
    if is_dtensor(value):
        placements = placements_of(value)
        if not placements:
            refuse(("per_rank",), f"a DTensor placed as {value.placements}; redistribute it to Shard or Replicate")
        return {_PLACED: list(placements), _SHAPE: list(value.shape), _LOCAL: local_of(value)}
    if type(value) is dict:
        return {key: _take_apart(item) for key, item in value.items()}
    return type(value)(map(_take_apart, value)) if type(value) in (list, tuple) else value


def _put_together(value: Any, parameter: torch.Tensor) -> Any:
    """Return the value again, its DTensors on the mesh of *parameter*."""
    if type(value) is dict and value.keys() == {_PLACED, _SHAPE, _LOCAL}:
        local, made = value[_LOCAL], None
        if is_dtensor(parameter):
            axes = axes_in_memory(local.shape, local.stride())
            made = dtensor_placed(value[_PLACED], parameter, tuple(value[_SHAPE]), local.dtype, axes)
        if made is None or local_of(made).shape != local.shape:
            raise ValueError(
                f"beside a DTensor of shape {value[_SHAPE]} is a parameter that is spread in another way here"
            )
        local_of(made).copy_(local)
        return made
    if type(value) is dict:
        return {key: _put_together(item, parameter) for key, item in value.items()}
    return type(value)(_put_together(item, parameter) for item in value) if type(value) in (list, tuple) else value
