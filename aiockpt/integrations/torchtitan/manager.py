"""The checkpoint manager for torchtitan: decides when and what to save, and where a run begins."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.adapters.optimizer_forms import OwnStateDicts
from aiockpt.integrations.contract import ask_first_rank, rank_of, size_of
from aiockpt.integrations.nested import flatten, nest

_titan: Any = import_module("torchtitan.components.checkpointer")
_files: Any = import_module("torchtitan.tools.filesystem")
_log: Any = import_module("torchtitan.tools.logging").logger
_dtypes: Any = import_module("torchtitan.config").TORCH_DTYPE_MAP

_MODES = {"disabled": "eager", "async": "eager", "async_with_pinned_mem": "lazy"}
"""Snapshot mode for each of torchtitan's modes."""
_SAVED_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
RNG = "rng"
"""Name of the random generators, beside torchtitan's own names of parts; ``exclude_from_loading`` also accepts it."""


class AiockptManager(_titan.BaseCheckpointManager):  # type: ignore[misc]  # Any, where torchtitan is not installed
    """Saves and loads a run of torchtitan; saves are in the background.

    Created through ``Trainer.Config(checkpoint=AiockptManager.Config(…))``. The error of a failed save is raised by the next
    save, or by ``close()``, which waits until all saves are committed.

    Args:
        config: from the trainer.
        dataloader, model_parts, optimizers, lr_schedulers, states: the parts to save; *states* by its own names.
        sd_adapter: the model's state dict adapter, to read and write folders of Hugging Face.
        base_folder: the trainer's dump folder, which contains ``config.folder``, unless that is a URL.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.BaseCheckpointManager.Config):  # type: ignore[misc]  # Any, where torchtitan is not installed
        """torchtitan's options of every checkpoint manager, and:

        Attributes:
            async_mode: ``"async"`` copies the state in the call; ``"async_with_pinned_mem"`` copies it beside the next
                forward and backward, and the optimizer waits; both write in the background. ``"disabled"`` returns when
                the checkpoint is committed.
            worker: the writer: a thread of this process, or a separate process that may outlive it.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        worker: Literal["thread", "process"] = "thread"

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: aiockpt.SaveFuture | None = None
        if not self.enable:
            return
        if config.async_mode not in _MODES:
            raise ValueError(f"checkpoint.async_mode: {config.async_mode!r} is none of {', '.join(_MODES)}")
        self._config = config
        self._given = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        self._own_states = dict(states)
        self._model = _titan.ModelWrapper(model_parts)
        self._optimizers = optimizers
        self._loader = None if dataloader is None else _wrap_loader(dataloader)
        self._theirs: Any = None
        self.folder = _files.join(base_folder, config.folder)
        self.states = {
            **states,
            _titan.MODEL: self._model,
            _titan.OPTIMIZER: optimizers,
            _titan.DATALOADER: self._loader,
            _titan.LR_SCHEDULER: lr_schedulers,
            RNG: aiockpt.RNG(),
        }
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("checkpoint.last_save_in_hf needs a state dict adapter, and this model has none")
        for name in config.exclude_from_loading:
            if name not in self.states:
                raise ValueError(f"checkpoint.exclude_from_loading: {name!r} is none of {', '.join(self.states)}")
        self._checkpointer = self.make_checkpointer(
            self.folder,
            snapshot=_MODES[config.async_mode],
            retention=aiockpt.Retention(last=config.keep_latest_k or None),
            worker=config.worker,
        )
        _log.info(f"Checkpoints are saved to and loaded from {self.folder} by aiockpt")

    def make_checkpointer(self, url: str, **options: Any) -> aiockpt.Checkpointer:
        """Return the checkpointer of a place; override it to pass more options, or tiers."""
        return aiockpt.Checkpointer(url, **options)

    # ------------------------------------------------------------------ save

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        if curr_step == 0:  # the seed checkpoint, from which runs of any sharding begin
            self._keep(self._checkpointer.save(0, self._state([_titan.MODEL])))
        elif last_step and self._config.last_save_in_hf:
            self._torchtitans().save(curr_step, last_step=True)
        elif last_step and self._config.last_save_model_only:
            self._export(curr_step)
        else:
            self._keep(self._checkpointer.save(curr_step, self._state(self.states)))
        return True

    def _is_due(self, step: int, last_step: bool) -> bool:
        if self._config.load_only:
            return False
        first = step == 1 and self._config.enable_first_step_checkpoint
        return first or last_step or step % self._config.interval == 0

    def _keep(self, save: aiockpt.SaveFuture) -> None:
        self.save_future = save
        if self._config.async_mode == "disabled":
            self._wait_for_saving()

    def _export(self, step: int) -> None:
        """Save the weights alone, as torchtitan does at the end, in a folder that no resumed run takes for a checkpoint."""
        place, dtype = self.folder.rstrip("/") + "-export", _dtypes[self._config.export_dtype]
        model = {
            name: tensor.to(dtype) if torch.is_floating_point(tensor) else tensor
            for name, tensor in self._model.state_dict().items()
        }
        with self.make_checkpointer(place) as export:
            export.save(step, {_titan.MODEL: nest(model)}).result()
        _log.info(f"The model of step {step}, in {dtype}, was saved to {place}")

    def _state(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the state of *names* for the checkpointer: the model and the optimizers as the dicts that torchtitan makes.

        The names in them depend neither on the number of pipeline stages, nor on whether projections are fused.
        """
        state = OwnStateDicts({name: self.states[name] for name in names if self.states[name] is not None})
        if _titan.MODEL in state:
            state[_titan.MODEL] = nest(self._model.state_dict())
        if _titan.OPTIMIZER in state:
            state[_titan.OPTIMIZER] = self._optimizers.state_dict()
        return state

    def _wait_for_saving(self) -> None:
        save, self.save_future = self.save_future, None
        if save is not None:
            save.result()

    def _maybe_wait_for_staging(self) -> None:
        self._checkpointer.barrier()

    def _close(self) -> None:
        """Wait until all saves are committed; while an exception is handled, first notify the other ranks."""
        self._checkpointer.__exit__(*sys.exc_info())

    # ------------------------------------------------------------------ load

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        steps = ask_first_rank(self._list_steps)
        if step == -1 and steps:
            step = steps[0] if steps[0] == 0 else -1
            self._fill(self._checkpointer, None if step == -1 else step, model_only=step == 0)
        elif step != -1 and (step in steps or not _files.isdir(_files.join(self.folder, f"step-{step}"))):
            self._fill(self._checkpointer, step, model_only=step == 0)
        elif not self._load_from_place(self._config.initial_load_path if step == -1 else None):
            return self._load_theirs(step)
        return True

    def _load_theirs(self, step: int) -> bool:
        """Load the checkpoint that torchtitan's own manager finds, in the folder or where a run is configured to begin."""
        elsewhere = self._config.initial_load_path or self._config.initial_load_in_hf
        if not (elsewhere or _files.isdir(self.folder)):
            _log.info(f"Nothing is in {self.folder}: this run begins anew")
            return False
        return bool(self._torchtitans().load(step))

    def _list_steps(self) -> list[int]:
        """Return all steps, including damaged ones, the newest first; finish the commits of a dead job before."""
        self._checkpointer.finish_commits().result()
        return [info.step for info in self._checkpointer.steps().result()]

    def _load_from_place(self, path: str | None) -> bool:
        """Begin from a checkpoint of aiockpt at *path*, its root or the folder of a step; return whether there is one."""
        if path is None or self._config.initial_load_in_hf:
            return False
        root, name = posixpath.split(path.rstrip("/"))
        is_step = re.fullmatch(r"step-(\d+)", name)
        with self.make_checkpointer(root if is_step else path) as place:
            steps = ask_first_rank(lambda: [info.step for info in place.steps().result()])
            step = int(is_step[1]) if is_step else steps[0] if steps else -1
            if step in steps:
                self._fill(place, step, model_only=self._config.initial_load_model_only)
        return step in steps

    def _fill(self, place: aiockpt.Checkpointer, step: int | None, *, model_only: bool) -> None:
        left_out = self._config.exclude_from_loading
        names = [_titan.MODEL] if model_only else [name for name in self.states if name not in left_out]
        if _titan.OPTIMIZER in names:
            _make_state(self._optimizers, place.describe(step).result())
        state = self._state(names)
        try:
            place.load(state, step).result()
        except aiockpt.StateMismatchError as error:
            error.add_note("checkpoint.exclude_from_loading=['dataloader', …] leaves out what cannot go on here")
            raise
        self._model.load_state_dict(flatten(state[_titan.MODEL]))
        if _titan.OPTIMIZER in state:
            self._optimizers.load_state_dict(state[_titan.OPTIMIZER])
        if _titan.DATALOADER in state and self._loader is not None:
            # Its iteration continues now, without the number that a new one draws from torch's generator.
            self._loader.held()

    def _torchtitans(self) -> Any:
        """Return torchtitan's own manager, for its checkpoints, and for folders of Hugging Face."""
        if self._theirs is None:
            config = {one.name: getattr(self._config, one.name) for one in fields(_titan.BaseCheckpointManager.Config)}
            config["keep_latest_k"] = 0  # it deletes nothing
            config["exclude_from_loading"] = [name for name in config["exclude_from_loading"] if name != RNG]
            self._theirs = _titan.CheckpointManager(
                _titan.CheckpointManager.Config(**config), states=self._own_states, **self._given
            )
        return self._theirs


def _make_state(optimizers: Any, saved: aiockpt.Description) -> None:
    """Add the tensors that *saved* fills to optimizers that never stepped, placed as their parameters are.

    torchtitan makes them by a step with gradients of zeros, which takes the memory of all gradients and calls the hooks
    of a step. Unknown state is still made so, through ``optimizers.state_dict()``.
    """
    nodes: Any = saved.values
    tensors = {tensor.name: tensor for tensor in saved.tensors}
    found = {
        key: tensors[node["name"]]
        for key, node in nodes.get("optimizer", {}).items()
        if isinstance(node, dict) and node.get("name") in tensors
    }
    for optimizer in optimizers:
        made = {} if optimizer.state else _state_like(optimizer, found)
        optimizer.state.update(made or {})


def _state_like(optimizer: torch.optim.Optimizer, found: Mapping[str, aiockpt.TensorInfo]) -> dict[Any, Any] | None:
    """Return tensors for the state of each parameter, zeros; None when the parameter has no tensor like one of them."""
    made: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            start = f"state.{name}."
            for key in (key for key in found if key.startswith(start)):
                shape, dtype = found[key].shape, _SAVED_DTYPES.get(found[key].dtype)
                if dtype is None or shape not in ((), parameter.shape):
                    return None
                on = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                of_one = made.setdefault(parameter, {})
                like = torch.zeros((), device=on) if shape == () else parameter
                of_one[key.removeprefix(start)] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return made


def _wrap_loader(dataloader: Any) -> aiockpt.Loader[Any]:
    """Return *dataloader* as the state of its data-parallel rank, saved by one of the ranks that read the same data."""
    rank, size = getattr(dataloader, "dp_rank", None), getattr(dataloader, "dp_world_size", None)
    if rank is None or size is None:
        return aiockpt.Loader(dataloader)
    readers: list[Any] = [None] * size_of()
    dist.all_gather_object(readers, rank)
    return aiockpt.Loader(dataloader, rank=rank, size=size, saves=readers.index(rank) == rank_of())
