"""Do all ranks see the place where they are about to save together? Asked once for each tier, before its first save.

Receipts in a place are the votes, so every rank must see what the others write there. A disk or a memory of one host is no
such place for a job on several hosts, whatever its URL looks like: without this question the save would wait for votes
that nobody will ever see, until its deadline. Rank 0 leaves an object and all others look for it; that also finds what no
name of a host would tell (two containers of one host, a folder that one of them did not mount).
"""

from __future__ import annotations

import platform
from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.coordinator import SaveRound
from aiockpt.engine.place import Place
from aiockpt.errors import CheckpointError, ObjectNotFoundError, UsageError
from aiockpt.pipeline.commit import Attempt
from aiockpt.ranks.rounds import Rounds
from aiockpt.ranks.storage_fallback import StorageFallback, hear_or_find
from aiockpt.runtime.notes import StoreLostError

LOOK_FOR_S = 10.0
"""A network file system may take a moment to show a new name."""
PAUSE_S = 0.05
_REASONS = {
    "process": "it is the memory of one process",
    "node": "it is the memory of one host",
    "shared": "it is a disk of one host, or is not mounted there",
}


class Probe(msgspec.Struct, frozen=True):
    """Rank 0's note: the object that it left, and its host, for people."""

    key: str
    host: str


class Visibility:
    """Whether all ranks see one tier.

    Args:
        seen: whether they are known to, so that nobody has to ask.
    """

    def __init__(self, place: Place, *, seen: bool) -> None:
        self._place = place
        self._note = f"place/{place.number}"
        self._asking = anyio.Lock()
        self._seen = seen

    @property
    def seen(self) -> bool:
        """Whether that is known, so that nobody has to ask again."""
        return self._seen

    async def check(self, rounds: Rounds, save_round: SaveRound, fallback: StorageFallback | None) -> None:
        """Return when this rank sees what rank 0 wrote; at once after the first time.

        Args:
            fallback: of the save that asks: rank 0's vote is an answer, too. None where its name is not known yet.

        Raises:
            UsageError: it does not; says what to do.
            RankError: another rank failed, or rank 0 is silent.
        """
        async with self._asking:
            if not self._seen:
                async with rounds.watching_failures(save_round):
                    self._seen = await self._look(rounds, save_round, fallback)

    async def _look(self, rounds: Rounds, save_round: SaveRound, fallback: StorageFallback | None) -> bool:
        """Look; return False when nobody can say what to look for: then the votes will show it, or their absence."""
        board, backend = rounds.board, self._place.backend
        with rounds.surviving_store():
            probe = await (
                self._hear_of_probe(rounds, save_round, fallback) if board.rank else self._leave_probe(rounds)
            )
            if isinstance(probe, Probe):
                try:
                    await self._look_for(probe, board.rank)
                finally:
                    if await board.arrive(f"{self._note}/{probe.key}") == board.world_size:
                        with suppress(CheckpointError):  # an empty object that stays harms nobody
                            await backend.delete([probe.key])
            return True
        return False

    async def _leave_probe(self, rounds: Rounds) -> Probe:
        probe = Probe(f".seen-{self._place.engine.token(6)}", platform.node())
        await self._place.backend.put(probe.key, b"")
        await rounds.board.post(self._note, probe)
        return probe

    async def _hear_of_probe(
        self, rounds: Rounds, save_round: SaveRound, fallback: StorageFallback | None
    ) -> Probe | Attempt:
        """Wait for rank 0's note, or for its vote."""

        async def hear(seconds: float) -> Probe | Attempt:
            return await rounds.board.wait(self._note, Probe, seconds, "the object")

        async def find(lost: bool) -> Probe | Attempt | None:
            if lost:
                raise StoreLostError("the store is lost", [0])
            return None if fallback is None else await fallback.begun()

        what = f"rank 0's object in {self._place.backend.url}"
        return await hear_or_find(self._place.engine, rounds, what, hear, find, waiting=rounds.waiting(save_round))

    async def _look_for(self, probe: Probe, rank: int) -> None:
        backend = self._place.backend
        with anyio.move_on_after(LOOK_FOR_S):
            while True:
                with suppress(ObjectNotFoundError):
                    await backend.stat(probe.key)
                    return
                await anyio.sleep(PAUSE_S)
        raise UsageError(
            f"{backend.url} is not one place for all ranks: rank {rank} on {platform.node()} does not see there what rank 0 "
            f"on {probe.host} wrote, because {_REASONS[backend.traits.scope]}. Ranks that save together vote there, so give "
            "a place that all of them share; a tier of one host is for jobs on one host"
        )
