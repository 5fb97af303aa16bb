"""Coordination with the other processes that save and load the same state: the protocol, and a process without others.

`Alone` is the process that saves by itself; `aiockpt.ranks.coordinator` is one rank of a job. The choice is made once,
with the checkpointer; no other part of a save or a load asks for the number of ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiockpt.engine.job import Round, RoundName, SaveJob
from aiockpt.engine.save import save_alone
from aiockpt.errors import RankTimeoutError
from aiockpt.state.shards import ShardedState

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine
    from aiockpt.engine.find import StepPlaces
    from aiockpt.engine.load import Filled, LoadRequest
    from aiockpt.engine.place import Place

F = TypeVar("F")
N = TypeVar("N")


class LoadRound(Protocol):
    """One load of all ranks, on the loop."""

    async def load(self, places: StepPlaces, request: LoadRequest) -> Filled | None:
        """Fill a state; None only when no checkpoint exists at all. Raises as `aiockpt.engine.load.load`."""
        ...

    async def agree_applied(self, error: Exception | None) -> None:
        """Agree on whether the objects of each rank accepted what they were given; raise where they did not."""


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

    def begin(self, step: int) -> Round:
        """Return the round of a save that begins now, which says what the ranks mean."""
        ...

    def begin_load(self) -> LoadRound:
        """Return the round of a load that is called now."""
        ...

    def join(self, board_name: str, name: RoundName) -> Round:
        """Return a round that another process of this rank has begun, whose notes have that name, and will leave."""
        ...

    def known_share(self, state: ShardedState) -> ShardedState | None:
        """Return what this process writes of *state* if known without the others; None where the ranks must plan it first.

        Any thread.
        """
        ...

    def depart(self, reason: str, *, failed: bool) -> None:
        """Notify the others that this process makes no more calls; wait until they can know.

        Args:
            failed: whether others may wait for it. Then this does not wait.
        """

    # ------------------------------------------------------------------ on the loop: what follows saves into several places

    async def post(self, key: str, note: object, outdated: Sequence[str] = ()) -> None:
        """Leave a note for the others, as far as they can be reached, and remove those under *outdated* keys."""

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
        """Return the note that rank 0 leaves under *key*; or, after a while without it, what shows the same.

        Args:
            what: is waited for.
            find: reads the storage, every *pause_s* seconds.

        Raises:
            RankTimeoutError: neither came within *deadline_s* seconds.
        """
        ...


class Alone:
    """A process that saves and loads by itself. What notifies or awaits other ranks does nothing: there are none."""

    rank, world_size, board_name = 0, 1, ""

    def begin(self, step: int) -> Round:
        return RoundAlone(RoundName(step))

    def begin_load(self) -> LoadRound:
        return LoadAlone()

    def join(self, board_name: str, name: RoundName) -> Round:
        return RoundAlone(name)

    def known_share(self, state: ShardedState) -> ShardedState | None:
        return state

    def depart(self, reason: str, *, failed: bool) -> None: ...
    async def post(self, key: str, note: object, outdated: Sequence[str] = ()) -> None: ...

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
        """Return what *find* returns."""
        found = await find()
        if found is None:
            raise RankTimeoutError(f"{what}: not there, and there is no other rank to wait for", [])
        return found


class RoundAlone:
    """A save of a process by itself: all of the state is its own, and there are no others to notify."""

    save = staticmethod(save_alone)

    def __init__(self, name: RoundName) -> None:
        self.name = name

    def share(self, state: ShardedState) -> ShardedState:
        return state

    def name_attempt(self) -> str | None:
        return None

    def abort(self, error: BaseException) -> None: ...
    def leave(self) -> None: ...
    async def announce(self) -> None: ...

    def taking_part(self, job: SaveJob, places: Sequence[Place]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def choose_place(
        self, job: SaveJob, places: Sequence[Place], choose: Callable[[], Awaitable[Place]]
    ) -> Place:
        return await choose()

    def accompanying(
        self, job: SaveJob, places: Sequence[Place], died: Callable[[], Exception | None]
    ) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class LoadAlone:
    """A load of a process by itself."""

    async def load(self, places: StepPlaces, request: LoadRequest) -> Filled | None:
        from aiockpt.engine.load import load  # it loads torch, which a writer process (`aiockpt.worker`) need not

        return await load(places, request)

    async def agree_applied(self, error: Exception | None) -> None:
        if error is not None:
            raise error
