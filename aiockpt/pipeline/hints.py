"""What is in a place that holds no step? Perhaps another place was meant, and training would begin from nothing."""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec

from aiockpt.errors import CheckpointError
from aiockpt.format.names import LATEST_KEY, check_step_id, parse_manifest, parse_step
from aiockpt.storage.backend import Backend

LOOK_S = 3.0
"""How long whoever found nothing is held up by this."""
FOLDERS_LOOKED_INTO, RUNS_SHOWN = 20, 5
WEIGHTS = ".safetensors"


class Hints(msgspec.Struct, frozen=True):
    """What a place without a step holds.

    Attributes:
        is_step: it is the folder of one step itself.
        runs: folders in it that hold steps, some at most.
        weights: a file of weights; empty where there is none.
        hint: what its hint says that the newest step was, which is not there any more; empty where there is none.
    """

    is_step: bool = False
    runs: tuple[str, ...] = ()
    weights: str = ""
    hint: str = ""

    def hints(self, place: str) -> list[str]:
        """Say what may have been meant instead of *place*, a path or a URL."""
        place = place.rstrip("/")
        hints = []
        if self.is_step:
            hints.append(f"{place} is one step: give the place above it")
        hints += [f"{place}/{run} holds steps" for run in self.runs]
        if self.hint:
            hints.append(f"{place} has held steps, the last of them {self.hint}: they were moved away or deleted")
        if self.weights:
            hints.append(f"{place} holds weights, {self.weights}: `aiockpt convert {place} PLACE` makes a step of them")
        return hints


async def look_for_hints(backend: Backend) -> Hints:
    """Return what *backend* holds beside steps, as far as it says so soon; that it cannot be read is no error here."""
    found = Hints()
    with anyio.move_on_after(LOOK_S), suppress(CheckpointError):
        listing = await backend.list("")
        names = [stat.key for stat in listing.objects]
        is_step = any(parse_manifest(name) is not None for name in names)
        found = Hints(is_step=is_step, weights=next((name for name in names if name.endswith(WEIGHTS)), ""))
        if LATEST_KEY in names and not any(parse_step(folder) is not None for folder in listing.folders):
            found = msgspec.structs.replace(found, hint=await _read_hint(backend))
        for folder in () if is_step else listing.folders[:FOLDERS_LOOKED_INTO]:
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
