"""The indices that a ``DataLoader`` reads, wrapped so that the rest of an epoch can be repeated.

They are drawn again with the random numbers of the beginning of the epoch, and those that were trained are skipped. No
sample is read for this. This module also decides how a new batch size or length of the data changes the position.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, SequentialSampler

import aiockpt

logger = logging.getLogger("aiockpt")

_RNG = aiockpt.RNG()


def find_generators(*owners: Any) -> list[torch.Generator]:
    """Return the generators that loaders, samplers and datasets own, also in nested objects, each of them once.

    A sampler that has an ``initial_seed`` is left out: it seeds its generator anew for each epoch.
    """
    found: dict[int, torch.Generator] = {}
    left, seen = list(owners), set[int]()
    while left:
        owner = left.pop(0)
        if id(owner) in seen or not hasattr(owner, "__dict__"):
            continue
        seen.add(id(owner))
        if isinstance(generator := vars(owner).get("generator"), torch.Generator) and not hasattr(
            owner, "initial_seed"
        ):
            found[id(generator)] = generator
        left += [vars(owner)[name] for name in ("batch_sampler", "sampler", "dataset") if name in vars(owner)]
    return list(found.values())


def write_generators(generators: list[torch.Generator], states: list[bytes]) -> None:
    """Set generators to states that `read_generators` returned."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def read_generators(generators: list[torch.Generator]) -> list[bytes]:
    """Return the states of generators."""
    return [generator.get_state().numpy().tobytes() for generator in generators]


class Indices:
    """The indices of a ``DataLoader``, which can repeat the rest of an epoch.

    Attributes:
        start: the state of the random generators at the beginning of the epoch's indices, or None.
    """

    @classmethod
    def put_into(cls, loader: DataLoader[Any]) -> Self:
        """Replace the sampler of *loader* by `Indices`, unless it is replaced already; return them."""
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        source: Any = getattr(loader, name)
        if isinstance(source, Indices):
            return source  # type: ignore[return-value]
        # The setter of a DataLoader refuses this; frameworks make a new loader instead.
        indices = loader.__dict__[name] = cls(source, loader)
        return indices

    def __init__(self, source: Any, loader: DataLoader[Any]) -> None:
        self._source = source
        self._generators = find_generators(loader, loader.sampler, source)
        self._go_on: tuple[Any, int, int] | None = None
        self.start: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        go_on, self._go_on = self._go_on, None
        if go_on is None:
            self.start = self.read()
            yield from self._source
            return
        now = _RNG.state_dict()
        self.start, passed, seen = go_on
        self.write(self.start)
        given = self._after(seen)
        drawn = list(islice(given, max(passed, 1)))  # the first one draws the order
        _RNG.load_state_dict(now)
        yield from drawn[passed:]
        yield from given

    def _after(self, seen: int) -> Iterator[Any]:
        """Return the items of an iteration after the first *seen* samples of its order."""
        sampler = _batch_sampler(self._source)
        if not seen or sampler is None:
            return iter(self._source)
        order, sampler.sampler = sampler.sampler, _Rest(sampler.sampler, seen)
        try:
            given = iter(self._source)
            # One item at once: torch's BatchSampler is a generator, and takes its sampler at the first item.
            return chain(list(islice(given, 1)), given)
        finally:
            sampler.sampler = order

    @property
    def counts_samples(self) -> bool:
        """Whether batches are cut from an order of samples, so that their size may change on a resume."""
        return _batch_sampler(self._source) is not None

    @property
    def is_in_order(self) -> bool:
        """Whether the samples come in the order of the data, regardless of their number."""
        return isinstance(getattr(_batch_sampler(self._source), "sampler", self._source), SequentialSampler)

    def go_on(self, start: Any, passed: int, seen: int = 0) -> None:
        """Make the next iteration the one that began at *start*, without its first items.

        Args:
            passed: number of items to skip.
            seen: number of samples before those items, where `counts_samples`.
        """
        if start is not None:
            self._go_on = (start, passed, seen)

    def reset(self) -> None:
        """Make the next iteration a whole one: nothing is left of the one that was to continue."""
        self._go_on = None

    def own(self) -> list[bytes]:
        """Return the state of the loader's own generators."""
        return read_generators(self._generators)

    def write_own(self, states: list[bytes]) -> None:
        """Set the loader's own generators."""
        write_generators(self._generators, states)

    def read(self) -> Any:
        """Return the state of all generators from which indices are drawn."""
        return {"global": _RNG.state_dict(), "own": self.own()}

    def write(self, state: Any) -> None:
        """Set all generators."""
        _RNG.load_state_dict(state["global"])
        self.write_own(state["own"])


def length_of(sized: Any) -> int | None:
    """Return the number of samples or batches; None where unknown."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def log_other_length(length: int | None, before: int | None) -> None:
    """Log if the length of the data differs from that in the checkpoint."""
    logger.warning(
        "the data have %s samples, and had %s when the checkpoint was made: the rest of this epoch is drawn of another "
        "order, so that some of its samples come twice, and others not",
        *(length, before),
    )


def whole_batches(samples: int, size: int, before: int) -> int:
    """Return the number of whole batches of *size* after which a loader resumes that cannot resume at any sample; log it."""
    logger.warning(
        "batches have %d samples, and had %d when %d samples of this epoch were trained: this loader goes on at whole "
        "batches, after %d samples",
        *(size, before, samples, samples // size * size),
    )
    return samples // size


class _Rest:
    """The order of a sampler without its beginning."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)


def _batch_sampler(source: Any) -> Any:
    """Return torch's sampler that cuts an order of samples into batches; None where batches are made in another way."""
    while hasattr(source, "batch_sampler"):
        source = source.batch_sampler
    is_plain = type(source).__name__ == "BatchSampler" and type(source).__module__.startswith(("torch.", "torchdata."))
    return source if is_plain else None
