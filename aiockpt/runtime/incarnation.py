"""The incarnation of a job: one start of its processes, which separates their notes from those of every other start.

The store of the notes may outlive the processes: a launcher hosts it, and starts the job again there, with as many ranks or
with others. Ranks of one start come at different times, and find all that earlier starts left. Guarantees:

- An incarnation has the token of rank 0's process as its id. Notes lie under it: those of another start are never read.
- A rank believes an announcement of rank 0 only when that process has answered it, by a token that is new in each process.
  What a dead process has announced or answered is never believed, whatever clocks say.
- Processes of an earlier start may live for a moment. Of several processes with one rank the one that began last counts; and
  where rank 0 and another rank began at different times, they wait a moment for one that fits better (`SETTLE_S`).
- No collective, nothing of a launcher's environment. It costs each rank a few calls of the store at its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

ANSWERED_AT_ONCE = 64
"""Questions that rank 0 answers in one turn; its other notes wait meanwhile."""
ASKED = 4
"""Announcements that are asked, the newest ones: those of processes that have ended never answer."""
TOGETHER_S = 1.0
"""Processes of one start begin within so many seconds of each other, as a rule."""
SETTLE_S = 4.0
"""How long rank 0 and a rank that began at another time wait for a better one, before they are taken for one start."""


class Store(Protocol):
    """The verbs of ``torch.distributed.Store`` that are used here. Blocking; any thread."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Incarnation:
    """One start of the ranks that save to one place, as one rank knows it. Its calls block for calls of the store.

    Args:
        store: shared by all ranks, and perhaps by earlier starts.
        place: what they save to, the same on all of them.
        process: the token of this process; see `aiockpt.runtime.processes.process_token`.
        id: of an incarnation that is known; empty where it is to be found.
    """

    def __init__(self, store: Store, place: str, rank: int, world_size: int, process: str, *, id: str = "") -> None:
        self.store, self.place, self.rank, self.world_size = store, place, rank, world_size
        self.id = id
        self._process = process
        self._starts = f"aiockpt/{place}/starts/{world_size}"
        self._asked: set[str] = set()
        self._read_count = 0
        self._asking: dict[int, str] = {}
        self._answered: dict[int, str] = {}

    def prefix(self, id: str) -> str:
        """Return the prefix of all notes of the incarnation *id*."""
        return f"{self._starts}/{id}"

    def count_board(self, part: str) -> int:
        """Return how many boards of a *part* this process has begun, with this one: the same on all ranks that do the same.

        Counted in the store, as several stores of one process may hold the same keys.
        """
        return self.store.add(f"{self._starts}/boards/{self._process}/{self.rank}/{part}", 1)

    def find(self, now_s: float) -> str:
        """Return the id of the incarnation that rank 0 takes this process for a part of; else an empty string.

        To be called again until it returns one. On rank 0 it announces this process, once, and returns its token.

        Args:
            now_s: on any clock, the same for all calls.
        """
        if self.id:
            return self.id
        if self.rank == 0:
            if self.store.add(f"{self._starts}/announced/{self._process}", 1) == 1:
                number = self.store.add(f"{self._starts}/count", 1)
                self.store.set(f"{self._starts}/announcement/{number}", self._process.encode())
            return self._process
        newest = max(filter(self._ask, self._leaders()), key=began_ms, default="")
        return newest if newest and self._is_settled(newest, now_s) else ""

    def _leaders(self) -> Iterator[str]:
        count = self.store.add(f"{self._starts}/count", 0)
        for number in range(count, max(0, count - ASKED), -1):
            yield from filter(None, [self._read(f"{self._starts}/announcement/{number}")])

    def _ask(self, leader: str) -> bool:
        """Ask the process that announced itself, once; return whether it has answered this one."""
        prefix = self.prefix(leader)
        if leader not in self._asked:
            self._asked.add(leader)
            number = self.store.add(f"{prefix}/questions", 1)
            self.store.set(f"{prefix}/question/{number}", f"{self.rank} {self._process}".encode())
        return self._read(f"{prefix}/answer/{self.rank}") == self._process

    def answer(self, now_s: float) -> bool:
        """Answer processes that have asked this one, which is rank 0; return whether each rank has an answer.

        Args:
            now_s: as for `find`.
        """
        prefix = self.prefix(self._process)
        count = min(self.store.add(f"{prefix}/questions", 0), self._read_count + ANSWERED_AT_ONCE)
        while self._read_count < count and (question := self._read(f"{prefix}/question/{self._read_count + 1}")):
            self._read_count += 1
            number, process = question.split()
            self._asking[int(number)] = max(process, self._asking.get(int(number), ""), key=began_ms)
        for rank, process in self._asking.items():
            if self._answered.get(rank) != process and self._is_settled(process, now_s):
                self.store.set(f"{prefix}/answer/{rank}", process.encode())
                self._answered[rank] = process
        return len(self._answered) >= self.world_size - 1

    def _is_settled(self, other: str, now_s: float) -> bool:
        """Return whether the process *other* and this one are taken for one start: if it began earlier, after a moment."""
        seen_s = _first_seen_s.setdefault((self._process, other), now_s)
        return began_ms(self._process) - began_ms(other) <= 1000 * TOGETHER_S or now_s - seen_s >= SETTLE_S

    def _read(self, key: str) -> str:
        """Return a note; an empty string where it is not there. ``get`` alone would block the store's client for minutes."""
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""


_first_seen_s: dict[tuple[str, str], float] = {}
"""When processes met first, by their tokens: a later checkpointer of a process does not wait again."""


def began_ms(process: str) -> int:
    """Return when a process began, by its token, in milliseconds since 1970; 0 where that is unknown."""
    began, _, _ = process.partition("-")
    return int(began) if began.isdigit() else 0
