"""The pool's order: first come, first served, whatever those before do. Against a line and a set."""

from __future__ import annotations

import threading
from types import TracebackType

from hypothesis import example, given
from hypothesis import strategies as st

from aiockpt.errors import StorageTimeoutError
from aiockpt.runtime.slabs import Slab, SlabPool
from tests.example_counts import examples
from tests.watch import until

SLAB_BYTES = 4096
PATIENT_S, HASTY_S = 60.0, 0.02
"""For how long a visitor waits: for ever as far as the test goes, or until its time passes while it waits."""
AGREE_S, POLL_S = 10.0, 0.0005


class FailedWorkError(Exception):
    """What the work of a visitor raises."""


class Visitor(threading.Thread):
    """Takes a slab, marks it as its own, keeps it until it is told to leave, and gives it back.

    Attributes:
        hasty: whether its time passes if it has to wait.
        slab: what it holds.
        visits: how often it was served.
        ended: whether it is gone, *timed_out* whether for want of a slab, *trouble* what should not have been.
    """

    def __init__(self, pool: SlabPool, number: int, hasty: bool) -> None:
        super().__init__(name=f"visitor {number}", daemon=True)
        self.hasty = hasty
        self.slab: Slab | None = None
        self.visits = 0
        self.ended = self.timed_out = False
        self.trouble: Exception | None = None
        self._pool = pool
        self._told = threading.Semaphore(0)
        self._way = ""

    def leave(self, way: str) -> None:
        """Have it "give" its slab back, "raise" at its work, or give it back and take one "again"; return at once."""
        self._way, self.slab = way, None
        self._told.release()

    def run(self) -> None:
        try:
            while self._visit() == "again":
                pass
        except StorageTimeoutError:
            self.timed_out = True
        except FailedWorkError:
            pass
        except Exception as error:  # noqa: BLE001  the test tells it
            self.trouble = error
        finally:
            self.ended = True

    def _visit(self) -> str:
        """Hold one slab; return how it was left."""
        slab = self._pool.acquire(HASTY_S if self.hasty else PATIENT_S)
        try:
            mark = self.name.encode()
            slab.memory[: len(mark)] = mark
            self.visits += 1
            self.slab = slab
            assert self._told.acquire(timeout=PATIENT_S)
            assert slab.memory[: len(mark)] == mark
            if self._way == "raise":
                raise FailedWorkError
        finally:
            self._pool.release(slab)
        return self._way


class LastFirst(threading.Condition):
    """Wakes whoever began to wait last first: which of several runs first once they are awake, nobody promises."""

    def notify(self, n: int = 1) -> None:
        self._waiters.reverse()  # type: ignore[attr-defined]
        super().notify(n)


class Crowd:
    """Visitors of one pool, and the model that they are compared with after every move.

    Attributes:
        line: who should be waiting, the first to be served first.
        holding: who should hold a slab.
    """

    def __init__(self, slabs: int, last_first: bool) -> None:
        self.pool = SlabPool(SLAB_BYTES, None)
        if last_first:
            self.pool._changed = LastFirst()
        self.slabs = 0
        self._allow(slabs)
        self.visitors: list[Visitor] = []
        self.line: list[Visitor] = []
        self.holding: list[Visitor] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave no thread behind, also of a test that failed."""
        self.pool.close()
        for visitor in self.visitors:
            visitor.leave("give")
            visitor.join(AGREE_S)

    def arrive(self, hasty: bool) -> None:
        """Have somebody come."""
        visitor = Visitor(self.pool, len(self.visitors), hasty)
        self.visitors.append(visitor)
        self.line.append(visitor)
        visitor.start()
        self._serve()

    def leave(self, which: int, way: str) -> None:
        """Have one who holds a slab leave, when those in the line whose time passes are gone.

        Args:
            way: as to `Visitor.leave`; or "all", of them at once; or "grow", for a pool that may hold one slab more.
        """
        hasty = [visitor for visitor in self.line if visitor.hasty]
        until(lambda: all(visitor.timed_out for visitor in hasty), f"the end of {hasty}", AGREE_S, POLL_S)
        self.line = [visitor for visitor in self.line if visitor not in hasty]
        self._compare()
        if way == "grow":
            self._allow(self.slabs + 1)
        for visitor in self.holding[:] if way == "all" else [self.holding[which % len(self.holding)]]:
            self.holding.remove(visitor)
            if way == "again":
                self.line.append(visitor)
            visitor.leave(way)
        self._serve()

    def drain(self) -> None:
        """Have everyone served, and see that nothing and nobody is left."""
        while self.holding:
            self.leave(0, "give")
        for visitor in self.visitors:
            visitor.join(AGREE_S)
        assert not any(visitor.is_alive() for visitor in self.visitors)
        assert [visitor.trouble for visitor in self.visitors] == [None] * len(self.visitors)
        assert all(visitor.visits or visitor.hasty for visitor in self.visitors)
        seen = self.pool.statistics()
        assert (seen.used_slabs, seen.waiting) == (0, 0)

    def _allow(self, slabs: int) -> None:
        self.slabs = slabs
        self.pool.fit(slabs, available_bytes=lambda: 1 << 30)

    def _serve(self) -> None:
        while self.line and len(self.holding) < self.slabs:
            self.holding.append(self.line.pop(0))
        self._compare()

    def _compare(self) -> None:
        """Wait until as many are served, and wait, as should be; then see that it is those who should."""
        until(self._counts_agree, f"{self.holding} served and {self.line} waiting", AGREE_S, POLL_S)
        assert {visitor for visitor in self.visitors if visitor.slab is not None} == set(self.holding)
        assert len({visitor.slab.number for visitor in self.holding if visitor.slab is not None}) == len(self.holding)
        seen = self.pool.statistics()
        assert seen.peak_used_slabs <= self.slabs
        assert seen.allocated_bytes <= seen.ceiling_bytes == self.slabs * SLAB_BYTES

    def _counts_agree(self) -> bool:
        """Say so; whoever's time has passed is out of the line as soon as it says so, and out of the pool's before."""
        seen = self.pool.statistics()
        waiting = sum(not visitor.ended for visitor in self.line)
        served = sum(visitor.slab is not None for visitor in self.visitors)
        return (seen.used_slabs, seen.waiting, served) == (len(self.holding), waiting, len(self.holding))


@given(
    slabs=st.integers(1, 3),
    last_first=st.booleans(),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "arrive in haste", "give", "raise", "again", "all", "grow"]),
            st.integers(0, 2),
        ),
        max_size=20,
    ),
)
@example(
    slabs=1, last_first=False, moves=[("arrive", 0), ("arrive in haste", 0), ("arrive", 0), ("again", 0), ("raise", 0)]
)
@example(slabs=2, last_first=True, moves=[("arrive", 0)] * 6 + [("again", 1), ("grow", 0), ("all", 0)])
@examples(150)
def test_slabs_go_to_whoever_came_first_and_all_of_them_come_back(
    slabs: int, last_first: bool, moves: list[tuple[str, int]]
) -> None:
    with Crowd(slabs, last_first) as crowd:
        for move, which in moves:
            if move.startswith("arrive"):
                crowd.arrive(hasty=move == "arrive in haste")
            elif crowd.holding:
                crowd.leave(which, move)
        crowd.drain()
