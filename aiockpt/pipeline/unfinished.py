"""Is a newer step being written while another one is loaded? What a load says of it, as nobody else would.

A writer process outlives its trainer, and the next trainer may look before it is done. From the storage alone that cannot
be told from a save whose job died, so what is known is said: the votes, and when something was last written.

Guarantees: nothing is decided here, no writer is waited for, and no load fails of it. What an object store does not show
(an upload that is not complete) is not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import anyio
import msgspec

from aiockpt.errors import CheckpointError
from aiockpt.format.manifest import decode_receipt
from aiockpt.format.names import attempt_folder, parse_failure, parse_receipt
from aiockpt.pipeline.discover import StepEntry
from aiockpt.runtime.world import Clock
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, read_record, walk

logger = logging.getLogger("aiockpt")

LOOK_S = 3.0
"""How long a load may be held up by that."""
LIVELY_S = 60.0
"""Who has written something so lately may be at work still: worth a warning."""


class Unfinished(msgspec.Struct, frozen=True):
    """A step that was begun and not committed, and where; *busy* are the attempts that this process is at."""

    backend: Backend
    entry: StepEntry
    busy: Collection[str]


async def tell_of_newer(unfinished: Sequence[Unfinished], newest: int | None, clock: Clock) -> None:
    """Log what there is of the newest step above *newest* that was begun and not committed.

    Args:
        newest: the number of the newest committed step; None where there is none, so that a program begins from nothing.
    """
    newer = [one for one in unfinished if newest is None or one.entry.step > newest]
    if not newer:
        return
    top = max(newer, key=lambda one: one.entry.step)
    with anyio.move_on_after(LOOK_S):
        for attempt in top.entry.attempts:
            if attempt in top.busy:
                continue
            try:
                await _tell(top.backend, top.entry.id, attempt, clock, alone=newest is None)
            except CheckpointError as error:
                logger.info("%s in %s was begun and not committed: %s", top.entry.id, top.backend.url, error)


async def _tell(backend: Backend, step_id: str, attempt: str, clock: Clock, *, alone: bool) -> None:
    """Log one attempt: a warning where its writer may live, or where it is all that there is of a run (*alone*)."""
    left = [stat async for stat in walk(backend, attempt_folder(step_id, attempt))]
    if any(parse_failure(stat.key.rpartition("/")[2]) is not None for stat in left):
        return  # given up: nobody can commit it
    if not left:
        await _tell_of_remains(backend, step_id, attempt)
        return
    said = "it was not written completely"
    votes = [
        stat.key
        for stat in left
        if parse_receipt(stat.key.rpartition("/")[2]) is not None and stat.size <= RECORD_LIMIT_BYTES
    ]
    if votes:  # one of them says how many there will be
        vote = decode_receipt(await read_record(backend, votes[0]), votes[0])
        if vote.world_size > 1:
            said = f"{len(votes)} of {vote.world_size} ranks have voted"
    ago_s = max(0.0, (clock.time_ns() - max(stat.modified_ns for stat in left)) / 1e9)
    logger.log(
        logging.WARNING if alone or ago_s < LIVELY_S else logging.INFO,
        "%s in %s was begun and is not committed, so it is not loaded: %s, last written %.0f s ago (attempt %s). Its job has"
        " died, or a writer of it is still at work (a process with `-m aiockpt.worker`): then wait for it, and load again",
        step_id,
        backend.url,
        said,
        ago_s,
        attempt,
    )


async def _tell_of_remains(backend: Backend, step_id: str, attempt: str) -> None:
    """Log an attempt without a file, if there is something else in it that has the name of a record: it was damaged."""
    listing = await backend.list(attempt_folder(step_id, attempt))
    names = [key.rpartition("/")[2] for key in (*listing.folders, *listing.others)]
    remains = [name for name in names if name not in ("d", "r")]
    if remains:
        logger.warning(
            "%s in %s was begun and cannot be loaded: of attempt %s there is no file, but %s",
            step_id,
            backend.url,
            attempt,
            ", ".join(remains),
        )
