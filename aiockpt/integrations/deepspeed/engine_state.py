"""All of an engine's state as one step has it, for the switch of the engine itself and for those of what drives it.

Weights and optimizer are called by the names of the parameters, so a step loads under any stage and number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

import aiockpt
from aiockpt.integrations.deepspeed.named_state import (
    MODEL,
    OPTIMIZER,
    PROGRESS,
    optimizer_kind,
    optimizer_state,
    weights_state,
)
from aiockpt.integrations.deepspeed.partitions import find_partitions
from aiockpt.integrations.deepspeed.run_progress import progress_objects, read_progress, set_progress
from aiockpt.integrations.deepspeed.state_to_load import StateToLoad
from aiockpt.integrations.first_rank import ask_first_rank

logger = logging.getLogger("aiockpt")

CLIENT, OF_RANK = "client_state", "client_state_of_rank"


def names_taken(engine: Any) -> set[str]:
    """Return the keys that the engine's own state has."""
    return {MODEL, OPTIMIZER, CLIENT, OF_RANK, PROGRESS, "rng", *progress_objects(engine)}


def build_state(engine: Any, client_state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what to save of an engine."""
    partitions = find_partitions(engine)
    return {
        MODEL: weights_state(engine, partitions),
        **({OPTIMIZER: optimizer_state(engine, partitions)} if partitions else {}),
        **progress_objects(engine),
        "rng": aiockpt.RNG(),
        PROGRESS: read_progress(engine) | {"ranks": _size(), "optimizer": optimizer_kind(engine)},
        OF_RANK: aiockpt.per_rank(dict(client_state or {})),
        **({CLIENT: dict(client_state or {})} if _rank() == 0 else {}),
    }


def load_step(
    engine: Any,
    ckpt: aiockpt.Checkpointer,
    step: int,
    more: Mapping[str, Any],
    *,
    strict: bool = True,
    optimizer: bool = True,
    scheduler: bool = True,
    progress: bool = True,
) -> dict[str, Any] | None:
    """Load parts of a step into an engine, and return the client state.

    Args:
        more: what else is loaded, by its key, with the progress of the run.
        strict: whether the weights must be all of them.
    """
    saved = ckpt.describe(step).result()
    if hasattr(engine.optimizer, "checkpoint_event_prologue"):
        engine.optimizer.checkpoint_event_prologue()
    try:
        asked = StateToLoad(engine, saved)
        asked.ask_weights()
        if optimizer:
            asked.ask_optimizer(partial(_read_scalars, ckpt, step))
        state = asked.state | (_progress_of(engine, saved, more, scheduler=scheduler) if progress else {})
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
    engine: Any, saved: aiockpt.Description, more: Mapping[str, Any], *, scheduler: bool
) -> dict[str, Any]:
    """Return what to load besides weights and optimizer."""
    values: Any = saved.values
    objects = progress_objects(engine) | {"rng": aiockpt.RNG()}
    if not scheduler:
        objects.pop("lr_scheduler", None)
    there = {*values, *saved.per_rank}
    for name in objects.keys() - there:
        logger.warning("step %d has no %s: it stays as it is here", saved.info.step, name)
    state = {name: one for name, one in objects.items() if name in there} | dict(more)
    if PROGRESS in values:
        # Each rank gets its own client state back, or that of rank 0 where the ranks are others now.
        same_ranks = values[PROGRESS]["ranks"] == _size()
        state |= {PROGRESS: None, **({OF_RANK: aiockpt.per_rank(None)} if same_ranks else {CLIENT: None})}
    return state


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
