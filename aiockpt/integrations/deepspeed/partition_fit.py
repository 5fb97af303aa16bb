"""Check that one ZeRO partition can hold what a step has of each of its parameters, made before a tensor is filled.

An optimizer under ZeRO steps whole partitions: of each key it has one tensor that lies as the partition does, or one value.
A step that was saved without ZeRO, or under other groups, may have for two parameters of a partition what differs in shape,
dtype, keys or value.
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
"""Returns the tensor of the step that a node of its values stands for; None for a plain value."""


class PartitionFit(msgspec.Struct, frozen=True):
    """The optimizer's values for a partition, by key.

    Attributes:
        spread: keys of one tensor that lies as the partition does, with its dtype.
        single: keys of one value for all parameters.
        problems: one sentence for each reason why it cannot.
    """

    spread: dict[Any, torch.dtype]
    single: list[Any]
    problems: list[str]


def fit_partition(
    states: Mapping[str, Mapping[Any, Any]], shapes: Mapping[str, tuple[int, ...]], find: FindTensor
) -> PartitionFit:
    """Return how the state of the parameters of a partition fits it. All ranks of it find the same.

    Args:
        states: what the step has of each parameter that has state, by key.
        shapes: of each whole parameter.
        find: what a node stands for.
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
    """Return in words what differs among the single values of the parameters of a partition; nothing where all agree.

    Args:
        nodes: of *key*, by parameter.
        values: of the tensors of the step that some of them stand for, by their names there.
        find: what a node stands for.
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
