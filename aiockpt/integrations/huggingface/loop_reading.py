"""Source of the batches of one loop over a loader that accelerate has prepared.

It counts the batches, and reads the first new batch of a resumed loop with the same random numbers as the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import aiockpt
from aiockpt.integrations.huggingface.loop_habit import SkipWindow, TrainingTraces

_RNG = aiockpt.RNG()
Values = dict[str, Any]


class GoOn(NamedTuple):
    """The position from which the next loop resumes.

    Attributes:
        passed: batches of the epoch before it.
        own: the state of the rank that saved.
        seen: samples before those batches, if they were trained in batches of another size.
        by_hand: the number of batches that a script may count that skips by hand.
        counts_samples: whether the position is not a number of batches of this size from the beginning of the epoch.
    """

    passed: int
    own: Values
    seen: int = 0
    by_hand: int = 0
    counts_samples: bool = False


class LoopOwner(Protocol):
    """The methods of `LoaderPosition` that a loop calls."""

    loader: Any
    training: TrainingTraces
    dispatches: bool
    keeps_itself: bool
    reads_again: bool

    @property
    def sampler_epoch(self) -> int | None: ...
    def read_generators(self) -> Any: ...
    def write_generators(self, states: Any) -> None: ...
    def log_habit(self, habit: str, reading: Any) -> None: ...


class LoopReading:
    """One loop over a loader, as the source of its batches. It lives as long as the loop, which holds the only reference.

    Args:
        go_on: the position from which it resumes; None begins an epoch.
        offset: batches of the epoch that are skipped without being fetched.
        ended: the loaded position, if its epoch had ended.
    """

    def __init__(
        self,
        position: LoopOwner,
        loader: Any,
        begin: Callable[[], Iterator[Any]],
        go_on: GoOn | None,
        offset: int,
        ended: GoOn | None,
    ) -> None:
        self.loader = loader
        self.epoch, self.iteration = position.sampler_epoch, loader.iteration
        self.ended = ended
        self.window: SkipWindow | None = None
        self.begun_at = position.training.mark()
        self.seen = 0 if go_on is None else go_on.seen
        self._position = position
        self._go_on = go_on
        self._draws = loader.num_workers == 0
        self._edge = 0 if go_on is None or not position.reads_again else go_on.passed
        self._offset, self.fetched = offset, 0
        self.before: Any = None
        self.start: Any = None
        if position.reads_again:
            if go_on is not None:
                _RNG.load_state_dict(go_on.own["start"]["global"])
                position.write_generators(go_on.own["start"]["own"])
            self.start = {"global": _RNG.state_dict(), "own": position.read_generators()}
        self._is_over = go_on is not None and position.keeps_itself and go_on.own["finished"]
        self._batches = iter(()) if self._is_over else begin()

    @property
    def passed(self) -> int:
        """The number of batches of this epoch that were yielded."""
        return self._offset + self.fetched - (0 if self.loader.end_of_dataloader else 1)

    @property
    def trains(self) -> bool:
        """Whether anything was trained since the loop began."""
        return self.begun_at != self._position.training.mark()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches) if self._position.dispatches else self.fetch(lambda: next(self._batches))

    def fetch(self, get: Callable[[], Any], has_ended: Callable[[Any], bool] = lambda _: False) -> Any:
        """Fetch the batch one ahead; the first new one with the same random numbers as before the resume."""
        at_edge = self._go_on is not None and self.fetched == self._edge
        if at_edge:
            assert self._go_on is not None
            self.before = self._go_on.own["before"]
            if self.before is not None:
                _RNG.load_state_dict(self.before)
        elif self._draws:
            self.before = _RNG.state_dict()
        try:
            batch = get()
        except StopIteration:
            self._end()
            raise
        finally:
            if at_edge and self._go_on is not None:
                _RNG.load_state_dict(self._go_on.own["now"])
        if has_ended(batch):
            self._end()
        else:
            self.fetched += 1
        return batch

    def watch_skips(self, loaded: GoOn) -> None:
        """Watch whether the script skips batches by hand, where it is known to train each before it fetches the next."""
        if loaded.own.get("skippable", True):
            self.window = SkipWindow(self._position.training, loaded.by_hand)

    def is_skipped(self) -> bool:
        """Return whether the script skips the batch that was yielded last, in place of one that was trained before."""
        window = self.window
        if window is None:
            return False
        if window.is_skipped():
            return True
        self.window = None
        self._position.log_habit("continue" if window.skipped_count else "no skipping", self)
        return False

    def _end(self) -> None:
        """Notify the prepared loader of the end of an epoch that another loader read, or that had nothing left."""
        whole = self._position.loader
        if self.fetched == 0 and (self._offset or self._go_on is not None):
            self.loader.iteration += 1  # accelerate does not count a loop without batches
            whole.iteration = self.loader.iteration
        elif self.loader is not whole:
            whole.iteration = self.loader.iteration + 1
