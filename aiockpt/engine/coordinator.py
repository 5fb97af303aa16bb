"""Coordination with the other processes that save and load the same state: the protocol, and a process without others.

`Alone` is the process that saves by itself; `aiockpt.ranks.coordinator` is one rank of a job. The choice is made once,
with the checkpointer; no other part of a save or a load asks for the number of ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiockpt.engine.round import SaveRound
from aiockpt.engine.save import SaveJob, save
from aiockpt.errors import RankTimeoutError
from aiockpt.futures import SaveResult
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine
    from aiockpt.engine.find import StepPlaces
    from aiockpt.engine.load import Filled, LoadRequest
    from aiockpt.engine.place import Place

F = TypeVar("F")
N = TypeVar("N")


class Coordinator(Protocol):
    """How the processes that save one state together act as one.

    Attributes:
        rank, world_size: which of them this process is.
        board_name: what distinguishes their notes from those of other jobs and checkpointers; empty where there are none.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def board_name(self) -> str: ...

    # ------------------------------------------------------------------ the calls; any thread, in the order of all ranks

    def next_round(self, step: int) -> SaveRound:
        """Return the round of a save that begins now, which says what the ranks mean."""
        ...

    def next_load(self) -> int:
        """Return the number of the load that is called now."""
        ...

    def share(self, save_round: SaveRound, state: ShardedState) -> tuple[ShardedState, bool]:
        """Return what this process writes of *state*, and whether that had to be planned with others: then it waited.

        Any thread but the loop's.

        Raises:
            RankError: the ranks cannot save this together.
        """
        ...

    def known_share(self, state: ShardedState) -> ShardedState | None:
        """Return what this process writes of *state* if known without the others; None where the ranks must plan it first.

        Any thread.
        """
        ...

    def abort(self, save_round: SaveRound, error: BaseException) -> None:
        """Notify the others, in the background, why this process takes no part in a round."""

    def leave(self, save_round: SaveRound) -> None:
        """Notify the others, in the background, that this process is done with a round."""

    def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the others that this process makes no more calls; wait until they can know.

        Args:
            failed: whether others may wait for it. Then this does not wait.
        """

    # ------------------------------------------------------------------ on the loop

    def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AbstractAsyncContextManager[None]:
        """Notify the others of what ends this block before `save` has begun.

        Args:
            places: where the save may be written to.
        """
        ...

    async def save(self, place: Place, job: SaveJob) -> SaveResult:
        """Save one state to a place; when this returns it is committed. Raises as `aiockpt.engine.save.save`."""
        ...

    async def load(self, places: StepPlaces, request: LoadRequest, number: int) -> Filled | None:
        """Fill a state; None only when no checkpoint exists at all. Raises as `aiockpt.engine.load.load`.

        Args:
            number: from `next_load`.
        """
        ...

    async def agree_applied(self, number: int, error: Exception | None) -> None:
        """Agree on whether the objects of each rank accepted what load *number* gave them; raise where they did not."""

    # ------------------------------------------------------------------ on the loop: several places, and a writer process

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        """Return the one of *places* that a save is written to: what *choose* returns on rank 0.

        Raises:
            RankError: rank 0 has not said it, and its vote is not found in any of them.
        """
        ...

    async def tell(self, key: str, note: object, outdated: Sequence[str] = ()) -> None:
        """Leave a note for the others, as far as they can be reached, and remove those under *outdated* keys."""

    async def hear(
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
        """Return the note that rank 0 leaves under *key*; or, after a while without it, what shows the same.

        Args:
            what: is waited for.
            find: reads the storage, every *pause_s* seconds.

        Raises:
            RankTimeoutError: neither came within *deadline_s* seconds.
        """
        ...

    def join(self, board_name: str) -> None:
        """Use the notes of that name, which another process of this rank has begun."""

    def name_attempt(self, save_round: SaveRound) -> str | None:
        """Return the nonce that a save has on all ranks; None where any will do. On the thread that copies: it may wait."""

    async def announce(self, job: SaveJob) -> None:
        """Say that this process knows what to write of a save that another one makes for it."""

    def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AbstractAsyncContextManager[None]:
        """Serve the others while the block waits for a save that another process makes, and leave its round.

        Args:
            places: where the save may be written to.
            died: returns how that process ended, if it has, and no other process goes on with the save.
        """
        ...


class Alone:
    """A process that saves and loads by itself. What notifies or awaits other ranks does nothing: there are none."""

    rank, world_size, board_name = 0, 1, ""

    def next_round(self, step: int) -> SaveRound:
        """Return the round of a process that saves alone."""
        return SaveRound(step)

    def next_load(self) -> int:
        """Return 0: loads are not counted."""
        return 0

    def share(self, save_round: SaveRound, state: ShardedState) -> tuple[ShardedState, bool]:
        """Return all of *state*."""
        return state, False

    def known_share(self, state: ShardedState) -> ShardedState | None:
        """Return all of *state*."""
        return state

    def abort(self, save_round: SaveRound, error: BaseException) -> None:
        """Does nothing."""

    def leave(self, save_round: SaveRound) -> None:
        """Does nothing."""

    def depart(self, reason: str, *, failed: bool) -> None:
        """Does nothing."""

    def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    async def save(self, place: Place, job: SaveJob) -> SaveResult:
        """Save one state; see `aiockpt.engine.save.save`."""
        return await save(place, job)

    async def load(self, places: StepPlaces, request: LoadRequest, number: int) -> Filled | None:
        """Fill a state; see `aiockpt.engine.load.load`."""
        from aiockpt.engine.load import load  # it loads torch, which a writer process (`aiockpt.worker`) need not

        return await load(places, request)

    async def agree_applied(self, number: int, error: Exception | None) -> None:
        """Raise *error*, if there is one: this process is all that there is."""
        if error is not None:
            raise error

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        """Return what *choose* returns."""
        return await choose()

    async def tell(self, key: str, note: object, outdated: Sequence[str] = ()) -> None:
        """Does nothing."""

    async def hear(
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
        """Return what *find* returns."""
        found = await find()
        if found is None:
            raise RankTimeoutError(f"{what}: not there, and there is no other rank to wait for", [])
        return found

    def join(self, board_name: str) -> None:
        """Does nothing."""

    def name_attempt(self, save_round: SaveRound) -> str | None:
        """Return None: any will do."""
        return None

    async def announce(self, job: SaveJob) -> None:
        """Does nothing."""

    def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()
