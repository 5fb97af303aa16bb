"""How does a protocol behave over minutes, tested in milliseconds? On an event loop whose clock jumps.

Guarantees:

- While any task can run, time stands still; when all of them sleep, it jumps to the earliest that wakes. So durations are
  those of the sleeps alone, exactly, and the same in every run.
- Worker threads are the calling thread (`aiockpt.testing.simulation.InlineExecutor`): no two calls ever race.
- A program that waits for something that can never come raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiockpt.testing.simulation import InlineExecutor

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: where the loop would sleep, its clock moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for another one: none of them will ever run again")
        if not ready and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at second 0 and never waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the seconds that have passed in this loop."""
        return self._jumping.now_s


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` on a new loop with a clock of its own and return what it returns.

    Raises:
        RuntimeError: all tasks wait for each other.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.get_loop().set_default_executor(InlineExecutor())
        return runner.run(main())
