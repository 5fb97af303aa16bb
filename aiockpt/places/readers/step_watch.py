"""Delivery of committed steps, once to each named reader: an evaluation, an upload, a rollout worker.

The steps that a reader has finished are recorded beside the run, in ``readers/NAME.json``, so that it resumes there after a
restart. Guarantees:

- A step is held while it is handed out: retention does not take it away (`aiockpt.places.readers.hold`).
- A step counts as done when the reader comes back for the next one. A reader that fails, or is killed, gets it again.
- A step that was saved again is handed out again; one that was only thinned, or copied, is not.
- A reader that follows, and has begun, waits out an outage; what it has finished meanwhile is noted after it.
- Nothing is promised for steps that retention deletes before the reader comes to them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import msgspec

from aiockpt.engine.alone import Destination
from aiockpt.engine.find import committed_steps
from aiockpt.errors import CheckpointError, CorruptionError, ObjectNotFoundError, StorageError, UsageError
from aiockpt.format.document import described
from aiockpt.futures import Future
from aiockpt.options import check_amount
from aiockpt.places.readers.hold import HeldStep, Hold, Holds
from aiockpt.storage.backend import Backend

logger = logging.getLogger("aiockpt")

FOLDER = "readers"
CURSOR_BYTES = 1 << 22
LONGEST_WAIT_S = 3600.0
"""Before a step that was given back is handed out again; the first time ``every_s``, then twice as long each time."""
T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunsWork(Protocol):
    """Runs work on a checkpointer's loop, with where its steps lie."""

    def __call__(self, what: str, work: Callable[[Destination], Awaitable[T]], /) -> Future[T]: ...


class Cursor(msgspec.Struct):
    """A reader's record: the attempts that it has finished, of the steps that exist."""

    done: set[str]


class NewStep(msgspec.Struct, frozen=True):
    """A step that the reader has not had; *older*: attempts that are finished with it, because only the newest is wanted."""

    step: int
    attempt: str
    older: frozenset[str]


class WatchedStep:
    """A step that is handed to a reader, and held until the reader comes back for the next one.

    Attributes:
        step, id: its number, and its folder below the root.
        url: the place where it lies.
        folder: the step's own, where that place is a folder of this machine; None elsewhere.
    """

    def __init__(self, held: HeldStep) -> None:
        self.step: int = held.step
        self.id: str = held.id
        self.url: str = held.url
        self.folder: Path | None = held.folder
        self.wanted_again = False

    def again(self) -> None:
        """Have it delivered again later: it does not count as finished."""
        self.wanted_again = True

    def __repr__(self) -> str:
        return f"<WatchedStep {self.id} in {self.url}>"


class StepWatch:
    """Yields the steps that a reader has not had, for ever, with ``for`` or ``async for``; see `aiockpt.Checkpointer.watch`.

    Args:
        run: starts work on the checkpointer's loop: `aiockpt.Checkpointer.run_on_destination`.
        holds: of that checkpointer.
        name: of the reader; one process at a time has it.
        every_s: seconds between two polls while there is nothing new.
        newest: only the newest step is wanted each time; older ones are skipped.
        follow: wait for steps to come, and for those that were given back; False ends when there is nothing new.

    Raises:
        UsageError: the name or the time is invalid.
    """

    def __init__(self, run: RunsWork, holds: Holds, name: str, *, every_s: float, newest: bool, follow: bool) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"watch({name!r}): name the reader in letters, digits, '.', '_' and '-', such as 'eval'")
        check_amount("watch", "every_s", every_s, " seconds")
        self._run = run
        self._holds = holds
        self._name = name
        self._every_s = every_s
        self._newest = newest
        self._follow = follow
        self._cursor: Cursor | None = None
        self._refused: CheckpointError | None = None
        self._has_begun = self._is_away = False
        self._given_back: dict[str, tuple[float, float]] = {}
        """Attempt → when it may be handed out again, and how long the next wait is."""

    def __iter__(self) -> Iterator[WatchedStep]:
        while True:
            new = self._run(f"look for steps for {self._name}", self._look).result()
            if new is None and not self._follow:
                self._end()
                return
            if new is None:
                time.sleep(self._every_s)
                continue
            hold = self._hold(new)
            try:
                handed = WatchedStep(hold.begin().result())
            except CheckpointError as error:
                self._put_off(new, error)
                continue
            try:
                yield handed
            finally:
                hold.release()
            self._run(f"note of {self._name}", partial(self._note, new, handed)).result()

    async def __aiter__(self) -> AsyncIterator[WatchedStep]:
        while True:
            new = await self._run(f"look for steps for {self._name}", self._look)
            if new is None and not self._follow:
                self._end()
                return
            if new is None:
                await anyio.sleep(self._every_s)
                continue
            hold = self._hold(new)
            try:
                handed = WatchedStep(await hold.begin())
            except CheckpointError as error:
                self._put_off(new, error)
                continue
            try:
                yield handed
            finally:
                await hold.let_go()
            await self._run(f"note of {self._name}", partial(self._note, new, handed))

    def _end(self) -> None:
        """Raise the error for which a step was not handed out; no further call would raise it."""
        if self._refused is not None:
            raise self._refused

    def _hold(self, new: NewStep) -> Hold:
        return self._holds.make(new.step, f"reader {self._name}")

    def _put_off(self, new: NewStep, error: CheckpointError | None = None) -> None:
        """Postpone a step that could not be handed out, or was returned."""
        _, wait_s = self._given_back.get(new.attempt, (0.0, self._every_s))
        self._given_back[new.attempt] = (time.monotonic() + wait_s, min(2 * wait_s, LONGEST_WAIT_S))
        if error is not None:
            self._refused = self._refused or error
            logger.warning("step %d is not handed to %s now: %s", new.step, self._name, error)

    # ------------------------------------------------------------------ on the loop

    async def _look(self, destination: Destination) -> NewStep | None:
        try:
            new = await self._poll(destination)
            if self._is_away:
                await self._write_cursor(destination)  # as a note may have failed
        except StorageError as error:
            self._wait_out(error)
            return None
        self._has_begun, self._is_away = True, False
        return new

    def _wait_out(self, error: StorageError) -> None:
        """Log the first error of an outage; but raise it at first, and without *follow*."""
        if not (self._has_begun and self._follow):
            raise error
        if not self._is_away:
            logger.warning("%s waits until its steps can be reached: %s", self._name, error)
        self._is_away = True

    async def _poll(self, destination: Destination) -> NewStep | None:
        """Return the step to hand out next; None where there is nothing new."""
        if self._cursor is None:
            self._cursor = await self._read_cursor(_home(destination))
        there: dict[str, int] = {}
        listed: set[int] = set()
        found = await committed_steps(destination, listed=listed)
        for one in reversed(found):
            if one.entry.head is not None:
                there[one.entry.head.attempt] = one.entry.step
        # A step that cannot be read now is not gone: forgotten here, it would be handed out once more.
        if len(listed) == len(destination.places) and not any(one.entry.unread_reason for one in found):
            self._cursor.done.intersection_update(there)
            self._given_back = {attempt: when for attempt, when in self._given_back.items() if attempt in there}
        now_s = time.monotonic()
        new = [attempt for attempt in there if attempt not in self._cursor.done]
        ready = [attempt for attempt in new if self._given_back.get(attempt, (0.0,))[0] <= now_s]
        if not ready or (self._newest and ready[-1] != new[-1]):
            return None
        chosen = ready[-1] if self._newest else ready[0]
        older = frozenset(new[: new.index(chosen)]) if self._newest else frozenset()
        return NewStep(there[chosen], chosen, older)

    async def _note(self, new: NewStep, handed: WatchedStep, destination: Destination) -> None:
        """Record that a step is finished, unless it is wanted again."""
        assert self._cursor is not None
        if handed.wanted_again:
            self._put_off(new)
            return
        self._given_back.pop(new.attempt, None)
        self._cursor.done |= {new.attempt, *new.older}
        try:
            await self._write_cursor(destination)
        except StorageError as error:
            self._wait_out(error)

    async def _write_cursor(self, destination: Destination) -> None:
        assert self._cursor is not None
        await _home(destination).put(self._key, msgspec.json.encode({"done": sorted(self._cursor.done)}))

    async def _read_cursor(self, backend: Backend) -> Cursor:
        try:
            return msgspec.json.decode(await backend.get(self._key, CURSOR_BYTES), type=described(Cursor))
        except ObjectNotFoundError:
            return Cursor(set())
        except msgspec.MsgspecError as error:
            raise CorruptionError(
                f"{self._key} in {backend.url} does not say what {self._name} is done with ({error}): remove it, and all "
                "steps are handed out again"
            ) from None

    @property
    def _key(self) -> str:
        return f"{FOLDER}/{self._name}.json"

    def __repr__(self) -> str:
        return f"<StepWatch of {self._name}>"


def _home(destination: Destination) -> Backend:
    """Return where readers' notes lie: the nearest place that outlives this host, or else the farthest there is."""
    backends = [place.backend for place in destination.places]
    return next((backend for backend in backends if backend.traits.durable), backends[-1])
