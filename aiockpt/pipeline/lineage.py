"""The place of a new save among all others: the run, what it descends from, and the logical clock.

Guarantees:

- A new save is newer than every step that was visible at the first one: nothing unproven moves the clock, and a step whose
  clock cannot be read delays no save. Room is left above the others for the clock that it may prove to have.
- The first save beside newer steps of another run, which were not loaded, logs a warning. So does the first one that finds
  that another run has saved since.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import anyio
import msgspec

from aiockpt.errors import StorageError
from aiockpt.format.manifest import MAX_ANCESTORS, MAX_OLDER, Ancestors, ForkedFrom, Head, Manifest, Older
from aiockpt.pipeline.commit import Attempt
from aiockpt.pipeline.discover import StepEntry, newest_vote
from aiockpt.pipeline.latest import find_steps
from aiockpt.pipeline.step_info import origin_in_words
from aiockpt.redaction import redact
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry_calls import QueryTimeout

logger = logging.getLogger("aiockpt")

PATIENCE_S = 10.0
"""How long the first save of a process waits for farther tiers to list their steps; less for a tier that refuses every
call. Their steps matter only where some were committed that this process has not loaded."""
ROOM = 2**32
"""The gap left in the logical clock for a step whose head cannot be read now: more than any run saves meanwhile."""
LAST_CLOCK = 2**63 - 1
"""What a manifest can hold."""


class Parent(msgspec.Struct, frozen=True):
    """The step that a run had loaded: its id, and the save that was loaded with the ancestors of that, newest first.

    A foreign checkpoint has neither id nor ancestors.
    """

    id: str | None = None
    ancestors: Ancestors = ()
    forked_from: ForkedFrom | msgspec.UnsetType = msgspec.UNSET


class Position(msgspec.Struct, frozen=True):
    """The position of the next save: the run, the save that it descends from, and the highest clock that was loaded."""

    run: str
    parent: Parent | None
    seen: int


class Lineage:
    """The line of saves of one checkpointer, over all of its tiers.

    Args:
        rank, world_size: which process this is among those that save together.
        make_run: makes the random name of a run.

    Attributes:
        places: those that may hold earlier steps; the first one must answer.
        runs: of this process: the present one, and those before each load.
        leaves_room: whether steps may exist that cannot be seen now, as of a host that is away: then `ROOM` is left for
            their clocks, so that what is saved from now on is newer than they are, should they come back.
    """

    def __init__(self, rank: int, world_size: int, make_run: Callable[[], str]) -> None:
        self.places: list[Backend] = []
        self._rank, self._world_size = rank, world_size
        self._make_run = make_run
        self._run = make_run()
        self.runs = {self._run}
        self._parent: Parent | None = None
        self._seen = 0
        self.leaves_room = False
        self._listed: set[str] = set()
        self._passed_by: set[str] = set()
        self._logged_others = False
        self._clock: int | None = None
        self._first_clock: int | None = None
        self._older: Older = ()
        # What was committed here, the newest last: its generation, and the number of the save.
        self._committed: dict[str, tuple[int, int]] = {}
        self._numbers = itertools.count(1)
        self._beginning = anyio.Lock()

    def next_number(self) -> int:
        """Return the number of the save that is called now. Any thread."""
        return next(self._numbers)

    async def begin_attempt(self, entry: StepEntry, nonce: str, number: int) -> Attempt:
        """Return a new attempt at a step, its logical clock above every one that was visible at the first save.

        Saves that run at once begin in any order: *number*, that of the call, decides which of them is newer.
        """
        # Saves that begin at once share the clock that the first of them finds.
        async with self._beginning:
            if self._clock is None:
                self._clock = self._first_clock = max(await self._newest(entry.step), self._seen)
            self.log_other_job(entry.head, self.places[0].url)
            parent = self._parent or Parent()
            return Attempt(
                id=entry.id,
                step=entry.step,
                attempt=nonce,
                generation=max(entry.generations, default=0) + 1,  # fixed here, once
                sequence=min(self._clock + number, LAST_CLOCK),
                run=self._run,
                parent=parent.id,
                rank=self._rank,
                world_size=self._world_size,
                ancestors=parent.ancestors or msgspec.UNSET,
                forked_from=parent.forked_from,
                older=self._older_than(number) or msgspec.UNSET,
            )

    def note_committed(self, step_id: str, generation: int, number: int) -> None:
        """Record that save *number* was committed: saves that are called, and begun, later are newer."""
        # A dict keeps the place of a key that it has: a step that is saved again goes to the end.
        self._committed.pop(step_id, None)
        self._committed[step_id] = generation, number
        if len(self._committed) > MAX_OLDER:
            del self._committed[next(iter(self._committed))]

    def _older_than(self, number: int) -> Older:
        """Return the older steps that the manifest of save *number* names."""
        own = {id: done for id, (done, earlier) in reversed(self._committed.items()) if earlier < number}
        return tuple({**own, **{id: there for id, there in self._older if id not in own}}.items())[:MAX_OLDER]

    async def _newest(self, step: int) -> int:
        """Return the highest logical clock in all places; an unreachable or stalled farther tier is not waited for.

        Args:
            step: the one that is about to be saved first.
        """
        clocks = [0]
        silent: list[StepEntry] = []
        present: list[StepEntry] = []

        async def list_place(place: Backend) -> None:
            entries = await find_steps(place)
            clocks.extend(entry.head.sequence for entry in entries if entry.head)
            clocks.extend([await newest_vote(place, entry) for entry in entries])
            present.extend(entry for entry in entries if entry.generations or entry.is_refused)
            silent.extend(entry for entry in entries if entry.unread_reason)
            self._log_others(place, entries, step)

        async def list_in_time(place: Backend) -> None:
            wait = QueryTimeout()
            wait.limit(PATIENCE_S)
            try:
                with wait.waiting():
                    await list_place(place)
                why = wait.reason()
            except StorageError as error:
                why = str(error)
            if why is not None:
                logger.warning("%s: could not be listed in time; the save goes on without it: %s", place.url, why)

        nearest, *farther = self.places
        async with open_tasks() as tasks:
            for place in farther:
                tasks.start_soon(list_in_time, place)
        await list_place(nearest)
        for entry in silent:
            logger.warning(
                "%s: its head cannot be read now; the save goes on without it: %s", entry.id, entry.unread_reason
            )
        self._older = _older(present)
        return max(clocks) + (ROOM if silent or self.leaves_room else 0)

    def _log_others(self, place: Backend, entries: Sequence[StepEntry], step: int) -> None:
        """Warn of newer steps of another run that this one has not loaded; the save goes on without them."""
        known = self._family(entries)
        others = [
            entry
            for entry in entries
            if entry.head
            and entry.head.sequence > self._seen
            and entry.head.attempt not in self._passed_by
            and entry.head.run not in known
        ]
        if not others or self._logged_others or self._rank != 0:
            return
        self._logged_others = True
        newest = max(others, key=lambda entry: entry.age_order)
        logger.warning(
            "%s holds %d step(s) of another run that were not loaded, the newest of them %d. Step %d is the newest from now"
            " on, and begins a new branch; the others stay, except those that are saved again by number. If this was"
            " not intended: load before the first save, or give each job a place of its own",
            place.url,
            len(others),
            newest.step,
            step,
        )

    def knows(self, id: str, generation: int) -> bool:
        """Return whether that save of a step is the last one that was committed here, or an earlier one."""
        return generation <= self._committed.get(id, (0, 0))[0]

    def log_other_job(self, head: Head | None, url: str) -> None:
        """Warn, once, if *head* is of a save that another run has made since the first one of this run."""
        if head is None or head.run in self.runs or self.is_earlier(head.sequence) or self._logged_others or self._rank:
            return
        self._logged_others = True
        _warn_of_other_job(head, url)

    def _family(self, entries: Sequence[StepEntry]) -> set[str]:
        """Return the runs of this process; and, when a step was loaded by its number, those that descend from its run.

        A load by number skips the steps after that one on purpose.
        """
        heads = [entry.head for entry in entries if entry.head]
        family = set(self.runs)
        if self._parent is None or not self._parent.ancestors or self._passed_by:
            return family
        run_of = {head.id: head.run for head in heads}
        family.add(self._parent.ancestors[0][0])
        for head in sorted(heads, key=lambda head: head.sequence):
            if head.parent is not None and run_of.get(head.parent) in family:
                family.add(head.run)
        return family

    def is_own(self, head: Head) -> bool:
        """Return whether the next save descends from that one, or is of the same run; not if a load has passed it by."""
        ancestors = () if self._parent is None else self._parent.ancestors
        return head.run == self._run or any(head.run == run and head.sequence <= latest for run, latest in ancestors)

    def is_earlier(self, sequence: int) -> bool:
        """Return whether the save with that logical clock was made before the first one of this process."""
        return self._first_clock is None or sequence <= self._first_clock

    def see(self, entries: Sequence[StepEntry]) -> None:
        """Make later saves newer than *entries*: they may be in a tier that the first save has not waited for."""
        self._listed = {entry.head.attempt for entry in entries if entry.head}
        if self._clock is not None:
            # Without those of this process: with them a save that begins now would get above one that was called later.
            others = [entry.head.sequence for entry in entries if entry.head and entry.head.run not in self.runs]
            self._clock = max([self._clock, *others])

    def _enter(self, run: str) -> None:
        self._run = run
        self.runs.add(run)

    def position(self) -> Position:
        """Return the position of the next save."""
        return Position(self._run, self._parent, self._seen)

    def adopt_position(self, position: Position) -> None:
        """Set the position to that of another process, for which this one saves."""
        self._enter(position.run)
        self._parent = position.parent
        self._catch_up(position.seen)

    def descend_from(self, loaded: Manifest, place: Backend | None = None) -> None:
        """Begin a new line of saves at a step that was loaded from *place*: earlier saves are another branch."""
        before = () if loaded.ancestors is msgspec.UNSET else loaded.ancestors
        fork = loaded.forked_from
        if place is not None and place not in self.places:
            fork = (redact(place.url), loaded.id, loaded.run)
        self._parent = Parent(loaded.id, ((loaded.run, loaded.sequence), *before)[:MAX_ANCESTORS], fork)
        self._passed_by |= self._listed  # the newest of them was chosen
        self._enter(self._make_run())
        self._catch_up(loaded.sequence)

    def begin_from_foreign(self, url: str) -> None:
        """Begin a line of saves at a checkpoint of another program, at *url*, which has neither step nor run."""
        self._parent = Parent(forked_from=(redact(url), "", ""))
        self._enter(self._make_run())

    @property
    def origin(self) -> str:
        """The step of another place that the line of saves began from, in words; else ""."""
        fork = msgspec.UNSET if self._parent is None else self._parent.forked_from
        return "" if fork is msgspec.UNSET else origin_in_words(fork)

    def _catch_up(self, clock: int) -> None:
        """Make later saves newer than one with that logical clock."""
        self._seen = max(self._seen, clock)
        if self._clock is not None:
            self._clock = max(self._clock, clock)


def _warn_of_other_job(head: Head, url: str) -> None:
    logger.warning(
        "another job saves to %s, too: its step %d (run %s) was committed since this one began. They replace each "
        "other's steps, and the next start takes the newest of either. End one of them (it may be an earlier start of "
        "this one that still runs), or give it a place of its own",
        *(url, head.step, head.run),
    )


def log_other_line(url: str, heads: Sequence[Head]) -> None:
    """Warn if the newest of *heads*, the first one, is of one of two jobs that have saved to one place at the same time."""
    newest = heads[0]
    began = min(head.sequence for head in heads if head.run == newest.run)
    others = [head for head in heads if head.sequence > began and not _are_one_line(head, newest)]
    if others:
        logger.warning(
            "%s holds the saves of two jobs that ran at the same time: step %d is the newest, of run %s, and step %d is the "
            "newest of run %s, which knows nothing of it. Step %d is taken; if the other is meant, name it: "
            "load(state, %d). Then give each job a place of its own",
            *(url, newest.step, newest.run, others[0].step, others[0].run, newest.step, others[0].step),
        )


def _are_one_line(one: Head, other: Head) -> bool:
    """Return whether two saves are of one run, or one descends from the other's."""
    runs = [{head.run, *(run for run, _ in head.ancestors or ())} for head in (one, other)]
    return one.run in runs[1] or other.run in runs[0]


def _older(present: Sequence[StepEntry]) -> Older:
    """Return the *present* steps as a manifest names them; where places have different generations, the lowest.

    Generation 1 stands for a step that cannot be listed: a reader that can list it also compares its date.
    """
    highest: dict[str, int] = {}
    for entry in sorted(present, key=lambda entry: entry.age_order, reverse=True):
        generation = max(entry.generations, default=1)
        highest[entry.id] = min(highest.get(entry.id, generation), generation)
    return tuple(highest.items())
