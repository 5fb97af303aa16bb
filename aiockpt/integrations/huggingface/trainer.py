"""How does a Trainer come to save and load with aiockpt? Methods of the instance are replaced: the one that saves, those
that load model, optimizer and random state. The loop and its callbacks stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.errors import CorruptionError, StepNotFoundError, UsageError
from aiockpt.integrations.huggingface.adapters import rule_of
from aiockpt.integrations.huggingface.folders import CheckpointFolders, is_ours, step_of
from aiockpt.integrations.huggingface.renames import renames

logger = logging.getLogger("aiockpt")


def attach(
    trainer: Any, place: Any = None, *, resume: bool = False, safetensors: bool = False, **options: Any
) -> aiockpt.Checkpointer:
    """Have *trainer* save and load with aiockpt; return the checkpointer that it uses.

    Saves run in the background; ``train()`` returns when all of them are committed. A folder ``checkpoint-N`` appears when
    step N is committed, so that ``resume_from_checkpoint=True``, ``save_total_limit`` and ``load_best_model_at_end`` see
    whole checkpoints only. Every rank calls it. Checkpoints that the Trainer wrote before are still resumed from.

    Args:
        trainer: of ``transformers``, before ``train()``.
        place: where to, as for `aiockpt.Checkpointer`; None is ``output_dir/aiockpt``.
        resume: whether ``train()`` goes on from the newest valid step where there is one, and begins anew where not.
        safetensors: whether each ``checkpoint-N`` gets its weights as a file of ``safetensors``, too, for
            ``from_pretrained``; written in the background from what was committed.
        **options: of `aiockpt.Checkpointer`. A model of PEFT saves what its base does not have, unless *only*
            says otherwise.

    Raises:
        UsageError: the Trainer writes its checkpoints in a way that cannot be replaced (DeepSpeed, a push to the hub).
    """
    for name, instead in (("is_deepspeed_enabled", "DeepSpeed's engine"), ("is_fsdp_xla_enabled", "XLA")):
        if getattr(trainer, name, False):
            raise UsageError(f"attach(): {instead} writes the checkpoints of this Trainer")
    if trainer.args.push_to_hub:
        raise UsageError("attach(): push_to_hub sends the files of checkpoint-N; push the trained model yourself")
    if hasattr(trainer.model, "peft_config"):
        if safetensors:
            raise UsageError(
                "attach(safetensors=True): a model of PEFT has weights of its adapters alone; save_model() writes them"
            )
        options.setdefault("only", rule_of(trainer.model))
    ckpt = aiockpt.Checkpointer(place or Path(trainer.args.output_dir) / "aiockpt", **options)
    raises = options.get("on_error", "raise") == "raise"
    folders = CheckpointFolders(trainer, ckpt, safetensors=safetensors, raises=raises)
    for name, method in _Attached(trainer, ckpt, folders, resume).replaces():
        setattr(trainer, name, method)
    trainer.add_callback(_publishing(folders))
    return ckpt


def _publishing(folders: CheckpointFolders) -> Any:
    """Return a callback of the Trainer that looks after each step whether a save was committed meanwhile."""
    transformers: Any = import_module("transformers")

    class AiockptPublishing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **named: Any) -> None:
            folders.publish()

    return AiockptPublishing()


class _Attached:
    """What takes the places of the Trainer's methods."""

    def __init__(self, trainer: Any, ckpt: aiockpt.Checkpointer, folders: CheckpointFolders, resume: bool) -> None:
        self._trainer = trainer
        self._ckpt = ckpt
        self._folders = folders
        self._resume = resume
        self._theirs: dict[str, Callable[..., Any]] = {}

    def replaces(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the names of the Trainer's methods, and what takes their places."""
        for name, method in (
            ("train", self._train),
            ("_save_checkpoint", self._save),
            ("_load_from_checkpoint", self._load_model),
            ("_load_optimizer_and_scheduler", self._load_optimizer),
            ("_load_scaler", self._load_scaler),
            ("_load_rng_state", self._load_random),
            ("_load_best_model", self._load_best),
        ):
            self._theirs[name] = getattr(self._trainer, name)
            yield name, method

    # ------------------------------------------------------------------ training

    def _train(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
        """Train, from the newest valid step where that is wanted, and wait until all is committed."""

        def train(folder: Any) -> Any:
            return self._theirs["train"](folder, *args, **named)

        automatic = self._resume and resume_from_checkpoint is None
        steps = self._committed() if automatic or resume_from_checkpoint is True else []
        theirs = self._folders.of_the_trainer() if automatic or resume_from_checkpoint is True else None
        if automatic and not steps and theirs is None:
            self._ckpt.load({}).result()  # raises where there are some, and none of them is valid
        if theirs is not None and (not steps or theirs[1] > self._ckpt.describe(steps[0]).result().info.created_ns):
            done = train(str(theirs[0]))  # what the Trainer wrote before it was attached, or without it since
        else:
            done = self._train_from(steps, train) if steps else train(resume_from_checkpoint)
        self._folders.settle()
        self._folders.rotate()
        return done

    def _train_from(self, steps: list[int], train: Callable[..., Any]) -> Any:
        """Train from the first of *steps* that can be loaded; a load that fails has trained nothing yet."""
        for step in steps[:-1]:
            begun = self._trainer.state.global_step
            try:
                return train(str(self._folders.path(step)))
            except (CorruptionError, StepNotFoundError) as error:
                if self._trainer.state.global_step not in (begun, step):
                    raise
                logger.warning("step %d is not resumed from: %s", step, error)
        return train(str(self._folders.path(steps[-1])))

    def _committed(self) -> list[int]:
        """Return the committed steps, the newest first, each with its folder."""
        steps = [info.step for info in self._ckpt.steps().result() if info.problem is None]
        for step in reversed(steps):
            self._folders.restore(step)
        self._trainer.accelerator.wait_for_everyone()
        if steps:
            self._folders.check_seen(steps[0])
        return steps

    # ------------------------------------------------------------------ saving

    def _save(self, model: Any, trial: Any) -> None:
        """Save the step that the Trainer is at; return when its state may change."""
        trainer = self._trainer
        step, best = trainer.state.global_step, trainer.state.best_global_step
        if trial is not None:
            raise UsageError(
                "attach(): runs of a search for hyperparameters would share one place; attach to none of them"
            )
        trainer.store_flos()
        if best and (best == step or self._folders.path(best).exists()):
            trainer.state.best_model_checkpoint = str(self._folders.path(best))
        state = self._model() if trainer.args.save_only_model else self._state()
        text = self._folders.stage(step)
        if trainer.args.process_index == 0:
            state["trainer"] = text
        self._folders.publish()
        self._folders.rotate()
        self._folders.expect(step, self._ckpt.save(step, state))

    def _model(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"model": trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model}

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "rng": aiockpt.RNG()}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return self._model() | state | ({} if scaler is None else {"scaler": scaler})

    # ------------------------------------------------------------------ loading

    def _load_model(self, folder: str, model: Any = None) -> None:
        if is_ours(folder):
            self._load(folder, self._model() if model is None else {"model": model}, "model")
        else:
            self._theirs["_load_from_checkpoint"](folder, model)

    def _load_optimizer(self, folder: str | None) -> None:
        if folder is None or not is_ours(folder):
            self._theirs["_load_optimizer_and_scheduler"](folder)
        else:
            self._go_on_without(step_of(folder), self._load(folder, self._state(), "optimizer", "scheduler"))

    def _go_on_without(self, step: int, held: Collection[str]) -> None:
        """Make up for what a step lacks that no Trainer has saved: its schedule goes on at the step, the rest is told.

        Args:
            held: the keys of the state that was saved.
        """
        if "trainer" in held:
            return
        self._trainer.state.compute_steps(self._trainer.args, self._trainer.state.max_steps)
        scheduler, lacks = self._trainer.lr_scheduler, [key for key in self._state() if key not in held]
        if "scheduler" in lacks and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            scheduler.last_epoch = step  # what the groups have of the step holds until the next one
            lacks.remove("scheduler")
        if lacks:
            logger.warning("step %d was not saved by a Trainer and has no %s: begun anew", step, ", ".join(lacks))

    def _load_scaler(self, folder: str | None) -> None:
        if folder is None or not is_ours(folder):
            self._theirs["_load_scaler"](folder)
        else:
            self._load(folder, self._state(), "scaler")

    def _load_random(self, folder: str | None) -> None:
        if folder is None or not is_ours(folder):
            self._theirs["_load_rng_state"](folder)
        else:
            self._load(folder, {"rng": aiockpt.RNG()}, "rng")

    def _load_best(self) -> None:
        folder = self._trainer.state.best_model_checkpoint
        self._folders.settle()
        self._trainer.accelerator.wait_for_everyone()
        if is_ours(folder):
            self._load(folder, self._model(), "model")
        else:
            self._theirs["_load_best_model"]()

    def _load(self, folder: str, state: dict[str, Any], *wanted: str) -> Collection[str]:
        """Load parts of a step, and return the keys that it holds.

        ``save_only_model`` left all but the model out, and a scaler may be new.
        """
        step = step_of(folder)
        held: Any = self._ckpt.describe(step).result().values
        if "model" not in held:
            raise UsageError(f"step {step} has no 'model': only what has its weights by that name is resumed from")
        parts = [key for key in wanted if key in state and key in held]
        if parts:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            self._ckpt.load(state, step, only=parts, rename=renames(model)).result()
        return set(held)
