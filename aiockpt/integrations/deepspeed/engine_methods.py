"""An engine of DeepSpeed that saves and loads with aiockpt: its ``save_checkpoint`` and ``load_checkpoint`` are replaced.

A ``CheckpointEngine`` alone would receive flat partitions under the names of files; only the engine has the parameters.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import aiockpt
from aiockpt.adapters.optimizer_forms import OwnStateDicts
from aiockpt.errors import StepNotFoundError, UsageError
from aiockpt.integrations.contract import (
    MethodCall,
    Replacements,
    ask_first_rank,
    begin_save,
    raise_if_lost,
    resume_newest,
    theirs_went_on,
    valid_steps,
)
from aiockpt.integrations.deepspeed.engine_state import build_state, load_step, used_names
from aiockpt.integrations.deepspeed.named_state import MODEL
from aiockpt.integrations.deepspeed.partitions import find_partitions, refuse_engine

_protocol: Any = import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine")

logger = logging.getLogger("aiockpt")

_LOAD = (
    "load_dir",
    "tag",
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)
"""The arguments of DeepSpeed's ``load_checkpoint``, in its order."""


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
    replacements = Replacements(engine)
    attached = _AttachedEngine(engine, ckpt, dict(state or {}))
    attached.commits.replace_methods(replacements, engine.checkpoint_engine)
    replacements.set(engine, "save_checkpoint", attached.save)
    replacements.put(engine, "load_checkpoint", attached.load, _LOAD)
    return ckpt


class _AttachedEngine:
    """The replacements of the engine's methods."""

    def __init__(self, engine: Any, ckpt: aiockpt.Checkpointer, more: dict[str, Any]) -> None:
        self._engine = engine
        self._ckpt = ckpt
        self._more = more
        self._known: dict[int, dict[str, Any]] = {}
        self.commits = DurableCommits()

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
        state = OwnStateDicts(build_state(engine, client_state) | self._more)
        frozen = [f"{MODEL}.{name}" for name, one in engine.module.named_parameters() if not one.requires_grad]
        left_out = frozen if exclude_frozen_parameters and frozen else None
        return begin_save(
            lambda: self._ckpt.save(step, state, user=user, exclude=left_out),
            partial(self.commits.expect, str(save_dir), tag, save_latest),
        )

    # ------------------------------------------------------------------ loading

    def load(self, call: MethodCall) -> Any:
        """Load the step of a tag, or the newest valid one; DeepSpeed loads its own checkpoints."""
        load_dir, tag = call.get("load_dir"), call.get("tag")
        tag = None if tag is None else str(tag)
        # A step that is still being written would not be found: only committed ones are listed.
        self._ckpt.wait()
        steps = self._find(tag)
        if tag is None and steps:
            went_on: bool = ask_first_rank(partial(self._went_on, str(load_dir), next(iter(steps))))
            steps = {} if went_on else steps
        if not steps:
            return self._load_of_deepspeed(call, load_dir, tag)
        if call.get("custom_load_fn") is not None:
            raise UsageError(
                "load_checkpoint(custom_load_fn=…) expects DeepSpeed's files; use read(step, name) for tensors"
            )

        def load(step: int) -> Any:
            all_parts = not call.get("load_module_only", False)
            client = load_step(
                self._engine,
                self._ckpt,
                step,
                self._more,
                strict=call.get("load_module_strict", True),
                optimizer=call.get("load_optimizer_states", True) and all_parts,
                progress=all_parts,
                without=() if call.get("load_lr_scheduler_states", True) else ("lr_scheduler",),
            )
            self._known = {step: steps[step]}
            return os.path.join(str(load_dir), tag or steps[step]["tags"][-1]), client

        return resume_newest(self._ckpt, load, list(steps))

    def _find(self, tag: str | None) -> dict[int, dict[str, Any]]:
        """Return the steps to try with what `save` has stored beside each, the newest first; the same on all ranks."""

        steps = valid_steps(self._ckpt)

        def find() -> dict[int, dict[str, Any]]:
            found: dict[int, dict[str, Any]] = {}
            for step in steps:
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
        written_ns, load = latest.stat().st_mtime_ns, "load_checkpoint(…, tag=…)"
        return theirs_went_on(
            self._ckpt, step, written_ns, is_larger, ours=f"step {step}", theirs=f"{tag} of {folder}", load=load
        )

    def _load_of_deepspeed(self, call: MethodCall, load_dir: Any, tag: str | None) -> Any:
        folder = str(load_dir)
        there = os.path.isfile(os.path.join(folder, "latest")) or (tag and os.path.isdir(os.path.join(folder, tag)))
        if ask_first_rank(lambda: bool(there)):
            return call()
        if tag is not None:
            raise StepNotFoundError(f"{self._ckpt!r} has no step with the tag {tag!r}, nor has {folder}")
        if not valid_steps(self._ckpt):
            raise_if_lost(self._ckpt)
        return None, None


class DurableCommits:
    """The answers of DeepSpeed's ``CheckpointEngine`` about saves: a commit returns when it is durable, not before.

    Other files of DeepSpeed, such as that of ``save_16bit_model``, are written and committed as before.
    """

    def __init__(self) -> None:
        self._saves: dict[str, aiockpt.SaveFuture] = {}
        self._newest: tuple[Any, aiockpt.SaveFuture] | None = None

    def replace_methods(self, replacements: Replacements, commits: Any) -> None:
        """Replace the methods of a ``CheckpointEngine``."""
        replacements.put(commits, "get_commit_info", self._newest_commit)
        replacements.put(commits, "commit", self._commit, ["info"])
        replacements.put(commits, "cleanup", self._clean_up)
        # A step would wait for the commit of a decoupled engine.
        replacements.put(commits, "is_decoupled", lambda call: False)

    def expect(self, save_dir: str, tag: str, save_latest: bool, future: aiockpt.SaveFuture) -> None:
        """Register the save of a tag."""
        self._saves = {name: one for name, one in self._saves.items() if not one.done()} | {tag: future}
        self._newest = (_protocol.CheckpointCommitInfo(tag, save_dir, save_latest), future)

    def _newest_commit(self, call: MethodCall) -> Any:
        """Return the request of the newest save once it is durable on all ranks; None before, and if it failed."""
        return self._newest[0] if self._newest is not None and self._newest[1].stage == "committed" else None

    def _commit(self, call: MethodCall) -> Any:
        """Wait until the save of a tag is durable; raise its error."""
        future = self._saves.get(call.get("info").tag)
        if future is None:
            return call()
        future.result()
        return True

    def _clean_up(self, call: MethodCall) -> None:
        """Wait for all saves."""
        for future in self._saves.values():
            future.result()
        call()
