"""The reader of universal checkpoints of DeepSpeed: whole weights and moments, a file each, and the engine's state.

``ds_to_universal`` makes one of ZeRO's flat partitions: ``zero/NAME/fp32.pt``, ``exp_avg.pt`` and others of each parameter,
beside ``zero/optimizer_state.pt`` and the ``*_model_states.pt`` of the ranks. The state has the form that
`aiockpt.integrations.deepspeed` saves, so an engine resumes from it, and a plain module and optimizer accept it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from aiockpt.convert.foreign import torch_files
from aiockpt.errors import CorruptionError, UsageError

_WEIGHTS = "fp32.pt"
_SETTINGS = "optimizer_state.pt"
_OF_DEEPSPEED = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version
    checkpoint_parallel_dimensions universal_checkpoint_info num_experts ds_autoep_layers iteration
"""


class StandIn:
    """Replaces an object of DeepSpeed that is not needed, so DeepSpeed's code does not run."""

    def __init__(self, *values: object) -> None:
        """Drop the values."""


_NUMBER = re.compile(r"\d+")
_STAND_INS: list[Any] = [
    (StandIn, f"deepspeed.runtime.{name}")
    for name in ("fp16.loss_scaler.LossScaler", "fp16.loss_scaler.DynamicLossScaler", "zero.config.ZeroStageEnum")
]


def is_one(path: Path) -> bool:
    """Return whether *path* is such a folder."""
    return any((path / "zero").glob(f"*/{_WEIGHTS}"))


def read(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    """Return the state in a universal checkpoint.

    Raises:
        UsageError: it holds objects besides those of DeepSpeed that are known, and *trust_pickle* does not allow them.
        CorruptionError: a file is missing or cut short, or they contradict each other.
    """
    # By number: the names are not padded, and a frozen parameter of ZeRO-3 is joined in the order of the ranks.
    files = sorted(path.glob("*_model_states.pt"), key=lambda file: [int(part) for part in _NUMBER.findall(file.name)])
    ranks = [_read(file, trust_pickle) for file in files]
    if not ranks:
        raise CorruptionError(f"{path} has no file *_model_states.pt")
    known, shapes = ranks[0], _shapes(ranks)
    model: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for folder in sorted(file.parent for file in (path / "zero").glob(f"*/{_WEIGHTS}")):
        name = folder.name
        for file in sorted(folder.glob("*.pt")):
            tensor = _shaped(file, _tensor_in(file, trust_pickle), None if file.stem == "step" else shapes.get(name))
            if file.name == _WEIGHTS:
                model[name] = tensor
            else:
                state.setdefault(name, {})[file.stem] = tensor
    for name in shapes.keys() - model.keys():
        raise CorruptionError(f"{path} has no weights of {name}")
    model |= _frozen_alike(path, files, ranks, model) | dict(_buffers(known))
    model |= {name: model[home] for name, home in (known.get("shared_params") or {}).items() if home in model}
    found: dict[str, Any] = {"model": model, "optimizer": _optimizer(path, ranks, state, trust_pickle)}
    if known.get("lr_scheduler") is not None:
        found["lr_scheduler"] = known["lr_scheduler"]
    counters = ("global_steps", "global_samples", "skipped_steps")
    found["deepspeed"] = {name: known.get(name, 0) for name in counters} | {"micro_steps": 0, "ranks": 0}
    found["client_state"] = {key: value for key, value in known.items() if key not in _OF_DEEPSPEED.split()}
    return found


def _read(file: Path, trust_pickle: bool) -> Any:
    with torch.serialization.safe_globals(_STAND_INS):
        return torch_files.read(file, trust_pickle)


def _tensor_in(file: Path, trust_pickle: bool) -> torch.Tensor:
    """Return the tensor in a file, which may be stored beside a description of its parts."""
    found = _read(file, trust_pickle)
    tensor = found.get("param", found.get("value"))
    if not isinstance(tensor, torch.Tensor):
        raise CorruptionError(f"{file} holds no tensor")
    return tensor


def _shaped(file: Path, tensor: torch.Tensor, shape: torch.Size | None) -> torch.Tensor:
    """Return a tensor in its shape: those of ZeRO-3 are flat."""
    if shape is None or tensor.dim() != 1 or tensor.shape == shape:
        return tensor
    if tensor.numel() != shape.numel():
        raise CorruptionError(f"{file} has {tensor.numel():,} elements, and its parameter the shape {tuple(shape)}")
    return tensor.view(shape)


def _shapes(ranks: list[Any]) -> dict[str, torch.Size]:
    return {
        name: torch.Size(shape)
        for rank in ranks[:1]
        for group in rank.get("param_shapes") or ()
        for name, shape in group.items()
    }


def _frozen_alike(
    path: Path, files: list[Path], ranks: list[Any], model: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the frozen parameters, which all ranks of tensor parallelism must have alike: no file says how to join them."""
    by_number: dict[str, list[Any]] = {}
    for file, rank in zip(files, ranks, strict=True):
        by_number.setdefault(_NUMBER.findall(file.name)[-1], []).append(rank)
    first, *others = [dict(_frozen(some, model)) for some in by_number.values()]
    for name, tensor in first.items():
        if any(name not in other or not torch.equal(tensor, other[name]) for other in others):
            raise UsageError(
                f"{path}: the ranks of tensor parallelism have different parts of the frozen parameter {name}, and "
                "universal checkpoints do not say how to join them: load it with DeepSpeed and save it with aiockpt"
            )
    return first


def _frozen(ranks: list[Any], model: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters without an optimizer; under ZeRO-3 each rank has a part, and the last one padding."""
    for name, shape in (ranks[0].get("frozen_param_shapes") or {}).items():
        parts = [rank["frozen_param_fragments"][name] for rank in ranks if rank.get("frozen_param_fragments")]
        if parts and parts[0].shape == shape:
            yield name, parts[0]
        elif parts:
            yield name, torch.cat([part.flatten() for part in parts])[: shape.numel()].view(shape)
        elif name not in model:
            raise CorruptionError(f"the frozen parameter {name} is in no file *_model_states.pt")


def _buffers(known: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers, in the precision that they had."""
    for name in known.get("buffer_names") or ():
        if name in (known.get("module") or {}):
            yield name, known["module"][name]


def _optimizer(path: Path, ranks: list[Any], state: dict[str, dict[str, Any]], trust_pickle: bool) -> dict[str, Any]:
    """Return the optimizer by the names of its parameters."""
    saved = _read(path / "zero" / _SETTINGS, trust_pickle)
    groups = saved.get("param_groups") or []
    names = [list(group) for group in ranks[0].get("param_shapes") or ()]
    if len(groups) != len(names):
        raise CorruptionError(f"{path} has {len(groups)} groups of the optimizer, and parameters in {len(names)}")
    # Under ZeRO-3 the number of steps is in the optimizer's own state, in one of its partitions.
    steps = [
        slots["step"]
        for slots in (saved.get("optimizer_state_dict") or {}).get("state", {}).values()
        if "step" in slots
    ]
    for entry in state.values() if steps else ():
        entry.setdefault("step", steps[0])
    return {
        "state": state,
        "param_groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "params": members}
            for group, members in zip(groups, names, strict=True)
        ],
    }
