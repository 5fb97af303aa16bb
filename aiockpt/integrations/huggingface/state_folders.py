"""The folders passed to ``accelerator.save_state``: each appears when its step is committed, and not before.

The state is in the step. A folder contains a mark with the number of the step, and the files of hooks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import aiockpt
from aiockpt.convert.publish import write_durably
from aiockpt.errors import CorruptionError, StepNotFoundError, UsageError
from aiockpt.integrations.contract import delete_step
from aiockpt.integrations.huggingface import folders
from aiockpt.integrations.huggingface.folders import (
    MARK,
    PendingFolder,
    move_into,
    rename_theirs,
    staged_path,
)
from aiockpt.prove.assignment import VARIABLE

logger = logging.getLogger("aiockpt")

_THEIRS = "random_states_0.pkl"
"""A file that accelerate writes into each folder of its own."""


class Mark(NamedTuple):
    """The mark of a folder: its *step*, and a *key* that is also in the step, so that no other step is accepted."""

    step: int
    key: str


class StateFolders:
    """The folders of one Accelerator. Its first process makes them; calls that change them do nothing in the others.

    `publish` makes them appear. It runs on the training thread after each ``backward()``, where it costs nothing.

    Args:
        delete_with_folder: whether a step is deleted when its folder was deleted.
    """

    def __init__(self, accelerator: Any, ckpt: aiockpt.Checkpointer, *, delete_with_folder: bool) -> None:
        self._settings = accelerator.project_configuration
        self._makes = accelerator.is_main_process
        self._makes_here = self._makes or (self._settings.save_on_each_node and accelerator.is_local_main_process)
        self._ckpt = ckpt
        self._delete_with_folder = delete_with_folder
        self._pending: list[PendingFolder] = []
        self._known: dict[int, Path] = {}
        self._replaced: list[tuple[Path, Mark]] = []

    # ------------------------------------------------------------------ names

    @property
    def root(self) -> Path | None:
        """The parent of the folders of ``automatic_checkpoint_naming``; None where the caller names them."""
        named = self._settings.automatic_checkpoint_naming
        return Path(self._settings.project_dir) / "checkpoints" if named else None

    def numbered(self) -> list[tuple[int, Path]]:
        """Return the folders of ``automatic_checkpoint_naming`` with their numbers, the newest number first."""
        paths = self.root.iterdir() if self.root is not None and self.root.is_dir() else ()
        found = [
            (int(match[1]), path.absolute())
            for path in paths
            if (match := re.fullmatch(r"checkpoint_(\d+)", path.name))
        ]
        return sorted(found, reverse=True)

    def of_step(self, step: int, user: dict[str, Any]) -> Path:
        """Return the folder of a step: in a project that was copied or moved, the one that is there now."""
        saved, mark = Path(user["folder"]), Mark(step, user["key"])
        project = self._settings.project_dir and Path(self._settings.project_dir).absolute()
        if not project or project in saved.parents:
            return saved
        here = (project.joinpath(*saved.parts[first:]) for first in range(1, len(saved.parts)))
        return next((folder for folder in here if read_mark(folder) == mark), saved)

    def check_newest(self, steps: list[int]) -> None:
        """Raise if there are no *steps* to load, but a numbered folder has its step in another place, or in this one before
        it was lost. If only the step of the newest folder is missing, log it.
        """
        marks = [(mark.step, folder) for _, folder in self.numbered() if (mark := read_mark(folder)) is not None]
        # Each start of a proof has a place of its own.
        if not marks or VARIABLE in os.environ:
            return
        try:
            check_folder(self._ckpt, max(marks)[1])
        except (UsageError, CorruptionError) as error:
            if not steps:
                error.add_note("To begin anew, remove such folders, or give another project_dir.")
                raise
            logger.warning("load_state() loads step %d: %s", steps[0], error)

    def number_after_theirs(self) -> None:
        """Give the next folder a greater number than those that accelerate wrote: the greatest one is loaded next time."""
        theirs = next((number for number, folder in self.numbered() if is_of_accelerate(folder)), -1)
        self._settings.iteration = max(self._settings.iteration, theirs + 1)

    # ------------------------------------------------------------------ making

    def stage(self, folder: Path, step: int) -> Path:
        """Return the folder, under another name, that hooks write into."""
        staged = staged_path(folder, step)
        if self._makes_here:
            pending = [save.staged for save in self._pending]
            for left in _staged_before(folder):
                if left not in pending:
                    shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        return staged

    def expect(self, folder: Path, mark: Mark, future: aiockpt.SaveFuture) -> None:
        """Make *folder* appear when its save is committed."""
        if not self._makes_here:
            return
        staged = staged_path(folder, mark.step)
        write_durably(staged / MARK, json.dumps(mark._asdict()).encode())
        self._pending.append(PendingFolder(mark.step, future, staged, folder))

    def publish(self) -> None:
        """Publish the folders of committed saves, in the order of the saves."""
        while self._pending and self._pending[0].future.done():
            pending = self._pending[0]
            if pending.future.stage == "committed":
                self._appear(pending.staged, pending.folder)
            else:
                shutil.rmtree(pending.staged, ignore_errors=True)
            self._pending.pop(0)

    def _appear(self, staged: Path, folder: Path) -> None:
        mark, before = read_mark(staged), read_mark(folder)
        if mark is None:  # the program has removed it, with all that was in the project
            return
        if before is not None:
            if before.step != mark.step:
                self._replaced.append((folder, before))
            (folder / MARK).unlink()  # until all files are there, the folder is incomplete
        elif is_of_accelerate(folder):
            rename_theirs(folder)
        if folder.exists():
            move_into(folder, staged)
        else:
            staged.rename(folder)
        self._known[mark.step] = folder

    def wait(self) -> None:
        """Wait until all saves are committed, and have their folders; raise errors."""
        try:
            self._ckpt.wait()
        finally:
            self.publish()

    def restore(self, infos: Iterable[Any]) -> None:
        """Publish the folders of steps that were committed when the process died; read those of the other steps.

        Args:
            infos: the oldest first, because a folder that was saved to again is that of the newest.
        """
        if not self._makes_here:
            return
        for info in infos:
            user = _user_of(self._ckpt, info.step)
            if "folder" not in user:
                continue
            folder, mark = Path(user["folder"]), Mark(info.step, user["key"])
            staged = staged_path(folder, info.step)
            if read_mark(staged) == mark and read_mark(folder) != mark:
                self._appear(staged, folder)
            if read_mark(folder) == mark:
                self._known[info.step] = folder

    # ------------------------------------------------------------------ deleting

    def _commit_order(self, folder: Path) -> tuple[bool, int]:
        """Return the sort key of a folder: its step, but before those of this place if another place has it.

        Times of files do not tell it, because a copy changes them, and numbers of folders do not after a run went back.
        """
        mark = read_mark(folder)
        assert mark is not None
        return (self._known.get(mark.step) == folder, mark.step)

    def _was_saved_to(self, folder: Path, mark: Mark) -> bool:
        """Return whether this place has the step of a mark, and *folder* is not a copy."""
        if self._known.get(mark.step) == folder:
            return True
        try:
            user = _user_of(self._ckpt, mark.step)
        except (StepNotFoundError, CorruptionError):
            return False
        return (user.get("folder"), user.get("key")) == (str(folder), mark.key)

    def rotate(self) -> None:
        """Delete steps and folders that ``total_limit`` does not keep, and steps whose folder now has another step."""
        self.publish()
        if not self._makes:
            return
        limit = self._settings.total_limit if self.root is not None else None
        doomed, self._replaced = self._replaced, []
        if limit is not None:
            ours = [folder for _, folder in self.numbered() if read_mark(folder) is not None]
            ours.sort(key=self._commit_order)
            old = ours[: max(len(ours) - max(limit, 1), 0)]
            doomed += [(folder, mark) for folder in old if (mark := read_mark(folder)) is not None]
            for folder in old:
                shutil.rmtree(folder)
        deleted = [mark.step for folder, mark in doomed if self._was_saved_to(folder, mark)]
        for step in deleted:
            self._known.pop(step, None)
        gone = [step for step, folder in self._known.items() if not folder.exists()]
        for step in gone:
            folder = self._known.pop(step)
            if self._delete_with_folder:
                deleted.append(step)
            else:
                logger.warning("%s is gone, and its step %d is kept: see delete_with_folder of attach()", folder, step)
        for step in deleted:
            delete_step(self._ckpt, step)


def read_mark(folder: Path) -> Mark | None:
    """Return the mark of a folder; None where aiockpt did not make it, or accelerate has written into it since."""
    saved = folders.read_mark(folder)
    is_ours = saved.keys() >= {"step", "key"} and not is_of_accelerate(folder)
    return Mark(saved["step"], saved["key"]) if is_ours else None


def is_of_accelerate(folder: Path) -> bool:
    """Return whether accelerate itself wrote a folder, which is renamed before aiockpt writes to that name."""
    return (folder / _THEIRS).exists()


def check_folder(ckpt: aiockpt.Checkpointer, folder: Path) -> int:
    """Return the step of a folder that *ckpt* has made.

    Raises:
        UsageError: its step is not in the place of *ckpt*.
    """
    mark = read_mark(folder)
    if mark is None:
        raise UsageError(f"{folder} was made neither by save_state() nor by accelerate itself; name another folder")
    try:
        user = _user_of(ckpt, mark.step)
    except StepNotFoundError:
        user = {}
    if user.get("key") != mark.key:
        raise UsageError(
            f"{folder} has no weights of its own: they are in a step that {ckpt!r} does not have; attach() to the place "
            "where it was saved"
        )
    return mark.step


def _user_of(ckpt: aiockpt.Checkpointer, step: int) -> dict[str, Any]:
    """Return what `save_state` has stored beside a step; an empty dict of a step that something else saved."""
    user = ckpt.describe(step).result().user
    return user if isinstance(user, dict) else {}


def _staged_before(folder: Path) -> list[Path]:
    """Return what saves to a folder have staged, those that a kill has stopped too."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.\d+\.aiockpt")
    return [path for path in folder.parent.glob(".*.aiockpt") if name.fullmatch(path.name)]
