"""Sampler for datasets with random access: yields the samples of one global order that no rank has yielded yet.

`ShardedSampler` replaces ``DistributedSampler`` and ``BatchSampler``, and works with `aiockpt.data.loader`: its state is the
remaining positions in the epoch's order, distributed to the ranks one by one, and independent of their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import torch

from aiockpt.data.data_source import data_ranks
from aiockpt.data.samples import LoaderPart, Span, reshard, split, with_counts
from aiockpt.errors import UsageError
from aiockpt.options import check_count

ORDER = "order"


class ShardedSampler:
    """Yields lists of indices: this rank's batches of one epoch. Pass it as ``batch_sampler``.

    Every rank yields the same number of batches in every epoch, also in the rest of one on another number of ranks, as
    ``DistributedDataParallel`` needs it. If the last round has fewer samples than ranks, it is merged with the round before,
    in batches whose sizes differ by one, and each sample still comes once. A sample is repeated only where fewer samples
    than ranks are left in total, or batches have one sample. With *drop_last* every batch is full.

    Attributes:
        even: whether ranks yield equal numbers of batches; `Loader` turns it off for ``count="trained"``.

    Args:
        length: samples in the dataset.
        batch_size: samples in a batch of this rank.
        rank: as for `aiockpt.data.loader.Loader`.
        size: the same.
        seed: of the order, together with the number of the epoch.
        shuffle: False keeps the order of the dataset.
        drop_last: skip samples that do not fill a batch on every rank.

    Raises:
        UsageError: an argument is not a number, or too small.
    """

    _epoch: int

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        rank: int | None = None,
        size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_count("ShardedSampler", "length", length, least=0)
        check_count("ShardedSampler", "batch_size", batch_size)
        self.rank, self.size = data_ranks(rank, size)
        self.batch_size = batch_size
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self.even = True
        self._drawn: deque[tuple[tuple[Span, ...], LoaderPart]] = deque()
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; it increases when training has received the last batch and left the loop."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of batches that are left of the epoch."""
        return self._batch_count(self._left)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that training has not received yet."""
        self._drawn.clear()
        left = self._left
        order = self._order()
        while self._batch_count(left):
            drawn, left = self._draw(left)
            self._drawn.append((drawn, left))
            # Where other ranks have one more sample, this rank repeats one, as DistributedSampler does.
            places = [place for span in drawn for place in span.positions] or [self.rank % self._length]
            yield order[places].tolist()

    def hand_out(self) -> LoaderPart:
        """Note that training has received the oldest batch that was drawn; return it as a part."""
        drawn, self._left = self._drawn.popleft()
        return LoaderPart(self._shared, spans=drawn)

    def without(self, left: LoaderPart, numbers: Collection[int]) -> LoaderPart | None:
        """Return what is *left* of this rank without the batches of these *numbers*, counted from the next one.

        None where some of them are not of this epoch.
        """
        kept: list[Span] = []
        for number in range(max(numbers) + 1):
            if not self._batch_count(left):
                return None
            drawn, left = self._draw(left)
            kept += () if number in numbers else drawn
        return LoaderPart(left.shared, spans=(*kept, *left.spans))

    def _batch_count(self, left: LoaderPart) -> int:
        """Return how many batches every rank has still to yield, where this rank has *left*."""
        most, least = self._counts(left)
        return least // self.batch_size if self._drop_last else -(-most // self.batch_size)

    def _draw(self, left: LoaderPart) -> tuple[tuple[Span, ...], LoaderPart]:
        """Return the samples of the next batch, and what is left after it."""
        most, least = self._counts(left)
        batch_count, size = self._batch_count(left), self.batch_size
        if least - size < batch_count - 1 and not self._drop_last:
            # A full batch would leave less than one sample for each of the remaining batches.
            taken = [-(-count // batch_count) for count in (left.span_count, most, least)]
        else:
            taken = [min(size, count) for count in (left.span_count, most, least)]
        drawn, rest = split(left.spans, taken[0])
        if self._drop_last and batch_count == 1:
            return drawn, LoaderPart(left.shared, most=0, least=0)
        return drawn, LoaderPart(left.shared, spans=rest, most=most - taken[1], least=least - taken[2])

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self._begin_epoch(self._epoch + 1)

    def parts(self) -> list[LoaderPart]:
        """Return the rest of this rank's samples, as one part: workers do not affect which samples come next."""
        return [msgspec.structs.replace(self._left, shared=self._shared)]

    def epoch_parts(self, epoch: int, rank: int, size: int, count: int = 1) -> list[LoaderPart]:
        """Return the parts of *count* readers of a rank out of *size* before the first batch of an epoch."""
        round_count = self.batch_size * size
        stop = self._length - self._length % round_count if self._drop_last else self._length
        whole = LoaderPart({**self._shared, "epoch": epoch}, spans=(Span(ORDER, 0, stop),))
        (own,) = with_counts(reshard([whole], size), 1)[rank : rank + 1]
        return reshard([own], count)

    def load_parts(self, parts: Sequence[LoaderPart]) -> None:
        """Continue with a part.

        Raises:
            UsageError: the dataset had another length.
        """
        (part,) = parts
        if part.shared["length"] != self._length:
            raise UsageError(
                f"the dataset has {self._length} samples and had {part.shared['length']} when the checkpoint was made; "
                "give the same dataset, or leave the loader out of load() with only="
            )
        self._epoch, self._seed, self._shuffle = (part.shared[key] for key in ("epoch", "seed", "shuffle"))
        self._left = part

    @property
    def _shared(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "seed": self._seed, "shuffle": self._shuffle, "length": self._length}

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._left = self.epoch_parts(epoch, self.rank, self.size)[0]

    def _counts(self, left: LoaderPart) -> tuple[int, int]:
        """Return the most and the least samples that a rank has left; this rank's count if those of others are unknown."""
        own = left.span_count
        if not self.even or left.most is None or left.least is None:
            return own, own
        return left.most, left.least

    def _order(self) -> torch.Tensor:
        """Return the index of the sample at each place of the epoch, (length,) int64, alike on every rank."""
        if not self._shuffle:
            return torch.arange(self._length)
        return torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + self._epoch))
