"""What does a rank owe the others in a save that its writer makes? A name, a note, a word for a dead writer, and its leave.

The writer tells the story of the save (`aiockpt.ranks.save`); the trainer plans it, and is there before and after.
Guarantees:

- Every turn is left once, by the trainer, however the save ends.
- A writer that dies has its save withdrawn before the others hear of it: they neither commit it nor wait for it. Where it
  had voted and the commit is decided, they hear of no failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiockpt.engine.context import Engine
from aiockpt.engine.job import SaveJob
from aiockpt.runtime.notes import StoreLostError
from aiockpt.tiers.tiers import Tiers
from aiockpt.worker.connection import PendingSave


def name_attempt(engine: Engine, job: SaveJob) -> str:
    """Return the nonce of a save that begins: with other ranks the one that all give it. On the thread that copies."""
    coordinator, save_round = engine.coordinator, job.save_round
    if coordinator is None or save_round is None:
        return engine.token(6)
    return coordinator.known_nonce(save_round) or engine.loop.submit(coordinator.attempt_nonce, save_round).result()


async def agree(engine: Engine, job: SaveJob) -> None:
    """Say that this rank knows what to write, when it did not have to ask; its writer saves without the note, too."""
    coordinator, save_round = engine.coordinator, job.save_round
    if coordinator is not None and save_round is not None and not job.agreed:
        with suppress(StoreLostError):
            await coordinator.announce(save_round)


@asynccontextmanager
async def taking_part(tiers: Tiers, job: SaveJob, pending: PendingSave) -> AsyncIterator[None]:
    """Be there for the other ranks while the block waits for what becomes of a save, and leave its turn."""
    coordinator, save_round = tiers.engines[0].coordinator, job.save_round
    if coordinator is None or save_round is None:
        yield
        return
    try:
        yield
    except BaseException:
        coordinator.invalidate()
        if pending.orphaned:  # reaped: nobody writes, votes or commits in this rank's name any more
            await tiers.abort_attempt(job, pending.connection.death())
        raise
    finally:
        await coordinator.leave(save_round)
