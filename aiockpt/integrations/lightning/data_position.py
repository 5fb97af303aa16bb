"""Position of training in the data: Lightning counts the trained batches; this module restores the loaders to that count.

Kinds of loaders, by how they resume in the middle of an epoch:

- `aiockpt.Loader`, and loaders with ``state_dict()`` (torchdata's ``StatefulDataLoader``), save their own position.
- A ``DataLoader`` with indices (shuffled or not, with any sampler whose generators are attributes) draws the indices of the
  epoch again, with the random numbers of its beginning, and skips those that were trained. No sample is read for this.
- Any other loader is read again from the beginning of the epoch, with the random numbers that it had there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

import aiockpt
from aiockpt.data.data_source import let_workers_outlive_signals
from aiockpt.integrations.indices import Indices, length_of, log_other_length, whole_batches

_RNG = aiockpt.RNG()


class WholeEpochs:
    """A wrapper of `aiockpt.Loader` for Lightning: its length is constant, and it is not read past the end of an epoch."""

    def __init__(self, loader: aiockpt.Loader[Any]) -> None:
        self.loader = loader
        loader.epoch_from = "trainer"
        self._length = len(loader)
        self._batches: Iterator[Any] = iter(())
        self._has_ended = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # Lightning ends the saved epoch, and then begins the next; batches that it read before the load are obsolete.
        if self.loader.is_over and not self._has_ended:
            self._has_ended, self._batches = True, iter(())
            return self._batches
        self._has_ended = False
        if len(self.loader) == 0:  # the last batch was returned, and no further one was requested
            next(self._batches, None)
        self._batches = iter(self.loader)
        return self._batches


class DataPosition:
    """The loaders of a fit, from one setup until the next.

    Args:
        combined: Lightning's ``CombinedLoader``.

    Raises:
        UsageError: a loader yields batches that were prefetched, or is read in a way that its sampler does not follow.
    """

    def __init__(self, combined: Any) -> None:
        self._combined = combined
        self.start: Any = _RNG.state_dict()
        self._last_fetch: Any = None
        self.loaders: list[aiockpt.Loader[Any]] = []
        self.indices: list[Indices | None] = []
        self._is_read = False
        self._counted = (0, 0)
        combined.flattened = [self._register(loader) for loader in combined.flattened]
        if self._is_read and self.loaders:
            raise aiockpt.UsageError(
                "one loader has a state and another one has none: give both of them one (aiockpt.Loader, StatefulDataLoader)"
            )

    def _register(self, loader: Any) -> Any:
        """Return the loader that Lightning reads in place of *loader*."""
        indices = None
        let_workers_outlive_signals(loader)
        if isinstance(loader, WholeEpochs):
            self.loaders.append(loader.loader)
        elif isinstance(loader, aiockpt.Loader):
            _check_length(loader)
            self.loaders.append(loader)
            loader = WholeEpochs(loader)
        elif hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            _check_length(loader)
            self.loaders.append(aiockpt.Loader(loader))
            self.loaders[-1].epoch_from = "trainer"
        elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            indices = _track(loader)
        else:
            self._is_read = True
        self.indices.append(indices)
        return loader

    def state(self) -> dict[str, Any]:
        """Return the state of this rank, without the loaders that have a state of their own."""
        return {
            "start": self.start if self._is_read else None,
            "last_fetch": self._last_fetch,
            "indices": [
                None if one is None else {"start": one.start, "own": one.generators.read()} for one in self.indices
            ],
        }

    def samples(self, batches: int) -> dict[str, Any] | None:
        """Return the trained samples of this rank in the epoch, batch size and length of the data; None where unknown."""
        size = self._batch_size()
        if size is None:
            return None
        before, samples = self._counted
        length = len(self._combined.flattened[0].dataset)
        return {"size": size, "samples": samples + (batches - before) * size, "length": length}

    def _batch_size(self) -> int | None:
        """Return the batch size, if there is a single loader, and it is read by indices."""
        only = self.indices[0] if len(self.indices) == 1 else None
        return None if only is None else getattr(only, "batch_size", None)

    def recount(self, saved: dict[str, Any], ranks: int) -> tuple[int, int]:
        """Return how many batches of the present size count as trained, and the samples before the first of them.

        Args:
            saved: the part of the checkpoint that all ranks share.
            ranks: the present number of ranks.
        """
        batches = saved["batches"] * saved["ranks"] // ranks
        trained, size = saved.get("samples"), self._batch_size()
        if trained is None or size is None:
            return batches, 0
        loader, only = self._combined.flattened[0], self.indices[0]
        assert only is not None
        samples, length = trained["samples"] * saved["ranks"] // ranks, len(loader.dataset)
        if length != trained["length"] and not only.is_in_order:
            log_other_length(length, trained["length"])
        if samples == batches * size:
            return batches, 0
        if not only.counts_samples:
            return whole_batches(samples, size, trained["size"]), 0
        left = max(0, len(only.sampler) - samples)
        batches = len(loader) - (left // size if only.drop_last else -(-left // size))
        self._counted = (batches, samples)
        return batches, samples

    def begin(self) -> None:
        """Note that an epoch is about to be read from its beginning."""
        self._counted = (0, 0)
        for one in self.indices:
            if one is not None:
                one.reset()
        self.start = _RNG.state_dict()

    def go_on(self, state: Any, passed: int, seen: int = 0) -> None:
        """Make the next iteration continue that of *state*, after *passed* trained batches.

        Args:
            state: the result of `state` on this rank; None where the number of ranks has changed.
            seen: samples before these batches; unless it is 0, the batches are cut anew.
        """
        if self._is_read:
            if state is not None:
                self.start, self._last_fetch = state["start"], state["last_fetch"]
                _RNG.load_state_dict(self.start)
            return
        for place, (one, loader) in enumerate(zip(self.indices, self._combined.flattened, strict=True)):
            if one is None:
                continue
            start = one.read() if state is None else state["indices"][place]["start"]
            length = length_of(loader) or 0
            cycles = self._combined._mode == "max_size_cycle" and 0 < length < passed
            if seen:
                one.go_on(start, 0, seen)
            else:
                one.go_on(start, (passed - 1) % length + 1 if cycles else passed)

    def pass_over(self, fetcher: Any, passed: int) -> None:
        """Read the trained batches again, for loaders that have no other way to this position."""
        if self._is_read:
            fetched = fetcher.fetched
            for left in reversed(range(passed)):
                if left == 0 and self._last_fetch is not None:
                    _RNG.load_state_dict(self._last_fetch)  # a loader without a length is one batch ahead
                next(fetcher, None)
            fetcher.fetched = fetched
            fetcher.done = fetcher.length is not None and fetched >= fetcher.length

    def watch(self, fetcher: Any) -> None:
        """Note the random generators before each fetch, for loaders whose batches must be read again."""
        if not self._is_read:
            return
        start_profiler = fetcher._start_profiler

        def note() -> None:
            self._last_fetch = _RNG.state_dict()
            start_profiler()

        fetcher._start_profiler = note

    def write_own(self, state: Any) -> None:
        """Set the loaders' own generators to their states in *state*."""
        for one, saved in zip(self.indices, state["indices"], strict=True):
            if one is not None and saved is not None:
                one.generators.write(saved["own"])


def _track(loader: DataLoader[Any]) -> Indices:
    """Return the source of *loader*'s indices, replaced by one that can resume."""
    source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if hasattr(source, "hand_out"):
        raise aiockpt.UsageError(
            f"a {type(source).__name__} must be notified of each batch: pass Lightning "
            "aiockpt.Loader(DataLoader(…)) in place of the DataLoader"
        )
    return Indices.put_into(loader)


def _check_length(loader: Any) -> None:
    if length_of(loader) is None:
        raise aiockpt.UsageError(
            f"Lightning reads a {type(loader).__name__} without a length one batch ahead, so that its state "
            "is that of a batch which was not trained: give the dataset a __len__"
        )
