"""A gate between a lazy save and the copy of its state, that a test opens."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiockpt.runtime.promise import Promise


class CopyGate:
    """Holds every copy that is made beside the program until it is opened, window by window."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    @contextmanager
    def open_for_who_waits(self, after_s: float = 0.0) -> Iterator[None]:
        """Be opened by the thread that has to block until a stage is settled, so many seconds after it began to."""
        wait = Promise.wait_anyway

        def open_and_wait(promise: Promise[Any], timeout_s: float | None) -> bool:
            if not promise.is_settled:
                threading.Timer(after_s, self.open.set).start()
            return wait(promise, timeout_s)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Promise, "wait_anyway", open_and_wait)
            yield
        self.open.set()  # where nobody had to

    def __call__(self, copy: Callable[..., None]) -> Callable[..., None]:
        def held(*arguments: Any) -> None:
            self.reached.set()
            assert self.open.wait(250)
            copy(*arguments)

        return held
