"""This rank's part of the optimizer state: its slices of ZeRO's flat partitions, each by the name of its parameter.

ZeRO-1 and -2 concatenate the parameters of a group, and each rank has an equal share: elements ``[start, end)`` of some
parameters. ZeRO-3 cuts each parameter into equal shares, and concatenates those of a rank. The padding between and after
them belongs to no parameter, and is not saved. Without ZeRO a parameter is its own partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

import aiockpt


class ParameterSlice(msgspec.Struct, frozen=True, eq=False):
    """The part of one parameter in a partition; empty where *count* is 0.

    Attributes:
        name: of the parameter in the module.
        shape: of the whole parameter.
        start: the first element, as an index into the flattened parameter.
        offset: the position of this element in the partition.
        count: number of elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    count: int


class FlatPartition(msgspec.Struct, frozen=True, eq=False):
    """A partition of this rank's optimizer, which stands for some parameters.

    Attributes:
        key: the tensor that the optimizer steps, and to which its state belongs.
        group: the number of its group in ``param_groups``.
        slices: in their order in the partition, including empty ones, so that all ranks have the same parameters.
        is_master: whether it is a copy of the weights in another precision.
    """

    key: torch.Tensor
    group: int
    slices: list[ParameterSlice]
    is_master: bool

    def part_of(self, tensor: torch.Tensor, one: ParameterSlice) -> torch.Tensor:
        """Return a parameter's part of *tensor*, which has the partition's layout: a leaf of a state, in the same memory."""
        if tuple(tensor.shape) == one.shape and one.count == tensor.numel():
            return tensor.detach()
        return aiockpt.Shards.flat(one.shape, one.start, tensor.detach()[one.offset : one.offset + one.count])


def find_partitions(engine: Any) -> list[FlatPartition]:
    """Return the partitions of this rank; parameters and their order are the same on all ranks.

    Raises:
        UsageError: the form of the engine's optimizer is not supported; the message names the alternative.
    """
    optimizer = engine.optimizer
    if optimizer is None or not hasattr(optimizer, "param_groups"):
        return []
    _check(optimizer)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(_of_stage_3(engine))
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return list(_of_stages_1_and_2(engine))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise aiockpt.UsageError(
            f"{type(optimizer).__name__} keeps copies of the weights without ZeRO: set zero_optimization.stage to 1, 2 or 3"
        )
    return [
        FlatPartition(
            parameter,
            number,
            [ParameterSlice(engine.param_names[parameter], tuple(parameter.shape), 0, 0, parameter.numel())],
            is_master=False,
        )
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def inner_optimizer(engine: Any) -> Any:
    """Return the optimizer that has the state."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def refuse_engine(engine: Any) -> None:
    """Refuse parallelism other than data parallelism.

    Raises:
        UsageError: the engine uses another kind; the message names it.
    """
    if type(engine).__name__ == "PipelineEngine":
        raise aiockpt.UsageError("attach(): pipelines save a file for each layer; save them with DeepSpeed")
    if engine.has_moe_layers:
        raise aiockpt.UsageError(
            "attach(): experts are spread over ranks in DeepSpeed's own way; save them with DeepSpeed"
        )
    if engine.mp_world_size > 1:
        raise aiockpt.UsageError("attach(): the model is spread over ranks (mpu); see aiockpt.integrations.megatron")


def _check(optimizer: Any) -> None:
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise aiockpt.UsageError(
            "offload to NVMe: the state is in files there; offload to the CPU, or save with DeepSpeed"
        )
    if getattr(optimizer, "offload_optimizer", False) and getattr(optimizer, "partial_offload", 1.0) < 1.0:
        raise aiockpt.UsageError(
            "offload_optimizer.ratio below 1 keeps two optimizers; set it to 1, or save with DeepSpeed"
        )
    if getattr(optimizer, "zenflow", False):
        raise aiockpt.UsageError("ZenFlow keeps state of its own: save with DeepSpeed")
    if getattr(optimizer, "offloaded_states", None):
        raise aiockpt.UsageError("states are offloaded at the moment: call engine.reload_states() first")


def _of_stages_1_and_2(engine: Any) -> Iterator[FlatPartition]:
    zero = engine.optimizer
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(zero.real_dp_process_group[number])
        first = rank * zero.partition_size[number]
        slices = []
        members = zip(
            zero.round_robin_bit16_groups[number],
            zero.round_robin_bit16_meta[number],
            zero.round_robin_bit16_offsets[number],
            strict=True,
        )
        for parameter, meta, begin in members:
            low, high = max(begin, first), min(begin + meta.numel(), first + flat.numel())
            count = max(0, high - low)
            start, offset = (low - begin, low - first) if count else (0, 0)
            slices.append(ParameterSlice(engine.param_names[parameter], tuple(meta.shape), start, offset, count))
        dtype = zero.round_robin_bit16_meta[number][0].dtype
        yield FlatPartition(flat, number, slices, is_master=flat.dtype != dtype)


def _of_stage_3(engine: Any) -> Iterator[FlatPartition]:
    zero = engine.optimizer
    for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
        slices, offset = [], 0
        for parameter in zero.fp16_groups[number]:
            start, count = range_of(parameter)
            slices.append(
                ParameterSlice(engine.param_names[parameter], tuple(parameter.ds_shape), start, offset, count)
            )
            offset += parameter.partition_numel()
        dtype = zero.fp16_partitioned_groups[number][0].dtype
        yield FlatPartition(flat, zero.sub_group_to_group_id[number], slices, is_master=flat.dtype != dtype)


def range_of(parameter: Any) -> tuple[int, int]:
    """Return the first element, flattened, and the number of elements that this rank has of a parameter of ZeRO-3."""
    size = parameter.partition_numel()
    start = min(torch.distributed.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    count = min(size, parameter.ds_numel - start)
    return (start, count) if count else (0, 0)


def weights_of(parameter: Any) -> torch.Tensor:
    """Return this rank's part of the weights of a parameter: a leaf of a state, in the same memory."""
    if not hasattr(parameter, "ds_id"):
        return parameter  # type: ignore[no-any-return]
    start, count = range_of(parameter)
    return aiockpt.Shards.flat(tuple(parameter.ds_shape), start, parameter.ds_tensor.detach().view(-1)[:count])


def finish_weights(engine: Any, partitions: list[FlatPartition]) -> None:
    """Synchronize the weights of model and optimizer after one of them was loaded; all ranks call it."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        for part, flat in zip(partitions, zero.fp16_partitioned_groups_flat, strict=True):
            # Both are the same tensor, unless the optimizer has its own precision or device.
            target, source = (flat, part.key) if part.is_master else (part.key, flat)
            if target.data_ptr() != source.data_ptr():
                target.data.copy_(source.data)
    elif hasattr(zero, "single_partition_of_fp32_groups"):
        if any(part.is_master for part in partitions):
            zero.update_lp_params()
        else:
            zero.refresh_fp32_params()
