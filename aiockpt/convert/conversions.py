"""The public functions of conversion: they return futures and run on the checkpointer's loop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from aiockpt.adapters.rename import Renames, Rules
from aiockpt.convert.casting import parse_dtype
from aiockpt.convert.choice import Converted
from aiockpt.convert.folder_layout import SHARD_BYTES
from aiockpt.convert.inbound import ImportRequest, convert_folder
from aiockpt.convert.links import link_step
from aiockpt.convert.outbound import ExportRequest, convert_step
from aiockpt.convert.source import SUFFIX
from aiockpt.engine.alone import Destination
from aiockpt.engine.submit import check_step
from aiockpt.errors import UsageError
from aiockpt.futures import Future
from aiockpt.redaction import redact
from aiockpt.session.checkpointer import Checkpointer, Place
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

Convert = Callable[[Destination, Backend], Awaitable[Converted]]


def to_hugging_face(
    checkpointer: Checkpointer,
    folder: Place,
    *,
    step: int | None = None,
    prefix: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    rename: Renames = (),
    replace: bool = False,
    link: bool = False,
    dry_run: bool = False,
    on_written: Callable[[int], object] = lambda _: None,
) -> Future[Converted]:
    """Write the weights of a step (the newest valid one for None) as a Hugging Face folder.

    Only weights are written: no optimizer, values or configuration. The caller adds ``config.json`` and a tokenizer.

    Args:
        folder: a path, a URL, or a backend, which stays open.
        prefix: the part of the state that is the weights, ``"model"``; None finds the one module.
        dtype: target of rounding for floating point of 16 bits and more, ``"bfloat16"``; None: no rounding.
        max_shard_bytes: of tensors in one file.
        rename: from the module's names to those in the folder, by regular expressions, one after the other, or a function.
        replace: remove the weights in the folder; on a file system only after all new ones are durable.
        link: write no weights, but make hard links to the files of the step, which are verified first; the links stay when
            the step is deleted. Possible for a module that one rank has saved to this machine's file system. The files do
            not note what is tied: `from_hugging_face` needs ``ties`` then.
        dry_run: write nothing, and return what would be written.
        on_written: called with the bytes of each window (verified ones, for links), on the loop thread; for progress.

    Raises: Raised by the future
        StepNotFoundError, NoValidCheckpointError: there is nothing to convert.
        UsageError: the prefix or the dtype does not fit the step, or its files cannot be linked.
        UnsupportedStateError: a tensor is composite, of one rank alone, or of a dtype that safetensors lacks.
        CorruptionError: the step is damaged; no part of the folder is left.
        ObjectExistsError: the folder holds weights already.
        StorageError: of either place.
    """
    if _split_file(folder)[1] is not None:
        raise UsageError(f"{folder}: weights become a folder of files; name a folder")
    request = ExportRequest(
        None if step is None else check_step(step),
        prefix,
        parse_dtype(dtype),
        max_shard_bytes,
        replace,
        dry_run,
        Rules(rename),
    )

    work = partial(link_step if link else convert_step, request=request, on_written=on_written)
    return _start(checkpointer, folder, f"conversion to {_called(folder)}", work)


def from_hugging_face(
    checkpointer: Checkpointer,
    folder: Place,
    *,
    step: int = 0,
    prefix: str = "model",
    dtype: str | torch.dtype | None = None,
    ties: Mapping[str, str] | None = None,
    rename: Renames = (),
    replace: bool = False,
    dry_run: bool = False,
    on_written: Callable[[int], object] = lambda _: None,
) -> Future[Converted]:
    """Save the weights of a Hugging Face folder as a step, as ``save(step, {prefix: model})`` would.

    Args:
        folder: a path, a URL, or a backend; or the path or URL of one ``.safetensors`` file.
        prefix: the place of the weights in the state.
        dtype: as for `to_hugging_face`.
        ties: further names of a tensor's memory → its name, for files that do not note them:
            ``{"lm_head.weight": "model.embed_tokens.weight"}``.
        rename: from the names in the files to those of the module, as for `to_hugging_face`.
        replace: add a generation where the step already exists.
        dry_run: as for `to_hugging_face`.
        on_written: the same.

    Raises: Raised by the future
        UsageError: there are no weights, or several sets of them; or a tie does not fit.
        CorruptionError: a file is missing or truncated, or a header or the index is false; no step became visible.
        StepExistsError: the step already exists.
        StorageError: of either place.
    """
    folder, only = _split_file(folder)
    step = check_step(step)
    request = ImportRequest(step, prefix, parse_dtype(dtype), ties or {}, replace, dry_run, only, Rules(rename))

    work = partial(convert_folder, request=request, on_written=on_written)
    return _start(checkpointer, folder, f"conversion of {_called(folder)}", work)


def _start(checkpointer: Checkpointer, folder: Place, what: str, convert: Convert) -> Future[Converted]:
    """Run *convert* on the checkpointer's loop, with the backend of *folder*."""

    async def run(steps: Destination) -> Converted:
        begun_ns = steps.engine.now_ns()
        place = open_backend(folder, world=steps.engine.world)
        try:
            done = await convert(steps, place)
            return msgspec.structs.replace(done, seconds=steps.engine.since_s(begun_ns))
        finally:
            if place is not folder:
                await place.close()

    return checkpointer.run_on_destination(what, run)


def _split_file(place: Place) -> tuple[Place, str | None]:
    """Return the folder of *place*, and the file name where *place* names a file."""
    if not isinstance(place, str | os.PathLike) or not os.fspath(place).endswith(SUFFIX):
        return place, None
    folder, slash, name = os.fspath(place).rpartition("/")
    folder = folder + "/" if folder.endswith("/") or (slash and not folder) else folder or "."
    return (folder if isinstance(place, str) else Path(folder)), name


def _called(place: Place) -> str:
    return redact(os.fspath(place)) if isinstance(place, str | os.PathLike) else place.url
