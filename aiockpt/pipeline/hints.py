"""Places that are given by mistake: the folder of one step, a folder above runs, weights of somebody else.

Training would begin from nothing there. The folder of a step is refused, by its name alone where that is free of doubt.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import unquote

import anyio
import msgspec

from aiockpt.errors import CheckpointError, UsageError
from aiockpt.format.names import LATEST_KEY, check_step_id, parse_attempt, parse_manifest, parse_step
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from aiockpt.runtime.world import Files

LOOK_S = 3.0
"""How long whoever found nothing is held up by this."""
FOLDERS_LOOKED_INTO, RUNS_SHOWN = 20, 5
WEIGHTS = ".safetensors"


class Hints(msgspec.Struct, frozen=True):
    """What a place without a step holds.

    Attributes:
        runs: folders in it that hold steps, some at most.
        weights: a file of weights; empty where there is none.
        hint: what its hint says that the newest step was, which is not there any more; empty where there is none.
    """

    runs: tuple[str, ...] = ()
    weights: str = ""
    hint: str = ""

    def hints(self, place: str) -> list[str]:
        """Say what may have been meant instead of *place*, a path or a URL."""
        place = place.rstrip("/")
        hints = [f"{place}/{run} holds steps" for run in self.runs]
        if self.hint:
            hints.append(f"{place} has held steps, the last of them {self.hint}: they were moved away or deleted")
        if self.weights:
            hints.append(f"{place} holds weights, {self.weights}: `aiockpt convert {place} PLACE` makes a step of them")
        return hints


class _StepFolder:
    """A place whose URL has a part that is called like a step; *step* is its number, None where there is no such part."""

    def __init__(self, url: str) -> None:
        self.url = unquote(url.removeprefix("file://")) if url.startswith("file://") else url
        parts = self.url.split("/")
        steps = [number for number, part in enumerate(parts) if parse_step(part) is not None]
        at = steps[-1] if steps else 0
        self.step = parse_step(parts[at])
        self.above, self.folder, self.inside = "/".join(parts[:at]), "/".join(parts[: at + 1]), parts[at + 1 :]

    def refusal(self) -> UsageError:
        what = "is in the folder of one step" if self.inside else "is one step"
        return UsageError(f"{self.url} {what}; give the folder above it, and the step: {self.above or '/'} {self.step}")


def refuse_step_folder(url: str, files: Files | None) -> None:
    """Raise UsageError where *url* is the folder of a step, or lies in it, as its name and the file system show.

    Args:
        files: the file system of ``file://``; None asks none.
    """
    found = _StepFolder(url)
    if found.step is None:
        return
    names = found.inside[:1]
    if files is not None and url.startswith("file://"):
        with suppress(OSError):
            names += files.listdir(found.folder)
    if any(parse_attempt(name) is not None or parse_manifest(name) is not None for name in names):
        raise found.refusal()


async def refuse_step(backend: Backend) -> None:
    """Raise UsageError where the place of *backend* is the folder of a step. Free of requests unless it is called like one.

    Raises:
        StorageError: it cannot be listed.
    """
    found = _StepFolder(backend.url)
    if found.step is not None and not found.inside:
        names = [stat.key for stat in (await backend.list("")).objects]
        if any(parse_manifest(name) is not None for name in names):
            raise found.refusal()


async def look_for_hints(backend: Backend) -> Hints:
    """Return what *backend* holds beside steps, as far as it says so soon; that it cannot be read is no error here."""
    found = Hints()
    with anyio.move_on_after(LOOK_S), suppress(CheckpointError):
        listing = await backend.list("")
        names = [stat.key for stat in listing.objects]
        found = Hints(weights=next((name for name in names if name.endswith(WEIGHTS)), ""))
        if LATEST_KEY in names and not any(parse_step(folder) is not None for folder in listing.folders):
            found = msgspec.structs.replace(found, hint=await _read_hint(backend))
        for folder in listing.folders[:FOLDERS_LOOKED_INTO]:
            if len(found.runs) < RUNS_SHOWN and await _holds_steps(backend, folder):
                found = msgspec.structs.replace(found, runs=(*found.runs, folder))
    return found


async def _read_hint(backend: Backend) -> str:
    with suppress(CheckpointError, UnicodeDecodeError):  # it is garbage then, and says nothing
        return check_step_id((await backend.get(LATEST_KEY, 200)).decode().strip())
    return ""


async def _holds_steps(backend: Backend, folder: str) -> bool:
    with suppress(CheckpointError):  # one that may not be read was not meant
        inside = await backend.list(folder)
        return any(parse_step(name.rpartition("/")[2]) is not None for name in inside.folders)
    return False
