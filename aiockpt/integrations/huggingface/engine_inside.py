"""The engine of DeepSpeed inside a Trainer or an Accelerator, saved and loaded by `aiockpt.integrations.deepspeed`.

So a run can resume under another stage of ZeRO, on another number of ranks, and without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

import aiockpt
from aiockpt.adapters.selection import Trainable, frozen_names
from aiockpt.integrations.contract import MethodCall, Replacements

Load = Callable[[MethodCall], Any]


class EngineInside:
    """The engine that an accelerator has prepared, if any.

    Args:
        replacements: of the attachment.
        load: replaces ``engine.load_checkpoint``; None keeps that.
    """

    def __init__(self, accelerator: Any, replacements: Replacements, load: Load | None = None) -> None:
        self._accelerator = accelerator
        self._replacements = replacements
        self._load = load
        replacements.put(accelerator, "prepare", self._prepare)

    @property
    def engine(self) -> Any:
        """The engine; None without DeepSpeed, and before one is prepared."""
        wrapped = getattr(self._accelerator, "deepspeed_engine_wrapped", None)
        return None if wrapped is None else wrapped.engine

    def _prepare(self, call: MethodCall) -> Any:
        made = call()
        engine = self.engine
        if engine is not None:
            import_module("aiockpt.integrations.deepspeed.partitions").refuse_engine(engine)
        if engine is not None and self._load is not None and "load_checkpoint" not in vars(engine):
            self._replacements.put(engine, "load_checkpoint", self._load, ("load_dir",))
        return made

    @property
    def keys(self) -> set[str]:
        """The keys of the engine's state."""
        found: set[str] = import_module("aiockpt.integrations.deepspeed.engine_state").used_names(self.engine)
        return found

    def build_state(self) -> dict[str, Any]:
        """Return the state of the engine to save; the schedule is saved beside it."""
        state: dict[str, Any] = import_module("aiockpt.integrations.deepspeed.engine_state").build_state(self.engine)
        state.pop("lr_scheduler", None)
        return state

    def load_step(self, ckpt: aiockpt.Checkpointer, step: int, *, without: Collection[str] = (), **parts: bool) -> None:
        """Load a step into the engine, except the schedule and the parts of its progress in *without*."""
        state: Any = import_module("aiockpt.integrations.deepspeed.engine_state")
        state.load_step(self.engine, ckpt, step, {}, without=("lr_scheduler", *without), **parts)

    def left_out(self, rule: object) -> list[str] | None:
        """Return the names of weights that a rule for modules leaves out: the state of an engine contains no module."""
        names = frozen_names(self.engine.module, rule, "model") if isinstance(rule, Trainable) else []
        return names or None


def show_engine(folder: Path, step: int) -> None:
    """Make the Trainer accept a folder as loadable by an engine: it searches the folder for those of DeepSpeed."""
    (folder / f"global_step{step}").mkdir(exist_ok=True)


def bare_scheduler(scheduler: Any) -> Any:
    """Return the scheduler itself; accelerate wraps the one that an engine steps."""
    return scheduler.scheduler if type(scheduler).__name__ == "DeepSpeedSchedulerWrapper" else scheduler
