"""Notes of receivers beside the versions: which version each reads, renewed while the receiver lives.

Guarantee: a note counts for `LIVES_S` seconds after its last renewal, by the storage's clock.
"""

from __future__ import annotations

import logging
import os
import socket

import msgspec

from aiockpt.errors import CheckpointError, ObjectNotFoundError
from aiockpt.format.document import described
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import storage_now_ns

logger = logging.getLogger("aiockpt")

FOLDER = "receivers"
RENEW_S = 60.0
LIVES_S = 10 * RENEW_S
NOTE_BYTES = 1 << 16


class ReceiverNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver has.

    Attributes:
        version, step: that were handed out last; -1 before the first.
        needs: the lowest number of a version that it reads now.
    """

    name: str
    version: int
    step: int
    needs: int
    host: str = ""
    pid: int = 0


async def write_note(backend: Backend, name: str, version: int, step: int, needs: int) -> None:
    """Write or renew the note of a receiver; not in a place that can only be read."""
    note = ReceiverNote(name=name, version=version, step=step, needs=needs, host=socket.gethostname(), pid=os.getpid())
    try:
        await backend.put(f"{FOLDER}/{name}.json", msgspec.json.encode(note))
    except CheckpointError as error:
        logger.debug("no note of receiver %s at %s: %s", name, backend.url, error)


async def remove_note(backend: Backend, name: str) -> None:
    """Remove the note of a receiver that ends."""
    try:
        await backend.delete([f"{FOLDER}/{name}.json"])
    except CheckpointError as error:
        logger.debug("the note of receiver %s stays at %s: %s", name, backend.url, error)


async def living_receivers(backend: Backend, nonce: str) -> list[ReceiverNote]:
    """Return the notes of the receivers that live."""
    there = (await backend.list(FOLDER)).objects
    if not there:
        return []
    now_ns = await storage_now_ns(backend, nonce)
    notes = []
    for stat in there:
        if now_ns - stat.modified_ns > LIVES_S * 1e9:
            continue
        try:
            data = await backend.get(stat.key, NOTE_BYTES)
            notes.append(msgspec.json.decode(data, type=described(ReceiverNote)))
        except (ObjectNotFoundError, msgspec.MsgspecError):
            continue  # it has ended at this moment, or is nobody's
    return notes
