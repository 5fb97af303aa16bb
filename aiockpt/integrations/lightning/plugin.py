"""The ``CheckpointIO`` for ``ModelCheckpoint``: its files become folders of aiockpt, written in the background.

Lightning still determines the content of a checkpoint, and how a fit resumes from it. ``ModelCheckpoint`` deletes an old
checkpoint as soon as the call that saves the newer one returns; here it is deleted when the newer one is committed.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import aiockpt
from aiockpt.integrations.lightning.package import TorchCheckpointIO
from aiockpt.integrations.lightning.trainer_state import hyper_parameters

logger = logging.getLogger("aiockpt")


class _Save:
    """A save in progress.

    Attributes:
        error: the error of a failed save.
        ended: whether it is committed or has failed, and its threads have ended.
        path: its folder.
    """

    def __init__(self, path: str, checkpoint: dict[str, Any], options: dict[str, Any]) -> None:
        self.path = path
        self.error: aiockpt.BackgroundSaveError | None = None
        self.ended = False
        self._place = aiockpt.Checkpointer(path, ranks=aiockpt.Ranks(), retention=aiockpt.Retention(last=1), **options)
        try:
            with suppress(aiockpt.CheckpointError):
                # So that the save continues the step that is there: Retention does not delete other branches.
                self._place.load({}).result()
            self._future = self._place.save(checkpoint.get("global_step", 0), {"checkpoint": checkpoint})
        except BaseException:
            self._place.close()
            raise

    def end(self, *, wait: bool) -> None:
        """Note whether the save has ended; with *wait*, wait until it has."""
        if not self.ended and (wait or self._future.done()):
            self.ended = True
            try:
                self._place.close()
            except aiockpt.BackgroundSaveError as error:
                self.error = error


class AiockptCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]  # Any, where Lightning is not installed
    """Saves the checkpoints of ``ModelCheckpoint`` in the background: ``Trainer(plugins=[AiockptCheckpointIO()])``.

    For one device and for DDP: strategies that shard bypass every such plug-in; use `AsyncCheckpoint` with them. The end of
    ``fit`` waits until all saves are committed. The error of a failed save is raised by the next one, or at the end. Files
    that Lightning has written are loaded as before.

    Args:
        options: of `aiockpt.Checkpointer`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._saves: list[_Save] = []
        self._removals: list[tuple[str, list[_Save]]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy *checkpoint*, and write it in the background to the folder *path*.

        Hyper-parameters that only pickle could save (classes, functions, enums) are saved as text.

        Raises:
            UsageError: there are *storage_options*; give them to the constructor.
            UnsupportedStateError: a value in it is neither plain nor a tensor; the message names it.
            BackgroundSaveError: an earlier save failed; this one goes on.
        """
        if storage_options is not None:
            raise aiockpt.UsageError("storage_options: give options of aiockpt.Checkpointer to AiockptCheckpointIO(…)")
        path = os.fspath(path)
        checkpoint = {
            name: hyper_parameters(one) if name.endswith(("hyper_parameters", "hparams_type")) else one
            for name, one in checkpoint.items()
        }
        for save in self._saves:
            save.end(wait=_is_same(save.path, path))  # "last.ckpt" again: one after the other
        self._saves.append(_Save(path, checkpoint, self._options))
        # A removal that still waits was meant for the checkpoint that this one replaces, and would delete this one.
        self._removals = [removal for removal in self._removals if not _is_same(removal[0], path)]
        self._finish(wait=False)

    def load_checkpoint(self, path: Any, *args: Any, **named: Any) -> dict[str, Any]:
        """Return the checkpoint in the folder *path*, with its tensors on the host.

        The other arguments apply to files that Lightning has written: here nothing is unpickled.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        self._finish(wait=True)
        if os.path.isfile(path):
            return dict(super().load_checkpoint(path, *args, **named))
        state: dict[str, Any] = {"checkpoint": None}
        with aiockpt.Checkpointer(os.fspath(path), ranks=aiockpt.Ranks()) as place:
            if place.load(state).result() is None:
                raise FileNotFoundError(f"no checkpoint is in {path}")
        checkpoint: dict[str, Any] = state["checkpoint"]
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint when all saves so far are committed; if one of them fails, keep it."""
        self._removals.append((os.fspath(path), list(self._saves)))
        self._finish(wait=False)

    def teardown(self) -> None:
        """Wait until all saves are committed, and raise their errors."""
        self._finish(wait=True)

    def _finish(self, *, wait: bool) -> None:
        for save in self._saves:
            save.end(wait=wait)
        removals, self._removals = self._removals, []
        for path, saves in removals:
            if any(save.error is not None for save in saves):
                logger.warning("%s: kept, because the save that replaces it failed", path)
            elif all(save.ended for save in saves):
                super().remove_checkpoint(path)
            else:
                self._removals.append((path, saves))
        failed = [save.error for save in self._saves if save.error is not None]
        self._saves = [save for save in self._saves if not save.ended]
        if failed:
            raise failed[0]


def _is_same(one: str, other: str) -> bool:
    """Return whether two paths are the same folder; ``last.ckpt`` may be a link, and a path relative."""
    return os.path.realpath(one) == os.path.realpath(other)
