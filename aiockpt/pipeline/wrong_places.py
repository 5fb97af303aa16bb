"""Places that are named by mistake: the folder of one step, a folder above runs, weights of another program.

Training would begin from scratch there. The folder of a step is refused, by its name alone where that is unambiguous.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import anyio
import msgspec

from aiockpt.errors import CheckpointError, UsageError
from aiockpt.format.names import parse_attempt, parse_manifest, parse_step
from aiockpt.storage.backend import Backend, local_path

if TYPE_CHECKING:
    from aiockpt.runtime.world import Files

HINTS_S = 3.0
"""The longest delay by reads for hints."""
FOLDERS_LISTED, RUNS_SHOWN = 40, 5
RUNS_BELOW = 2
"""Of how many folders between the place and a run the names are given, at most."""
WEIGHTS = ".safetensors"


class _StepFolder(msgspec.Struct, frozen=True):
    """The last folder of a step in a URL, the part of the URL below it, and why that is refused."""

    path: str
    inside: list[str]
    refusal: str


@lru_cache
def _find_step_folder(url: str, given: str = "") -> _StepFolder | None:
    url = str(local_path(url) or url)
    parts = url.split("/")
    for at in range(len(parts) - 1, -1, -1):
        if (step := parse_step(parts[at])) is not None:
            inside, above = parts[at + 1 :], "/".join(parts[:at]) or "/"
            what = "is in the folder of one step" if inside else "is one step"
            refusal = f"{given}{url} {what}; give the folder above it, and the step: {above} {step}"
            return _StepFolder("/".join(parts[: at + 1]), inside, refusal)
    return None


def refuse_step_folder(url: str, files: Files | None) -> None:
    """Raise UsageError where *url* is the folder of a step, lies in it, leads there by links, or is a checkpoint of DCP.

    That is decided by its name and, for ``file://``, by the file system.

    Args:
        files: the file system of ``file://``; None decides by the name alone.
    """
    found = _find_step_folder(url)
    if (path := local_path(url)) is None:
        files = None
    elif files is not None:
        _refuse_dcp(str(path), files)
        if found is None and (real := os.path.realpath(path)) != str(path):
            found = _find_step_folder(real, f"{path} leads to ")
    if found is None:
        return
    names = found.inside[:1] + _names_in(found.path, files)
    if any(parse_attempt(name) is not None or parse_manifest(name) is not None for name in names):
        raise UsageError(found.refusal)


def _names_in(path: str, files: Files | None) -> list[str]:
    with suppress(OSError):
        return [] if files is None else files.listdir(path)
    return []


def _refuse_dcp(path: str, files: Files) -> None:
    with suppress(OSError):
        files.lstat(f"{path.rstrip('/')}/.metadata")  # long before a long listing
        if any(parse_step(name) is not None for name in files.listdir(path)):
            return
        raise UsageError(
            f"{path} is a checkpoint of torch.distributed.checkpoint, and no place for steps: give another folder. A run "
            f"begins from it by resume(state, fork='dcp://{path}'); aiockpt convert dcp://{path} RUN makes a step of it"
        )


async def refuse_step(backend: Backend) -> None:
    """Raise UsageError where the place of *backend* is the folder of a step. No request is made unless its name is one's.

    Raises:
        StorageError: it cannot be listed.
    """
    found = _find_step_folder(backend.url)
    if found is None or found.inside:
        return
    listing = await backend.list("")
    if any(parse_manifest(stat.key) is not None for stat in listing.objects):
        raise UsageError(found.refusal)


class Hints(msgspec.Struct, frozen=True):
    """The contents of a place without a step.

    Attributes:
        runs: some folders in it that hold steps.
        weights: a file of weights; empty where there is no such file.
    """

    runs: tuple[str, ...] = ()
    weights: str = ""

    def hints(self, place: str) -> list[str]:
        """Return what may have been meant instead of *place*, a path or a URL."""
        place = place.rstrip("/")
        hints = [f"{place}/{run} holds steps" for run in self.runs]
        if self.weights:
            hints.append(f"{place} holds weights, {self.weights}: `aiockpt convert {place} PLACE` makes a step of them")
        return hints


async def find_hints(backend: Backend) -> Hints:
    """Return what *backend* holds beside steps, as far as reads within `HINTS_S` show; a failed read is no error."""
    runs: list[str] = []
    weights = ""
    with anyio.move_on_after(HINTS_S), suppress(CheckpointError):
        listing = await backend.list("")
        weights = next((stat.key for stat in listing.objects if stat.key.endswith(WEIGHTS)), "")
        left = deque(listing.folders)
        for _ in range(FOLDERS_LISTED):
            if not left or len(runs) == RUNS_SHOWN:
                break
            folder = left.popleft()
            with suppress(CheckpointError):  # one that may not be read was not meant
                inside = (await backend.list(folder)).folders
                if any(parse_step(name.rpartition("/")[2]) is not None for name in inside):
                    runs.append(folder)
                elif folder.count("/") < RUNS_BELOW:
                    left.extend(inside)
    return Hints(tuple(runs), weights)
