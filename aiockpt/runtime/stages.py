"""Timing of the stages of a save or a load: on the thread where each happens, emitted on the loop's.

An operation has one `Stages`. Nothing waits for a device, and a stage costs two reads of the clock and one event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiockpt.events import BytesWritten, Event, Operation, StageEnded


class StageTally:
    """One stage, until it ends, and its measurements.

    Attributes:
        key: the data file or the place; empty for all of the step.
        bytes: moved by the stage.
        hash_ns: spent on hashing by worker threads.
    """

    __slots__ = ("begun_ns", "bytes", "hash_ns", "key", "stage")

    def __init__(self, stage: str = "", begun_ns: int = 0, key: str = "", size: int = 0) -> None:
        self.stage, self.begun_ns, self.key, self.bytes = stage, begun_ns, key, size
        self.hash_ns = 0


class Stages:
    """Times the stages of one operation.

    Args:
        emit: passes an event to the observers; called on the loop thread.
        now_ns: the monotonic time, from any thread.
        step: that is saved, loaded or copied.
    """

    def __init__(
        self, emit: Callable[[Event], object], now_ns: Callable[[], int], operation: Operation, step: int
    ) -> None:
        self.now_ns = now_ns
        self._emit = emit
        self._operation: Operation = operation
        self._step = step
        self._noted: list[Event] = []
        self._flushed = False

    @contextmanager
    def time(self, stage: str, key: str = "", size: int = 0) -> Iterator[StageTally]:
        """Time the block, and emit the stage at its end, also when it fails. On the loop thread.

        Args:
            key: the data file or the place; empty for all of the step.
            size: the bytes that it moves, where they are known before.
        """
        tally = StageTally(stage, self.now_ns(), key, size)
        try:
            yield tally
        except BaseException as error:
            self._emit(self._ended(tally, error))
            raise
        self._emit(self._ended(tally))

    def note(self, stage: str, begun_ns: int, ended_ns: int | None = None) -> None:
        """Note, on any thread, that a stage ended at *ended_ns*, None for now; the next `flush` emits it."""
        self._noted.append(self._ended(StageTally(stage, begun_ns), now_ns=ended_ns))

    def follow(self, event: Event) -> None:
        """Emit *event*; before the first `flush`, at that one. On the loop thread."""
        self._noted.append(event)
        if self._flushed:
            self.flush()

    def ended(self, stage: str, begun_ns: int) -> None:
        """Emit a stage that ends now. On the loop thread."""
        self._emit(self._ended(StageTally(stage, begun_ns)))

    def wrote(self, key: str, size: int, begun_ns: int) -> None:
        """Emit bytes that have reached the storage. On the loop thread."""
        now_ns = self.now_ns()
        seconds = (now_ns - begun_ns) / 1e9
        self._emit(BytesWritten(at_ns=now_ns, step=self._step, bytes=size, key=key, seconds=seconds))

    def flush(self) -> None:
        """Emit what was noted. On the loop thread."""
        self._flushed = True
        noted, self._noted = self._noted, []
        for event in noted:
            self._emit(event)

    def _ended(self, tally: StageTally, error: BaseException | None = None, *, now_ns: int | None = None) -> StageEnded:
        now_ns = self.now_ns() if now_ns is None else now_ns
        return StageEnded(
            at_ns=now_ns,
            step=self._step,
            operation=self._operation,
            stage=tally.stage,
            seconds=(now_ns - tally.begun_ns) / 1e9,
            key=tally.key,
            bytes=tally.bytes,
            hash_s=tally.hash_ns / 1e9,
            failed=error is not None,
            error=_in_words(error),
        )


def _in_words(error: BaseException | None) -> str:
    if error is None:
        return ""
    return "given up, for something else failed" if isinstance(error, asyncio.CancelledError) else repr(error)


UNREPORTED = Stages(lambda _: None, time.monotonic_ns, "load", -1)
"""For an operation without observers."""
