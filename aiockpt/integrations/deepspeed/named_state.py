"""State of an engine by parameter name: weights and optimizer state, independent of ZeRO's partitions.

    model            the weights in the precision of the optimizer, frozen ones in that of the model, and the buffers
    optimizer        in the form of torch's ``get_optimizer_state_dict(model, optimizer)``

So a checkpoint has no partitions: it loads under any stage and number of ranks, and into a plain module and optimizer.
16-bit weights are not saved beside those of the optimizer: each optimizer step makes them by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import aiockpt
from aiockpt.adapters.kinds import NAMES, default_keys, innermost
from aiockpt.adapters.module import EXTRA
from aiockpt.integrations.deepspeed.partitions import FlatPartition, ParameterSlice, inner_optimizer, weights_of
from aiockpt.state.codecs import class_name

MODEL, OPTIMIZER, PROGRESS = "model", "optimizer", "deepspeed"


def optimizer_state(engine: Any, partitions: list[FlatPartition]) -> dict[str, Any]:
    """Return the optimizer to save.

    Raises:
        UsageError: the state of a partition does not have the layout of the partition.
    """
    states = inner_optimizer(engine).state
    state = {
        one.name: {key: _state_part(partition, one, key, value) for key, value in states[partition.key].items()}
        for partition in partitions
        if partition.key in states
        for one in partition.slices
    }
    return {"state": state, "param_groups": group_settings(engine, partitions)}


def optimizer_kind(engine: Any) -> dict[str, Any]:
    """Return the class and default group keys of the optimizer, which its saved state, a dict, does not contain."""
    inner = inner_optimizer(engine)
    return {} if inner is None else {"class": class_name(type(innermost(inner))), "keys": default_keys(inner)}


def group_settings(engine: Any, partitions: list[FlatPartition]) -> list[dict[str, Any]]:
    """Return the groups of the optimizer, with the names of their parameters."""
    groups: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key not in NAMES}, "params": []}
        for group in inner_optimizer(engine).param_groups
    ]
    for partition in partitions:
        groups[partition.group]["params"] += [one.name for one in partition.slices]
    return groups


def module_leaves(engine: Any, partitions: list[FlatPartition]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a module by name: weights, persistent buffers, extra state. Tied ones are repeated."""
    masters = {
        one.name: partition.part_of(partition.key, one)
        for partition in partitions
        if partition.is_master
        for one in partition.slices
    }
    for prefix, member in engine.module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for name, parameter in member.named_parameters(recurse=False, remove_duplicate=False):
            master = masters.get(engine.param_names[parameter])
            yield before + name, weights_of(parameter) if master is None else master
        for name, buffer in member.named_buffers(recurse=False, remove_duplicate=False):
            if name not in member._non_persistent_buffers_set:
                yield before + name, nn.Buffer(buffer)  # in the same memory; a Buffer marks that ranks may differ
        if type(member).get_extra_state is not nn.Module.get_extra_state:
            yield before + EXTRA, member.get_extra_state()


def _state_part(partition: FlatPartition, one: ParameterSlice, key: str, value: Any) -> Any:
    """Return a parameter's part of a partition's optimizer state."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape != partition.key.shape:
        raise aiockpt.UsageError(
            f"optimizer state {key!r} of shape {tuple(value.shape)} beside a partition of {tuple(partition.key.shape)}: the "
            "parts of its parameters in it are unknown; save with DeepSpeed"
        )
    return partition.part_of(value, one)
