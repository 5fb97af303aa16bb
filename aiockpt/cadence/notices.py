"""How do the other ranks learn what rank 0 decided? Numbered notes in the job's store, each read by all and then removed.

Guarantees: those of `aiockpt.runtime.meeting`; and no thread that trains waits for a note that is there in time: it is
asked for beforehand, on the loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiockpt.cadence.schedule import Note
from aiockpt.errors import RankTimeoutError
from aiockpt.runtime.loop import refuse_in_event_loop
from aiockpt.runtime.meeting import Meeting
from aiockpt.runtime.world import Loop

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger("aiockpt")


class Notices:
    """One rank's end of the notes about when to save. Its methods are for the training thread.

    Args:
        deadline_s: for rank 0, when a step is reached that it has not decided.
    """

    def __init__(self, loop: Loop, meeting: Meeting, deadline_s: float) -> None:
        self.is_leader = meeting.rank == 0
        self._loop = loop
        self._meeting = meeting
        self._deadline_s = deadline_s
        self._chapter = self._number = 0
        self._asked: Future[Note] | None = None

    def turn_back(self) -> None:
        """Begin anew: an older checkpoint was loaded, on all ranks, and steps come again."""
        self.end()
        self._chapter, self._number = self._chapter + 1, 0

    def post(self, note: Note) -> None:
        """Leave the next note. Does not wait."""
        self._meeting.begin()
        self._number += 1
        self._loop.submit(self._meeting.post, self._key(self._number), note).add_done_callback(_log_failure)

    def ask(self) -> None:
        """Begin to look for the next note, unless that has begun. Does not wait."""
        if self._asked is None:
            self._meeting.begin()
            self._asked = self._loop.submit(self._hear, self._key(self._number + 1))

    def heard(self) -> Note | None:
        """Return the next note when it has come; None while it has not. Does not wait."""
        asked = self._asked
        if asked is None or not asked.done():
            return None
        self._asked = None
        if isinstance(asked.exception(), RankTimeoutError):
            return None  # both slept through the deadline, in a long evaluation perhaps: nobody needed it so far
        note = asked.result()
        self._number += 1
        return note

    def wait(self) -> Note:
        """Wait for the next note.

        Raises:
            RankTimeoutError: rank 0 left none before the deadline.
            StoreLostError: the store does not answer any more.
            BlockingCallError: this thread runs an event loop.
        """
        while (note := self.heard()) is None:
            refuse_in_event_loop(
                "waiting for rank 0 to decide whether to save", "ask on a worker thread (asyncio.to_thread)"
            )
            begun_before = self._asked is not None
            self.ask()
            self._wait(begun_before)
        return note

    def _wait(self, begun_before: bool) -> None:
        """Wait for the end of the look for the next note, and raise what ended it.

        A deadline that began to run before this wait is no reason to give up.
        """
        assert self._asked is not None
        error = self._asked.exception()
        if error is not None and not (begun_before and isinstance(error, RankTimeoutError)):
            self._asked = None
            raise error

    def end(self) -> None:
        """Stop looking. Any thread; idempotent."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()

    async def _hear(self, key: str) -> Note:
        """Wait for a note; the last rank to read it removes it."""
        meeting = self._meeting
        note = await meeting.wait(key, Note, self._deadline_s, "whether to save the next steps")
        if await meeting.arrive(f"{key}/readers") == meeting.world_size - 1:
            await meeting.forget([key, f"{key}/readers"])
        return note

    def _key(self, number: int) -> str:
        return f"{self._chapter}/{number}"


def _log_failure(posting: Future[None]) -> None:
    if not posting.cancelled() and (error := posting.exception()) is not None:
        logger.error("the other ranks cannot be told when to save: %s", error)
