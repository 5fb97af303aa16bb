"""The state of a place of versions at this moment: its newest version, and where each receiver is."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from aiockpt.errors import StorageError
from aiockpt.publish.form import CHAIN
from aiockpt.publish.receiver_notes import LIVES_S, RENEW_S, read_notes
from aiockpt.publish.version_chain import VersionChain
from aiockpt.publish.versions import Versions
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import storage_now_ns

SILENT_S = 3 * RENEW_S
"""Seconds without a note after which a receiver is shown as silent."""


class ReceiverNow(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver.

    Attributes:
        version, step: that it was given last; -1 before the first.
        behind: how many versions newer the newest one is.
        keeps: the lowest number of a version that stays for it; None where none does.
        noted_s: seconds since its last note.
    """

    name: str
    host: str
    version: int
    step: int
    behind: int
    keeps: int | None
    noted_s: float

    @property
    def is_silent(self) -> bool:
        """Whether its note is overdue."""
        return self.noted_s > SILENT_S


class PlaceNow(msgspec.Struct, frozen=True, kw_only=True):
    """A place of versions.

    Attributes:
        version, step, kind, bytes, weight_bytes: of the newest version; bytes are those of its files.
        published_s: seconds since then.
        oldest: number of the oldest version; *count*: of versions, folds are none.
        receivers: those that are furthest behind first.
    """

    ended: ClassVar[bool] = False
    version: int
    step: int
    kind: str
    bytes: int
    weight_bytes: int
    published_s: float
    oldest: int
    count: int
    receivers: list[ReceiverNow]


class PlaceWatch:
    """Reads the versions and the receivers' notes in one place; for one task."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._world = World()
        self._versions = Versions(backend, self._world)
        self._chain = VersionChain(self._versions)
        self._ahead_ns: int | None = None

    async def poll(self) -> PlaceNow | None:
        """Return the state of the place; None where it has no version."""
        if self._ahead_ns is None:
            self._ahead_ns = await self._compare_clocks()
        if (newest := await self._chain.newest()) is None:
            return None
        now_ns = self._world.clock.time_ns() + self._ahead_ns
        receivers = [
            ReceiverNow(
                name=note.name,
                host=note.host,
                version=note.version,
                step=note.step,
                behind=newest.number - note.version,
                keeps=note.needs if note.needs >= 0 and noted_s <= LIVES_S else None,
                noted_s=noted_s,
            )
            for note, noted_s in await read_notes(self._backend, now_ns)
        ]
        numbers = (await self._versions.list())[CHAIN]
        return PlaceNow(
            version=newest.number,
            step=newest.notes.step,
            kind=newest.notes.kind,
            bytes=newest.file_bytes,
            weight_bytes=newest.notes.weight_bytes,
            published_s=max(now_ns - newest.notes.created_ns, 0) / 1e9,
            oldest=min(numbers),
            count=len(numbers),
            receivers=sorted(receivers, key=lambda one: (-one.behind, one.name)),
        )

    async def _compare_clocks(self) -> int:
        """Return how far the storage's clock, which dates the notes, is ahead; 0 where nothing can be written."""
        try:
            return await storage_now_ns(self._backend, self._world.token(6).hex()) - self._world.clock.time_ns()
        except StorageError:
            return 0
