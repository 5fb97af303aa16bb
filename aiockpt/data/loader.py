"""Loaders that resume at the next batch, on more or fewer ranks than before: each sample once, without gaps.

`Loader` wraps the iterable that training reads, and is put into the state. It saves the state *at the batch that was
yielded last*, however many batches are prefetched after it:

    sampler = ShardedSampler(len(dataset), batch_size=8, seed=1)
    loader = Loader(DataLoader(dataset, batch_sampler=sampler, num_workers=4))
    state = {"model": model, "optimizer": optimizer, "loader": loader}

A `Reshardable` source can be distributed to any number of data-parallel ranks and workers. A source that has only
``state_dict()/load_state_dict()`` (torchdata's ``StatefulDataLoader``) loads on the same number of them; otherwise it is
refused before anything is overwritten. Any other source is refused when it is wrapped.

Ranks that read the same data (peers in tensor or pipeline parallelism) pass the same data-parallel rank; their state is
saved once, and a difference between them is refused when the checkpoint is committed.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec
import torch

from aiockpt.data.data_source import (
    EpochDealer,
    Prefetched,
    SelfSaving,
    advise,
    begin,
    data_ranks,
    find_reader,
    is_at_end,
    let_workers_outlive_signals,
    with_data,
    without_data,
    worker_count,
)
from aiockpt.data.epochs import (
    EpochLeft,
    HandedOut,
    Untrained,
    add_untrained,
    are_same_readers,
    deal_epochs,
    read_epochs,
    write_epochs,
)
from aiockpt.data.resume_log import (
    Place,
    log_resumed,
    warn_of_forgotten_skips,
    warn_of_last_batch,
    warn_of_left_loop,
    warn_of_range,
)
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.samples import LoaderPart, write_part
from aiockpt.data.skips import Skips, read_skips, without_skipped
from aiockpt.errors import UsageError, kind_in_words
from aiockpt.options import refuse_value
from aiockpt.runtime.loop import Mutex

Batch = TypeVar("Batch")
Form = Literal["parts", "whole"]
Given = TypeVar("Given")
Count = Literal["handed", "trained"]
EpochFrom = Literal["loop", "step", "trainer"]
"""What counts epochs: the loops over the loader, the program by its steps, or a trainer with a resume of its own."""
NOTHING = Untrained.NOTHING


class FrozenState(msgspec.Struct, frozen=True):
    """The state of a loader at one batch, as plain values.

    Attributes:
        form: ``"parts"`` can be resharded, ``"whole"`` cannot.
        shared: values that are equal on all data-parallel ranks; None where these need not be in the same epoch.
        own: the state of one of them: ``{"parts": […]}``, or ``{"workers": count, "state": …}``; ``"epochs"`` with the
            rest of each, where batches were yielded and not trained; and ``"iterating"``, whether an iteration was in
            progress that is to continue.
    """

    form: Form
    shared: Any
    own: dict[str, Any]


class _TakenBatch(msgspec.Struct, frozen=True):
    """A batch read from the source: raw, as passed to training, its part, and state and position of the source after it."""

    raw: Any
    prepared: Any
    part: LoaderPart | None
    after: Any
    stop: int = 0


LoaderMark = tuple[object, Skips, int]
"""A loader right before a rewind: the loop in progress, what is skipped, and where this number of readers began."""


class Loader(Generic[Batch]):
    """Iterates over *source*, and can be saved and loaded at every batch.

    Iterate over it instead of over *source*. Saving in the middle of an epoch and continuing afterwards costs nothing. A
    checkpoint is a point in the program, and the resume goes on behind it: the first ``for`` after a load yields the rest of
    the epoch. If the checkpoint was made inside the loop at the last batch, that is nothing, so that what stands behind the
    loop runs; if it was made behind the loop, it is the next epoch.

    With ``count="trained"`` a batch counts when `trained` is called with it, from any thread and in any order. A checkpoint
    records which batches were trained by then. After a load all others are yielded, also on another number of ranks: first,
    in order, those that were yielded before. A batch of a `ShardedSampler` is read again; a batch of another source is saved
    with the checkpoint as it came: tensors and plain values, which must not change until it is trained.

    With an `RNG` in the same state, the numbers that training draws after a resume (dropout) are, bit by bit, those of a run
    that was never interrupted: each ``for`` over a ``DataLoader`` without a ``generator`` of its own draws one number from
    torch's global generator on the CPU, and a ``for`` that continues a loop inside which a checkpoint was made draws no
    number. This holds for any number of workers, for ``persistent_workers``, `StreamLoader` and torchdata's
    ``StatefulDataLoader`` (which by itself draws once more after a resume, and when it is saved before its first batch).
    It does not hold for numbers drawn in workers (random augmentation): they are seeded anew in the middle of an epoch. Nor
    does it hold for ``count="trained"``, where training does not draw in the order of the batches.

    Attributes:
        handed_count: batches that this object has yielded.
        position: batches of this run up to the one that was yielded last, the skipped ones among them (`aiockpt.Rewind`);
            a load sets it back.
        is_over: whether the loaded checkpoint was made at the last batch of its epoch, and the loop was not left.

    Args:
        source: a `Reshardable`, a ``DataLoader`` whose ``batch_sampler`` (or, without workers, whose dataset) is one, or
            an iterable with ``state_dict()`` and ``load_state_dict()``.
        rank: this data-parallel rank; None takes that of ``torch.distributed``, 0 where it is not initialised.
        size: the number of data-parallel ranks; None as for *rank*. Pass both if there are other kinds of parallelism.
        saves: False where another rank saves this data-parallel rank's state, and this one's may differ from it.
        count: when a batch is done: ``"handed"``, when it is yielded; ``"trained"``, when `trained` is called with it.
        ahead_count: batches to read from *source* ahead of training, each kept together with its state.
        prepare: called with each batch as soon as it is read, for example to start its transfer to the device.
        epoch_from_step: whether the program computes its epoch from the step. Then `epoch`, after a checkpoint at the last
            batch, is the next one, and so is the first loop; what stands behind the loop of the epoch before does not run.

    Raises:
        UsageError: *source* has no state to save, or yields batches in another order than it draws their samples.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        *,
        rank: int | None = None,
        size: int | None = None,
        saves: bool = True,
        count: Count = "handed",
        ahead_count: int = 0,
        prepare: Callable[[Batch], Batch] | None = None,
        epoch_from_step: bool = False,
    ) -> None:
        if count not in get_args(Count):
            refuse_value("Loader", "count", count, "'handed' or 'trained'")
        self._source = source
        self._reader = find_reader(source)
        self.rank, self.size = self._ranks(rank, size)
        self.saves = saves
        self._ahead_count = ahead_count
        self._prepare = prepare
        self._untrained = Untrained() if count == "trained" else None
        if isinstance(self._reader, ShardedSampler):
            self._reader.even = self._untrained is None
        self._lock = Mutex()
        self.handed_count = self.position = 0
        self._skips = Skips()
        self._dealt_at = 0
        self._set_back: object = None
        self.before_next: Callable[[], object] | None = None
        self._resumed_in = 0
        self._left_after, self._has_warned = 0, False
        # State of the source after the batch that was yielded last; None where that is its present state.
        self._after: Any = None
        self._iteration: object = None
        self._goes_on = False
        self.is_over = False
        self.epoch_from: EpochFrom = "step" if epoch_from_step else "loop"
        # Loaded data that the source does not yield: batches that come first, and the epochs after this one.
        self._again: deque[Any] = deque()
        self._later: deque[EpochLeft] = deque()
        if self._reader is None and not isinstance(source, SelfSaving):
            raise UsageError(f"{kind_in_words(source)} has no state to save. {advise(source)}")
        # The epoch whose batches are yielded, and the epoch of the source: mostly the same.
        self._number = self._source_number = self._source_epoch() or 0

    def _ranks(self, rank: int | None, size: int | None) -> tuple[int, int]:
        """Return the data-parallel rank and the number of ranks.

        Raises:
            UsageError: the source reads as another rank: no resume could deal the rest of an epoch.
        """
        own = getattr(self._reader, "rank", None), getattr(self._reader, "size", None)
        ranks = data_ranks(rank, size)
        # A process that knows of no other may read one part of the data, and has a checkpoint of its own (torchft's groups).
        if None not in own and own != ranks and ranks != (0, 1):
            raise UsageError(
                f"Loader(rank={ranks[0]}, size={ranks[1]}): its {type(self._reader).__name__} reads as rank {own[0]} of "
                f"{own[1]}; give both the same, and saves=False on ranks that read the same batches as another one"
            )
        return ranks

    def __repr__(self) -> str:
        waiting = "" if self._untrained is None else f", {len(self._untrained)} batches not trained"
        return f"<Loader of {type(self._source).__name__}, data-parallel rank {self.rank} of {self.size}{waiting}>"

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0. It increases when the loop over the last batch has ended.

        It is saved with the position. Not all batches of earlier epochs need be trained.
        """
        if self.is_between_loops:
            self._call_before_next()
        epoch = self._source_epoch()
        if epoch is None or self._number != self._source_number:
            epoch = self._number
        return epoch + (self.is_over and self.epoch_from != "loop")

    @property
    def untrained_count(self) -> int:
        """The number of batches that were yielded and are not trained; 0 with ``count="handed"``."""
        return 0 if self._untrained is None else len(self._untrained)

    def __len__(self) -> int:
        own = len(self._source) if self._number == self._source_number else 0  # type: ignore[arg-type]  # where it has one
        return own + len(self._again)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of the epoch."""
        if self._resumed_in and self._speaks and self.epoch_from == "loop":
            warn_of_range(self._resumed_in, inspect.currentframe())
        self._resumed_in = 0
        return self._iterate(lambda _number, batch: batch, by_number=False)

    def numbered(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches that are left of the epoch, each with a number for `trained`.

        For batches that are changed, copied or sent to other processes before training. No two batches of this object have
        the same number, even after a load.

        Raises:
            UsageError: with ``count="handed"``.
        """
        self._check_counts_trained()
        return self._iterate(lambda number, batch: (number, batch), by_number=True)

    def trained(self, batch: Any = NOTHING, *, number: int | None = None) -> None:
        """Note that a batch is trained, or dropped for good: saves from now on do not contain it.

        Any thread may call it. Call it together with the optimizer's step: no other thread or task may save between the
        two.

        Args:
            batch: the very object that the loader yielded; or instead
            number: the number that `numbered` yielded with it.

        Raises:
            UsageError: the batch was not yielded, or was trained before; or ``count`` is ``"handed"``.
        """
        untrained = self._check_counts_trained()
        if (batch is NOTHING) == (number is None):
            raise UsageError("trained(): give the batch, or number= as numbered() gave it")
        with self._lock:
            untrained.remove_number(untrained.number_of(batch) if number is None else number)

    def _check_counts_trained(self) -> Untrained:
        if self._untrained is None:
            raise UsageError("this loader counts a batch once it is handed out; give Loader(…, count='trained')")
        return self._untrained

    # ------------------------------------------------------------ handing out

    @property
    def is_between_loops(self) -> bool:
        """Whether a loop has ended its epoch, in any process of the run, and no other has begun since."""
        return self._number > 0 and not self._goes_on and self._iteration is None

    @property
    def is_read_in_order(self) -> bool:
        """Whether the position moves with the loops of the program."""
        return self._untrained is None and self.epoch_from != "trainer" and self.handed_count > 0

    @property
    def counts_trained(self) -> bool:
        """Whether a batch counts when `trained` is called with it."""
        return self._untrained is not None

    @property
    def has_moved(self) -> bool:
        """Whether batches were yielded, or the position moves with the source."""
        return self.handed_count > 0 or not isinstance(self._reader, Prefetched)

    def _call_before_next(self) -> None:
        """Call `before_next`, once: the program asks for a batch, a loop, or the number of the next epoch."""
        then, self.before_next = self.before_next, None
        if then is not None:
            then()

    def _iterate(self, deliver: Callable[[int, Batch], Given], *, by_number: bool) -> Iterator[Given]:
        self._call_before_next()
        while self._again:
            # It stays in the queue until it is noted: neither a save in between nor an error of *prepare* may lose it.
            raw = self._again[0]
            prepared = self._prepared(raw)
            with self._lock:
                number = self._note(_TakenBatch(raw, prepared, None, self._after), by_number=by_number)
                self._again.popleft()
            yield deliver(number, prepared)
        if self._number != self._source_number:
            self._end_epoch()
            return
        # A source that only knows its own state ends its epoch itself, in a loop that is empty.
        if self.is_over and self._reader is not None:
            self._goes_on = False
            self.position += self._skipped_rest()
            self._end_epoch()
            if self.epoch_from == "loop":
                return
        # Before `_begin`, which resets `_goes_on`.
        may_be_over, is_told = self._goes_on, self.is_over
        self._warn_of_left_loop()
        iteration, batches = self._begin()
        try:
            for taken in self._prefetch(iteration, batches):
                may_be_over = False
                self._left_after += 1
                with self._lock:
                    number = self._note(taken, by_number=by_number)
                yield deliver(number, taken.prepared)
                self._call_before_next()
                if self._set_back is iteration:
                    break
            else:
                self._end_epoch()
        finally:
            # A load, or another loop, may have replaced it meanwhile.
            if self._iteration is iteration:
                self._iteration = None
        if self._set_back is iteration:
            del batches  # with its workers
            yield from self._iterate(deliver, by_number=by_number)
            return
        if may_be_over:  # the checkpoint was made at the last batch, which only an empty loop shows of some sources
            if self._speaks and not is_told:
                warn_of_last_batch(self._number - 1, by_step=self.epoch_from == "step")
            if self.epoch_from != "loop" and self._reader is None:
                yield from self._iterate(deliver, by_number=by_number)

    def _warn_of_left_loop(self) -> None:
        if self._left_after > 1 and self._speaks and not self._has_warned:  # one batch: a look at the data
            self._has_warned = True
            warn_of_left_loop(self._left_after)

    def _begin(self) -> tuple[object, Iterator[Batch]]:
        with self._lock:
            if self._ahead_count and self._after is not None:
                self._go_back(self._after)  # the last loop ended early, after reading ahead of training
            let_workers_outlive_signals(self._source)
            batches = begin(self._source, self._goes_on)
            iteration, self._left_after = object(), 0
            self._iteration = iteration
            self._goes_on = False
            if self._untrained is not None:
                # The source is past its first batch before that is noted: a save on another thread must not read it.
                self._after = self._read()
            return iteration, batches

    def _prefetch(self, iteration: object, batches: Iterator[Batch]) -> Iterator[_TakenBatch]:
        """Yield each batch once `ahead_count` batches were read after it, or the source has ended."""
        taken: deque[_TakenBatch] = deque()
        keeps = bool(self._ahead_count) or self._untrained is not None
        position = self.position
        for raw in batches:
            if self._iteration is not iteration:
                raise UsageError(
                    "the loader was loaded, or another loop over it began: end this loop, and start a new one"
                )
            with self._lock:
                part = self._reader.hand_out() if isinstance(self._reader, Prefetched) else None
                position += 1
                if not keeps:
                    self.position = position
            if position - 1 in self._skips:
                continue
            taken.append(_TakenBatch(raw, self._prepared(raw), part, self._read() if keeps else None, position))
            if len(taken) > self._ahead_count:
                yield taken.popleft()
        yield from taken
        self.position = position

    def _prepared(self, raw: Batch) -> Batch:
        return raw if self._prepare is None else self._prepare(raw)

    def _note(self, taken: _TakenBatch, *, by_number: bool) -> int:
        """Note that a batch is yielded; return its number."""
        number = -1
        self.handed_count += 1
        if self._untrained is not None:
            kept = NOTHING if taken.part is not None else taken.raw
            given = NOTHING if by_number else taken.prepared
            number = self._untrained.add(HandedOut(self._number, kept, taken.part, given))
        self._after = taken.after
        self.position = max(self.position, taken.stop)
        return number

    def _end_epoch(self) -> None:
        with self._lock:
            if self._later:
                following = self._later.popleft()
                self._number, self._again = following.number, deque(following.batches)
                if following.parts is not None and following.number > self._source_number:
                    self._go_back(following.parts)
                    self._source_number = following.number
            else:
                if isinstance(self._reader, Prefetched):
                    self._reader.end_epoch()
                self._number += 1
                self._source_number = self._number
            self._after = self._iteration = None
            self._left_after = 0
            self.is_over = False

    # ------------------------------------------------------------ saving

    def held(self) -> FrozenState:
        """Return the state at the batch that was yielded last, or of all untrained batches; no worker is contacted.

        Without read-ahead, the present state of the source is read; otherwise the state was kept with the batch.
        """
        with self._lock:
            after = self._read() if self._after is None else self._after
            own: dict[str, Any] = {"iterating": self._goes_on or self._iteration is not None}
            own |= self._own_position(after)
            if self._source_epoch() is None:
                own["epoch"] = self._number
            if self._reader is None:
                own |= {"workers": worker_count(self._source), "state": after}
            if self._untrained is None and not self._again and not self._later:
                if self._reader is None:
                    return FrozenState("whole", None, own)
                return FrozenState("parts", after[0].shared, {"parts": [write_part(part) for part in after], **own})
            own["epochs"] = write_epochs(self._left(None if self._reader is None else after))
            return FrozenState("whole" if self._reader is None else "parts", None, own)

    def _own_position(self, after: Any) -> dict[str, Any]:
        """Return position and skips; and what is left of the epoch without those to come, where that can be computed."""
        own: dict[str, Any] = {"position": self.position}
        if self._skips.ranges:
            own["skips"] = [list(each) for each in self._skips.ranges]
            to_come = self._skips.offsets_from(self.position)
            if to_come and isinstance(self._reader, ShardedSampler):
                without = self._reader.without(after[0], to_come)
                own |= {} if without is None else {"without": [write_part(without)]}
        return own

    def _left(self, parts: tuple[LoaderPart, ...] | None) -> list[EpochLeft]:
        """Return the rest of each epoch: batches in training, batches that come again, and *parts* of the source."""
        left = {epoch.number: epoch for epoch in self._later}
        left[self._number] = EpochLeft(self._number, tuple(self._again))
        if self._source_number in left:
            left[self._source_number] = EpochLeft(self._source_number, left[self._source_number].batches, parts)
        return add_untrained(left, () if self._untrained is None else self._untrained.entries(), len(parts or ()))

    def _read(self) -> Any:
        """Return the present state of the source: its parts, or its own ``state_dict()``."""
        if self._reader is not None:
            return tuple(self._reader.parts())
        with torch.random.fork_rng(devices=[]):  # a StatefulDataLoader may begin its iteration to report its position
            state = with_data(self._source, self._source.state_dict())  # type: ignore[attr-defined]  # it was checked
        if self._ahead_count or self._untrained is not None:
            state = copy.deepcopy(state)  # the source continues and may change what it returned
        return state

    def _go_back(self, after: Any) -> None:
        """Reset the source to the state that `_read` returned."""
        if self._reader is not None:
            self._reader.load_parts(after)
        else:
            self._source.load_state_dict(without_data(self._source, after))  # type: ignore[attr-defined]  # it was checked

    @property
    def _speaks(self) -> bool:
        return not self.rank and self.epoch_from != "trainer"

    def _source_epoch(self) -> int | None:
        return getattr(self._source if self._reader is None else self._reader, "epoch", None)

    # ------------------------------------------------------------ loading

    def misfit(self, form: Any, size: int, readers: Mapping[str, Any]) -> str | None:
        """Return why a saved state cannot be continued here, or None.

        Args:
            form: its `FrozenState.form`.
            size: the number of data-parallel ranks that saved.
            readers: `FrozenState.own` of each of them, by rank in decimal.
        """
        if sorted(readers) != sorted(map(str, range(size))):
            return f"the checkpoint has the state of the data-parallel ranks {sorted(readers)[:8]}, of {size}"
        here: Form = "whole" if self._reader is None else "parts"
        if form != here:
            can = ("cannot", "can") if form == "whole" else ("can", "cannot")
            return (
                f"it was saved by a loader that {can[0]} be resharded, and here is one that {can[1]}; give the same kind of "
                "loader"
            )
        if form == "parts":
            return None
        own = readers.get(str(self.rank))
        saved_count, here_count = own.get("workers") if isinstance(own, Mapping) else None, worker_count(self._source)
        if size != self.size:
            differ, remedy = f"by {size} data-parallel ranks, and here are {self.size}", f"Resume on {size}"
        elif saved_count != here_count:
            differ = f"with num_workers={saved_count}, and here it is num_workers={here_count}"
            remedy = f"Set num_workers={saved_count}"
        else:
            return None
        return (
            f"saved {differ}; the state of a {type(self._source).__name__} cannot be split. {remedy}, or give a source that "
            "can be dealt anew (ShardedSampler, StreamLoader, or your own parts())"
        )

    def needed_ranks(self, size: int) -> range:
        """Return the ranks, of *size* that saved, whose states `resume` needs: all to reshard, else only this one."""
        return range(self.rank, self.rank + 1) if size == self.size and self._reader is None else range(size)

    def resume(self, shared: Any, owns: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a saved state. Batches that were yielded before are released.

        Args:
            shared: as in `FrozenState`.
            owns: `FrozenState.own` of the `needed_ranks`, in their order.

        Raises:
            UsageError: the state was not returned by `held`, or the source refuses it.
        """
        saved = [read_epochs(own, shared) for own in owns]
        is_dealt = self._reader is not None and not are_same_readers(saved, self.size, len(self._reader.parts()))
        if is_dealt:
            saved = [read_epochs(without_skipped(own), shared) for own in owns]
        with self._lock:
            self._read_position(owns, is_dealt=is_dealt)
            if self._reader is None:
                (epochs,) = saved
                of_source = epochs[-1]
                self._go_back(owns[0]["state"])
            else:
                epochs = self._deal(saved)
                of_source = next(epoch for epoch in epochs if epoch.parts is not None)
                self._go_back(of_source.parts)
            self._number, self._source_number = epochs[0].number, of_source.number
            # Without a list of epochs the number is that of the source, which has it after `_go_back`, or was saved for it.
            if not any("epochs" in own for own in owns):
                number = self._source_epoch()
                if number is None:
                    number = owns[self.rank if len(owns) == self.size else 0].get("epoch", 0)
                self._number = self._source_number = number if isinstance(number, int) else 0
            self._again, self._later = deque(epochs[0].batches), deque(epochs[1:])
            self._after = self._iteration = None
            self._left_after = 0
            self._goes_on = any(own.get("iterating", False) for own in owns)
            if self._untrained is not None:
                self._untrained.invalidate()
            self._resumed_in = self._number
            self.is_over = self._goes_on and not (self._again or self._later) and self._is_at_end(saved, owns)
        if self._speaks:
            place: Place = "last batch" if self.is_over else "within" if self._goes_on else "behind"
            log_resumed(self._source, self._number, place, by_step=self.epoch_from == "step")

    def _read_position(self, owns: Sequence[Mapping[str, Any]], *, is_dealt: bool) -> None:
        """Adopt position and skips of this rank; for readers that were dealt anew no position is that of the same batch."""
        if not is_dealt:
            self.position, self._skips = read_skips(owns[0 if len(owns) == 1 else self.rank])
            return
        read = [read_skips(own) for own in owns]
        if self._speaks and any(
            skips.offsets_from(at) and "without" not in own for own, (at, skips) in zip(owns, read, strict=True)
        ):
            warn_of_forgotten_skips(self._source)
        self.position = self._dealt_at = max(at for at, _ in read)
        self._skips = Skips()

    def mark(self) -> LoaderMark:
        """Return what `go_on` needs to know of the time before a load."""
        return self._iteration, self._skips, self._dealt_at

    def go_on(self, mark: LoaderMark, skip: tuple[int | None, int] | None) -> int:
        """Go on at the loaded position after a rewind: also the loop that was in progress, with its next batch.

        Args:
            mark: from before the load.
            skip: the positions to skip from now on, beside those of before; from the loaded position on for None.

        Returns:
            How many batches are skipped, of those after the loaded position.
        """
        iteration, skips, dealt_at = mark
        with self._lock:
            self._set_back = iteration
            self._resumed_in, self.before_next = 0, None
            ranges = [] if skip is None else [(self.position if skip[0] is None else skip[0], skip[1])]
            if dealt_at == self._dealt_at:
                self._skips = self._skips.union([*skips.ranges, *ranges])
            elif self._speaks and (skips.ranges or ranges):
                warn_of_forgotten_skips(self._source)
            self.is_over |= self._goes_on and self._skipped_rest() > 0
            return len(self._skips.offsets_from(self.position))

    @property
    def skipped_count(self) -> int:
        """The batches of this run that are skipped (`aiockpt.Rewind`), also those still to come."""
        return len(self._skips)

    def _skipped_rest(self) -> int:
        """Return how many batches are left of the epoch of a `ShardedSampler`, if all of them are skipped; else 0."""
        if not (isinstance(self._reader, ShardedSampler) and self._skips.ranges):
            return 0
        rest = range(self.position, self.position + len(self._reader))
        return len(rest) if all(position in self._skips for position in rest) else 0

    def _is_at_end(self, saved: Sequence[Sequence[EpochLeft]], owns: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether nothing is left of the loaded epoch on any rank, as far as that can be known."""
        if self._reader is None:
            return is_at_end(self._source, owns[0]["state"])
        if isinstance(self._reader, ShardedSampler) and self._reader.even:
            return len(self._reader) == self._skipped_rest()
        return isinstance(self._reader, Prefetched) and all(map(_is_empty, saved))

    def _deal(self, saved: Sequence[Sequence[EpochLeft]]) -> list[EpochLeft]:
        """Return the epochs that this rank continues: its own, if the number of readers is unchanged, else new shares."""
        assert self._reader is not None
        if any(epochs[-1].parts is None for epochs in saved):
            raise UsageError("the state of a loader cannot be read: its source has no position; load another step")
        begins = self._reader.epoch_parts if isinstance(self._reader, EpochDealer) else None
        return deal_epochs(saved, rank=self.rank, size=self.size, count=len(self._reader.parts()), begin=begins)


def _is_empty(epochs: Sequence[EpochLeft]) -> bool:
    """Return whether a rank has nothing left of its epoch, and is in no other epoch."""
    (first, *others) = epochs
    return not others and not first.batches and all(part.is_empty for part in first.parts or ())
