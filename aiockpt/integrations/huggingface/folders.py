"""The folders ``checkpoint-N`` of the Trainer: each appears when its step is committed, and not before.

The weights are in the step. A folder contains the Trainer's own state, the configuration, a mark with the number of the
step, the files of callbacks and overridden methods, and on request the weights as a file of ``safetensors``. If callbacks
or overrides write into a folder, it has its final name from the start, since their threads may continue to write; its mark
then shows that it is not committed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiockpt
from aiockpt.convert import to_hugging_face
from aiockpt.convert.folder_layout import is_weights
from aiockpt.convert.publish import write_durably
from aiockpt.errors import CheckpointError, StepNotFoundError, UsageError
from aiockpt.integrations.contract import delete_step
from aiockpt.integrations.huggingface.runs import RUN, run_of, step_in_run

logger = logging.getLogger("aiockpt")

STATE = "trainer_state.json"
"""Name of the file to which the Trainer writes its own state, and from which it reads the state."""
MARK = "aiockpt.json"
PREFIX = "checkpoint-"
_THEIRS = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
"""Files that the Trainer writes into each checkpoint from which it resumes, and aiockpt into none."""
_UPLOADS: dict[str, tuple[object, ...]] = {
    "_log_model": (True, "all", "checkpoint"),
    "_log_artifacts": (True,),
    "_log_checkpoints": ("same", "last", "best"),
    "sync_checkpoints": (True,),
}
"""Attributes of transformers' callbacks for W&B, ClearML, DVC, MLflow, Neptune and Flyte, and their values for uploads."""


class PendingFolder(NamedTuple):
    """A save in progress, its staged folder, and the final name of that; it has the name at once if callbacks see it.

    Attributes:
        future: of the save, and then that of its weights, if they are put into the folder.
        link: whether they are linked, or written; None before.
    """

    step: int
    future: Any
    staged: Path
    folder: Path
    link: bool | None = None

    def appear(self) -> None:
        """Mark the folder as that of a committed step and rename it to its final name; other files under that name stay."""
        if not self.staged.exists():  # a callback has moved it away
            return
        _mark(self.staged, self.step)
        if self.staged == self.folder:
            return
        set_aside(self.folder, but=self.step)
        if has_mark(self.folder):
            remove_weights(self.folder)
            move_into(self.folder, self.staged)
            return
        if self.folder.exists():
            move_into(self.staged, self.folder)
        self.staged.rename(self.folder)


class CheckpointFolders:
    """The folders of one Trainer. Its first process makes them, or with ``save_on_each_node`` the first of each node; in
    other processes the calls do nothing.

    Args:
        safetensors: whether weights are put into them.
        raises: whether `publish` raises the error of a failed save.
    """

    def __init__(self, trainer: Any, ckpt: aiockpt.Checkpointer, *, safetensors: bool, raises: bool) -> None:
        self._trainer = trainer
        self._ckpt = ckpt
        self._safetensors = safetensors
        self._raises = raises
        self._saves: list[PendingFolder] = []
        # Steps, the oldest commit first: read from the place when it is needed, then continued by `publish`.
        self._order: list[int] = []
        self._has_warned = False
        self.run = 0

    def path(self, step: int) -> Path:
        return Path(self._trainer.args.output_dir) / f"{PREFIX}{step_in_run(step)}"

    def set_aside(self, step: int) -> None:
        """Free the name of a step for a folder that callbacks will see; a folder of the same step is reused."""
        if self._trainer.args.should_save:
            set_aside(self.path(step), but=self.run * RUN + step)
            remove_weights(self.path(step))
            if not self._has_warned and (names := uploads(self._trainer.callback_handler.callbacks)):
                self._has_warned = True
                logger.warning(
                    "%s: uploads each checkpoint-N without weights; those are in %r, and save_model() writes them",
                    *(", ".join(names), self._ckpt),
                )

    def stage(self, step: int, *, shown: bool) -> str | None:
        """Write the contents of the folder of a step, under another name unless it is *shown*; return the Trainer's state as
        text.
        """
        trainer, number = self._trainer, self.run * RUN + step
        if not trainer.args.should_save:
            return None
        staged = self.path(step) if shown else staged_path(self.path(step), number)
        if not shown:
            shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True, exist_ok=True)
        # Before STATE is written: a folder with STATE but no mark counts as the Trainer's own (`of_the_trainer`).
        _mark(staged, number, committed=False)
        held = trainer.state.stateful_callbacks
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            name = type(callback).__name__
            if name in held and hasattr(callback, "state"):
                held[name] = [*held[name], callback.state()] if isinstance(held[name], list) else callback.state()
        trainer.state.save_to_json(str(staged / STATE))
        model = trainer.accelerator.unwrap_model(trainer.model)
        parts: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
        for part in (*parts, trainer.processing_class):
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(staged)
        return (staged / STATE).read_text()

    def expect(self, step: int, future: aiockpt.SaveFuture, *, shown: bool) -> None:
        """Register a save: when it is committed, its folder appears, or if *shown*, is marked as committed."""
        if self._trainer.args.should_save:
            folder = self.path(step)
            self._saves.append(PendingFolder(step, future, folder if shown else staged_path(folder, step), folder))

    def hide_unfinished(self) -> None:
        """Rename the folders that a killed process has shown to callbacks but not committed."""
        if self._trainer.args.should_save:
            for folder in self._marked(is_pending):
                hidden = staged_path(folder, step_of(folder))
                shutil.rmtree(hidden, ignore_errors=True)
                folder.rename(hidden)

    def publish(self) -> None:
        """Publish the folders of saves committed since the last call; raise errors, if *raises*."""
        while self._saves and self._saves[0].future.done():
            save = self._saves.pop(0)
            failed = save.future.exception()
            # Weights of several ranks, or of a place on another file system, are not linked but written.
            is_unlinked = save.link and isinstance(failed, UsageError)
            if save.link is None and failed is not None:
                shutil.rmtree(save.staged, ignore_errors=True)
            elif is_unlinked or (save.link is None and self._safetensors and save.staged.exists()):
                self._put_weights(save, link=not is_unlinked)
                continue
            else:  # its step is committed, even if its weights could not be put into the folder
                save.appear()
                self._order = [*(step for step in self._order if step != save.step), save.step]
            with suppress(*(() if self._raises else (CheckpointError,))):
                save.future.result()

    def _put_weights(self, save: PendingFolder, *, link: bool) -> None:
        """Start to put the weights of a committed save into its folder."""
        future = to_hugging_face(self._ckpt, save.staged, step=save.step, prefix="model", link=link)
        self._saves.insert(0, save._replace(future=future, link=link))

    def wait(self) -> None:
        """Wait until all saves are committed, and have their folders; raise errors."""
        self._ckpt.wait()
        self.publish()
        while self._saves:
            self._saves[0].future.exception()
            self.publish()

    def restore(self, step: int) -> None:
        """Make the folder of a step that was committed when the process died, or that a program without a Trainer has
        saved; do nothing if the folder is complete.
        """
        folder = self.path(step)
        save = PendingFolder(step, None, staged_path(folder, step), folder)
        is_whole = is_ours(folder) and step_of(folder) == step and _is_readable(folder)
        # A step that was saved again may have been committed without its folder.
        is_staged = _is_readable(save.staged) and (not is_whole or self._is_of(save.staged, step))
        if not self._trainer.args.should_save or (is_whole and not is_staged):
            return
        if is_staged:
            save.appear()
        elif has_mark(folder) or not folder.exists():  # otherwise it is the Trainer's own, with the same number
            set_aside(folder, but=step)
            values: Any = self._ckpt.describe(step).result().values
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / STATE, (values.get("trainer") or self._state_at(step)).encode())
            _mark(folder, step)

    def _is_of(self, staged: Path, step: int) -> bool:
        """Return whether a staged folder is that of a committed step, and not of a save that never was."""
        values: Any = self._ckpt.describe(step).result().values
        return "trainer" in values and _history(values["trainer"]) == _history((staged / STATE).read_text())

    def confirm(self, folder: Path) -> bool:
        """Return whether the save of a folder is committed; note it in a folder that was copied before the commit."""
        if is_pending(folder) and stands_for(folder, self._ckpt, by_number=False):
            _mark(folder, step_of(folder))
        return is_ours(folder)

    def check_seen(self, step: int) -> None:
        """Raise on all ranks unless each sees the folder of a step. Every rank calls it.

        Raises:
            UsageError: some ranks do not; the message names them.
        """
        args = self._trainer.args
        seen: list[bool] = import_module("accelerate.utils").gather_object([_is_readable(self.path(step))])
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise UsageError(
                f"rank {blind}: {PREFIX}{step} is not in {args.output_dir}; give an output_dir that all nodes see, or "
                "TrainingArguments(save_on_each_node=True) and a place that all nodes see: attach(trainer, place)"
            )

    def of_the_trainer(self) -> tuple[Path, int] | None:
        """Return the folder with the largest number of those that the Trainer itself wrote, with its time in ns; or None."""
        states = [
            path for path in Path(self._trainer.args.output_dir).glob(f"{PREFIX}*/{STATE}") if not has_mark(path.parent)
        ]
        states = [path for path in states if path.parent.name.removeprefix(PREFIX).isdecimal()]
        # As the Trainer's own resume: times do not survive every copy.
        newest = max(states, key=lambda path: step_of(path.parent), default=None)
        return None if newest is None else (newest.parent, newest.stat().st_mtime_ns)

    def newest_of_ours(self) -> Path | None:
        """Return the folder with the largest number of those whose contents are in a step; or None."""
        return max(self._marked(is_ours), key=lambda folder: step_in_run(step_of(folder)), default=None)

    def _marked(self, accept: Callable[[Path], bool]) -> list[Path]:
        folders = [mark.parent for mark in Path(self._trainer.args.output_dir).glob(f"{PREFIX}*/{MARK}")]
        return [folder for folder in folders if accept(folder)]

    def rotate(self) -> None:
        """Delete the steps that ``save_total_limit`` does not keep, and their folders."""
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        if not args.should_save or not args.save_total_limit or args.save_total_limit < 0:
            return
        found = {step for step in map(step_of, self._marked(is_ours)) if run_of(step) == self.run}
        if len(found) <= args.save_total_limit:
            return
        steps = self._in_order_of_commits(found)
        kept = {*steps[-1:], *([step_of(best)] if best and is_ours(best) and step_of(best) in steps else [])}
        others = [step for step in steps if step not in kept]
        for step in others[: max(len(steps) - max(args.save_total_limit, len(kept)), 0)]:
            # The step first: after a kill in between, the next call deletes the folder that is left; a step left alone
            # would get its folder back from `restore`.
            if delete_step(self._ckpt, step):
                shutil.rmtree(self.path(step), ignore_errors=True)

    def _in_order_of_commits(self, steps: set[int]) -> list[int]:
        """Sort *steps*, the oldest commit first, after those that the place does not have.

        Neither by number, since a run that went back continues with smaller ones, nor by time, which a copy may lose.
        """
        if not steps <= set(self._order):
            self._order = [info.step for info in reversed(self._ckpt.steps().result())]
        places = {step: place for place, step in enumerate(self._order)}
        return sorted(steps, key=lambda step: (places.get(step, -1), step))

    def _state_at(self, step: int) -> str:
        """Return the state that this Trainer would have at a step, for a step without one."""
        transformers: Any = import_module("transformers")
        args = self._trainer.args
        state = transformers.TrainerState(global_step=step_in_run(step), train_batch_size=args.train_batch_size)
        state.compute_steps(args, args.max_steps)
        return json.dumps(dataclasses.asdict(state))


def stands_for(folder: str | os.PathLike[str], ckpt: aiockpt.Checkpointer, *, by_number: bool) -> bool:
    """Return whether *ckpt* has the step of a folder: a step of that number, and, if a Trainer saved it, with the same
    history, unless the number is enough (*by_number*).
    """
    try:
        values: Any = ckpt.describe(step_of(folder)).result().values
    except StepNotFoundError:
        return False
    held = values.get("trainer")
    return by_number or held is None or _history(held) == _history((Path(folder) / STATE).read_text())


def _history(text: str) -> str:
    """Return the part of a Trainer's state that distinguishes runs, as text, because NaN is not equal to itself."""
    state = json.loads(text)
    return json.dumps([state["global_step"], state["log_history"]])


def uploads(callbacks: Iterable[Any]) -> list[str]:
    """Return the classes of transformers' own callbacks that are set to upload the folders of checkpoints."""
    return [
        type(one).__name__
        for one in callbacks
        if type(one).__module__.startswith("transformers.integrations")
        and any(getattr(one, name, None) in values for name, values in _UPLOADS.items())
    ]


def set_aside(folder: Path, *, but: int) -> None:
    """Rename a folder of another run, or one that the Trainer itself wrote, but not that of the step *but*."""
    if is_ours(folder) and step_of(folder) != but:
        aside = staged_path(folder, step_of(folder))
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    elif (folder / STATE).exists() and not has_mark(folder):
        rename_theirs(folder)


def rename_theirs(folder: Path) -> None:
    """Rename a folder that aiockpt did not make, so that a search for names that begin like its own does not find it."""
    names = (f"before-aiockpt-{number}.{folder.name}" for number in count(1))
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))


def remove_weights(folder: Path) -> None:
    """Remove the weights that were put into the folder of an earlier save: they are not those of the next one."""
    if has_mark(folder):
        for path in folder.iterdir():
            if is_weights(path.name):
                path.unlink()


def move_into(folder: Path, staged: Path) -> None:
    """Move the contents of *staged* into *folder*, the mark last. Files of the same name are replaced, and others stay, as
    if they were written in place.
    """
    for path in sorted(staged.iterdir(), key=lambda path: (path.name == MARK, path.name == STATE)):
        if path.is_dir() and (folder / path.name).is_dir():
            move_into(folder / path.name, path)
        else:
            path.replace(folder / path.name)
    staged.rmdir()


def staged_path(folder: Path, step: int) -> Path:
    """Return the path of a folder until *step* is committed; the step before may be in progress for the same folder."""
    return folder.with_name(f".{folder.name}.{step}.aiockpt")


def _mark(folder: Path, step: int, *, committed: bool = True) -> None:
    mark = {"step": step} if committed else {"step": step, "committed": False}
    write_durably(folder / MARK, f"{json.dumps(mark)}\n".encode())


def _is_readable(folder: Path) -> bool:
    """Return whether the Trainer's own state is complete in a folder."""
    try:
        return isinstance(json.loads((folder / STATE).read_text()), dict)
    except (OSError, ValueError):
        return False


def read_mark(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a folder's mark; an empty dict without a readable one."""
    try:
        mark = json.loads((Path(folder) / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def has_mark(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder was made here, committed or not, and the Trainer itself has not written into it since."""
    return (Path(folder) / MARK).exists() and not any((Path(folder) / name).exists() for name in _THEIRS)


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return whether the contents of a folder are in a step."""
    return has_mark(folder) and not is_pending(folder)


def is_pending(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder belongs to a save that is not committed, or never was."""
    return has_mark(folder) and read_mark(folder).get("committed", True) is False


def step_of(folder: str | os.PathLike[str]) -> int:
    """Return the saved step of a folder."""
    step = read_mark(folder).get("step") if has_mark(folder) else None
    return step if type(step) is int else int(Path(folder).name.removeprefix(PREFIX))
