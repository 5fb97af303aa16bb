"""Sources of a loader: those that can be resharded, those that only save their own state, and checks for them.

A *reader* is a data-parallel rank, or one worker of it; see `aiockpt.data.samples`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import isgeneratorfunction
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from aiockpt.data.samples import LoaderPart
from aiockpt.errors import UsageError

logger = logging.getLogger("aiockpt")

Batch = TypeVar("Batch")


@runtime_checkable
class Reshardable(Protocol):
    """A source of data that can be distributed to another number of readers."""

    def parts(self) -> Sequence[LoaderPart]:
        """Return the part that each reader of this rank (the rank itself, or its workers) has still to yield to training."""
        ...

    def load_parts(self, parts: Sequence[LoaderPart]) -> object:
        """Continue with these parts, as many as `parts` returns."""


@runtime_checkable
class Prefetched(Reshardable, Protocol):
    """A source that is read ahead of training; `hand_out` is called for each batch that training receives."""

    def hand_out(self) -> LoaderPart | None:
        """Note that training has received the oldest batch that was drawn: `parts` no longer contains it.

        Returns:
            The part with the samples of this batch, if they can be read again; None if the batch itself must be kept until
            it is trained.
        """

    def end_epoch(self) -> object:
        """Note that training has received the last batch: `parts` is now a whole new epoch."""


@runtime_checkable
class EpochDealer(Prefetched, Protocol):
    """A source that can compute the part of each reader at the beginning of any epoch.

    So it can also continue on another number of ranks from a checkpoint at which some ranks were an epoch ahead.
    """

    def epoch_parts(self, epoch: int, rank: int, size: int, count: int) -> Sequence[LoaderPart]:
        """Return the parts of the *count* readers of a data-parallel rank out of *size*, before the first batch."""
        ...


@runtime_checkable
class SelfSaving(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def data_ranks(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size as given, or those of ``torch.distributed``.

    Raises:
        UsageError: only one of them is given, or the rank is outside ``range(size)``.
    """
    if (rank is None) != (size is None):
        raise UsageError("give both rank and size, the data-parallel ones, or neither")
    if rank is None or size is None:
        started = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}: a data-parallel rank is 0 or more and less than their number")
    return rank, size


def begin(source: Iterable[Batch], goes_on: bool) -> Iterator[Batch]:
    """Begin to iterate over *source*; draw one number from torch's CPU generator, as a ``DataLoader`` does for its seed.

    How often a ``DataLoader`` itself draws depends on whether its workers persist, and whether its state was read.

    Args:
        goes_on: whether this continues an iteration from a checkpoint, which has drawn its number. Then the generator is
            restored, and the seed is another one, so that the workers of the next iteration do not draw these numbers again.
    """
    generator = getattr(source, "generator", source)
    takes_seed = generator is None or isinstance(generator, _Seed)  # only a DataLoader has one
    # No devices: by default the generators of all CUDA devices would be saved and restored, too.
    with torch.random.fork_rng(devices=[], enabled=goes_on or takes_seed):
        if goes_on:
            torch.default_generator.manual_seed(_draw())
        if takes_seed and isgeneratorfunction(type(source).__iter__):
            # A wrapper (Fabric's), or a class with its own __iter__, begins its DataLoader with the first batch: after this.
            loader = loader_in(source)
            if loader is not None:
                loader.generator = _Seed().manual_seed(_draw())
        batches = iter(source)
    if takes_seed and not goes_on:
        _draw()
    return batches


class _Seed(torch.Generator):
    """The generator of one iteration, of which only a seed is drawn."""


def loader_in(source: object) -> DataLoader[Any] | None:
    """Return *source* if it is a ``DataLoader``, else the one that it wraps, or None."""
    found = (source, *getattr(source, "__dict__", {}).values())
    return next((one for one in found if isinstance(one, DataLoader)), None)


def let_workers_outlive_signals(source: object) -> None:
    """Make workers that a ``DataLoader`` starts from now on leave the process group of their parent.

    A signal to the whole group (a scheduler's, ``kill 0``) ends workers first, and the next batch raises before the parent
    can save. The workers still end with their parent, which they watch, and when the parent ends them.
    """
    loader = loader_in(source)
    if loader is not None and not isinstance(loader.worker_init_fn, _OwnGroup):
        loader.worker_init_fn = _OwnGroup(loader.worker_init_fn)


class _OwnGroup:
    """Starts a worker outside of its parent's process group, then calls the program's own function. Can be pickled."""

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        with suppress(OSError):  # it leads a session
            os.setpgid(0, 0)
        if self._then is not None:
            self._then(worker_id)


def _draw() -> int:
    """Return the next number of torch's generator, drawn as by a ``DataLoader``."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def find_reader(source: Any) -> Reshardable | None:
    """Return the part of *source* that can be resharded: itself, its batch sampler or its dataset; or None."""
    own = [source, getattr(source, "batch_sampler", None)]
    if own[1] is None:
        own.append(getattr(source, "sampler", None))  # batch_size=None: each of its items is a batch
    if not worker_count(source):
        own.append(getattr(source, "dataset", None))  # a worker would have a copy of it
    reader = next((candidate for candidate in own if isinstance(candidate, Reshardable)), None)
    if isinstance(reader, Prefetched) and not getattr(source, "in_order", True):
        raise UsageError("in_order=False: which samples a batch has is not known; leave it at True")
    return reader


def is_at_end(source: Any, state: Any) -> bool:
    """Return whether the *state* of a ``StatefulDataLoader`` is that at the last batch, with the loop not left yet."""
    with suppress(AttributeError, KeyError, TypeError):  # another loader, or a stream without a length
        inside = state.get("_snapshot") or {"_snapshot_step": state["_num_yielded"]}
        given = inside["_snapshot_step"] + state.get("_steps_since_snapshot", 0)
        return bool(not state["_iterator_finished"] and given == len(source))
    return False


def load_bare(source: Any, state: Any, where: str) -> None:
    """Load the *state* of a source that is in the state by itself; warn of an iterator that the program still reads.

    Such an iterator of a ``StatefulDataLoader`` goes on where it was, and the next checkpoint has the loaded position.
    """
    iterator = _iterator(source)
    source.load_state_dict(without_data(source, state))
    if iterator is not None and iterator() is not None:
        logger.warning(
            "%s: the program holds an iterator that it made before the load: it does not go on from the checkpoint, and the "
            "next checkpoint does not have its position. Call iter() after the load",
            where,
        )


def _iterator(source: Any) -> weakref.ref[Any] | None:
    begun = getattr(source, "_iterator", None) if isinstance(source, DataLoader) else None
    return None if begun is None else weakref.ref(begun)


_DATA = "aiockpt_data"
"""Extra key in the state of a ``StatefulDataLoader``, which it ignores: the description that its position refers to."""


def with_data(source: Any, state: Any) -> Any:
    """Return the *state* of a source; for a ``StatefulDataLoader``, with the description that its position refers to."""
    data = _describe(source, state)
    return state if data is None else {**state, _DATA: data}


def without_data(source: Any, state: Any) -> Any:
    """Return the state that *source* itself saved, from a state of `with_data`.

    Log a warning if the position of a ``StatefulDataLoader`` now means other samples, which it does not report itself.
    """
    now = _describe(source, state)
    if now is None or _DATA not in state:
        return state
    with suppress(AttributeError, KeyError, TypeError):  # another version of torchdata
        if what := _difference(state[_DATA], now, state):
            logger.warning(
                "%s: %s. To train each sample once, end this epoch with what it began with, or use a ShardedSampler; only= "
                "leaves the loader out of load(), and a whole epoch begins",
                *(type(source).__name__, what),
            )
    return {key: value for key, value in state.items() if key != _DATA}


def _describe(source: Any, state: Any) -> dict[str, Any] | None:
    """Return the description that the position of a ``StatefulDataLoader`` refers to; None for other sources."""
    if not (isinstance(source, DataLoader) and isinstance(state, Mapping) and "_iterator_finished" in state):
        return None
    cut = source.batch_sampler if source.batch_size is None else source
    samples = None if isinstance(source.dataset, IterableDataset) else _length(source.dataset)
    name = f"{type(source.sampler).__module__.partition('.')[0]}.{type(source.sampler).__name__}"
    return {"samples": samples, "batch_size": getattr(cut, "batch_size", None), "sampler": name}


_IN_ORDER = "torch.SequentialSampler"
_ANEW = ("torch.RandomSampler", "torch.SubsetRandomSampler", "torch.WeightedRandomSampler")


def _difference(before: Mapping[str, Any], now: Mapping[str, Any], state: Any) -> str | None:
    """Return as text why the next samples are not the rest of the epoch; None where they are."""
    inside = state.get("_snapshot") or {**state, "_snapshot_step": state["_num_yielded"], "_main_snapshot": state}
    main, since = inside["_main_snapshot"], state.get("_steps_since_snapshot", 0)
    given = inside["_snapshot_step"] + since
    seen = (main["_sampler_iter_state"] or {}).get("samples_yielded", given)
    differ = before["samples"] != now["samples"]
    lengths = f"the data have {now['samples']} samples, and had {before['samples']} when the checkpoint was made"
    if differ and now["samples"] is not None and now["samples"] < seen:
        return f"{lengths}, of which {seen} were trained: it cannot go on there, and raises"
    if state["_iterator_finished"] or not given:
        return None
    if before["sampler"] != now["sampler"]:
        return (
            f"its samples come from {now['sampler']}, and came from {before['sampler']} when the checkpoint was made: what "
            "comes next is not the rest of this epoch"
        )
    other = "the rest of this epoch is drawn of another order, so that some of its samples come twice, and others not"
    if now["sampler"] in _ANEW:
        return (
            f"a {now['sampler']} has no state: unless its generator is where it was when this epoch began, {other}; "
            "shuffle=True in its place gives one that has a state"
        )
    if differ and now["sampler"] != _IN_ORDER:
        return f"{lengths}: {other}"
    if before["batch_size"] != now["batch_size"] and (since or _counts_batches(inside, main, state, now["sampler"])):
        return (
            f"batches have {now['batch_size']} samples, and had {before['batch_size']} when {given} of this epoch were "
            "trained; this loader counts batches, so that samples come twice, or not at all"
        )
    return None


def _counts_batches(inside: Any, main: Any, state: Any, sampler: str) -> bool:
    """Return whether the order has no saved state, so that a resume skips as many batches as were yielded."""
    if sampler != "torch._InfiniteConstantSampler":
        return main["_sampler_iter_state"] is None and main["_index_sampler_state"] is None
    reader = next(iter(inside.get("_worker_snapshots", {}).values()), state) or {}
    return reader["dataset_state"] is None and reader["fetcher_state"]["dataset_iter_state"] is None


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def advise(source: Any) -> str:
    """Return as text the code to write in place of a *source* that cannot be saved, with its own arguments."""
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return "An aiockpt.StreamLoader takes the place of a DataLoader that reads from front to back"
    if not isinstance(source, DataLoader) or source.batch_sampler is None:
        return (
            "Give a DataLoader with batch_sampler=aiockpt.ShardedSampler(…), a source with parts() and load_parts(), "
            "or one with state_dict() and load_state_dict()"
        )
    sampler, size = source.sampler, source.batch_size
    if isinstance(sampler, Reshardable):
        name = type(sampler).__name__
        return f"A {name} yields whole batches: write DataLoader(data, batch_sampler={name}(…)), without sampler="
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


def advise_for_state(value: object) -> str | None:
    """Return as text the loader to write for *value* in a state, if it is a part of one; None for the rest."""
    if isinstance(value, DataLoader):
        return advise(value)
    if isinstance(value, Reshardable):
        return "A loader that reads it saves its position: for a sampler, make a DataLoader(data, batch_sampler=…)"
    if isinstance(value, Sampler | _BaseDataLoaderIter):
        return "Write a DataLoader(data, batch_sampler=aiockpt.ShardedSampler(len(data), batch_size))"
    return None


def worker_count(source: Any) -> int:
    """Return the number of workers of a ``DataLoader``; 0 for any other source."""
    return int(getattr(source, "num_workers", 0))
