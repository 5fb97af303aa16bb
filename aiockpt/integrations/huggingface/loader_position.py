"""The position of a loop in a loader that accelerate has prepared; accelerate itself keeps none.

A prepared loader reads one batch ahead of those that it yields. So a position records the number of yielded batches and
three random states: at the beginning of the epoch, at the read of the batch ahead, and at the save. The next loop over the
loader then yields the rest of the epoch, and after the last batch the next epoch:

- Indices are drawn again with the random numbers of the beginning of the epoch, and those that were yielded are skipped.
- A stream (`IterableDataset`, ``dispatch_batches``) is read again from its beginning, without yielding old batches again.
- A stream with ``use_stateful_dataloader`` has a state of its own.

A script that skips by hand, or by the functions of accelerate, reaches the same position (`loop_habit`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

import aiockpt
from aiockpt.integrations.huggingface.loop_habit import Habit, SkipWindow, TrainingTraces
from aiockpt.integrations.indices import Generators, Indices, length_of, log_other_length, log_other_size, whole_batches

logger = logging.getLogger("aiockpt")

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


class _TrackedIndices(Indices):
    """Indices that pass as instances of the wrapped class: accelerate checks for a ``BatchSampler``."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._source)


class LoaderPosition:
    """The position in one prepared loader.

    Attributes:
        training: the traces that training leaves.
        dispatches: whether the first rank reads for all, and sends the other ranks their parts.
        keeps_itself: whether it is a stream with a state of its own.
        reads_again: whether it must be read from the beginning of the epoch to reach the middle.
        generators: those that the loader and its data own.
    """

    def __init__(self, loader: Any, training: TrainingTraces) -> None:
        self.loader = loader
        self.training = training
        self.dispatches = hasattr(loader, "_fetch_batches")
        streams = isinstance(loader.dataset, IterableDataset)
        self.keeps_itself = streams and bool(loader.use_stateful_dataloader)
        self.reads_again = not self.keeps_itself and (streams or self.dispatches)
        self._go_on: GoOn | None = None
        self._reading: weakref.ref[LoopReading] | None = None
        self._followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._habit = Habit()
        self._indices = None if self.reads_again or self.keeps_itself else self._track()
        of_loader = Generators(loader.base_dataloader, "dataset", "sampler", "batch_sampler")
        self.generators = of_loader if self._indices is None else self._indices.generators
        self._bind(loader, None)

    def _track(self) -> Indices:
        _drop_begun(self.loader.base_dataloader)
        return _TrackedIndices.put_into(self.loader.base_dataloader)

    # ------------------------------------------------------------------ loops

    def _bind(self, loader: Any, skipped: int | None) -> None:
        """Register each loop over *loader*, which does not read the first *skipped* batches of an epoch."""
        base = loader.base_dataloader
        begin = base.__iter__
        self._followers.add(loader)

        def read() -> LoopReading:
            loaded, self._go_on = self._go_on, None
            by_script = skipped if loaded is None or skipped is None else self._agree(loader, loaded, skipped)
            is_next = loaded is not None and _is_next(loaded, by_script)
            go_on, ended = (None, loaded) if is_next else (loaded, None)
            # The script may have drawn numbers since the load, which an uninterrupted run does not draw here.
            if ended is not None:
                _RNG.load_state_dict(ended.own["now"])
            if go_on is not None and by_script is not None:
                go_on = go_on._replace(passed=by_script)
            if go_on is not None and by_script is None and self._indices is not None:
                self._indices.go_on(go_on.own["start"], go_on.passed, go_on.seen)
            passed = (by_script or 0) if go_on is None else go_on.passed
            if self.reads_again:
                loader.skip_batches = passed
            reading = LoopReading(self, loader, begin, go_on, 0 if self.reads_again else passed, ended)
            if loaded is not None and by_script is None and (go_on is not None or loaded.counts_samples):
                reading.watch_skips(loaded)
            if loaded is not None and by_script is not None:
                self.log_habit("skip_first_batches", reading)
            self._reading = weakref.ref(reading)
            self._habit.begin(self.training.backward_count)
            return reading

        # An attribute of the object is enough: accelerate calls base_dataloader.__iter__() by name, and not iter().
        base.__iter__ = read
        _follow(loader, lambda batches: self._hand_out(batches))
        if self.dispatches:
            fetch = loader._fetch_batches
            loader._fetch_batches = lambda reading: reading.fetch(
                lambda: fetch(reading), lambda fetched: fetched[1][0] is None
            )

    def _agree(self, loader: Any, loaded: GoOn, skipped: int) -> int | None:
        """Return how many batches the first loop after a load skips that asks for *skipped*; None: as in *loaded*."""
        if loaded.own["finished"] and not _is_next(loaded, skipped):
            return skipped
        if loaded.counts_samples:
            sampler = _skipping_sampler(loader)
            if sampler is not None:
                sampler.skip_batches = 0
            return None
        if not loaded.own["finished"] and abs(skipped - loaded.passed) > 1:  # some scripts skip the last batch by hand
            logger.warning(
                "skip_first_batches(…, %d): %d batches of this epoch were trained when the checkpoint was made",
                *(skipped, loaded.passed),
            )
        return skipped

    def _hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a loop; repeat a batch for each earlier one that the script skips by hand."""
        reading: LoopReading | None = None
        try:
            for batch in batches:
                # Not before the loop: accelerate's __iter__ is a generator, which calls `read` for its first batch.
                reading = None if self._reading is None else self._reading()
                self._habit.note_fetch(self.training.backward_count)
                is_again = True
                while is_again:
                    yield batch
                    is_again = reading is not None and reading.is_skipped()
        finally:
            if reading is not None and reading.window is not None:
                reading.window.close()
        if reading is not None and reading.ended is not None and not reading.trains:
            self._begin_again(reading, reading.ended)

    def _begin_again(self, reading: LoopReading, ended: GoOn) -> None:
        """Begin the epoch of a loop that trained nothing again: all skipped batches were of the epoch before."""
        if not ended.own.get("skippable", True):
            return
        self.log_habit("continue", reading)
        self._reading = None
        self.loader.iteration = reading.iteration
        self.sampler_epoch = reading.epoch
        if self.keeps_itself:
            _drop_begun(self.loader.base_dataloader)
        _RNG.load_state_dict(ended.own["now"])
        self.generators.write(ended.own["generators"])
        self._habit = Habit(*ended.own["habit"])

    def log_habit(self, habit: str, reading: LoopReading) -> None:
        """Log once how the script reaches its position."""
        logger.info("the loop goes on in epoch %d of its loader; skipping seen: %s", reading.iteration, habit)

    def follow(self, skip: Callable[[Any, int], Any], count: int) -> Any:
        """Return the loader that *skip* makes, without the first *count* batches; loops over it are also registered."""
        skipping = skip(self.loader, count)
        self._follow_skipping(skipping, count)
        return skipping

    def recognise(self, loader: Any) -> bool:
        """Follow a loop over *loader*, if accelerate's function made it from this one to skip batches; return whether so."""
        sampler = _skipping_sampler(loader)
        if self.reads(loader) or loader.dataset is not self.loader.dataset:
            return False
        if self._indices is not None and (sampler is None or sampler.batch_sampler is not self._indices):
            return False
        self._follow_skipping(loader, loader.skip_batches if sampler is None else sampler.skip_batches)
        return True

    def _follow_skipping(self, loader: Any, count: int) -> None:
        go_on = self._go_on
        if go_on is not None and go_on.own["finished"] and not _is_next(go_on, count):
            loader.iteration = self.loader.iteration - 1
        self._bind(loader, count)

    def reads(self, loader: Any) -> bool:
        """Return whether loops over *loader* are registered."""
        return loader in self._followers

    def is_read_unseen(self, loader: Any) -> bool:
        """Return whether *loader* was made from this one in a way that is not tracked."""
        return loader.dataset is self.loader.dataset and not self.reads(loader)

    # ------------------------------------------------------------------ the state

    def shared(self) -> Values:
        """Return the part of the state that is the same on all ranks."""
        reading = None if self._reading is None else self._reading()
        state: Values = {
            "iteration": (self.loader if reading is None else reading.loader).iteration,
            "passed": None if reading is None else reading.passed,
            "seen": 0 if reading is None else reading.seen,
            "epoch": self.sampler_epoch if reading is None else reading.epoch,
            "seed": getattr(self.loader.get_sampler(), "initial_seed", None),
            "batch_size": self._batch_size(),
            "length": length_of(self.loader.dataset),
        }
        if reading is None and self._go_on is not None:  # loaded, and no loop has begun since
            state |= {"passed": self._go_on.passed, "seen": self._go_on.seen}
            if self._go_on.own["finished"]:
                state["iteration"] -= 1
                state["epoch"] = None if state["epoch"] is None else state["epoch"] - 1
        return state

    def own(self) -> Values:
        """Return the part of the state that belongs to this rank."""
        reading = None if self._reading is None else self._reading()
        loaded = {} if self._go_on is None or reading is not None else self._go_on.own
        state: Values = {**loaded, "generators": self.generators.read(), "now": _RNG.state_dict()}
        if self.keeps_itself and "loader" not in loaded:
            state["loader"] = (self.loader if reading is None else reading.loader).state_dict()
        state["habit"] = self._habit.counts(self.training.backward_count)
        if reading is not None:
            start = reading.start if self._indices is None else self._indices.start
            finished = bool(reading.loader.end_of_dataloader)
            skippable = reading.trains and not Habit(*state["habit"]).collects
            state |= {"start": start, "before": reading.before, "finished": finished, "skippable": skippable}
        return state

    def go_on(self, shared: Values, own: Values) -> None:
        """Resume from this state: with the rest of the epoch, or with the next one if nothing is left."""
        self.loader.iteration = shared["iteration"]
        self.sampler_epoch = shared["epoch"]
        if shared["seed"] is not None and hasattr(self.loader.get_sampler(), "initial_seed"):
            self.loader.get_sampler().initial_seed = shared["seed"]
        if self.keeps_itself and own.get("finished"):
            # The next epoch is a new one; the state of an end would skip all of it.
            _drop_begun(self.loader.base_dataloader)
        elif self.keeps_itself:
            self.loader.load_state_dict(own["loader"])
        self.generators.write(own["generators"])
        self._reading, self._go_on = None, None
        self._habit = Habit(*own.get("habit", ()))
        if self._indices is not None:
            self._indices.reset()
        if shared["passed"] is None:
            size, before = self._batch_size(), shared.get("batch_size")
            # Between two loops only a loader that has trained counts: that of an evaluation may have any size.
            if self._habit.used and size is not None and before not in (None, size):
                log_other_size(size, before)
            return
        self._go_on = self._in_samples(shared, own)
        if own["finished"]:
            self.loader.iteration += 1
            self.sampler_epoch = None if shared["epoch"] is None else shared["epoch"] + 1
        elif self._indices is not None:
            self._indices.go_on(own["start"], 0)

    def _in_samples(self, shared: Values, own: Values) -> GoOn:
        """Return the position for the next loop, if the batch size or the length of the data may have changed."""
        passed, seen, size = shared["passed"], shared.get("seen", 0), self._batch_size()
        before, length = shared.get("batch_size", size), length_of(self.loader.dataset)
        if size is None or before is None:
            return GoOn(passed, own, by_hand=passed)
        is_counted = own["finished"] or (self._indices is not None and self._indices.counts_samples)
        if size != before and is_counted:
            log_other_size(size, before)
        samples, by_hand = seen + passed * before, max(passed, -(-(seen + passed * before) // size))
        if own["finished"]:
            return GoOn(by_hand, own, 0, by_hand, counts_samples=size != before)
        in_order = self._indices is not None and self._indices.is_in_order
        if length != shared.get("length", length) and not in_order:
            log_other_length(length, shared["length"])
        if size == before:
            return GoOn(passed, own, seen, by_hand, seen > 0)
        if is_counted:
            return GoOn(0, own, samples, by_hand, counts_samples=True)
        return GoOn(whole_batches(samples, size, before), own, 0, by_hand, counts_samples=True)

    def _batch_size(self) -> int | None:
        """Return the samples of a batch over all ranks; None where the loader has no such number."""
        loader = self.loader
        try:
            if self.dispatches:  # its own total_batch_size reads it from the dataset
                return int(
                    loader.batch_sampler.batch_size * (1 if loader.split_batches else loader.state.num_processes)
                )
            return int(loader.total_batch_size)
        except (AttributeError, TypeError):
            return None

    @property
    def sampler_epoch(self) -> int | None:
        """The epoch number of a sampler that draws by it; None for other samplers."""
        return getattr(self.loader.get_sampler(), "epoch", None)

    @sampler_epoch.setter
    def sampler_epoch(self, epoch: int | None) -> None:
        sampler = self.loader.get_sampler()
        if epoch is not None and hasattr(sampler, "epoch"):
            sampler.epoch = epoch


class LoopReading:
    """One loop over a loader, as the source of its batches. It lives as long as the loop, which holds the only reference.

    Args:
        go_on: the position from which it resumes; None begins an epoch.
        offset: batches of the epoch that are skipped without being fetched.
        ended: the loaded position, if its epoch had ended.
    """

    def __init__(
        self,
        position: LoaderPosition,
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
                position.generators.write(go_on.own["start"]["own"])
            self.start = {"global": _RNG.state_dict(), "own": position.generators.read()}
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


def _drop_begun(base: Any) -> None:
    """Make a ``StatefulDataLoader`` begin anew, because it began to read when accelerate read its state."""
    base._iterator = None
    base.__dict__["_initial_iter_for_state_dict"] = False


def _follow(loader: Any, loop: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Route each ``for`` over *loader* through *loop*: Python looks up ``__iter__`` only in the type."""
    kind = type(loader)
    followed = type(kind.__name__, (kind,), {"__iter__": lambda self: loop(kind.__iter__(self))})
    # The __class__ of these loaders is a property of accelerate, without a setter.
    object.__dict__["__class__"].__set__(loader, followed)


def _is_next(go_on: GoOn, skipped: int | None) -> bool:
    """Return whether a loop that skips *skipped* batches is of the next epoch, because nothing is left of this one."""
    return bool(go_on.own["finished"]) and (skipped or 0) < go_on.passed


def _skipping_sampler(loader: Any) -> Any:
    """Return the sampler that skips the first indices in a loader that accelerate made for skipping; or None."""
    samplers = (loader.batch_sampler, loader.sampler)
    return next((one for one in samplers if type(one).__name__ == "SkipBatchSampler"), None)
