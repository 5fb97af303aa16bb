"""End of a command, and of the process that it has started, on control-C, SIGTERM, or a closed terminal.

A child does not outlive its parent: a signal ends the child first. A signal that arrives while the child is being started
is held back until it runs. Use on the main thread, where signal handlers run.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import BinaryIO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_DEADLINE_S = 30.0
"""For a child to end after SIGTERM (torchrun ends its ranks then; killed itself, it would leave them behind)."""


class Interrupted(KeyboardInterrupt):
    """The signal *number* ends the command, as control-C would."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Interrupted` in the block when a signal ends the command."""

    def end(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    with _handle(end):
        yield


@contextmanager
def open_child(command: Sequence[str], log: BinaryIO, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child whose standard error is *log*, and wait for it; where the block raises, the child is ended first."""
    held_back: list[int] = []
    with (
        _handle(lambda number, _: held_back.append(number)) as restored,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env) as child,
    ):
        try:
            restored.close()
            for number in held_back:
                signal.raise_signal(number)
            yield child
        except BaseException:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_DEADLINE_S)
            child.kill()
            raise


def _handle(handler: Callable[[int, FrameType | None], object]) -> ExitStack:
    restored = ExitStack()
    for number in ENDING:
        restored.callback(signal.signal, number, signal.signal(number, handler))
    return restored
