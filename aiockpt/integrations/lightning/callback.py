"""The callback for Lightning: decides when to save a step, where a fit resumes, and which checkpoints to keep.

Lightning has hooks inside steps and epochs, but not between them: a checkpoint made in a hook has a state in the middle of
other hooks, which a resumed run skips or calls twice. So the ends of steps and epochs are intercepted after all hooks and
after validation, by methods that are replaced on the trainer's own loops during a fit
(`aiockpt.integrations.lightning.resume`).
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import weakref
from typing import Any, Literal

import torch

import aiockpt
from aiockpt.integrations.lightning.package import SIGTERMException, callbacks, check_trainer
from aiockpt.integrations.lightning.resume import Point, Resume
from aiockpt.integrations.lightning.trainer_state import begin_pruning
from aiockpt.prove.assignment import VARIABLE

logger = logging.getLogger("aiockpt")

_STEP = re.compile(r"step-(\d+)")
_finished: dict[tuple[int, str | None, str], weakref.ref[Any]] = {}
"""Trainers whose fit has ended, by the process, the start of a proof, and the place."""


class AsyncCheckpoint(callbacks.Checkpoint):  # type: ignore[misc]  # Any, where Lightning is not installed
    """Saves a fit in the background, and resumes by itself from the newest checkpoint of *dir*.

    ``trainer.fit(…)`` returns when all saves are committed. The error of a failed save is raised by the next save, or by
    ``fit`` at its end. A fit in which nothing was saved logs a warning. ``fit(ckpt_path=…)`` accepts the folder of a step
    (``"runs/7/step-00000040"``), the place or ``"best"``; so do ``validate``, ``test`` and ``predict``. ``.ckpt`` files of
    Lightning are loaded as before. A second trainer of one process is refused where a first one has finished.

    Args:
        dir: a folder or a URL; or several ``aiockpt.Tier``.
        every_n_train_steps: save when ``trainer.global_step`` has passed a multiple of it, after the validation that
            belongs to the step. Where that stands still (optimizers that Lightning does not know, or none), batches count.
        every_n_epochs: save after every n epochs; 1 when neither option is given.
        keep_last: how many of the newest checkpoints to keep; None keeps all, or with *monitor* only the newest.
        monitor: the name of a logged metric; the best checkpoints by it are also kept. An epoch with a validation that did
            not log it ends the fit with a `UsageError`, after its save. ``best_model_path`` and
            ``best_model_score`` identify the best of this run, of equal ones the oldest.
        mode: whether the best is the lowest (``"min"``) or the highest (``"max"``).
        save_top_k: how many of the best to keep.
        save_last: save when training ends, at any step.
        resume: False begins anew; existing checkpoints stay.
        options: of `aiockpt.Checkpointer`: ``snapshot="lazy"``, ``worker="process"``, ``only=``, ``limits=``, ….

    Raises:
        UsageError: an option cannot be used.
    """

    def __init__(
        self,
        dir: Any,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        keep_last: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        resume: bool = True,
        **options: Any,
    ) -> None:
        for name, value in {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise aiockpt.UsageError(f"{name}={value!r}: give a number of 1 or more, or None")
        if "retention" in options and (keep_last is not None or monitor is not None):
            raise aiockpt.UsageError("retention= says what stays: leave out keep_last= and monitor=")
        best = None if monitor is None else aiockpt.Best(monitor, save_top_k, mode)
        if best is not None or keep_last is not None:
            options["retention"] = aiockpt.Retention(last=keep_last or 1, best=best)
        self.dir = dir
        self.monitor, self.mode = monitor, mode
        self.last_step: int | None = None
        """The step that was saved or loaded last."""
        self._every_steps = every_n_train_steps
        self._every_epochs = 1 if every_n_train_steps is None and every_n_epochs is None else every_n_epochs
        self._save_last, self._resume = save_last, resume
        self._options = options
        self._scores: dict[int, float] = {}
        self._checkpointer: aiockpt.Checkpointer | None = None
        self._source: aiockpt.Checkpointer | None = None
        self._asked: str | None = None
        self._step: int | None = None
        self._lead, self._saved_at = 0, (0, 0, 0)
        self._is_fitting = self._has_warned = False
        self._fit: Resume | None = None

    @property
    def best_model_path(self) -> str:
        """The folder of the best checkpoint by *monitor*; "" where there is none."""
        step = self._best_step()
        return "" if step is None else self._path(step)

    @property
    def best_model_score(self) -> torch.Tensor | None:
        step = self._best_step()
        return None if step is None else torch.tensor(self._scores[step])

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach to the trainer for *stage*."""
        check_trainer(trainer)
        self._asked = None
        if self._fit is not None:
            self._fit.undo()
        self._fit = Resume(trainer, self)
        if stage == "fit" and not trainer.fast_dev_run:
            self._fit.follow_loops()
            self._fit.register_loaders()

    def begin(self, trainer: Any) -> None:
        """Open the place, and pass hooks and callbacks their part of the checkpoint from which this fit resumes."""
        if trainer.fast_dev_run:
            return
        if self._asked is None and self._resumes(trainer):
            self._check_unfinished(trainer)
        self._checkpointer = aiockpt.Checkpointer(self.dir, **self._options)
        self.last_step = None
        place, self._step = split_path(self._asked) if self._asked is not None else (self._place(), None)
        if os.path.realpath(place) != os.path.realpath(self._place()):
            self._source = aiockpt.Checkpointer(place)
        if self._resumes(trainer) and not trainer.strategy.restore_checkpoint_after_setup:
            assert self._fit is not None
            self._fit.load_first(self._source or self._checkpointer, self._step)

    def _check_unfinished(self, trainer: Any) -> None:
        """Refuse to resume what another trainer of this process has finished, such as that of another fold.

        Raises:
            UsageError: it has.
        """
        finished = _finished.get(self._key())
        if finished is not None and finished() is not trainer:
            place = self._place()
            raise aiockpt.UsageError(
                f"{place}: a fit of this process has ended there. To begin another one (the next fold or trial), give it a "
                f"folder of its own, AsyncCheckpoint({posixpath.join(place, 'fold-2')!r}), or resume=False; to train on "
                f"from its newest checkpoint: trainer.fit(…, ckpt_path={place!r})"
            )

    def _key(self) -> tuple[int, str | None, str]:
        return os.getpid(), os.environ.get(VARIABLE), os.path.realpath(self._place())

    def _resumes(self, trainer: Any) -> bool:
        return not trainer._checkpoint_connector._loaded_checkpoint and (self._resume or self._asked is not None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the checkpoint of this fit: model, optimizers and schedulers exist, on their devices."""
        if self._checkpointer is None:
            self.begin(trainer)
        self._is_fitting = self._checkpointer is not None
        if self._checkpointer is None:
            return
        assert self._fit is not None
        loaded = self._fit.load(self._source or self._checkpointer, self._step) if self._resumes(trainer) else None
        self._lead = self._lead if trainer.global_step else 0
        if loaded is not None:
            self.last_step, self._lead = loaded.step, loaded.step - trainer.global_step
            trainer._checkpoint_connector._ckpt_path = posixpath.join(loaded.url, loaded.id)
        known: dict[int, float | None] = {**self._scores}  # of an earlier fit, if the trainer goes on from there
        if loaded is not None and self._source is None and self.monitor is not None:
            known = {info.step: info.metrics.get(self.monitor) for info in self._checkpointer.steps().result()}
        # Later steps, and without a load all steps of the folder, belong to another run.
        self._scores = {
            step: score
            for step, score in known.items()
            if score is not None and step <= self._lead + trainer.global_step
        }
        self._saved_at = self._progress(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until all saves are committed."""
        if self._is_fitting and self.last_step is None and trainer.is_global_zero:
            logger.warning("%s: nothing was saved in this fit: it reached no save, or trained no batch", self._place())
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if SIGTERM has stopped training; wait until all saves are committed; notify other ranks of this exit."""
        if (isinstance(exception, SIGTERMException) or trainer.received_sigterm) and self._fit is not None:
            self._fit.stop()
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)
        if self._fit is not None:
            self._fit.undo()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait until all is committed, and restore the trainer's own methods."""
        if self._fit is not None:
            self._fit.undo()
        self._close()
        if stage == "fit" and not trainer.fast_dev_run:
            _finished[self._key()] = weakref.ref(trainer)

    def _close(self) -> None:
        for checkpointer in (self._source, self._checkpointer):
            if checkpointer is not None:
                checkpointer.close()
        self._source = self._checkpointer = None
        self._is_fitting = False

    # ------------------------------------------------------------------ what the loops come to

    def accept_path(self, path: Any) -> bool:
        """Return whether a ``ckpt_path`` is a checkpoint of aiockpt, which `on_fit_start` then loads."""
        name = posixpath.basename(os.fspath(path).rstrip("/"))
        is_ours = _STEP.fullmatch(name) is not None or str(path) == self._place()
        if is_ours:
            self._asked = os.fspath(path)
        return is_ours

    def load_weights(self, trainer: Any) -> dict[str, Any]:
        """Fill the model from the requested checkpoint; return the part that Lightning itself restores."""
        place, step = split_path(self._asked or "")
        module, state = trainer.lightning_module, {} if trainer.global_rank else {"lightning": None}
        with aiockpt.Checkpointer(place) as source:
            loaded = source.load(state, step).result()
            if loaded is None:
                raise aiockpt.StepNotFoundError(f"{place} has no checkpoint")
            saved: dict[str, Any] = trainer.strategy.broadcast(state.get("lightning"))
            begin_pruning(module, saved["aiockpt"]["pruned"])
            source.load({"model": trainer.strategy.model or module}, loaded.step, strict=module.strict_loading).result()
        del saved["loops"], saved["aiockpt"]
        return {"state_dict": module.state_dict(), **saved}

    def read_weights(self, step: int) -> dict[str, torch.Tensor]:
        """Return the weights of a step by their names; only this rank calls it."""
        place = self.dir if self._asked is None else split_path(self._asked)[0]
        with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as source:
            names = [info.name for info in source.describe(step).result().tensors]
            reads = {
                name.removeprefix("model."): source.read(step, name) for name in names if name.startswith("model.")
            }
            return {name: read.result() for name, read in reads.items()}

    def reach(self, trainer: Any, point: Point, *, ends: bool) -> None:
        """Save if a save is due at this end of a step or an epoch.

        Args:
            ends: whether training ends here.
        """
        # The last step of an epoch is reached twice, after its batch and after its epoch.
        if self._checkpointer is None or not self._is_fitting:
            return
        step = self._number(trainer, ends=ends)
        if step in (self.last_step, 0):
            return
        if point == "batch":
            due = (
                self._every_steps is not None and step // self._every_steps > (self.last_step or 0) // self._every_steps
            )
        else:
            due = (
                self._every_epochs is not None
                and trainer.fit_loop.epoch_progress.current.completed % self._every_epochs == 0
            )
        if due or (ends and self._save_last):
            self._save(trainer, self._checkpointer, step, point)

    @staticmethod
    def _progress(trainer: Any) -> tuple[int, int, int]:
        """Return the steps and batches so far, and how often parameters were changed."""
        changes = sum(one._version for one in trainer.lightning_module.parameters())
        return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready, changes

    def _number(self, trainer: Any, *, ends: bool) -> int:
        """Return the number of a step that is saved now: ``global_step``, and the batches in which that stood still.

        They count if they have trained: parameters have changed, or no optimizer has any. (Else gradients may be accumulated
        by hand.) At the end they count in any case.
        """
        number: int = self._lead + trainer.global_step
        if trainer.global_step != self._saved_at[0]:
            return number
        _, batches, changes = self._progress(trainer)
        stepped = {id(one) for by in trainer.optimizers for group in by.param_groups for one in group["params"]}
        has_none = stepped.isdisjoint(map(id, trainer.lightning_module.parameters()))
        trains = ends or has_none or changes != self._saved_at[2]
        return number + (batches - self._saved_at[1] if trains else 0)

    def _save(self, trainer: Any, checkpointer: aiockpt.Checkpointer, step: int, point: Point) -> None:
        assert self._fit is not None
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if isinstance(value, int | float | torch.Tensor) and torch.as_tensor(value).numel() == 1
        }
        # Before the save: that may raise the error of an earlier one after this one has begun.
        self.last_step, self._lead, self._saved_at = step, step - trainer.global_step, self._progress(trainer)
        if self.monitor in metrics:
            self._scores[step] = metrics[self.monitor]
        elif self.monitor is not None and trainer.is_global_zero and not self._has_warned:
            # Before the first validation its metrics are missing in every run.
            self._has_warned = _has_validated(trainer) or not trainer.enable_validation
            if self._has_warned:
                logger.warning(self._describe_missing(trainer))
        checkpointer.save(step, self._fit.state(point), metrics=metrics)

    def check_monitor(self, trainer: Any) -> None:
        """Refuse a *monitor* that an epoch with a validation has not logged, as ``ModelCheckpoint`` does.

        Raises:
            UsageError: it was not logged.
        """
        if self.monitor is None or not self._is_fitting or not _has_validated(trainer):
            return
        # It may be logged on the first rank alone, whose metrics are saved.
        if trainer.strategy.broadcast(self.monitor not in trainer.callback_metrics):
            raise aiockpt.UsageError(self._describe_missing(trainer))

    def _describe_missing(self, trainer: Any) -> str:
        there = ", ".join(sorted(trainer.callback_metrics)) or "none"
        return (
            f"monitor={self.monitor!r} was not logged so far, and no checkpoint is kept as the best; logged are: {there}. "
            f"Correct the name, or log it: self.log({self.monitor!r}, …)"
        )

    # ------------------------------------------------------------------ which is the best

    def _best_step(self) -> int | None:
        sign = 1 if self.mode == "min" else -1
        scores = {step: sign * score for step, score in self._scores.items() if score == score}
        # Of equal ones the oldest, which is the one that Retention keeps.
        return min(scores, key=lambda step: (scores[step], step), default=None)

    def _path(self, step: int) -> str:
        return posixpath.join(self._place(), f"step-{step:08d}")

    def _place(self) -> str:
        first = self.dir[0] if isinstance(self.dir, list | tuple) else self.dir
        return str(getattr(first, "url", first))


def _has_validated(trainer: Any) -> bool:
    """Return whether a validation has run in this process, other than the sanity check."""
    return bool(trainer.fit_loop.epoch_loop.val_loop._has_run)


def split_path(path: str) -> tuple[str, int | None]:
    """Return the place and the step of a ``ckpt_path``; no step where it is the place alone."""
    place, name = posixpath.split(path.rstrip("/"))
    step = _STEP.fullmatch(name)
    return (place or ".", int(step[1])) if step else (path, None)
