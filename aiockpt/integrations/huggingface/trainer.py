"""A Trainer that saves and loads with aiockpt. Its methods that save are replaced, and those that load model, optimizer and
random state. The loop, its callbacks and overridden methods stay as they are.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

import aiockpt
from aiockpt.errors import UsageError
from aiockpt.integrations.contract import (
    MethodCall,
    Replacements,
    ask_first_rank,
    load_newest,
    raise_if_lost,
    theirs_went_on,
    valid_steps,
)
from aiockpt.integrations.huggingface.engine_inside import EngineInside, bare_scheduler, show_engine
from aiockpt.integrations.huggingface.folders import CheckpointFolders, is_ours, is_pending, stands_for, step_of
from aiockpt.integrations.huggingface.model_names import renames, rule_of
from aiockpt.integrations.huggingface.overrides import Overrides
from aiockpt.integrations.huggingface.resume_differences import log_order, log_position
from aiockpt.integrations.huggingface.runs import RUN, finish_run, is_first_run, next_run, run_of, step_in_run
from aiockpt.prove.assignment import VARIABLE

logger = logging.getLogger("aiockpt")

_SAVING = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
_LOADING = (
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods that subclasses override to write or read files of their own in ``checkpoint-N``."""
_TRAIN = ("resume_from_checkpoint", "trial")


def attach(
    trainer: Any, place: Any = None, *, resume: bool = False, safetensors: bool = False, **options: Any
) -> aiockpt.Checkpointer:
    """Make *trainer* save and load with aiockpt; return the checkpointer that it uses.

    Saves run in the background; ``train()`` returns when all of them are committed. A folder ``checkpoint-N`` appears when
    step N is committed, so that ``resume_from_checkpoint=True``, ``save_total_limit`` and ``load_best_model_at_end`` see
    whole checkpoints only. Every rank calls it. Checkpoints that the Trainer wrote before are still resumed from.

    Args:
        trainer: of ``transformers``, before ``train()``.
        place: the place to save to, as for `aiockpt.Checkpointer`; None is ``output_dir/aiockpt``.
        resume: whether ``train()`` resumes from the newest valid step; without one it begins anew.
        safetensors: whether each ``checkpoint-N`` also gets its weights as a file of ``safetensors`` for
            ``from_pretrained``; written in the background from the committed step.
        **options: of `aiockpt.Checkpointer`. For a model of PEFT whose base is known, only the weights that
            the base lacks are saved, unless *only* is given.

    Raises:
        UsageError: the Trainer writes its checkpoints in a way that cannot be replaced (XLA, a push to the hub).
    """
    if getattr(trainer, "is_fsdp_xla_enabled", False):
        raise UsageError("attach(): XLA writes the checkpoints of this Trainer")
    if trainer.args.push_to_hub:
        raise UsageError("attach(): push_to_hub sends the files of checkpoint-N; push the trained model yourself")
    if hasattr(trainer.model, "peft_config"):
        if safetensors:
            raise UsageError(
                "attach(safetensors=True): a model of PEFT has weights of its adapters alone; save_model() writes them"
            )
        if "only" not in options:
            options["only"] = rule_of(trainer.model)
    place = place or Path(trainer.args.output_dir).absolute() / "aiockpt"
    ckpt = aiockpt.Checkpointer(place, **options)
    raises = options.get("on_error", "raise") == "raise"
    folders = CheckpointFolders(trainer, ckpt, safetensors=safetensors, raises=raises)
    attached = _Attached(trainer, ckpt, folders, str(place), resume, options.get("only"))
    attached.replace_methods()
    trainer.callback_handler.callbacks.insert(0, _publishing(folders, attached.log_order))
    return ckpt


def _publishing(folders: CheckpointFolders, log_order: Callable[[Any], None]) -> Any:
    """Return a callback for the Trainer that polls after each step for saves that were committed meanwhile.

    At the end of a training it waits for all of them, so that the callbacks behind it find the last folder.

    Args:
        log_order: called with the loader that a training reads, when it begins.
    """
    transformers: Any = import_module("transformers")

    class AiockptPublishing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **named: Any) -> None:
            log_order(named["train_dataloader"])

        def on_step_end(self, *args: Any, **named: Any) -> None:
            folders.publish()

        def on_train_end(self, *args: Any, **named: Any) -> None:
            folders.wait()

    return AiockptPublishing()


class _Attached:
    """The replacements of the Trainer's methods."""

    def __init__(
        self,
        trainer: Any,
        ckpt: aiockpt.Checkpointer,
        folders: CheckpointFolders,
        place: str,
        resume: bool,
        only: Any,
    ) -> None:
        self._trainer = trainer
        self._ckpt = ckpt
        self._folders = folders
        self._place = place
        self._resume = resume
        self._only = only
        self._replacements = Replacements(trainer)
        self._inside = EngineInside(trainer.accelerator, self._replacements, self._load_engine)
        self._run = 0
        self._holders: dict[str, aiockpt.Checkpointer] = {}
        self._opened = ExitStack()
        self._theirs: Any = import_module("transformers").Trainer
        self._overrides = Overrides(
            trainer, self._theirs, (*_SAVING, *_LOADING), always=("_save_checkpoint", "_save_rng_state")
        )
        self._saving: set[str] | None = None
        self._shows = False
        self._resumed: tuple[str, int, int] | None = None
        self._folder: Any = None

    def replace_methods(self) -> None:
        trainer, overrides, put = self._trainer, self._overrides, self._replacements.put
        loading: dict[str, Callable[..., Any]] = {
            "_load_from_checkpoint": self._load_model,
            "_load_optimizer_and_scheduler": self._load_optimizer,
            "_load_scaler": self._load_scaler,
            "_load_rng_state": self._load_random,
            "_load_best_model": self._load_best,
        }
        writing = {name: partial(self._write_file, name) for name in _SAVING if name != "_save_checkpoint"}
        overrides.put_below(
            trainer,
            {
                "train": self._train_below,
                "_save_checkpoint": self._save,
                "_init_training_state": self._begin,
                **writing,
                **loading,
            },
        )
        for name in overrides.passed_over.keys() & loading.keys():
            put(trainer, name, partial(self._load_instead, name, loading[name]))
        put(trainer, "train", self._train, _TRAIN)
        put(trainer, _SAVING[0], self._enter_save)
        overrides.log_passed_over()

    def _call_theirs(self, name: str, *args: Any, **named: Any) -> Any:
        """Call the Trainer's own method, or an override that is not called otherwise."""
        override = self._overrides.passed_over.get(name)
        if override is not None:
            return override(*args, **named)
        return getattr(self._theirs, name)(self._trainer, *args, **named)

    # ------------------------------------------------------------------ training

    def _train(self, call: MethodCall) -> Any:
        """Train, from the newest valid step if requested, and wait until all saves are committed.

        A trial of a search for hyperparameters is a separate run; it never resumes a saved one.
        """
        resume_from_checkpoint = call.get("resume_from_checkpoint")
        if call.get("trial") is not None:
            if self._trainer.args.save_strategy != "no":
                self._refuse_search()
            return call()

        def train(folder: Any) -> Any:
            if self._trainer.is_deepspeed_enabled and folder is not None and is_ours(folder):
                show_engine(Path(folder), step_in_run(step_of(folder)))
            with self._opened:
                self._opened.callback(self._holders.clear)
                if folder is resume_from_checkpoint or call.accepts("resume_from_checkpoint"):
                    return call(resume_from_checkpoint=folder)
                self._folder = folder
                return call()

        self._folders.wait()  # of a training that was interrupted; until then its folders are not marked as committed
        automatic = self._resume and resume_from_checkpoint is None
        self._run = self._folders.run = next_run(self._place) if self._resume else 0
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = self._check_committed(resume_from_checkpoint)
        newest = automatic or resume_from_checkpoint is True
        steps = self._committed(all_runs=not automatic) if newest else []
        theirs = self._newest_of_the_trainer(steps) if newest and not (automatic and self._run) else None
        if newest:
            ask_first_rank(partial(self._check_place, theirs, steps))
        if automatic and not steps and theirs is None:
            self._check_none()
        if theirs is not None:
            done = train(str(theirs))  # written by the Trainer before it was attached, or later without aiockpt
        else:
            done = self._train_from(steps, train) if steps else train(resume_from_checkpoint)
        self._folders.wait()
        self._folders.rotate()
        finish_run(self._place)
        return done

    def _train_below(self, *args: Any, **named: Any) -> Any:
        """Train, from the folder that an override without such an argument could not pass on."""
        folder, self._folder = self._folder, None
        call = MethodCall(partial(self._theirs.train, self._trainer), _TRAIN, args, named)
        return call() if folder is None else call(resume_from_checkpoint=folder)

    def _refuse_search(self) -> NoReturn:
        raise UsageError(
            "attach(): the trials of a search for hyperparameters would share one place: attach to the Trainer after the "
            "search, or search with save_strategy='no'"
        )

    def _newest_of_the_trainer(self, steps: list[int]) -> Path | None:
        """Return the folder that the Trainer itself wrote last; None without one, or if the first of *steps* is newer."""
        theirs = self._folders.of_the_trainer()
        if theirs is None or not steps:
            return theirs and theirs[0]
        (folder, written_ns), ours = theirs, self._folders.path(steps[0])
        if folder == ours:  # written over the folder of that step
            return folder
        is_larger = step_of(folder) > step_in_run(steps[0])
        load = "train(resume_from_checkpoint={!r})"
        went_on = theirs_went_on(
            self._ckpt, steps[0], written_ns, is_larger, ours=str(ours), theirs=str(folder), load=load
        )
        return folder if went_on else None

    def _check_place(self, theirs: Path | None, steps: list[int]) -> None:
        """Raise if the place is empty, but a folder has its step in one: in another, or in this one before it was lost. If
        only that step is missing, log it.

        Args:
            theirs: what the Trainer itself wrote last; if it has the larger number, the run went on without aiockpt.
            steps: to resume from, the newest first.
        """
        ours = self._folders.newest_of_ours()
        if ours is None or (theirs is not None and step_of(theirs) >= step_in_run(step_of(ours))):
            return
        # An earlier run of this process, such as another fold, may have had a place of its own; each start of a proof has.
        there = [info.step for info in self._ckpt.steps().result()]
        if not is_first_run() or VARIABLE in os.environ or step_of(ours) in there or (there and not steps):
            return
        if steps:
            logger.warning(
                "resumed from %s: the weights of %s are in step %d, which %r does not have; attach() to the place where it "
                "was saved, or copy that step, too",
                *(theirs or self._folders.path(steps[0]), ours, step_of(ours), self._ckpt),
            )
            return
        named = "" if theirs is None else f"train(resume_from_checkpoint={str(theirs)!r}) resumes from what is older; "
        raise UsageError(
            f"{ours} has its weights in a step, but {self._ckpt!r} has no step at all: attach() to the place where it was "
            f"saved, or copy the folder 'aiockpt' beside it, too; {named}to begin anew, remove such folders, or give "
            "another output_dir"
        )

    def _check_none(self) -> None:
        """Raise if there are steps, but no valid one; log damaged steps of this run, if other runs have valid ones."""
        lost = [info.step for info in self._ckpt.steps().result() if run_of(info.step) == self._run]
        if lost:
            raise_if_lost(self._ckpt)
            logger.warning("steps %s of this run cannot be read: it begins anew", ", ".join(map(str, lost)))

    def _check_committed(self, folder: Any) -> Any:
        """Return the folder to resume from: *folder*, or another one if a kill prevented the commit of its save."""
        self._trainer.accelerator.wait_for_everyone()  # the first process marks folders as committed
        pending = is_pending(folder)
        self._trainer.accelerator.wait_for_everyone()  # and renames the others
        if not pending:
            return folder
        steps = self._committed(all_runs=True)
        if ask_first_rank(partial(self._folders.confirm, Path(folder))):
            return folder
        newest = str(self._folders.path(steps[0])) if steps else None
        logger.warning("%s: its save was never committed; resumed from %s", folder, newest or "the beginning")
        return newest

    def _train_from(self, steps: list[int], train: Callable[..., Any]) -> Any:
        """Train from the first of *steps* that can be loaded; when a load fails, nothing is trained yet."""
        begun = 0

        def begin(step: int) -> Any:
            nonlocal begun
            begun = self._trainer.state.global_step
            return train(str(self._folders.path(step)))

        return load_newest(steps, begin, lambda step: self._trainer.state.global_step in (begun, step_in_run(step)))

    def _committed(self, *, all_runs: bool) -> list[int]:
        """Return the committed steps, the newest first, each with its folder; of this run alone, or of all."""
        steps = [step for step in valid_steps(self._ckpt) if all_runs or run_of(step) == self._run]
        self._folders.hide_unfinished()
        for step in reversed(steps):
            self._folders.restore(step)
        self._trainer.accelerator.wait_for_everyone()
        if steps:
            self._folders.check_seen(steps[0])
        return steps

    def _begin(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Begin the state of a run; log if a resume has nothing to train (the Trainer would train one more step)."""
        folder, per_epoch = resume_from_checkpoint, num_update_steps_per_epoch
        begun: tuple[int, int] = self._call_theirs(
            "_init_training_state", max_steps, per_epoch, num_train_epochs, folder, trial
        )
        if folder is not None and is_ours(folder) and self._holder(folder) is self._ckpt:
            self._run = self._folders.run = run_of(step_of(folder))
        step = self._trainer.state.global_step
        if folder is None:
            return begun
        # For data without a length the Trainer has no number of epochs, and no position within one.
        log_position(self._trainer, folder, *begun, per_epoch if num_train_epochs < sys.maxsize else None)
        if step < max_steps:
            self._resumed = (folder, *begun)
            return begun
        logger.warning(
            "%s: all %d steps of this run are trained, and nothing is left to do; raise max_steps or num_train_epochs to "
            "train on, or begin anew in another output_dir",
            folder,
            step,
        )
        return num_train_epochs, 0

    def log_order(self, loader: Any) -> None:
        """Log if a resumed run reads its data from *loader* in another order."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            log_order(*resumed, loader)

    # ------------------------------------------------------------------ saving

    def _enter_save(self, call: MethodCall) -> None:
        """Save through the Trainer's method or its override; if that does not call ``super()``, save here."""
        self._saving = set()
        self._shows = self._shows_folder()
        # Before an override is called: what it writes before super() must not be in the folder that is set aside.
        if self._shows:
            self._folders.set_aside(self._trainer.state.global_step)
        try:
            call()
            if _SAVING[0] not in self._saving:
                self._save(*call.args, **call.named)
        finally:
            self._saving = None

    def _shows_folder(self) -> bool:
        """Return whether callbacks or overrides may read the folder of a save before that is committed. Every rank calls it:
        some ranks may have callbacks that others lack.
        """
        plain: Any = import_module("transformers").TrainerCallback.on_save
        here = any(type(one).on_save is not plain for one in self._trainer.callback_handler.callbacks)
        gather: Any = import_module("accelerate.utils").gather_object
        return bool(self._overrides.called) or any(gather([here]))

    def _write_file(self, name: str, output_dir: Any = None, *args: Any, **named: Any) -> None:
        """Skip files whose contents are in the step; call the override to which this method leads, if any."""
        folder = self._folders.path(self._trainer.state.global_step)
        if self._saving is None or output_dir is None or Path(output_dir).absolute() != folder.absolute():
            self._call_theirs(name, output_dir, *args, **named)
            return
        self._saving.add(name)
        if name == "save_model" and "_save" in self._overrides.called:
            getattr(self._trainer, "_save")(output_dir)  # noqa: B009  a method that subclasses override

    def _call_overrides(self, folder: str) -> None:
        """Call overridden methods, which write their own files beside a checkpoint."""
        assert self._saving is not None
        called = self._overrides.called | ({"save_model"} if "_save" in self._overrides.called else set())
        for name in ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"):
            left_out = name != "save_model" and self._trainer.args.save_only_model
            if name in called and name not in self._saving and not left_out:
                getattr(self._trainer, name)(folder, **({"_internal_call": True} if name == "save_model" else {}))

    def _save(self, model: Any, trial: Any = None, *args: Any, **named: Any) -> None:
        """Save the Trainer's present step; return when its state may change."""
        trainer = self._trainer
        step, best = trainer.state.global_step, trainer.state.best_global_step
        if trial is not None:
            self._refuse_search()
        if self._saving is not None:
            self._saving.add("_save_checkpoint")
        trainer.store_flos()
        # The Trainer asks only whether the folder exists; that of this step appears when the save is committed.
        if best and (best == step or self._folders.path(best).exists()):
            trainer.state.best_model_checkpoint = str(self._folders.path(best))
        state = self._model() if trainer.args.save_only_model else self._state()
        shows = self._saving is not None and self._shows
        text = self._folders.stage(step, shown=shows)
        if shows:
            trainer.accelerator.wait_for_everyone()
            self._call_overrides(str(self._folders.path(step)))
        if trainer.args.process_index == 0:
            state["trainer"] = text
        self._folders.publish()
        self._folders.rotate()
        number = self._run * RUN + step
        left_out = None if self._inside.engine is None else self._inside.left_out(self._only)
        self._folders.expect(number, self._ckpt.save(number, state, exclude=left_out), shown=shows)

    def _model(self) -> dict[str, Any]:
        trainer = self._trainer
        if self._inside.engine is not None:
            return {"model": self._inside.build_state()["model"]}
        return {"model": trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model}

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {"optimizer": trainer.optimizer, "rng": aiockpt.RNG()} | self._model()
        if self._inside.engine is not None:
            state = self._inside.build_state()
        scaler = getattr(trainer.accelerator, "scaler", None)
        state["scheduler"] = bare_scheduler(trainer.lr_scheduler)
        return state | ({} if scaler is None else {"scaler": scaler})

    # ------------------------------------------------------------------ loading

    def _load_instead(self, name: str, ours: Callable[..., None], call: MethodCall) -> None:
        """Load in place of an override without ``super()``; also call one that reads the files of another override."""
        folder = (*call.args, *call.named.values(), self._trainer.state.best_model_checkpoint)[0]
        is_of_ours = folder is not None and is_ours(folder)
        if is_of_ours:
            ours(*call.args, **call.named)
        if not is_of_ours or (name == "_load_rng_state" and "_save_rng_state" in self._overrides.called):
            call()

    def _holder(self, folder: str) -> aiockpt.Checkpointer:
        """Return the checkpointer for the step of a folder; for another output_dir, the place may be beside the folder.

        Raises:
            UsageError: the step is neither there nor in the place of this Trainer.
        """
        if folder not in self._holders:
            beside, ckpts = Path(folder).absolute().parent / "aiockpt", [self._ckpt]
            own = os.path.realpath(beside.parent) == os.path.realpath(self._trainer.args.output_dir)
            if beside.is_dir() and not own and str(beside) != self._place:
                ckpts.insert(0, self._opened.enter_context(aiockpt.Checkpointer(beside)))
            found = [ckpt for ckpt in ckpts if ask_first_rank(partial(stands_for, folder, ckpt, by_number=own))]
            if not found:
                raise UsageError(
                    f"{folder} has no weights of its own: they are in a step that {self._ckpt!r} does not have; copy the "
                    "folder 'aiockpt' beside it, too, or attach() to the place where it was saved"
                )
            self._holders[folder] = found[0]
        return self._holders[folder]

    def _load_model(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if is_ours(resume_from_checkpoint):
            self._load(resume_from_checkpoint, self._model() if model is None else {"model": model}, "model")
        else:
            self._call_theirs("_load_from_checkpoint", resume_from_checkpoint, model)

    def _load_optimizer(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_ours(checkpoint):
            self._call_theirs("_load_optimizer_and_scheduler", checkpoint)
        else:
            parts = ("scheduler",) if self._inside.engine is not None else ("optimizer", "scheduler")
            self._go_on_without(step_of(checkpoint), self._load(checkpoint, self._state(), *parts))

    def _go_on_without(self, step: int, held: Collection[str]) -> None:
        """Log the parts that a step lacks; of one that no Trainer saved, set the schedule to the step.

        Args:
            held: the keys of the saved state.
        """
        if "trainer" in held:
            lacks = [key for key in ("optimizer", "scheduler", "rng") if key not in held]
            if lacks:
                logger.warning("step %d has no %s (save_only_model=True): begun anew", step, ", ".join(lacks))
            return
        self._trainer.state.compute_steps(self._trainer.args, self._trainer.state.max_steps)
        scheduler, lacks = self._trainer.lr_scheduler, [key for key in self._state() if key not in held]
        if "scheduler" in lacks and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            scheduler.last_epoch = step_in_run(step)  # the saved values of the groups are valid until the next step
            lacks.remove("scheduler")
        if lacks:
            logger.warning("step %d was not saved by a Trainer and has no %s: begun anew", step, ", ".join(lacks))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_ours(checkpoint):
            self._call_theirs("_load_scaler", checkpoint)
        else:
            self._load(checkpoint, self._state(), "scaler")

    def _load_random(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_ours(checkpoint):
            self._call_theirs("_load_rng_state", checkpoint)
        else:
            self._load(checkpoint, {"rng": aiockpt.RNG()}, "rng")

    def _load_best(self) -> None:
        folder = self._trainer.state.best_model_checkpoint
        self._folders.wait()
        self._trainer.accelerator.wait_for_everyone()
        if not is_ours(folder):
            self._call_theirs("_load_best_model")
        elif self._inside.engine is not None:
            self._inside.load_step(self._holder(folder), step_of(folder), optimizer=False, progress=False)
        else:
            self._load(folder, self._model(), "model")

    def _load_engine(self, call: MethodCall) -> Any:
        """Load the step of a folder into the engine; DeepSpeed loads its own checkpoints."""
        folder = call.get("load_dir")
        if not is_ours(folder):
            return call()
        strict = call.named.get("load_module_strict", True)
        # The Trainer loads the random numbers itself, after it has drawn the order of the epoch.
        self._inside.load_step(self._holder(folder), step_of(folder), strict=strict, without=("rng",))
        return str(folder), {}

    def _load(self, folder: str, state: dict[str, Any], *wanted: str) -> Collection[str]:
        """Load parts of a step, and return the keys that it holds.

        ``save_only_model`` left all but the model out, and a scaler may be new.
        """
        step, ckpt = step_of(folder), self._holder(folder)
        held: Any = ckpt.describe(step).result().values
        if "model" not in held:
            raise UsageError(f"step {step} has no 'model': only a step with weights under that name can be resumed")
        parts = [key for key in wanted if key in state and key in held]
        if parts:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            ckpt.load(state, step, only=parts, rename=renames(model)).result()
        return set(held)
