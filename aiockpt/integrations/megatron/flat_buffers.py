"""A rank's part of the optimizer state: its slices of Megatron's flat buffers, as boxes of the parameters' tensors.

A ``DistributedOptimizer`` distributes flat buffers of concatenated parameters: a rank has elements ``[start, end)`` of some
parameters, flattened (its ``gbuf_ranges``). The model's sharded state dict has the place of a parameter in the global
tensor. Both together give boxes of the global tensor: ranks do not communicate, and a checkpoint loads under any tensor,
pipeline, expert and data parallelism. Keys are those of Megatron's ``fully_reshardable`` format, which gathers.

The other values that torch's own optimizers keep for a parameter are saved beside its tensors, so that such an optimizer
can continue from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

import aiockpt
from aiockpt.integrations.megatron.sharded_leaves import MAIN, STATE, GroupSettings, ShardParts, flat_parts, mapping

_distributed: Any = import_module("megatron.core.optimizer.distrib_optimizer")
_optimizers: Any = import_module("megatron.core.optimizer.optimizer")
_dicts: Any = import_module("megatron.core.dist_checkpointing.dict_utils")

SETTINGS = "optimizer.settings."
STEP = "step"
_OF_TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
"""Values of a group that torch's AdamW also has."""
_EXPERTS = "is_expert_parallel"
"""Key of a group: whether its parameters are experts on several ranks. It belongs to the parallelism, not the settings."""
_REFUSED = (
    "use optimizer.sharded_state_dict(…, metadata={'distrib_optim_sharding_type': 'fully_reshardable'}), which gathers, in "
    "place of optimizer_state()"
)


def optimizer_state(
    optimizer: Any, model_sharded_state_dict: dict[str, Any], *, is_loading: bool = False
) -> dict[str, Any]:
    """Return the sharded state dict of any of Megatron's optimizers, with no collective; its tensors are those in use.

    For an optimizer that has not stepped, the zeros with which its first step would begin are created.

    Args:
        optimizer: as ``get_megatron_optimizer`` returns it.
        model_sharded_state_dict: of the model, or of all its chunks in one dict.
        is_loading: whether the result is for a load.

    Raises:
        UsageError: the form of the optimizer's state is not supported; the message names the alternative.
    """
    ours = list(_chained(optimizer))
    if not any(isinstance(one, _distributed.DistributedOptimizer) for one in ours):
        for one in ours:
            _make_plain_state(one)
        state: dict[str, Any] = optimizer.sharded_state_dict(model_sharded_state_dict, is_loading=is_loading)
        _note_count(state)
        return state
    bases = {id(base.data): base for base in _dicts.nested_values(model_sharded_state_dict) if hasattr(base, "data")}
    groups: dict[str, Any] = {}
    tensors: list[Any] = []
    for one in ours:
        _check(one)
        _make_state(one)
        found = list(_leaves(one, bases))
        tensors += [leaf for _, leaf in found]
        _add_settings(groups, one, found, is_loading=is_loading)
    return {"param_state": dict(enumerate(tensors)), "settings": groups}


def load_optimizer_state(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Set the values that are not tensors from the result of ``load`` for `optimizer_state`; tensors are already filled."""
    if "settings" not in loaded:
        optimizer.load_state_dict(loaded)
        return
    settings = loaded["settings"]
    for one in _chained(optimizer):
        for group in one.optimizer.param_groups:
            group.update(settings[_group_key(group)])
            if STEP in group or _distributed.HAVE_APEX_OR_TE:
                group[STEP] = settings[STEP]
        for state in one.optimizer.state.values():
            if STEP in state:
                state[STEP].fill_(settings[STEP])
        if one.grad_scaler and "grad_scaler" in settings:
            one.grad_scaler.load_state_dict(settings["grad_scaler"])


def _chained(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers in a chain, without those that have no parameters on this rank."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(one, "is_stub_optimizer", False):
            yield one


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, _distributed.DistributedOptimizer):
        raise aiockpt.UsageError(f"{type(optimizer).__name__} in a chain with a DistributedOptimizer: {_REFUSED}")
    if optimizer.ddp_config.use_megatron_fsdp:
        raise aiockpt.UsageError("Megatron FSDP keeps DTensors: save them with aiockpt.Checkpointer as they are")
    if isinstance(optimizer.optimizer, _distributed.HybridDeviceOptimizer):
        raise aiockpt.UsageError(f"an optimizer on host and device (HybridDeviceOptimizer): {_REFUSED}")
    if optimizer.config.use_precision_aware_optimizer:
        raise aiockpt.UsageError(f"use_precision_aware_optimizer keeps scaled state: {_REFUSED}")


def _make_state(optimizer: Any) -> None:
    """Make the state that the first step of an optimizer would make: zeros."""
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
                if not _distributed.HAVE_APEX_OR_TE:
                    state[STEP] = torch.zeros((), dtype=torch.float32)


def _make_plain_state(optimizer: Any) -> None:
    """Make that state for an optimizer that is not distributed, as Megatron does for a load."""
    state = optimizer.optimizer.state
    is_new = any(parameter not in state for group in optimizer.optimizer.param_groups for parameter in group["params"])
    if is_new and optimizer.init_state_fn is not None:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for slots in state.values():
            if "exp_avg" in slots and not _distributed.HAVE_APEX_OR_TE:  # torch's Adam cannot step without its count
                slots.setdefault(STEP, torch.zeros((), dtype=torch.float32))


def _note_count(tree: Any) -> None:
    """Add the step count of torch's Adam where it is 0: Megatron leaves it out, and then cannot load."""
    if type(tree) is not dict:
        return
    if "param_groups" in tree and any("exp_avg" in slots for slots in tree["state"].values() if type(slots) is dict):
        if not _distributed.HAVE_APEX_OR_TE:
            tree["state"].setdefault("common_step", torch.zeros(()))
        return
    for inner in tree.values():
        _note_count(inner)


def _leaves(optimizer: Any, bases: dict[int, Any]) -> Iterator[tuple[int, ShardParts]]:
    """Yield the slices of this rank, each with the number of its group.

    They are slices of all state, and of main parameters that are copies of the weights.
    """
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    base = bases.get(id(parameter))
                    if base is None:
                        raise aiockpt.UsageError(
                            f"a parameter of shape {tuple(parameter.shape)} is not in model_sharded_state_dict: give "
                            "model.sharded_state_dict() of all chunks, with the parameters themselves (keep_vars=True)"
                        )
                    group, order = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][order]
                    values = optimizer.optimizer.param_groups[group]
                    tensors = dict(optimizer.optimizer.state[main])
                    said = {key: values[key] for key in _OF_TORCH if key in values}
                    said[STEP] = torch.tensor(float(tensors.pop(STEP, values.get(STEP, 0))))
                    if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                        tensors[MAIN[0]] = main.detach()
                    for key, tensor in tensors.items():
                        for piece in _slices(optimizer, base, ranges["param"].start, key, tensor, said):
                            yield group, piece


def _slices(
    optimizer: Any, base: Any, start: int, state_key: str, data: torch.Tensor, said: Mapping[str, Any]
) -> Iterator[ShardParts]:
    """Yield a slice of a parameter's state, cut where a factory cuts the parameter."""
    first, end = start, start + data.numel()
    for piece, piece_start in _pieces(base):
        low, high = max(first, piece_start), min(end, piece_start + piece.data.numel())
        part = data[low - first : max(low, high) - first]
        shape, parts = flat_parts(piece, max(0, low - piece_start) if len(part) else 0, part)
        saves = _is_first_replica(piece.replica_id) and not optimizer.distributed_optimizer_instance_id
        beside = {
            f"state.{piece.key}.{key}" if key == STEP else f"param_groups.{piece.key}.{key}": value
            for key, value in said.items()
            if saves and state_key not in MAIN
        }
        yield ShardParts(f"{STATE}{state_key}.{piece.key}", part, shape, parts, saves=saves, beside=beside)


def _pieces(base: Any) -> Iterator[tuple[Any, int]]:
    """Yield the tensors as which a parameter is saved, each with the number of its first element."""
    if not isinstance(base, mapping.ShardedTensorFactory):
        yield base, 0
        return
    for piece in _dicts.nested_values({"built": base.build()}):
        data = piece.data
        if data.untyped_storage().data_ptr() != base.data.untyped_storage().data_ptr() or not data.is_contiguous():
            raise aiockpt.UsageError(f"{base.key}: its factory does not cut it into runs of elements; {_REFUSED}")
        yield piece, data.storage_offset() - base.data.storage_offset()


def _is_first_replica(replica_id: Any) -> bool:
    """Return whether this copy of a parameter is the one to save, regardless of data parallelism.

    The last number is the data-parallel rank, which is ignored: each of these ranks has its own slice.
    """
    return isinstance(replica_id, int) or not any(replica_id[:-1])


def _add_settings(
    found: dict[str, Any], optimizer: Any, leaves: Sequence[tuple[int, ShardParts]], *, is_loading: bool
) -> None:
    """Add the values that are not tensors to *found*, each as an object that is equal on all ranks."""
    for number, group in enumerate(optimizer.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", STEP, _EXPERTS)}
        key = _group_key(group)
        settings = found.setdefault(key, _object(SETTINGS + key, options))
        settings.parameters = [*settings.parameters, *(leaf.parameter for one, leaf in leaves if one == number)]
        known = settings.data
        if known != options and not is_loading:
            differing = sorted(name for name in options if known.get(name) != options[name])
            raise aiockpt.UsageError(f"experts have another {', '.join(differing)} than the rest of {key}; {_REFUSED}")
    steps = {int(state[STEP]) for state in optimizer.optimizer.state.values() if STEP in state}
    steps |= {int(group[STEP]) for group in optimizer.optimizer.param_groups if group["params"] and STEP in group}
    if len(steps) > 1:
        raise aiockpt.UsageError(f"the optimizer's parameters have made {sorted(steps)} steps; {_REFUSED}")
    if is_loading or steps or any(group["params"] for group in optimizer.optimizer.param_groups):
        found[STEP] = _object(SETTINGS + STEP, max(steps, default=0))
    if optimizer.grad_scaler:
        found["grad_scaler"] = _object(SETTINGS + "grad_scaler", optimizer.grad_scaler.state_dict())


def _object(key: str, value: Any) -> Any:
    return GroupSettings(key, value, (1,), (0,), replica_id=0)


def _group_key(group: dict[str, Any]) -> str:
    """Return the identity of a group of parameters under any parallelism, as Megatron distinguishes them."""
    known = {key: group.get(key, group.get(f"pre_{key}")) for key in _optimizers.param_group_identifier_keys}
    del known[_EXPERTS]
    return ",".join(f"{key}={value}" for key, value in known.items())
