"""Check that one ZeRO partition can hold the saved state of all its parameters; it runs before a tensor is filled.

An optimizer under ZeRO steps whole partitions: for each key it has one tensor with the layout of the partition, or one
value. In a step that was saved without ZeRO, or under other groups, the states of two parameters of a partition may differ
in shape, dtype, keys or value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

import aiockpt
from aiockpt.adapters.tensors import torch_dtype
from aiockpt.state.tree import TAG

FindTensor = Callable[[Any], aiockpt.TensorInfo | None]
"""Returns the tensor of the step that a node refers to; None for a plain value."""


class PartitionFit(msgspec.Struct, frozen=True):
    """The optimizer's values for a partition, by key.

    Attributes:
        spread: keys with one tensor that has the layout of the partition, with its dtype.
        single: keys with one value for all parameters.
        problems: the reasons why the partition cannot hold the state, one sentence each.
    """

    spread: dict[Any, torch.dtype]
    single: list[Any]
    problems: list[str]


def fit_partition(
    states: Mapping[str, Mapping[Any, Any]], shapes: Mapping[str, tuple[int, ...]], find: FindTensor
) -> PartitionFit:
    """Return how the state of the parameters of a partition fits it. All its ranks find the same.

    Args:
        states: the saved state of each parameter that has state, by key.
        shapes: of each whole parameter.
        find: returns the tensor that a node refers to.
    """
    fit = PartitionFit({}, [], [])
    for key in dict.fromkeys(key for entry in states.values() for key in entry):
        lacking = [name for name, entry in states.items() if key not in entry]
        if lacking:
            holder = next(name for name, entry in states.items() if key in entry)
            fit.problems.append(f"optimizer state {key!r} is there for {holder} and not for {lacking[0]}: {_TOGETHER}")
            continue
        infos = {name: find(entry[key]) for name, entry in states.items()}
        like_parameters = all(info and tuple(info.shape) == shapes[name] for name, info in infos.items())
        scalars = all(info is None or not info.shape for info in infos.values())
        # Beside a parameter that is a scalar itself, a count of steps has its shape.
        if like_parameters and not (scalars and key == "step"):
            dtypes = {name: torch_dtype(info.dtype) for name, info in infos.items() if info}
            (first, dtype), *_ = dtypes.items()
            fit.problems.extend(
                [
                    f"optimizer state {key!r} is {dtype} for {first} and {other} for {name}: {_TOGETHER}"
                    for name, other in dtypes.items()
                    if other != dtype
                ][:1]
            )
            fit.spread[key] = dtype
        elif scalars:
            fit.single.append(key)
        else:
            fit.problems.extend(
                [
                    f"optimizer state {key!r} has the shape {tuple(info.shape) if info else ()} for {name}, which has "
                    f"{shapes[name]}: {_TOGETHER}"
                    for name, info in infos.items()
                    if info is None or tuple(info.shape) != shapes[name]
                ][:1]
            )
    return fit


def different_values(key: Any, nodes: Mapping[str, Any], values: Mapping[str, Any], find: FindTensor) -> list[str]:
    """Return as text how the single values of a partition's parameters differ; an empty list where all agree.

    Args:
        nodes: of *key*, by parameter.
        values: the values of the tensors to which some nodes refer, by their names in the step.
        find: returns the tensor that a node refers to.
    """

    def value_of(node: Any) -> Any:
        info = find(node)
        return node if info is None else values[info.name]

    (first, node), *others = nodes.items()
    value = value_of(node)
    return [
        f"optimizer state {key!r} is {_shown(value)} for {first} and {_shown(value_of(other))} for {name}: {_TOGETHER}"
        for name, other in others
        if value_of(other) != value
    ][:1]


_TOGETHER = "ZeRO has one for both, which lie in one partition"


def _shown(value: Any) -> str:
    return f"a {value[TAG]}" if type(value) is dict and TAG in value else repr(value)
