"""An engine of DeepSpeed that saves and loads with aiockpt: its ``save_checkpoint`` and ``load_checkpoint`` are replaced.

A ``CheckpointEngine`` alone would receive flat partitions under the names of files; only the engine has the parameters.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import aiockpt
from aiockpt.errors import StepNotFoundError, UsageError
from aiockpt.integrations.deepspeed.engine_state import build_state, load_step, used_names
from aiockpt.integrations.deepspeed.named_state import MODEL
from aiockpt.integrations.deepspeed.partitions import find_partitions, refuse_engine
from aiockpt.integrations.steps import (
    ask_first_rank,
    begin_save,
    compare_with_theirs,
    load_newest,
    raise_if_lost,
    valid_steps,
)

_protocol: Any = import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine")

logger = logging.getLogger("aiockpt")


def attach(engine: Any, place: Any, *, state: Mapping[str, Any] | None = None, **options: Any) -> aiockpt.Checkpointer:
    """Make *engine* save and load with aiockpt; return the checkpointer that it uses.

    ``save_checkpoint(folder, tag)`` returns an `aiockpt.SaveFuture` when the state is copied. ``load_checkpoint(folder)``
    loads the newest valid step of *place* under any ZeRO stage and number of ranks, and returns ``(None, None)`` without
    one; a checkpoint that DeepSpeed itself wrote into the folder is loaded by DeepSpeed. Every rank calls *attach*.

    Args:
        engine: of ``deepspeed.initialize``.
        place: the place to save to, as for `aiockpt.Checkpointer`.
        state: further objects of the run that are saved and loaded with it, by name: ``{"loader": loader}``.
        **options: of `aiockpt.Checkpointer`.

    Raises:
        UsageError: the form of the engine's state is not supported; the message names it and the alternative.
    """
    refuse_engine(engine)
    find_partitions(engine)
    taken = used_names(engine) & set(state or {})
    if taken:
        raise UsageError(
            f"attach(): state= has {', '.join(sorted(taken))}, which the engine's own state has; rename it"
        )
    ckpt = aiockpt.Checkpointer(place, **options)
    attached = _AttachedEngine(engine, ckpt, dict(state or {}))
    engine.checkpoint_engine = attached.commits
    engine.save_checkpoint, engine.load_checkpoint = attached.save, attached.load
    return ckpt


class _AttachedEngine:
    """The replacements of the engine's methods."""

    def __init__(self, engine: Any, ckpt: aiockpt.Checkpointer, more: dict[str, Any]) -> None:
        self._engine = engine
        self._ckpt = ckpt
        self._more = more
        self._known: dict[int, dict[str, Any]] = {}
        self.load_theirs: Callable[..., Any] = engine.load_checkpoint
        self.commits = DurableCommits(engine.checkpoint_engine)
        before = getattr(engine.load_checkpoint, "__self__", None)
        if isinstance(before, _AttachedEngine):  # to another place
            self.load_theirs, self.commits = before.load_theirs, DurableCommits(before.commits.before)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> aiockpt.SaveFuture:
        """Save; when it returns, the state may change. The step is the engine's ``global_steps``."""
        engine, step = self._engine, self._engine.global_steps
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        if engine.micro_steps % engine.gradient_accumulation_steps():
            logger.warning("save_checkpoint() between the batches of one step: their gradients are not saved")
        tag = f"global_step{step}" if tag is None else str(tag)
        # Two tags of one global step are one state: both tags name it. The last one is its newest with save_latest.
        known = self._known.get(step, {"tags": [], "latest": False})
        tags = known["tags"]
        if save_latest:
            tags = [*(one for one in tags if one != tag), tag]
        elif tag not in tags:
            tags = [tag, *tags]
        user = {"tags": tags, "latest": save_latest or known["latest"]}
        self._known = {step: user}
        state = build_state(engine, client_state) | self._more
        frozen = [f"{MODEL}.{name}" for name, one in engine.module.named_parameters() if not one.requires_grad]
        left_out = frozen if exclude_frozen_parameters and frozen else None
        return begin_save(
            lambda: self._ckpt.save(step, state, user=user, exclude=left_out),
            partial(self.commits.expect, str(save_dir), tag, save_latest),
        )

    # ------------------------------------------------------------------ loading

    def load(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load the step of a tag, or the newest valid one; DeepSpeed loads its own checkpoints."""
        tag = None if tag is None else str(tag)
        # A step that is still being written would not be found: only committed ones are listed.
        self._ckpt.wait()
        steps = self._find(tag)
        if tag is None and steps:
            went_on: bool = ask_first_rank(partial(self._went_on, str(load_dir), next(iter(steps))))
            steps = {} if went_on else steps
        if not steps:
            return self._load_of_deepspeed(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        if custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint(custom_load_fn=…) expects DeepSpeed's files; use read(step, name) for tensors"
            )

        def load(step: int) -> Any:
            client = load_step(
                self._engine,
                self._ckpt,
                step,
                self._more,
                strict=load_module_strict,
                optimizer=load_optimizer_states and not load_module_only,
                progress=not load_module_only,
                without=() if load_lr_scheduler_states else ("lr_scheduler",),
            )
            self._known = {step: steps[step]}
            return os.path.join(str(load_dir), tag or steps[step]["tags"][-1]), client

        return load_newest(list(steps), load)

    def _find(self, tag: str | None) -> dict[int, dict[str, Any]]:
        """Return the steps to try with what `save` has stored beside each, the newest first; the same on all ranks."""

        def find() -> dict[int, dict[str, Any]]:
            self._ckpt.finish_commits().result()
            found: dict[int, dict[str, Any]] = {}
            for step in valid_steps(self._ckpt):
                user: Any = self._ckpt.describe(step).result().user
                of_save = isinstance(user, dict) and "tags" in user
                known: Any = user if of_save else {"tags": [f"global_step{step}"], "latest": True}
                if known["latest"] if tag is None else tag in known["tags"]:
                    found[step] = known
                    if tag is not None:
                        break
            return found

        return ask_first_rank(find)

    def _went_on(self, folder: str, step: int) -> bool:
        """Return whether DeepSpeed itself wrote what is newest, in a run that went on without aiockpt after *step*."""
        latest = Path(folder, "latest")
        if not latest.is_file():
            return False
        tag = latest.read_text().strip()
        number = re.search(r"\d+$", tag)
        is_larger = None if number is None else int(number[0]) > step
        found = compare_with_theirs(self._ckpt, step, latest.stat().st_mtime_ns, is_larger)
        if found is None:
            return False
        logger.warning(
            "%s of %s, which DeepSpeed itself wrote, has %s than step %d: %s is loaded; to load the other one: "
            "load_checkpoint(…, tag=…)",
            *(tag, folder, found, step, tag if found.went_on else f"step {step}"),
        )
        return found.went_on

    def _load_of_deepspeed(self, load_dir: Any, tag: str | None, *others: Any) -> Any:
        folder = str(load_dir)
        there = os.path.isfile(os.path.join(folder, "latest")) or (tag and os.path.isdir(os.path.join(folder, tag)))
        if ask_first_rank(lambda: bool(there)):
            return self.load_theirs(load_dir, tag, *others)
        if tag is not None:
            raise StepNotFoundError(f"{self._ckpt!r} has no step with the tag {tag!r}, nor has {folder}")
        if ask_first_rank(lambda: not valid_steps(self._ckpt)):
            raise_if_lost(self._ckpt)
        return None, None


class DurableCommits(_protocol.CheckpointEngine):  # type: ignore[misc]  # Any, where DeepSpeed is not installed
    """The ``CheckpointEngine`` of an engine that saves with aiockpt: a commit returns when it is durable, not before.

    Other files of DeepSpeed, such as that of ``save_16bit_model``, go to the engine that was replaced.
    """

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.name = "aiockpt"
        self.before = before
        self._saves: dict[str, aiockpt.SaveFuture] = {}
        self._newest: tuple[Any, aiockpt.SaveFuture] | None = None

    def expect(self, save_dir: str, tag: str, save_latest: bool, future: aiockpt.SaveFuture) -> None:
        """Register the save of a tag."""
        self._saves = {name: one for name, one in self._saves.items() if not one.done()} | {tag: future}
        self._newest = (_protocol.CheckpointCommitInfo(tag, save_dir, save_latest), future)

    def get_commit_info(self) -> Any:
        """Return the request of the newest save once it is durable on all ranks; None before, and if it failed."""
        if self._newest is None or self._newest[1].stage != "committed":
            return None
        return self._newest[0]

    def commit(self, info: Any) -> bool:
        """Wait until the save of a tag is durable; raise its error."""
        future = self._saves.get(info.tag)
        if future is None:
            return bool(self.before.commit(info))
        future.result()
        return True

    def cleanup(self) -> None:
        """Wait for all saves."""
        for future in self._saves.values():
            future.result()
        self.before.cleanup()

    def create(self, info: Any) -> None:
        self.before.create(info)

    def save(self, state_dict: Any, path: str) -> Any:
        return self.before.save(state_dict=state_dict, path=path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.before.load(path, map_location=map_location)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.before.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self.before.is_data_parallel_writer(dp_rank))

    def is_decoupled(self) -> bool:
        """Return False: DeepSpeed's steps would wait for the commit of a decoupled engine."""
        return False

    def preserves_storage_sharing(self) -> bool:
        return bool(self.before.preserves_storage_sharing())
