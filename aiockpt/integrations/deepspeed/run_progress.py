"""Progress of the run: schedulers and samplers of an engine, its counters, and the scale of its loss."""

from __future__ import annotations

from typing import Any

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The fields of a loss scaler that change; the rest of it is configuration."""


def progress_objects(engine: Any) -> dict[str, Any]:
    """Return what has a ``state_dict()`` of its own, by name."""
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
    values: dict[str, Any] = {name: int(getattr(engine, name)) for name in COUNTERS}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None:
        values["loss_scale"] = {name: getattr(scaler, name) for name in SCALE if hasattr(scaler, name)}
    return values


def set_progress(engine: Any, values: dict[str, Any]) -> None:
    """Set what `read_progress` has read; a step that was under way begins anew."""
    for name in COUNTERS:
        setattr(engine, name, values[name])
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    saved = values.get("loss_scale")
    # One that does not change is configuration, too.
    if scaler is not None and saved is not None and scaler.dynamic:
        for name, value in saved.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
