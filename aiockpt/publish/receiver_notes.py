"""Notes of receivers beside the versions: which version each reads, renewed while the receiver lives.

Guarantee: a note counts for `LIVES_S` seconds after its last renewal, by the storage's clock.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from aiockpt.errors import CheckpointError
from aiockpt.format.document import described
from aiockpt.storage.backend import Backend, Stat
from aiockpt.storage.transfer import get_many, storage_now_ns

logger = logging.getLogger("aiockpt")

FOLDER = "receivers"
RENEW_S = 60.0
LIVES_S = 10 * RENEW_S
FORGOTTEN_S = 24 * 3600.0
"""After that time the next publication removes a note, so that nobody is shown one for ever; a receiver that comes back
writes it again."""
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


async def write_note(backend: Backend, name: str, version: int, step: int, needs: int) -> None:
    """Write or renew the note of a receiver; not in a place that can only be read."""
    note = ReceiverNote(name=name, version=version, step=step, needs=needs, host=socket.gethostname())
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


async def has_versions(backend: Backend) -> bool:
    """Return whether *backend* is a place of versions; torch is not imported for it."""
    return any(name.startswith("weight_v") for name in (await backend.list("")).folders)


async def living_receivers(backend: Backend, nonce: str) -> list[ReceiverNote]:
    """Return the notes of the receivers that live; remove those that are older than `FORGOTTEN_S`."""
    there = (await backend.list(FOLDER)).objects
    if not there:
        return []
    now_ns = await storage_now_ns(backend, nonce)
    forgotten = [stat for stat in there if now_ns - stat.modified_ns > FORGOTTEN_S * 1e9]
    await backend.delete([stat.key for stat in forgotten])
    notes = await _read(backend, [stat for stat in there if stat not in forgotten], now_ns)
    return [note for note, noted_s in notes if noted_s <= LIVES_S]


async def read_notes(backend: Backend, now_ns: int) -> list[tuple[ReceiverNote, float]]:
    """Return all notes, also of receivers that have died, and how many seconds before *now_ns* they were written."""
    return await _read(backend, (await backend.list(FOLDER)).objects, now_ns)


async def _read(backend: Backend, there: Sequence[Stat], now_ns: int) -> list[tuple[ReceiverNote, float]]:
    notes = []
    for stat, data in zip(there, await get_many(backend, [stat.key for stat in there], NOTE_BYTES), strict=True):
        with suppress(msgspec.MsgspecError):  # it is nobody's
            if data is not None:
                note = msgspec.json.decode(data, type=described(ReceiverNote))
                notes.append((note, max(now_ns - stat.modified_ns, 0) / 1e9))
    return notes
