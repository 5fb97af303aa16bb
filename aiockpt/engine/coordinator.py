"""The protocol of coordination with the other processes that save and load the same state.

`aiockpt.engine.alone` is the process that saves by itself; `aiockpt.ranks.coordinator` is one rank of a job. The choice is
made once, with the checkpointer; no other part of a save or a load asks for the number of ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiockpt.engine.job import Round, RoundName
from aiockpt.errors import RankTimeoutError
from aiockpt.runtime.notes import Lookout
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine
    from aiockpt.engine.find import StepPlaces
    from aiockpt.engine.load import Filled, LoadRequest

F = TypeVar("F")
N = TypeVar("N")


class LoadRound(Protocol):
    """One load of all ranks, on the loop."""

    async def load(self, places: StepPlaces, request: LoadRequest) -> Filled | None:
        """Fill a state; None only when no checkpoint exists at all. Raises as `aiockpt.engine.load.load`."""
        ...

    async def agree_applied(self, error: Exception | None) -> None:
        """Agree on whether the objects of each rank accepted their values; raise where they did not."""


class Coordinator(Protocol):
    """The coordination of the processes that save one state together. The bodies are those of a process by itself.

    Attributes:
        rank, world_size: which of them this process is.
        board_name: what distinguishes their notes from those of other jobs and checkpointers; empty without other ranks.
    """

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def board_name(self) -> str:
        return ""

    # ------------------------------------------------------------------ the calls; any thread, in the order of all ranks

    def begin(self, step: int) -> Round:
        """Return the round of a save that begins now; it identifies the save among the ranks."""
        ...

    def begin_load(self) -> LoadRound:
        """Return the round of a load that is called now."""
        ...

    def join(self, board_name: str, name: RoundName) -> Round:
        """Join the round *name* on the board *board_name*, which another process of this rank has begun and will leave."""
        ...

    def known_share(self, state: ShardedState) -> ShardedState | None:
        """Return the share of *state* that this process writes, if known; None where the ranks must plan it first.

        Any thread.
        """
        return state

    def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the others that this process makes no more calls; wait until that is posted.

        Args:
            failed: whether others may wait for it. Then this does not wait.
        """
        return

    def make_lookout(self, what: str, deadline_s: float) -> Lookout | None:
        """Return what ends a wait for *what* of other ranks once they have gone; on the loop. None without other ranks."""
        return None

    # ------------------------------------------------------------------ on the loop: what follows saves into several places

    async def post(self, key: str, note: object, outdated: Sequence[str] = ()) -> None:
        """Post a note for the others, as far as they can be reached, and remove those under *outdated* keys."""
        return

    async def receive(
        self,
        engine: Engine,
        key: str,
        kind: type[N],
        what: str,
        find: Callable[[], Awaitable[F | None]],
        *,
        pause_s: float,
        deadline_s: float,
    ) -> N | F:
        """Return the note that rank 0 posts under *key*; or, after a while without it, what *find* returns.

        Args:
            what: the awaited thing, in words.
            find: reads the storage, every *pause_s* seconds.

        Raises:
            RankTimeoutError: neither came within *deadline_s* seconds.
        """
        found = await find()
        if found is None:
            raise RankTimeoutError(f"{what}: not there, and there is no other rank to wait for", [])
        return found
