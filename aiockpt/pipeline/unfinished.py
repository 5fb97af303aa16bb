"""Newer steps that were begun and not committed, which a load logs.

A writer process outlives its trainer, and the next trainer may load before the writer is done. From the storage alone
that cannot be distinguished from a save whose job died, so the known facts are logged: the votes, and the date of the
last write. Nothing is decided here, no writer is waited for, and no load fails because of it. An incomplete upload to
an object store is not visible.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import anyio

from aiockpt.errors import CheckpointError
from aiockpt.format.manifest import decode_receipt
from aiockpt.format.names import attempt_folder, parse_failure, parse_receipt
from aiockpt.pipeline.discover import StepAt
from aiockpt.runtime.world import Clock
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, read_record, walk

logger = logging.getLogger("aiockpt")

LISTING_S = 3.0
"""The longest delay of a load by that."""
LIVELY_S = 60.0
"""A writer whose last write is more recent may still run: that is logged as a warning."""


async def log_newer(unfinished: Sequence[StepAt], newest: int | None, busy: Collection[str], clock: Clock) -> None:
    """Log the attempts at the newest step above *newest* that was begun and not committed.

    Args:
        newest: the number of the newest committed step; None where there is none, and a program begins from scratch.
        busy: the attempts under way in this process.
    """
    newer = [one for one in unfinished if newest is None or one.entry.step > newest]
    if not newer:
        return
    top = max(newer, key=lambda one: one.entry.step)
    step_id, url = top.entry.id, top.backend.url
    with anyio.move_on_after(LISTING_S):
        for attempt in top.entry.attempts:
            if attempt in busy:
                continue
            try:
                level, said = await _describe_attempt(top.backend, step_id, attempt, clock, alone=newest is None)
            except CheckpointError as error:
                level, said = logging.INFO, f"was begun and not committed: {error}"
            if said:
                logger.log(level, "%s in %s %s", step_id, url, said)


async def _describe_attempt(
    backend: Backend, step_id: str, attempt: str, clock: Clock, *, alone: bool
) -> tuple[int, str]:
    """Return the level and the text to log of an attempt; "" logs nothing.

    It is a warning where the writer may be alive, or where the attempt is the only trace of a run (*alone*).
    """
    folder = attempt_folder(step_id, attempt)
    left = [stat async for stat in walk(backend, folder)]
    if any(parse_failure(stat.key.rpartition("/")[2]) is not None for stat in left):
        return logging.INFO, ""  # aborted: it can no longer be committed
    if not left:  # any other object under the name of a record is damage
        listing = await backend.list(folder)
        names = [key.rpartition("/")[2] for key in (*listing.folders, *listing.others)]
        remains = ", ".join(name for name in names if name not in ("d", "r"))
        said = f"was begun and cannot be loaded: of attempt {attempt} there is no file, but {remains}"
        return logging.WARNING, said if remains else ""
    said = "it was not written completely"
    votes = [
        stat.key
        for stat in left
        if parse_receipt(stat.key.rpartition("/")[2]) is not None and stat.size <= RECORD_LIMIT_BYTES
    ]
    if votes:  # each of them states the world size
        vote = decode_receipt(await read_record(backend, votes[0]), votes[0])
        if vote.world_size > 1:
            said = f"{len(votes)} of {vote.world_size} ranks have voted"
    ago_s = max(0.0, (clock.time_ns() - max(stat.modified_ns for stat in left)) / 1e9)
    return (
        logging.WARNING if alone or ago_s < LIVELY_S else logging.INFO,
        f"was begun and is not committed, so it is not loaded: {said}, last written {ago_s:.0f} s ago (attempt {attempt}). "
        "Its job has died, or a writer of it is still at work (a process with `-m aiockpt.worker`): then wait for it, and "
        "load again",
    )
