"""What does a rank owe the others in a save that its writer makes? A name, a note, a word for a dead writer, and its leave.

The writer tells the story of the save (`aiockpt.engine.together`); the trainer plans it, and is there before and after.
Guarantees:

- Every turn is left once, by the trainer, however the save ends.
- A writer that dies has its save withdrawn before the others hear of it: they neither commit it nor wait for it. Where it
  had voted and the commit is decided, they hear of no failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiockpt.engine.context import Engine
from aiockpt.engine.ticket import Ticket
from aiockpt.engine.tiers import Tiers
from aiockpt.runtime.meeting import StoreLostError
from aiockpt.worker.connection import Errand


def name_attempt(engine: Engine, ticket: Ticket) -> str:
    """Return the nonce of a save that begins: with other ranks the one that all give it. On the thread that copies."""
    sharing, turn = engine.sharing, ticket.turn
    if sharing is None or turn is None:
        return engine.token(6)
    return sharing.known_nonce(turn) or engine.loop.submit(sharing.attempt_nonce, turn).result()


async def agree(engine: Engine, ticket: Ticket) -> None:
    """Say that this rank knows what to write, when it did not have to ask; its writer saves without the note, too."""
    sharing, turn = engine.sharing, ticket.turn
    if sharing is not None and turn is not None and not ticket.agreed:
        with suppress(StoreLostError):
            await sharing.announce(turn)


@asynccontextmanager
async def taking_part(tiers: Tiers, ticket: Ticket, errand: Errand) -> AsyncIterator[None]:
    """Be there for the other ranks while the block waits for what becomes of a save, and leave its turn."""
    sharing, turn = tiers.engines[0].sharing, ticket.turn
    if sharing is None or turn is None:
        yield
        return
    try:
        yield
    except BaseException:
        sharing.doubt()
        if errand.orphaned:  # reaped: nobody writes, votes or commits in this rank's name any more
            await tiers.withdraw(ticket, errand.connection.death())
        raise
    finally:
        await sharing.leave(turn)
