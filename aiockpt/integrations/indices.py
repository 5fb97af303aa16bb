"""The indices that a ``DataLoader`` reads, wrapped so that the rest of an epoch can be repeated.

They are drawn again with the random numbers of the beginning of the epoch, and those that were trained are skipped. No
sample is read for this. This module also decides how a new batch size or length of the data changes the position.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

import aiockpt

logger = logging.getLogger("aiockpt")

_RNG = aiockpt.RNG()
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PARTS = ("sampler", "batch_sampler", "dataset")


class Generators:
    """The random generators that a loader, its samplers and its data own, also in nested objects.

    Each has the path of its attribute as its name, and a generator with several paths has the first one. They are looked
    up at each call, as an owner may make its generator when it is first iterated. An owner that has an ``initial_seed`` is
    left out: it seeds its generator anew for each epoch.

    Args:
        loader: a ``DataLoader``, before its sampler is replaced.
        parts: names of its attributes, in the order in which they are searched.
    """

    def __init__(self, loader: Any, *parts: str) -> None:
        # Not the loader itself, which refers to the `Indices` that have this object.
        self._parts = {name: getattr(loader, name, None) for name in ("generator", *parts)}

    def read(self) -> dict[str, bytes | str]:
        """Return the states of all generators."""
        states = {name: _read(one) for name, one in self._find().items()}
        if unreadable := [name for name, state in states.items() if state is None]:
            _warn_once(", ".join(unreadable), "cannot be saved")
        return {name: state for name, state in states.items() if state is not None}

    def write(self, states: Mapping[str, bytes | str]) -> None:
        """Set the generators to states that `read` returned."""
        found = self._find()
        missing = found.keys() ^ states.keys()
        missing |= {name for name in found.keys() & states.keys() if not _write(found[name], states[name])}
        if missing:
            _warn_once(", ".join(sorted(missing)), "has no state in the checkpoint, or is missing in the loader")

    def _find(self) -> dict[str, Any]:
        found: dict[int, tuple[str, Any]] = {}
        left: list[tuple[str, Any]] = [("", SimpleNamespace(**self._parts))]
        seen = set[int]()
        while left:
            path, owner = left.pop(0)
            if id(owner) in seen or not hasattr(owner, "__dict__"):
                continue
            seen.add(id(owner))
            for name, value in sorted(vars(owner).items(), key=lambda item: item[0] != "generator"):
                if isinstance(value, _KINDS) and not hasattr(owner, "initial_seed"):
                    found.setdefault(id(value), (path + name, value))
                elif name in _PARTS or isinstance(value, Sampler | Dataset):
                    left.append((f"{path}{name}.", value))
        return dict(found.values())


def _read(generator: Any) -> bytes | str | None:
    """Return the state of a generator, torch's as bytes and others as JSON; None where it cannot be saved."""
    try:
        if isinstance(generator, torch.Generator):
            return generator.get_state().numpy().tobytes()
        if isinstance(generator, random.Random):
            return json.dumps(generator.getstate())
        is_old = isinstance(generator, np.random.RandomState)
        state = generator.get_state(legacy=False) if is_old else generator.bit_generator.state
        return json.dumps(state, default=lambda array: {"dtype": array.dtype.str, "values": array.tolist()})
    except (NotImplementedError, TypeError, ValueError, AttributeError):  # SystemRandom, classes of other libraries
        return None


def _write(generator: Any, state: bytes | str) -> bool:
    """Set a generator; return whether *state* is one of its kind."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))  # type: ignore[arg-type]
        elif isinstance(generator, random.Random):
            version, words, gauss = json.loads(state)
            generator.setstate((version, tuple(words), gauss))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(json.loads(state, object_hook=_to_array))
        else:
            generator.bit_generator.state = json.loads(state, object_hook=_to_array)
    except (NotImplementedError, TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return False
    return True


def _to_array(value: dict[str, Any]) -> Any:
    return np.array(value["values"], value["dtype"]) if value.keys() == {"dtype", "values"} else value


@cache
def _warn_once(names: str, what: str) -> None:
    logger.warning(
        "random generator %s of the training data %s: after a resume within an epoch, samples that are drawn from it "
        "may come twice, and others not; draw from a torch.Generator, random.Random or numpy Generator that is an "
        "attribute of the sampler",
        *(names, what),
    )


class Indices:
    """The indices of a ``DataLoader``, which can repeat the rest of an epoch.

    Attributes:
        generators: the loader's own.
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
        self.generators = Generators(loader, *_PARTS)
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
        now, own = _RNG.state_dict(), self.generators.read()
        self.start, passed, seen = go_on
        self.write(self.start)
        given = self._after(seen)
        drawn = list(islice(given, max(passed, 1)))  # the first one draws the order
        _RNG.load_state_dict(now)
        # No sample is read again: what draws in the data stays as it was set.
        if of_data := {name: state for name, state in own.items() if name.startswith("dataset.")}:
            self.generators.write({**self.generators.read(), **of_data})
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

    def read(self) -> Any:
        """Return the state of all generators from which indices are drawn."""
        return {"global": _RNG.state_dict(), "own": self.generators.read()}

    def write(self, state: Any) -> None:
        """Set all generators."""
        _RNG.load_state_dict(state["global"])
        self.generators.write(state["own"])


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


def log_other_size(size: int, before: int) -> None:
    """Log if batches have another size than in the checkpoint: what a script counts in batches is not converted."""
    logger.warning(
        "batches have %d samples, and had %d when the checkpoint was made: the loader goes on after the samples that were "
        "trained; a script that counts its steps or epochs in batches ends at another sample: count samples, or resume with "
        "batches of %d",
        *(size, before, before),
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
