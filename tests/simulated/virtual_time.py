"""An event loop on a virtual clock: time moves to the next timer only when no task can run.

Guarantees:

- Timers fire in order, at their times by the clock; between them only the program advances the clock. So durations are
  those of the sleeps alone, and the same in every run.
- Virtual hours take only as long as the work done in them.
- A program in which every task waits and no timer is set can never go on: `run_virtually` raises instead of waiting.
- One thread: worker threads are the calling thread, as in `tests.simulated.simulation.run_inline`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from tests.simulated.simulation import InlineExecutor, SimulatedClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NothingCanHappenError(AssertionError):
    """Every task waits, and no timer or other task can wake one."""


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]], clock: SimulatedClock | None = None) -> T:
    """Run ``main()`` on an event loop whose time begins at 0 and is that of *clock* (a new one when left out).

    Raises:
        NothingCanHappenError: the program hangs.
    """
    ticking = SimulatedClock() if clock is None else clock
    selector = _VirtualSelector(ticking)
    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(selector, ticking)) as runner:
        runner.get_loop().set_default_executor(InlineExecutor())
        try:
            return runner.run(main())
        finally:
            selector.is_virtual = False  # closing a loop joins a thread


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _VirtualSelector, clock: SimulatedClock) -> None:
        self._simulated_clock = clock
        self._began_ns = clock.monotonic_ns()
        super().__init__(selector)
        # asyncio's own name, unchanged from 3.4 to 3.14: a timer is due when its time is less than this away. The real
        # clock's nanosecond is lost in a float of many seconds, and the loop would wait for a timer again and again.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return (self._simulated_clock.monotonic_ns() - self._began_ns) / 1e9

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer; one for the end of time (``anyio.sleep_forever``) does not count, else no hang is detected."""
        if math.isinf(when):
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


class _VirtualSelector(selectors.SelectSelector):
    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock
        self.is_virtual = True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.is_virtual:
            return super().select(timeout)
        ready = super().select(0)
        if not ready and timeout is None:
            self.is_virtual = False
            raise NothingCanHappenError("every task waits, and no timer is set: the program hangs")
        if not ready and timeout is not None:
            self._clock.now_ns += max(0, math.ceil(timeout * 1e9))
        return ready
