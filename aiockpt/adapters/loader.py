"""Which batch comes next after a resume, on more or fewer ranks than before? Each sample once, none left out.

`Loader` wraps what training iterates over, and is put into the state. What it saves is the state *at the batch that was
handed out last*, whatever is prefetched behind it:

    sampler = ShardedSampler(len(dataset), batch_size=8, seed=1)
    loader = Loader(DataLoader(dataset, batch_sampler=sampler, num_workers=4))
    state = {"model": model, "optimizer": optimizer, "loader": loader}

Three kinds of source, by how much is known of them:

- `Reshardable`: says what its readers have still to give, so that it can be dealt to any number of data-parallel ranks
  and workers (`ShardedSampler`, `StreamLoader`, your own).
- anything with ``state_dict()/load_state_dict()`` (torchdata's ``StatefulDataLoader``): comes back on the same number of
  data-parallel ranks and workers, and is refused otherwise, before anything is overwritten.
- anything else is refused when it is wrapped.

Ranks that read the same data (peers in tensor or pipeline parallelism) give the same data-parallel rank; what they hold
is saved once, and a difference between them is refused when the checkpoint is committed.

A ``DataLoader`` without a ``generator`` takes a seed from torch's global one whenever an iteration begins. So that a
resumed run draws the numbers of one that was never interrupted, the iteration that goes on in place of one that was under
way takes none; see `Loader`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from aiockpt.errors import UsageError, kind_in_words
from aiockpt.state.samples import LoaderPart, read_part, reshard, write_part

Batch = TypeVar("Batch")
Form = Literal["parts", "whole"]


@runtime_checkable
class Reshardable(Protocol):
    """A source of data that can be dealt to another number of readers."""

    def parts(self) -> Sequence[LoaderPart]:
        """Return what each reader of this rank (the rank itself, or its workers) has still to give to training."""
        ...

    def load_parts(self, parts: Sequence[LoaderPart]) -> object:
        """Go on with these parts, as many as `parts` returns."""


@runtime_checkable
class Prefetched(Reshardable, Protocol):
    """A source that is read further than training has come: it is told of each batch that training gets."""

    def hand_out(self) -> object:
        """Note that the oldest batch that was drawn is training's now: `parts` no longer contains it."""

    def end_epoch(self) -> object:
        """Note that training got the last batch: `parts` is a whole new epoch now."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class FrozenState(msgspec.Struct, frozen=True):
    """The state of a loader at one batch, as plain values.

    Attributes:
        form: ``"parts"`` can be resharded, ``"whole"`` cannot.
        shared: what all data-parallel ranks have alike.
        own: what belongs to one of them: ``{"parts": […]}``, or ``{"workers": count, "state": …}``; and ``"iterating"``,
            whether an iteration was under way, which is to go on.
    """

    form: Form
    shared: Any
    own: dict[str, Any]


class Loader(Generic[Batch]):
    """Iterates over *source*, and can be saved and loaded at every batch.

    Iterate over it instead of over *source*; to save in the middle of an epoch and go on afterwards costs nothing. After a
    load, start a new ``for``: it gives the rest of the epoch. It is empty where the checkpoint was made after the last
    batch, inside the loop.

    With an `RNG` in the same state, the numbers that training draws after a resume (dropout) are those of a run that was
    never interrupted, bit by bit: torch's global generator on the CPU gives one number to each ``for`` over a
    ``DataLoader`` without a ``generator`` of its own, and none to the one that goes on where a checkpoint was made inside
    a loop. That holds for any number of workers, for ``persistent_workers``, `StreamLoader` and torchdata's
    ``StatefulDataLoader`` (which by itself draws once more after a resume, and when it is saved before its first batch).
    It does not hold for what workers draw (random augmentation): they are seeded anew in the middle of an epoch.

    Args:
        source: a `Reshardable`, a ``DataLoader`` whose ``batch_sampler`` (or, without workers, whose dataset) is one, or
            an iterable with ``state_dict()`` and ``load_state_dict()``.
        rank: which data-parallel rank this is; None takes that of ``torch.distributed``, 0 where it is not initialised.
        size: how many of them there are; None as for *rank*. Give both whenever there are other kinds of parallelism.
        saves: False where another rank saves this data-parallel rank's state, and this one's may differ from it.
        ahead_count: batches to take from *source* ahead of training, each kept together with its state.
        prepare: called with each batch as soon as it is taken, to begin its way to the device.

    Raises:
        UsageError: nothing in *source* can be saved, or the batches come in another order than their samples are drawn.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        *,
        rank: int | None = None,
        size: int | None = None,
        saves: bool = True,
        ahead_count: int = 0,
        prepare: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.rank, self.size = data_ranks(rank, size)
        self.saves = saves
        self._source = source
        self._reader = _find_reader(source)
        self._ahead_count = ahead_count
        self._prepare = prepare
        self._handed_out: FrozenState | None = None
        self._iteration: object = None
        self._goes_on = False
        if self._reader is None and not isinstance(source, _Stateful):
            raise UsageError(f"{kind_in_words(source)} has no state to save. {_advise(source)}")

    def __repr__(self) -> str:
        return f"<Loader of {type(self._source).__name__}, data-parallel rank {self.rank} of {self.size}>"

    @property
    def epoch(self) -> int | None:
        """The number of the epoch, from 0, as the source tells it; None where it does not.

        `ShardedSampler` and `StreamLoader` do; it is the next one's once the loop over the last batch has ended.
        """
        return getattr(self._source if self._reader is None else self._reader, "epoch", None)

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # where the source has a length

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of the epoch."""
        batches = _begin(self._source, self._goes_on)
        iteration = self._iteration = object()
        self._goes_on = False
        try:
            yield from self._give_all(batches)
        finally:
            if self._iteration is iteration:
                self._iteration = None

    def _give_all(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        taken: deque[tuple[Batch, FrozenState | None]] = deque()
        for batch in batches:
            if isinstance(self._reader, Prefetched):
                self._reader.hand_out()
            state = self._read() if self._ahead_count else None
            taken.append((batch if self._prepare is None else self._prepare(batch), state))
            if len(taken) > self._ahead_count:
                yield self._give(*taken.popleft())
        while taken:
            yield self._give(*taken.popleft())
        if isinstance(self._reader, Prefetched):
            self._reader.end_epoch()
        self._handed_out = None

    def held(self) -> FrozenState:
        """Return the state at the batch that was handed out last; no worker is asked, and none is waited for.

        What is not read ahead is read now: the source stands where training does. Otherwise it was kept with the batch.
        """
        held = self._handed_out or self._read()
        iterating = self._goes_on or self._iteration is not None
        return FrozenState(held.form, held.shared, {**held.own, "iterating": iterating})

    def misfit(self, form: Any, size: int, readers: Mapping[str, Any]) -> str | None:
        """Return why a saved state cannot go on here, or None.

        Args:
            form: how it was saved.
            size: by how many data-parallel ranks.
            readers: `FrozenState.own` of each of them, by rank in decimal.
        """
        if sorted(readers) != sorted(map(str, range(size))):
            return f"the checkpoint has the state of the data-parallel ranks {sorted(readers)[:8]}, of {size}"
        here: Form = "whole" if self._reader is None else "parts"
        if form != here:
            return (
                "it was saved by a loader that can be resharded, and here is one that cannot"
                if form == "parts"
                else "it was saved by a loader that cannot be resharded, and here is one that can"
            ) + "; give the same kind of loader"
        if form == "parts":
            return None
        advice = "or give a source that can be dealt anew (ShardedSampler, StreamLoader, or your own parts())"
        if size != self.size:
            return (
                f"saved by {size} data-parallel ranks, and here are {self.size}; the state of a "
                f"{type(self._source).__name__} cannot be split. Resume on {size}, {advice}"
            )
        own = readers[str(self.rank)]
        saved_count, here_count = own.get("workers") if isinstance(own, Mapping) else None, _worker_count(self._source)
        if saved_count != here_count:
            return (
                f"saved with num_workers={saved_count}, and here it is num_workers={here_count}; the state of a "
                f"{type(self._source).__name__} cannot be split. Set num_workers={saved_count}, {advice}"
            )
        return None

    def needed_ranks(self, size: int) -> range:
        """Return whose states `resume` needs, of *size* ranks that saved: all of them to reshard, or only this rank's."""
        return range(self.rank, self.rank + 1) if size == self.size and self._reader is None else range(size)

    def resume(self, shared: Any, owns: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state.

        Args:
            shared: as in `FrozenState`.
            owns: `FrozenState.own` of the `needed_ranks`, in their order.

        Raises:
            UsageError: the state is not what `held` returns, or the source refuses it.
        """
        if self._reader is None:
            self._source.load_state_dict(owns[0]["state"])  # type: ignore[attr-defined]  # checked when it was wrapped
        else:
            self._reader.load_parts(self._deal(shared, owns))
        self._handed_out, self._iteration = None, None
        self._goes_on = any(own.get("iterating", False) for own in owns)

    def _deal(self, shared: Any, owns: Sequence[Mapping[str, Any]]) -> Sequence[LoaderPart]:
        """Return the parts of this rank: those it saved where there are as many readers as then, new ones otherwise."""
        assert self._reader is not None
        count = len(self._reader.parts())
        try:
            saved = [[read_part(part, shared) for part in own["parts"]] for own in owns]
        except (KeyError, TypeError) as error:
            raise UsageError(f"the state of a loader cannot be read: {error!r}; load another step") from error
        dealt = reshard([part for parts in saved for part in parts], self.size * count)
        return dealt[self.rank * count : (self.rank + 1) * count]

    def _give(self, batch: Batch, state: FrozenState | None) -> Batch:
        self._handed_out = state
        return batch

    def _read(self) -> FrozenState:
        """Return the state of the source as it is."""
        if self._reader is not None:
            parts = self._reader.parts()
            return FrozenState("parts", parts[0].shared, {"parts": [write_part(part) for part in parts]})
        with torch.random.fork_rng(devices=[]):  # a StatefulDataLoader may begin its iteration to say where it is
            state = self._source.state_dict()  # type: ignore[attr-defined]  # checked when it was wrapped
        if self._ahead_count:
            state = copy.deepcopy(state)  # the source goes on and may change what it returned
        return FrozenState("whole", None, {"workers": _worker_count(self._source), "state": state})


def data_ranks(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size as given, or those of ``torch.distributed``.

    Raises:
        UsageError: only one of them is given, or the rank is not one of so many.
    """
    if (rank is None) != (size is None):
        raise UsageError("give both rank and size, the data-parallel ones, or neither")
    if rank is None or size is None:
        started = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}: a data-parallel rank is 0 or more and less than their number")
    return rank, size


def _begin(source: Iterable[Batch], goes_on: bool) -> Iterator[Batch]:
    """Begin to iterate over *source*; take from torch's generator on the CPU what a ``DataLoader`` takes for a seed.

    How often one takes it by itself depends on whether its workers persist, and whether it was asked for its state.

    Args:
        goes_on: with an iteration that was under way at a checkpoint, and has taken it. The generator is left as it is,
            and the seed is another one, so that the workers of the next iteration do not draw these numbers again.
    """
    takes_seed = getattr(source, "generator", source) is None  # what is no DataLoader has none, and does as it likes
    with torch.random.fork_rng(devices=[], enabled=goes_on or takes_seed):
        if goes_on:
            torch.default_generator.manual_seed(_draw())
        batches = iter(source)
    if takes_seed and not goes_on:
        _draw()
    return batches


def _draw() -> int:
    """Return the next number of torch's generator, in the way of a ``DataLoader``."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _find_reader(source: Any) -> Reshardable | None:
    """Return what in *source* can be resharded."""
    own = [source, getattr(source, "batch_sampler", None)]
    if not _worker_count(source):
        own.append(getattr(source, "dataset", None))  # a worker would have a copy of it
    reader = next((candidate for candidate in own if isinstance(candidate, Reshardable)), None)
    if isinstance(reader, Prefetched) and not getattr(source, "in_order", True):
        raise UsageError("in_order=False: which samples a batch has is not known; leave it at True")
    return reader


def _advise(source: Any) -> str:
    """Return what to write in place of a *source* that cannot be saved, with its own numbers."""
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return "An aiockpt.StreamLoader takes the place of a DataLoader that reads from front to back"
    if not isinstance(source, DataLoader) or source.batch_sampler is None:
        return (
            "Give a DataLoader with batch_sampler=aiockpt.ShardedSampler(…), a source with parts() and load_parts(), "
            "or one with state_dict() and load_state_dict()"
        )
    sampler, size = source.sampler, source.batch_size
    if size is None:
        return (
            "Write DataLoader(data, batch_sampler=aiockpt.ShardedSampler(len(data), batch_size)) in place of "
            f"batch_sampler=<{type(source.batch_sampler).__name__}>, or give that one parts() and load_parts()"
        )
    shuffle = not isinstance(sampler, SequentialSampler) and getattr(sampler, "shuffle", True)
    drop_last = ["drop_last=True"] if source.drop_last else []
    theirs = {RandomSampler: ["shuffle=True"], SequentialSampler: []}.get(
        type(sampler), [f"sampler=<{type(sampler).__name__}>"]
    )
    given = ", ".join([f"batch_size={size}", *theirs, *drop_last])
    ours = ", ".join([f"len(data), {size}", *([] if shuffle else ["shuffle=False"]), *drop_last])
    return f"Write DataLoader(data, batch_sampler=aiockpt.ShardedSampler({ours})) in place of {given}"


def _worker_count(source: Any) -> int:
    return int(getattr(source, "num_workers", 0))
