"""Ray Train (2.60): reports of saves when they are committed, and a resume from the newest checkpoint that Ray knows.

    with aiockpt.Checkpointer("/shared/run-7") as ckpt:
        for step in range(resume(ckpt, state), steps):
            loss = train_one_step()
            report({"loss": loss}, ckpt.save(step, state) if step % 100 == 0 else None)

Ray keeps a *handle* of each checkpoint, a folder with one small file that names the step and the place. Tensors go from the
workers to the place; nothing is uploaded twice. Ray is notified of a checkpoint when all ranks have committed it, in the
order of the reports, while training continues.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

import aiockpt
from aiockpt.format.document import described
from aiockpt.integrations.contract import valid_steps

_train: Any = import_module("ray.train")

HANDLE = "aiockpt.json"

logger = logging.getLogger("aiockpt")


class RayHandle(msgspec.Struct, frozen=True):
    """The handle of a checkpoint that Ray keeps: the *step* and *id* of it, and the *url* of the place where it is."""

    url: str
    step: int
    id: str


def report(metrics: Mapping[str, Any], save: aiockpt.SaveFuture | None = None, **options: Any) -> None:
    """Report *metrics*, with the checkpoint that *save* becomes; every worker calls it, as ``ray.train.report``.

    It returns before the save is committed. A save that fails ends the worker, as an upload of Ray's does; one that was
    skipped (``Limits(when_full="skip")``) is reported as metrics alone.

    Args:
        save: what ``ckpt.save(…)`` or ``ckpt.step(…)`` returned; None reports metrics alone.
        options: others of ``ray.train.report``, such as ``validation``.
    """
    waits = {"checkpoint_upload_mode": _train.CheckpointUploadMode.ASYNC, **options}
    if save is None or _train.get_context().get_world_rank() != 0 or _was_skipped(save):
        _train.report(dict(metrics), **waits)  # the other workers report, too: Ray counts reports
        return

    def write(local: Any, name: str) -> Any:
        done = save.result()
        handle = RayHandle(done.url, done.step, done.id)
        Path(local.path, HANDLE).write_bytes(msgspec.json.encode(handle))
        return _train.get_context().get_storage().persist_current_checkpoint(local, name)

    local = _train.Checkpoint.from_directory(tempfile.mkdtemp(prefix="aiockpt-"))  # Ray deletes it
    _train.report(dict(metrics), local, checkpoint_upload_fn=write, **waits)


def resume(ckpt: aiockpt.Checkpointer, state: Mapping[str, Any]) -> int:
    """Load the step from which Ray continues into *state*, and return the next step; every worker calls it.

    It is the step of ``ray.train.get_checkpoint()``, so that reports and checkpoints agree: a step that was committed and
    not reported before a worker died is trained again. If Ray has no checkpoint, it is the newest step of the place.

    Raises:
        UsageError: Ray's newest checkpoint was not made by `report`.
        StepNotFoundError: the place does not have the step; retention has deleted it, or it is in another place.
    """
    checkpoint = _train.get_checkpoint()
    if checkpoint is None:
        return ckpt.resume(state)
    handle = read_handle(checkpoint)
    step, urls = handle.step, ckpt.run_on_destination("resume", _urls).result()
    try:
        ckpt.load(state, step).result()
    except aiockpt.StepNotFoundError as error:
        newer = [one for one in valid_steps(ckpt) if one > step and handle.url in urls]
        if not newer:
            error.add_note(
                f"Ray's newest checkpoint is step {step} of {handle.url}: keep what is reported, or load it there"
            )
            raise
        step = newer[0]
        logger.warning(
            "resumed from step %d: step %d of Ray's newest checkpoint is deleted, and a later one was committed before it "
            "could be reported",
            *(step, handle.step),
        )
        ckpt.load(state, step).result()
    if handle.url not in urls:
        logger.warning(
            "resumed from step %d of %s, but Ray's newest checkpoint is that step of %s: unless the one is a copy of the "
            "other, resume from there, or begin a run of another name",
            *(handle.step, " and ".join(urls), handle.url),
        )
    return step + 1


async def _urls(destination: Any) -> list[str]:
    return [place.backend.url for place in destination.places]


def read_handle(checkpoint: Any) -> RayHandle:
    """Return the handle in a checkpoint of Ray (``result.checkpoint``, ``ray.train.get_checkpoint()``).

    Raises:
        UsageError: it was not made by `report`.
    """
    with checkpoint.as_directory() as folder:
        path = Path(folder, HANDLE)
        if not path.exists():
            raise aiockpt.UsageError(
                f"{checkpoint.path} has no {HANDLE}: it was not made by aiockpt.integrations.ray.report; begin a run of "
                "another name, or load it as it was saved and save that once"
            )
        return msgspec.json.decode(path.read_bytes(), type=described(RayHandle))


def _was_skipped(save: aiockpt.SaveFuture) -> bool:
    return save.done() and isinstance(save.exception(), aiockpt.SaveSkippedError)
