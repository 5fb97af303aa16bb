"""Backends that let a test act around a call in the middle of a save, or that hold it until released.

Verbs are called as in `aiockpt.testing.faults`; to "put", "put_new", "get", "create", "list" and "upload.write" something
can be done, the others just pass.
"""

import threading
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Any

import anyio.to_thread

from aiockpt.storage.backend import Backend
from aiockpt.storage.forwarding import BackendCall, Forwarding

PATIENCE_S = 250

Act = Callable[[str, str], Awaitable[None]]
"""What to do, given the verb and the key (for "list" the prefix) of a call."""


async def _nothing(verb: str, key: str) -> None: ...


class Around(Forwarding):
    """*inner*, with *before* and *after* awaited around each call; what they raise, the caller gets."""

    VERBS = frozenset({"put", "put_new", "get", "create", "list", "upload.write"})

    def __init__(self, inner: Backend, before: Act = _nothing, after: Act = _nothing) -> None:
        super().__init__(inner)
        self._before, self._after = before, after

    async def forward(self, call: BackendCall) -> Any:
        if call.verb not in self.VERBS:
            return await call()
        await self._before(call.verb, call.key)
        answer = await call()
        await self._after(call.verb, call.key)
        return answer


class Gate(Around):
    """*inner*, whose calls of *verb* on keys that match wait until `open_up`.

    Args:
        times: how many of them wait; None for all.

    Attributes:
        reached: set when the first call has come to the gate.
    """

    def __init__(self, inner: Backend, verb: str = "create", match: str = "*", times: int | None = None) -> None:
        super().__init__(inner, before=self._pass)
        self._verb, self._match, self._times = verb, match, times
        self.reached, self._open = threading.Event(), threading.Event()

    def open_up(self) -> None:
        self._open.set()

    async def _pass(self, verb: str, key: str) -> None:
        if verb != self._verb or not fnmatchcase(key, self._match) or self._times == 0:
            return
        if self._times is not None:
            self._times -= 1
        self.reached.set()
        assert await anyio.to_thread.run_sync(self._open.wait, PATIENCE_S), f"nobody let {verb} {key} go on"


def striking(inner: Backend, strike: Callable[[], object]) -> Around:
    """Return *inner*, with *strike* called, once and in a thread, after the first write of a data file."""
    strikes = [strike]

    async def after(verb: str, key: str) -> None:
        if verb == "upload.write" and strikes:
            await anyio.to_thread.run_sync(strikes.pop())

    return Around(inner, after=after)
