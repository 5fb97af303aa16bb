"""Which samples of a dataset with random access come next? Those of one global order that nobody has had yet.

`ShardedSampler` stands where ``DistributedSampler`` and ``BatchSampler`` would, and follows `aiockpt.adapters.loader`:
its state is the places in the epoch's order that are left, dealt to the ranks one by one, and not tied to their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aiockpt.adapters.data_source import data_ranks
from aiockpt.errors import UsageError
from aiockpt.keywords import check_count
from aiockpt.state.samples import LoaderPart, Span, reshard, split

ORDER = "order"


class ShardedSampler:
    """Yields lists of indices: this rank's batches of one epoch. Give it as ``batch_sampler``.

    Without *drop_last* no sample is repeated to make ranks even, so that they may differ by a batch at the end of an
    epoch. With it they are even, unless their number changed during the epoch: then the last round may not be.

    Args:
        length: samples in the dataset.
        batch_size: samples in a batch of this rank.
        rank: as for `aiockpt.adapters.loader.Loader`.
        size: the same.
        seed: of the order, together with the number of the epoch.
        shuffle: False keeps the order of the dataset.
        drop_last: leave out what does not fill a batch on every rank.

    Raises:
        UsageError: a number is none, or too small.
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
        self._drawn: deque[tuple[tuple[Span, ...], tuple[Span, ...]]] = deque()
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; the next one's once training has had the last batch and left the loop."""
        return self._epoch

    def __len__(self) -> int:
        """Return how many batches are left of the epoch."""
        return -(-LoaderPart(spans=self._left).span_count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that training has not got yet."""
        self._drawn.clear()
        left = self._left
        order = self._order()
        while left:
            drawn, left = split(left, self.batch_size)
            self._drawn.append((drawn, left))
            yield order[[place for span in drawn for place in span.positions]].tolist()

    def hand_out(self) -> LoaderPart:
        """Note that the oldest batch that was drawn is training's now; return it as a part."""
        drawn, self._left = self._drawn.popleft()
        return LoaderPart(self._shared, spans=drawn)

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self._begin_epoch(self._epoch + 1)

    def parts(self) -> list[LoaderPart]:
        """Return what this rank has still to give, as one part: workers have no say in which samples come next."""
        return [LoaderPart(self._shared, spans=self._left)]

    def epoch_parts(self, epoch: int, rank: int, size: int, count: int = 1) -> list[LoaderPart]:
        """Return what a rank out of *size* has before the first batch of an epoch, dealt to *count* readers."""
        round_count = self.batch_size * size
        stop = self._length - self._length % round_count if self._drop_last else self._length
        whole = LoaderPart({**self._shared, "epoch": epoch}, spans=(Span(ORDER, 0, stop),))
        return reshard([reshard([whole], size)[rank]], count)

    def load_parts(self, parts: Sequence[LoaderPart]) -> None:
        """Go on with a part.

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
        self._left = part.spans

    @property
    def _shared(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "seed": self._seed, "shuffle": self._shuffle, "length": self._length}

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._left = self.epoch_parts(epoch, self.rank, self.size)[0].spans

    def _order(self) -> torch.Tensor:
        """Return the index of the sample at each place of the epoch, (length,) int64, alike on every rank."""
        if not self._shuffle:
            return torch.arange(self._length)
        return torch.randperm(self._length, generator=torch.Generator().manual_seed(self._seed + self._epoch))
