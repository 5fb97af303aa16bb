"""Where in its data is a loop over a loader that accelerate has prepared? Accelerate itself does not say.

A prepared loader reads one batch ahead of what it yields. So what is kept with a position is how many batches were yielded,
the random state that the epoch began with, the one that the batch ahead was read with, and the one at the save. The next
loop over the loader then gives the rest of the epoch, and may be empty. How it gets there:

- Indices are drawn again with the random numbers of the begin of the epoch, and those that were yielded are passed over.
- A stream (`IterableDataset`, ``dispatch_batches``) is read again from its begin, and what was yielded is not yielded again.
- A stream with ``use_stateful_dataloader`` has a state of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

import aiockpt
from aiockpt.integrations.indices import Indices, find_generators, read_generators, write_generators

_RNG = aiockpt.RNG()
Values = dict[str, Any]


class _TrackedIndices(Indices):
    """Indices that are taken for what they are made of: accelerate asks whether something is a ``BatchSampler``."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._source)


class _GoOn(NamedTuple):
    """What the next loop goes on with: after *passed* batches, and with random states of the rank that saved."""

    passed: int
    own: Values


class _Reading:
    """One loop over a loader, as the source of its batches. It ends with the loop, which alone holds it.

    Args:
        go_on: what it goes on with; None begins an epoch.
        offset: batches of the epoch that are passed over without being fetched.
    """

    def __init__(
        self,
        position: LoaderPosition,
        loader: Any,
        begin: Callable[[], Iterator[Any]],
        go_on: _GoOn | None,
        offset: int,
    ) -> None:
        self.loader = loader
        self.epoch = position.sampler_epoch
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
        """The batches of this epoch that were yielded."""
        return self._offset + self.fetched - (0 if self.loader.end_of_dataloader else 1)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches) if self._position.dispatches else self.fetch(lambda: next(self._batches))

    def fetch(self, get: Callable[[], Any], has_ended: Callable[[Any], bool] = lambda _: False) -> Any:
        """Fetch the batch that is one ahead; the first new one with the random numbers that it was read with."""
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

    def _end(self) -> None:
        """Have the loader that was prepared know of the end of an epoch that another one read, or that had nothing left."""
        whole = self._position.loader
        if self.fetched == 0 and self._offset:
            self.loader.iteration += 1  # accelerate does not count a loop without batches
            whole.iteration = self.loader.iteration
        elif self.loader is not whole:
            whole.iteration = self.loader.iteration + 1


class LoaderPosition:
    """The position in one prepared loader.

    Attributes:
        dispatches: whether the first rank reads, and sends the others what they need.
        keeps_itself: whether it is a stream that has a state of its own.
        reads_again: whether it is read from the begin of the epoch to get to the middle of it.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dispatches = hasattr(loader, "_fetch_batches")
        streams = isinstance(loader.dataset, IterableDataset)
        self.keeps_itself = streams and bool(loader.use_stateful_dataloader)
        self.reads_again = not self.keeps_itself and (streams or self.dispatches)
        self._go_on: _GoOn | None = None
        self._reading: weakref.ref[_Reading] | None = None
        self._followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._indices = None if self.reads_again or self.keeps_itself else self._track()
        self._bind(loader, None)

    def _track(self) -> Indices:
        base = self.loader.base_dataloader
        name = "sampler" if base.batch_sampler is None else "batch_sampler"
        source = getattr(base, name)
        indices = source if isinstance(source, Indices) else _TrackedIndices(source, base)
        _drop_begun(base)
        base.__dict__[name] = indices  # a DataLoader refuses this by its setter; accelerate makes a new one for it
        return indices

    def _bind(self, loader: Any, skipped: int | None) -> None:
        """Have each loop over *loader* be known here; *skipped* batches of an epoch are none of its own."""
        base = loader.base_dataloader
        begin, own_skip = base.__iter__, loader.skip_batches
        self._followers.add(loader)

        def read() -> _Reading:
            go_on, self._go_on = self._go_on, None
            if go_on is not None and skipped is not None:
                go_on = go_on._replace(passed=skipped)
            if go_on is not None and self._indices is not None and skipped is None:
                self._indices.go_on(go_on.own["start"], go_on.passed)
            loader.skip_batches = go_on.passed if go_on is not None and self.reads_again else own_skip
            passed = 0 if go_on is None else go_on.passed
            offset = 0 if self.reads_again else passed if skipped is None else skipped
            reading = _Reading(self, loader, begin, go_on, offset)
            self._reading = weakref.ref(reading)
            return reading

        base.__iter__ = read
        if self.dispatches:
            fetch = loader._fetch_batches
            loader._fetch_batches = lambda reading: reading.fetch(
                lambda: fetch(reading), lambda fetched: fetched[1][0] is None
            )

    def follow(self, skip: Callable[[Any, int], Any], count: int) -> Any:
        """Return what *skip* makes of the loader, without the first *count* batches; loops over it are known, too."""
        if self._go_on is not None and self._go_on.own["finished"] and count < self._go_on.passed:
            self._begin_next_epoch()
        skipping = skip(self.loader, count)
        self._bind(skipping, count)
        return skipping

    def _begin_next_epoch(self) -> None:
        """The last batch of an epoch was yielded, and the caller goes on with the first one of the next."""
        self._go_on = None
        self.loader.iteration += 1
        self.sampler_epoch = self.loader.iteration
        if self._indices is not None:
            self._indices.forget()

    def reads(self, loader: Any) -> bool:
        """Return whether loops over *loader* are known here."""
        return loader in self._followers

    def is_read_unseen(self, loader: Any) -> bool:
        """Return whether *loader* was made of this one in a way that was not seen."""
        return loader.dataset is self.loader.dataset and not self.reads(loader)

    # ------------------------------------------------------------------ the state

    def shared(self) -> Values:
        """Return what is the same on all ranks."""
        reading = None if self._reading is None else self._reading()
        passed = None if self._go_on is None else self._go_on.passed  # loaded, and no loop has begun since
        return {
            "iteration": (self.loader if reading is None else reading.loader).iteration,
            "passed": passed if reading is None else reading.passed,
            "epoch": self.sampler_epoch if reading is None else reading.epoch,
            "seed": getattr(self.loader.get_sampler(), "initial_seed", None),
        }

    def own(self) -> Values:
        """Return what belongs to this rank."""
        reading = None if self._reading is None else self._reading()
        loaded = {} if self._go_on is None or reading is not None else self._go_on.own
        state: Values = {**loaded, "generators": self.read_generators(), "now": _RNG.state_dict()}
        if self.keeps_itself and "loader" not in loaded:
            state["loader"] = (self.loader if reading is None else reading.loader).state_dict()
        if reading is not None:
            start = reading.start if self._indices is None else self._indices.start
            finished = bool(reading.loader.end_of_dataloader)
            state |= {"start": start, "before": reading.before, "finished": finished}
        return state

    def go_on(self, shared: Values, own: Values) -> bool:
        """Go on from there; return whether of the epoch nothing is left."""
        self.loader.iteration = shared["iteration"]
        self.sampler_epoch = shared["epoch"]
        if shared["seed"] is not None and hasattr(self.loader.get_sampler(), "initial_seed"):
            self.loader.get_sampler().initial_seed = shared["seed"]
        if self.keeps_itself and own.get("finished"):
            # The next epoch is a new one; the state of an end would skip all of it.
            _drop_begun(self.loader.base_dataloader)
        elif self.keeps_itself:
            self.loader.load_state_dict(own["loader"])
        self.write_generators(own["generators"])
        self._reading, self._go_on = None, None
        if self._indices is not None:
            self._indices.forget()
        if shared["passed"] is None:
            return False
        self._go_on = _GoOn(shared["passed"], own)
        if self._indices is not None:
            self._indices.go_on(own["start"], 0)
        return bool(own["finished"])

    @property
    def sampler_epoch(self) -> int | None:
        """The number of the epoch as a sampler has it that draws by that number; None for others."""
        return getattr(self.loader.get_sampler(), "epoch", None)

    @sampler_epoch.setter
    def sampler_epoch(self, epoch: int | None) -> None:
        sampler = self.loader.get_sampler()
        if epoch is not None and hasattr(sampler, "epoch"):
            sampler.epoch = epoch

    def read_generators(self) -> list[bytes]:
        """Return the state of the generators that the loader and its data own."""
        return self._indices.own() if self._indices is not None else read_generators(self._generators())

    def write_generators(self, states: list[bytes]) -> None:
        """Set these generators."""
        if self._indices is not None:
            self._indices.write_own(states)
        else:
            write_generators(self._generators(), states)

    def _generators(self) -> list[Any]:
        base = self.loader.base_dataloader
        return find_generators(base, base.dataset, base.sampler, base.batch_sampler)


def _drop_begun(base: Any) -> None:
    """Have a ``StatefulDataLoader`` begin anew: it has begun to read already, when accelerate asked it for its state."""
    base._iterator = None
    base.__dict__["_initial_iter_for_state_dict"] = False
