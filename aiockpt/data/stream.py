"""Loader for streamed datasets whose workers read ahead: each batch carries the position of its worker after it.

`StreamLoader` is a ``DataLoader`` for datasets that are read from front to back. The state of a worker comes with every
batch, so that a save neither contacts nor waits for workers; prefetched batches count as not read. After a resume, the
rest is distributed to any number of data-parallel ranks and workers:

    loader = Loader(StreamLoader(dataset, batch_size=8, num_workers=4))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from aiockpt.data.data_source import data_ranks, let_workers_outlive_signals
from aiockpt.data.samples import LoaderPart, reshard

Sample = TypeVar("Sample")
Sample_co = TypeVar("Sample_co", covariant=True)


class StreamDataset(Protocol[Sample_co]):
    """A dataset that is read from front to back. It is independent of ranks, workers and batches."""

    def whole(self, epoch: int) -> LoaderPart:
        """Return the whole of an epoch. Every rank must return the same."""
        ...

    def load_part(self, part: LoaderPart) -> object:
        """Read this part from now on."""

    def part(self) -> LoaderPart:
        """Return the rest after the sample that was yielded last: advance before each yield. *shared* may be None."""
        ...

    def __iter__(self) -> Iterator[Sample_co]:
        """Yield the samples of the part."""
        ...


class StreamLoader(Generic[Sample]):
    """Yields batches of a streamed dataset, from this data-parallel rank's part of it.

    Args:
        dataset: see `StreamDataset`.
        batch_size: samples in a batch of this rank; the last one of each worker may have fewer.
        num_workers: processes that read; 0 reads in this one.
        rank: as for `aiockpt.data.loader.Loader`; pass the same to both.
        size: the same.
        collate_fn: makes a batch of a list of samples.
        options: any other option of ``DataLoader``. Its workers live for one epoch, and batches stay in order.
    """

    _epoch: int

    def __init__(
        self,
        dataset: StreamDataset[Sample],
        *,
        batch_size: int,
        num_workers: int = 0,
        rank: int | None = None,
        size: int | None = None,
        collate_fn: Callable[[list[Sample]], Any] = default_collate,
        **options: Any,
    ) -> None:
        self.rank, self.size = data_ranks(rank, size)
        self.num_workers = num_workers
        self._dataset = dataset
        self._options = {**options, "batch_size": batch_size, "num_workers": num_workers}
        self._collate = _Collate(dataset, collate_fn)
        self._given: tuple[int, LoaderPart] | None = None
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; it increases when training has received the last batch and left the loop."""
        return self._epoch

    @property
    def generator(self) -> torch.Generator | None:
        """What seeds the workers, as for ``DataLoader``."""
        generator: torch.Generator | None = self._options.get("generator")
        return generator

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that training has not received yet."""
        self._parts, self._turn, self._given = self._in_turn(), 0, None
        source = _Source(self._dataset, self._parts)
        loader = DataLoader(source, collate_fn=self._collate, **self._options)
        let_workers_outlive_signals(loader)
        return self._yield_batches(iter(loader))

    def _yield_batches(self, collated: Iterator[tuple[Any, int, LoaderPart]]) -> Iterator[Any]:
        for batch, reader, part in collated:
            self._given = (reader, part)
            yield batch

    def hand_out(self) -> None:
        """Note that training has received the batch that was yielded last. A stream cannot read it again."""
        if self._given is not None:
            reader, part = self._given
            self._parts[reader] = msgspec.structs.replace(part, shared=self._parts[reader].shared)
            self._turn = reader + 1

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self._begin_epoch(self._epoch + 1)

    def parts(self) -> list[LoaderPart]:
        """Return the part that each worker has still to yield, beginning with the worker of the next batch."""
        return [_with_epoch(part, self._epoch) for part in self._in_turn()]

    def epoch_parts(self, epoch: int, rank: int, size: int, count: int) -> list[LoaderPart]:
        """Return the parts of the *count* workers of a rank out of *size* before the first batch of an epoch."""
        return [_with_epoch(part, epoch) for part in self._deal(epoch, rank, size, count)]

    def load_parts(self, parts: Sequence[LoaderPart]) -> None:
        """Continue with a part for each worker."""
        self._epoch = parts[0].shared["epoch"]
        self._turn = 0
        self._parts = [msgspec.structs.replace(part, shared=part.shared["shared"]) for part in parts]

    def _in_turn(self) -> list[LoaderPart]:
        """Return the parts, rotated to begin with that of the next batch: a ``DataLoader`` begins with its first worker."""
        turn = self._turn % len(self._parts)
        return [*self._parts[turn:], *self._parts[:turn]]

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._turn = 0
        self._parts = self._deal(epoch, self.rank, self.size, max(self.num_workers, 1))

    def _deal(self, epoch: int, rank: int, size: int, count: int) -> list[LoaderPart]:
        return reshard([self._dataset.whole(epoch)], size * count)[rank * count : (rank + 1) * count]


def _with_epoch(part: LoaderPart, epoch: int) -> LoaderPart:
    return msgspec.structs.replace(part, shared={"epoch": epoch, "shared": part.shared})


class _Source(IterableDataset[Any]):
    """The dataset in a worker, with that worker's part."""

    def __init__(self, dataset: StreamDataset[Any], parts: Sequence[LoaderPart]) -> None:
        self._dataset = dataset
        self._parts = list(parts)

    def __iter__(self) -> Iterator[Any]:
        self._dataset.load_part(self._parts[_reader()])
        yield from self._dataset


class _Collate:
    """Makes a batch; returns it with the number of its reader and the rest of that reader's part.

    A ``DataLoader`` collates in the reading process, right after reading the samples and before it reads more. It sends
    collate function and dataset to a worker together, so that both refer to the same object there.
    """

    def __init__(self, dataset: StreamDataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int, LoaderPart]:
        return self._collate(samples), _reader(), self._dataset.part()


def _reader() -> int:
    worker = get_worker_info()
    return 0 if worker is None else worker.id
