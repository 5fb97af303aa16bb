"""Where does a new save stand among all others? The run, what it descends from, and the logical clock (DECISIONS 6)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import anyio

from aiockpt.engine.patience import Patience
from aiockpt.errors import StorageError
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.commit import Attempt, begin
from aiockpt.pipeline.discover import StepEntry, scan
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend

logger = logging.getLogger("aiockpt")

PATIENCE_S = 10.0
"""How long the first save of a process waits for farther tiers to say how new their steps are, and less for one that
refuses every call. What they hold only matters where steps were committed that this process has not loaded."""


class Lineage:
    """The line of saves of one checkpointer, over all of its tiers.

    Args:
        ranks: this process among those that save together.
        make_run: makes the random name of a run.

    Attributes:
        places: where steps may lie that came before; the first one must answer.
    """

    def __init__(self, ranks: Ranks, make_run: Callable[[], str]) -> None:
        self.places: list[Backend] = []
        self._ranks = ranks
        self._make_run = make_run
        self._run = make_run()
        self._runs = {self._run}
        self._parent: str | None = None
        self._seen = 0
        self._clock: int | None = None
        self._first_clock: int | None = None
        self._numbers = itertools.count(1)
        self._beginning = anyio.Lock()

    def next_number(self) -> int:
        """Return the number of the save that is called now. Any thread."""
        return next(self._numbers)

    async def begin_attempt(self, entry: StepEntry, nonce: str, number: int) -> Attempt:
        """Return a new attempt at a step, its logical clock above every one that was visible at the first.

        Saves that run at once begin in any order: *number*, that of the call, decides which of them is the newer.
        """
        async with self._beginning:
            if self._clock is None:
                self._clock = self._first_clock = max(await self._newest(), self._seen)
            return begin(
                entry,
                nonce=nonce,
                run=self._run,
                sequence=self._clock + number,
                parent=self._parent,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
            )

    async def _newest(self) -> int:
        """Return the highest logical clock anywhere; a farther tier that is away, or stalled, is not waited for."""
        clocks = [0]

        async def look(place: Backend) -> None:
            clocks.extend(entry.head.sequence for entry in await scan(place) if entry.head)

        async def look_if_there(place: Backend) -> None:
            wait = Patience()
            wait.limit(PATIENCE_S)
            try:
                with wait.waiting():
                    await look(place)
                why = wait.reason()
            except StorageError as error:
                why = str(error)
            if why is not None:
                logger.warning("%s does not say what it has, and a new save does not wait for it: %s", place.url, why)

        nearest, *farther = self.places
        async with open_tasks() as tasks:
            for place in farther:
                tasks.start_soon(look_if_there, place)
        await look(nearest)
        return max(clocks)

    def is_earlier(self, sequence: int) -> bool:
        """Say whether the save with that logical clock was made before the first one here."""
        return self._first_clock is None or sequence <= self._first_clock

    def see(self, entries: Sequence[StepEntry]) -> None:
        """Have the saves from now on be newer than *entries*: a tier may answer that was not waited for at the first one."""
        if self._clock is not None:
            others = [entry.head.sequence for entry in entries if entry.head and entry.head.run not in self._runs]
            self._clock = max([self._clock, *others])

    def _enter(self, run: str) -> None:
        self._run = run
        self._runs.add(run)

    def position(self) -> tuple[str, str | None, int]:
        """Return where the next save stands: the run, the step that it descends from, and the clock of that."""
        return self._run, self._parent, self._seen

    def take_position(self, run: str, parent: str | None, seen: int) -> None:
        """Stand where the lineage of another process stands, for which this one saves."""
        self._enter(run)
        self._parent = parent
        self._seen = max(self._seen, seen)
        if self._clock is not None:
            self._clock = max(self._clock, seen)

    def descend_from(self, loaded: Manifest) -> None:
        """Begin a new line of saves at a step that was loaded: what was saved before is another branch."""
        self._parent = loaded.id
        self._enter(self._make_run())
        self._seen = max(self._seen, loaded.sequence)
        if self._clock is not None:
            self._clock = max(self._clock, loaded.sequence)
