"""Notes that the ranks of one job exchange, small and fast, in a c10d store; never a collective.

The store (of ``torch.distributed``, or any with its verbs) is the fast wake-up; what is *true* of a checkpoint stands in
storage (docs/format.md#the-commit). Guarantees:

- No process group is used: training's collectives are never mixed with ours.
- Every wait has a deadline and names the ranks it waited for. None blocks inside the store, whose client serves one call
  at a time: a waiter polls. The `Lookout` of a wait may log which ranks it is for, and end it before its deadline.
- A note is written once, by one rank, which removes it when every rank is done with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from aiockpt.errors import CheckpointError, RankFailedError, RankTimeoutError
from aiockpt.format.document import described
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.units import name_numbers

T = TypeVar("T")
FIRST_PAUSE_S, GROWTH = 0.001, 1.5
LAST_PAUSE_S, LAST_PAUSE_OF_A_RANK_S = 0.2, 0.001
"""Between two polls of the store: with more ranks each polls less often, so that a store serves 10,000 of them."""
RELAYED_LAST_PAUSE_S = 0.03
"""The same for a writer process, each of whose polls takes time from its trainer."""
ADMITTED_LAST_PAUSE_S = 0.05
"""The same on rank 0 while ranks are to be admitted, beside its other work."""
_SHOWN = 8
EVERYWHERE = "//"
"""How keys begin whose notes are of no incarnation: for messages alone."""


class StoreLostError(RankFailedError):
    """The store no longer answers; the process that hosts it, most often rank 0, may simply have ended normally."""


class Lookout(Protocol):
    """Checks other ranks during a wait for them; see `aiockpt.ranks.membership`."""

    async def check_ranks(self, ranks: Iterable[int]) -> Exception | None:
        """Return the error if one of *ranks* has gone; None while all may answer."""
        ...

    async def explain(self, ranks: Sequence[int]) -> str:
        """Return what is known of *ranks*, which missed the deadline."""
        ...


class NoteBoard:
    """One rank's access to the notes of one engine. Use on its event loop.

    Notes are those of one incarnation. Until that is known, calls here wait for rank 0: without a deadline, except for those
    that have one.

    Args:
        incarnation: of the ranks; it may not be known yet.
        part: what the notes are about; `begin` distinguishes several boards about one part in one process.
        relayed: whether the store is read through another process; this one may outlive it.
    """

    def __init__(self, incarnation: Incarnation, part: str = "saves", *, relayed: bool = False) -> None:
        self.rank = incarnation.rank
        self.world_size = incarnation.world_size
        self.relayed = relayed
        self.place = incarnation.place
        self._incarnation = incarnation
        self._store = incarnation.store
        self._part = part
        self._number: int | None = None
        self._prefix = incarnation.prefix(incarnation.id) if incarnation.id else ""
        self._looks_again = False
        self._calls = Limiter("store", 1)
        usual_s = min(LAST_PAUSE_S, 0.004 + LAST_PAUSE_OF_A_RANK_S * self.world_size)
        self._last_pause_s = max(usual_s, RELAYED_LAST_PAUSE_S) if relayed else usual_s

    @property
    def begun(self) -> bool:
        """Whether `begin` has been called, and the store answered."""
        return self._number is not None

    @property
    def entered(self) -> bool:
        """Whether the incarnation is known."""
        return bool(self._prefix) and not self._looks_again

    @property
    def name(self) -> str:
        """The key prefix of its notes, different from those of all other boards; empty before it is known."""
        return f"{self._prefix}/{self._part}/{self._number}" if self.begun and self.entered else ""

    def join(self, name: str) -> None:
        """Use the board of that *name*, which another process of this rank has begun."""
        self._prefix, self._part, number = name.rsplit("/", 2)
        self._number = int(number)

    def begin(self) -> None:
        """Choose a name that no other board has, with the first call that all ranks make in the same order.

        Not before: one rank alone may have made a checkpointer only to read. Blocks for one call of the store, once. If that
        fails, every later call here raises: the caller, a training thread, receives the error from its future.
        """
        if self._number is None:
            with suppress(RuntimeError, OSError):
                # Rank 0 may have been started again since this rank made its checkpointer.
                self._looks_again = not self._incarnation.id
                self._number = self._incarnation.count_board(self._part)

    async def enter(self, deadline_s: float, what: str, lookout: Lookout | None = None) -> None:
        """Wait until the incarnation is known: rank 0 is there, and knows of this process.

        Raises:
            RankTimeoutError: rank 0 has not answered after *deadline_s* seconds; names *what* was waited for.
            Exception: the error that *lookout* has returned for rank 0.
        """

        async def there() -> bool:
            return True

        await self._poll(there, deadline_s, what, lambda: (0,), lookout)

    async def admit(self, is_over: Callable[[], bool]) -> None:
        """On rank 0: answer the processes that ask for the incarnation, until each rank has an answer and *is_over*.

        Until then, for the process of a rank may be one of an earlier start, and the right one comes after it.
        """
        for pause_s in growing_pauses(FIRST_PAUSE_S, ADMITTED_LAST_PAUSE_S):
            if await self._call(partial(self._incarnation.answer, anyio.current_time())) and is_over():
                return
            await anyio.sleep(pause_s)

    async def post(self, key: str, note: Any) -> None:
        """Write *note* (anything that msgpack holds) under *key*."""
        data = msgspec.msgpack.encode(note)
        await self._call(lambda: self._store.set(self._key(key), data), key)

    async def find(self, key: str, kind: type[T]) -> T | None:
        """Return the note under *key*; None if there is no note."""
        found = await self._call(lambda: self._read([self._key(key)]))
        return msgspec.msgpack.decode(found[0], type=described(kind)) if found else None

    async def find_all(self, keys: Sequence[str], kind: type[T]) -> list[T | None]:
        """Return the note under each of *keys*; None where there is none."""
        found = await self._call(lambda: self._read_any(list(map(self._key, keys))), *keys)
        return [None if note is None else msgspec.msgpack.decode(note, type=described(kind)) for note in found]

    async def run(self, work: Callable[[], T]) -> T:
        """Run *work*, which blocks briefly, under the limiter of the store's calls."""
        return await run_blocking(self._calls, work)

    async def wait(
        self,
        key: str,
        kind: type[T],
        deadline_s: float,
        what: str,
        ranks: Iterable[int] = (0,),
        lookout: Lookout | None = None,
    ) -> T:
        """Return the note under *key* as soon as it is there.

        Raises:
            RankTimeoutError: it is not there after *deadline_s* seconds; names *what* was waited for, and *ranks*.
            Exception: the error that *lookout* has returned for *ranks*.
        """
        return await self._poll(lambda: self.find(key, kind), deadline_s, what, lambda: ranks, lookout)

    async def gather(
        self, keys: dict[int, str], kind: type[T], deadline_s: float, what: str, lookout: Lookout | None = None
    ) -> dict[int, T]:
        """Return the note of each rank under its key.

        Raises:
            RankTimeoutError: names the ranks without a note.
            Exception: the error that *lookout* has returned for them.
        """
        missing = dict(keys)
        found: dict[int, T] = {}

        async def poll_missing() -> dict[int, T] | None:
            ranks = list(missing)
            notes = await self._call(lambda: self._read_any([self._key(missing[rank]) for rank in ranks]))
            for rank, note in zip(ranks, notes, strict=True):
                if note is not None:
                    found[rank] = msgspec.msgpack.decode(note, type=described(kind))
                    del missing[rank]
            return None if missing else found

        return await self._poll(poll_missing, deadline_s, what, lambda: missing, lookout)

    async def arrive(self, key: str) -> int:
        """Add one to the count under *key*; return it."""
        return await self._call(lambda: self._store.add(self._key(key), 1))

    async def count(self, key: str) -> int:
        # `get` blocks until the key is there. Adding 0 reads a count, and makes it where there is none.
        return await self._call(lambda: self._store.add(self._key(key), 0))

    async def is_there(self, key: str) -> bool:
        return await self._call(lambda: self._store.check([self._key(key)]))

    async def wait_all_arrived(self, key: str, patience_s: float) -> bool:
        """Wait until every rank has arrived at *key*, *patience_s* seconds at most; return whether they have."""

        async def find() -> bool | None:
            arrived = await self._call(lambda: self._store.add(self._key(key), 0))
            return True if arrived >= self.world_size else None

        try:
            return await self._poll(find, patience_s, key, tuple)
        except RankTimeoutError:
            return False

    async def delete(self, keys: Iterable[str]) -> None:
        """Remove notes that no rank needs any more; absent ones are fine."""
        await self._call(lambda: [self._store.delete_key(self._key(key)) for key in keys])

    async def _poll(
        self,
        find: Callable[[], Awaitable[T | None]],
        deadline_s: float,
        what: str,
        ranks: Callable[[], Iterable[int]],
        lookout: Lookout | None = None,
    ) -> T:
        """Poll until *find* returns a value; once after the deadline, too, in case this process was stopped meanwhile.

        Poll once more also after *lookout* has returned an error.
        """
        with anyio.move_on_after(deadline_s):
            for pause_s in growing_pauses(FIRST_PAUSE_S, self._last_pause_s):
                # Before `find`: a rank may have posted its note before it has gone, and this `find` still reads it.
                end = None if lookout is None else await lookout.check_ranks(ranks())
                found = await find() if await self._enter() else None
                if found is not None:
                    return found
                if end is not None:
                    raise end
                await anyio.sleep(pause_s)
        found = await find() if await self._enter() else None
        if found is not None:
            return found
        late = sorted(ranks())
        known = "" if lookout is None else f": {await lookout.explain(late)}"
        raise RankTimeoutError(f"{what}: nothing from {name_ranks(late)} within {deadline_s:g} s{known}", late)

    async def _enter(self) -> bool:
        """Look for the incarnation once, if it is not known; return whether it is."""
        number = self._number
        if not self.entered and (id := await self._ask(partial(self._incarnation.find, anyio.current_time()))):
            self._prefix = self._incarnation.prefix(id)
            self._looks_again = number != self._number  # `begin` was called meanwhile
        return self.entered

    async def _call(self, work: Callable[[], T], *keys: str) -> T:
        """Make calls of the store, once the incarnation is known; at once where *keys* are not of one."""
        if not (keys and all(key.startswith(EVERYWHERE) for key in keys)):
            for pause_s in growing_pauses(FIRST_PAUSE_S, self._last_pause_s):
                if await self._enter():
                    break
                await anyio.sleep(pause_s)
        return await self._ask(work)

    async def _ask(self, work: Callable[[], T]) -> T:
        try:
            return await run_blocking(self._calls, work)
        except CheckpointError:
            raise
        except (RuntimeError, OSError) as error:  # what c10d stores raise
            raise StoreLostError(f"the store of the ranks' notes does not answer: {error}", [0]) from error

    def _read(self, names: Sequence[str]) -> list[bytes]:
        """Return the notes when all are there; ``get`` alone would block the store's client for minutes."""
        return [bytes(self._store.get(name)) for name in names] if self._store.check(list(names)) else []

    def _read_any(self, names: Sequence[str]) -> list[bytes | None]:
        whole = self._read(names)
        if whole or not names:
            return list(whole)
        return [next(iter(self._read([name])), None) for name in names]

    def _key(self, key: str) -> str:
        """Return the name of a note in the store.

        A key that begins with "/" is shared by all boards of the incarnation, one that begins with `EVERYWHERE` by all that
        ever used the store: what is found there may be of an earlier start.
        """
        if key.startswith(EVERYWHERE):
            return f"aiockpt{key[1:]}"
        if key.startswith("/"):
            return self._prefix + key
        if self._number is None:
            raise StoreLostError("the store of the ranks' notes did not answer this rank's first call", [0])
        return f"{self.name}/{key}"


def growing_pauses(first_s: float, last_s: float) -> Iterator[float]:
    """Yield the seconds between polls of something that may arrive soon or late: short ones first."""
    pause_s = first_s
    while True:
        yield min(pause_s, last_s)
        pause_s = min(pause_s * GROWTH, last_s)


def name_ranks(ranks: Sequence[int], most: int = _SHOWN) -> str:
    """Return "rank 3", or "ranks 1, 2, 5 and 7 more", at *most* so many of them, for messages."""
    return name_numbers("rank", ranks, most)
