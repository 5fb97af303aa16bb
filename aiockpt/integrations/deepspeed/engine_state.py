"""The whole state of an engine in one step, for `attach` to an engine and for the integrations that drive one.

Weights and optimizer are stored by the names of the parameters, so a step loads under any stage and number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import aiockpt
from aiockpt.adapters.optimizer_forms import OwnStateDicts
from aiockpt.integrations.contract import ask_first_rank, rank_of, size_of
from aiockpt.integrations.deepspeed.named_state import (
    MODEL,
    OPTIMIZER,
    PROGRESS,
    module_leaves,
    optimizer_kind,
    optimizer_state,
)
from aiockpt.integrations.deepspeed.partitions import find_partitions
from aiockpt.integrations.deepspeed.state_to_load import StateToLoad
from aiockpt.integrations.nested import nest

logger = logging.getLogger("aiockpt")

CLIENT, OF_RANK = "client_state", "client_state_of_rank"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The fields of a loss scaler that change; the rest of it is configuration."""


def used_names(engine: Any) -> set[str]:
    """Return the keys that the engine's own state has."""
    return {MODEL, OPTIMIZER, CLIENT, OF_RANK, PROGRESS, "rng", *progress_objects(engine)}


def build_state(engine: Any, client_state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    partitions = find_partitions(engine)
    return {
        MODEL: nest(dict(module_leaves(engine, partitions))),
        **({OPTIMIZER: optimizer_state(engine, partitions)} if partitions else {}),
        **progress_objects(engine),
        "rng": aiockpt.RNG(),
        PROGRESS: read_progress(engine) | {"ranks": size_of(), "optimizer": optimizer_kind(engine)},
        OF_RANK: aiockpt.per_rank(dict(client_state or {})),
        **({CLIENT: dict(client_state or {})} if rank_of() == 0 else {}),
    }


def load_step(
    engine: Any,
    ckpt: aiockpt.Checkpointer,
    step: int,
    more: Mapping[str, Any],
    *,
    strict: bool = True,
    optimizer: bool = True,
    progress: bool = True,
    without: Collection[str] = (),
) -> dict[str, Any] | None:
    """Load parts of a step into an engine, and return the client state.

    Args:
        more: further objects to load with the progress of the run, by key.
        strict: whether the step must have all weights.
        without: parts of the progress that are not loaded.
    """
    saved = ckpt.describe(step).result()
    if hasattr(engine.optimizer, "checkpoint_event_prologue"):
        engine.optimizer.checkpoint_event_prologue()
    try:
        asked = StateToLoad(engine, saved)
        asked.ask_weights()
        if optimizer:
            asked.ask_optimizer(partial(_read_scalars, ckpt, step))
        state = OwnStateDicts(asked.state | (_progress_of(engine, saved, more, without) if progress else {}))
        ckpt.load(state, step, strict=True if strict else {MODEL: False}).result()
        asked.finish()
    finally:
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
    if state.get(PROGRESS) is not None:
        set_progress(engine, state[PROGRESS])
    loaded: dict[str, Any] | None = state[OF_RANK].value if OF_RANK in state else state.get(CLIENT, {})
    return loaded


def _read_scalars(ckpt: aiockpt.Checkpointer, step: int, names: list[str]) -> dict[str, Any]:
    """Return scalars of a step by the names of their tensors; rank 0 reads them for all."""

    def read() -> dict[str, Any]:
        reading = {name: ckpt.read(step, name) for name in names}
        return {name: future.result().item() for name, future in reading.items()}

    return ask_first_rank(read) if names else {}


def _progress_of(
    engine: Any, saved: aiockpt.Description, more: Mapping[str, Any], without: Collection[str]
) -> dict[str, Any]:
    """Return the state to load besides weights and optimizer."""
    values: Any = saved.values
    objects = progress_objects(engine) | {"rng": aiockpt.RNG()}
    objects = {name: one for name, one in objects.items() if name not in without}
    there = {*values, *saved.per_rank}
    for name in objects.keys() - there:
        logger.warning("step %d has no %s: the present one is kept", saved.info.step, name)
    state = {name: one for name, one in objects.items() if name in there} | dict(more)
    if PROGRESS in values:
        # Each rank gets its own client state, or that of rank 0 where the number of ranks has changed.
        same_ranks = values[PROGRESS]["ranks"] == size_of()
        state |= {PROGRESS: None, **({OF_RANK: aiockpt.per_rank(None)} if same_ranks else {CLIENT: None})}
    return state


def progress_objects(engine: Any) -> dict[str, Any]:
    """Return the objects with a ``state_dict()``, by name."""
    found: dict[str, Any] = {}
    if engine.lr_scheduler is not None:
        found["lr_scheduler"] = engine.lr_scheduler
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
        found["random_ltd"] = engine.random_ltd_scheduler
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        found["grad_scaler"] = scaler
    return found


def read_progress(engine: Any) -> dict[str, Any]:
    """Return the counters, and the loss scale where there is one."""
    values: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None:
        values["loss_scale"] = {name: getattr(scaler, name) for name in _SCALE if hasattr(scaler, name)}
    return values


def set_progress(engine: Any, values: dict[str, Any]) -> None:
    """Set the values that `read_progress` returned; a step that was in progress begins anew."""
    for name in _COUNTERS:
        setattr(engine, name, values[name])
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    saved = values.get("loss_scale")
    # A loss scale that does not change is configuration, too.
    if scaler is not None and saved is not None and scaler.dynamic:
        for name, value in saved.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
