"""What would happen, however long it took? An event loop whose time leaps to the next timer when nothing else is to do.

Guarantees:

- Timers fire in order, at their times by the given clock; between them no time passes but what somebody lets pass.
- Hours take as long as what is done in them.
- A program in which every task waits and no timer is set can never go on: `run_in_leaps` raises instead of waiting.
- One thread: worker threads are the calling thread, as in `aiockpt.testing.simulation.run_inline`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from aiockpt.testing.simulation import InlineExecutor, SimulatedClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NothingCanHappenError(AssertionError):
    """Every task waits, for something that no timer and no other task can bring."""


def run_in_leaps(main: Callable[[], Coroutine[Any, Any, T]], clock: SimulatedClock) -> T:
    """Run ``main()`` on an event loop whose time is that of *clock*, and moves only by leaps.

    Raises:
        NothingCanHappenError: it hangs.
    """
    selector = _LeapingSelector(clock)
    with asyncio.Runner(loop_factory=lambda: _LeapingLoop(selector, clock)) as runner:
        runner.get_loop().set_default_executor(InlineExecutor())
        try:
            return runner.run(main())
        finally:
            selector.leaps = False  # closing a loop joins a thread


class _LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _LeapingSelector, clock: SimulatedClock) -> None:
        self._simulated_clock = clock
        self._began_ns = clock.monotonic_ns()
        super().__init__(selector)
        # asyncio's own name, unchanged from 3.4 to 3.14: a timer is due when its time is less than this away. The real
        # clock's nanosecond is lost in a float of many seconds, and a timer would be waited for again and again.
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
        """Set a timer; one for the end of time (``anyio.sleep_forever``) is none, or nobody would ever seem to hang."""
        if math.isinf(when):
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


class _LeapingSelector(selectors.SelectSelector):
    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock
        self.leaps = True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.leaps:
            return super().select(timeout)
        ready = super().select(0)
        if not ready and timeout is None:
            self.leaps = False
            raise NothingCanHappenError("every task waits, and no timer is set: the program hangs")
        if not ready and timeout is not None:
            self._clock.now_ns += max(0, math.ceil(timeout * 1e9))
        return ready
