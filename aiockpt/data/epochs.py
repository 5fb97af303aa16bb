"""Epochs in progress: the rest of each, when batches are trained in another order than they were yielded.

Asynchronous training yields batches of one epoch while some of the last one are not trained, and its ranks need not be in
the same epoch. So a data-parallel rank has a list of epochs, each with the rest that it has to yield. `deal_epochs` turns
the lists of all old ranks into that of a new one. Pure: every rank computes the same from the same checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from aiockpt.data.samples import LoaderPart, in_lock_step, join_parts, read_part, reshard, with_counts, write_part
from aiockpt.errors import UsageError, kind_in_words

# Batches that were yielded and are not trained yet. They are yielded again after a resume.
#
# `Untrained` identifies a batch by its number, counted from 0 by each loader, or by the identity of the yielded object.
# Not thread-safe: its loader holds a lock.


_UNCHANGING = (bool, int, float, complex, str, bytes, type(None))
_EMPTY = object()


class HandedOut(msgspec.Struct, frozen=True):
    """A batch that was yielded to training and is not trained yet.

    Attributes:
        epoch: the number of the epoch that it belongs to.
        batch: the object from the source, saved unchanged; `Untrained.NOTHING` where *part* can be read again.
        part: its samples, where they can be read again.
        given: the object by which training identifies it; `Untrained.NOTHING` where it uses the number.
    """

    epoch: int
    batch: Any
    part: LoaderPart | None
    given: Any


class Untrained:
    """The batches that are not trained yet, in the order in which they were yielded."""

    NOTHING = _EMPTY

    def __init__(self) -> None:
        self._waiting: dict[int, HandedOut] = {}
        self._numbers: dict[int, deque[int]] = {}
        self._next = self._first = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def entries(self) -> Iterable[HandedOut]:
        """Return them, the oldest first."""
        return self._waiting.values()

    def add(self, one: HandedOut) -> int:
        """Add a batch that was yielded; return its number.

        Raises:
            UsageError: the source has reused the object of a batch that is not trained yet.
        """
        self._refuse_same(one.batch, "a batch is saved as it is until it is trained, so give another object each time")
        self._refuse_same(one.given, "iterate over numbered(), which distinguishes them")
        number, self._next = self._next, self._next + 1
        self._waiting[number] = one
        for held in self._objects(one):
            self._numbers.setdefault(id(held), deque()).append(number)
        return number

    def number_of(self, batch: Any) -> int:
        """Return the number of the batch that is this very object.

        Raises:
            UsageError: there is no such batch.
        """
        numbers = self._numbers.get(id(batch), ())
        number = next((number for number in numbers if self._waiting[number].given is batch), None)
        if number is None:
            raise UsageError(
                f"{kind_in_words(batch)} is not a batch in training: it was trained before, it was handed out "
                "before a load(), or it is not the very object that the loader gave. Where batches are changed or sent "
                "on their way, iterate over loader.numbered() and call loader.trained(number=…)"
            )
        return number

    def remove_number(self, number: int) -> None:
        """Note that the batch of this number is trained.

        Raises:
            UsageError: it was trained before, or no such batch was yielded since the last load.
        """
        # True would be batch 1: equal numbers are one key.
        one = self._waiting.pop(number, None) if type(number) is int else None
        if one is None:
            if type(number) is not int or not 0 <= number < self._next:
                why = f"trained(number={number!r}): give a number that numbered() gave; the next one is {self._next}"
            elif number < self._first:
                why = f"batch {number} was handed out before the load(), and comes again under another number; drop it"
            else:
                why = f"batch {number} was trained before; call trained() once for each batch"
            raise UsageError(why)
        for held in self._objects(one):
            numbers = self._numbers[id(held)]
            numbers.remove(number)
            if not numbers:
                del self._numbers[id(held)]

    def invalidate(self) -> None:
        """Release all batches: another state was loaded. The numbers continue."""
        self._waiting.clear()
        self._numbers.clear()
        self._first = self._next

    def _refuse_same(self, held: Any, advice: str) -> None:
        if held is _EMPTY or isinstance(held, _UNCHANGING) or id(held) not in self._numbers:
            return
        number = self._numbers[id(held)][0]
        raise UsageError(
            f"the source gave {kind_in_words(held)} again that is batch {number}, not trained yet; {advice}"
        )

    def _objects(self, one: HandedOut) -> list[Any]:
        """Return the objects that are kept of a batch, each once."""
        return list({id(held): held for held in (one.given, one.batch) if held is not _EMPTY}.values())


class EpochLeft(msgspec.Struct, frozen=True):
    """The rest of an epoch that one data-parallel rank has still to yield.

    Attributes:
        number: of the epoch, counted from 0, equal on all ranks.
        batches: objects from the source that were yielded and not trained; they come first.
        parts: the parts of this rank's readers after that; None where the source is past this epoch, or where only its
            own state has its position.
    """

    number: int
    batches: tuple[Any, ...] = ()
    parts: tuple[LoaderPart, ...] | None = None


EpochParts = Callable[[int, int, int, int], Sequence[LoaderPart]]
"""The parts before the first batch, by epoch, rank, ranks and readers of a rank: `EpochDealer.epoch_parts`."""


def add_untrained(left: Mapping[int, EpochLeft], handed_out: Iterable[HandedOut], count: int) -> list[EpochLeft]:
    """Return what is *left* of each epoch together with its untrained batches, which come first in their epoch.

    Args:
        left: by the number of the epoch.
        handed_out: the batches that are not trained, in their order.
        count: readers of this rank.
    """
    all_left = dict(left)
    by_epoch: dict[int, list[HandedOut]] = {}
    for one in handed_out:
        by_epoch.setdefault(one.epoch, []).append(one)
    for number, some in by_epoch.items():
        epoch = all_left.get(number, EpochLeft(number))
        batches = [one.batch for one in some if one.part is None]
        given = [one.part for one in some if one.part is not None]
        parts = epoch.parts
        if given:
            first, *others = parts or [LoaderPart(given[0].shared)] * count
            parts = (join_parts([*given, first]), *others)
        all_left[number] = EpochLeft(number, (*batches, *epoch.batches), parts)
    return [all_left[number] for number in sorted(all_left)]


def write_epochs(epochs: Iterable[EpochLeft]) -> list[dict[str, Any]]:
    """Return epochs as plain values, with their batches."""
    plain = []
    for epoch in epochs:
        one: dict[str, Any] = {"number": epoch.number, "batches": list(epoch.batches)}
        if epoch.parts is not None:
            one |= {"shared": epoch.parts[0].shared, "parts": [write_part(part) for part in epoch.parts]}
        plain.append(one)
    return plain


def read_epochs(own: Mapping[str, Any], shared: Any) -> list[EpochLeft]:
    """Return the epochs in the state of a data-parallel rank; the last is the epoch of its source.

    A state without a list of epochs has only that one, with all batches trained.

    Raises:
        UsageError: it is not the state of a loader.
    """
    try:
        if "epochs" not in own:
            return [EpochLeft(0, (), _read_parts(own["parts"], shared) if "parts" in own else None)]
        epochs = [
            EpochLeft(
                msgspec.convert(one["number"], int),
                tuple(one["batches"]),
                _read_parts(one["parts"], one["shared"]) if "parts" in one else None,
            )
            for one in own["epochs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the state of a loader cannot be read: {error!r}; load another step") from error
    if not epochs or sorted({epoch.number for epoch in epochs}) != [epoch.number for epoch in epochs]:
        raise UsageError("the state of a loader cannot be read: its epochs are none, or in disorder; load another step")
    return epochs


def _read_parts(parts: Sequence[Any], shared: Any) -> tuple[LoaderPart, ...]:
    return tuple(read_part(part, shared) for part in parts)


def deal_epochs(
    saved: Sequence[Sequence[EpochLeft]], *, rank: int, size: int, count: int, begin: EpochParts | None
) -> list[EpochLeft]:
    """Return the epochs of one rank out of *size*, with *count* readers, from those of all old ranks.

    With the same number of ranks and readers, each continues its own. Otherwise samples, and batches that were not trained,
    are distributed epoch by epoch.

    Args:
        saved: the epochs of each old rank, in order, as `read_epochs` returns them.
        begin: returns the parts of an epoch that a rank has not begun, while another has; None where that is unknown.

    Raises:
        UsageError: two readers have the same sample, or the parts of a rank in an epoch are unknown.
    """
    same = are_same_readers(saved, size, count)
    dealt: list[EpochLeft] = []
    for number in range(min(epochs[0].number for epochs in saved), max(epochs[-1].number for epochs in saved) + 1):
        of_ranks = [_left_of(number, epochs) for epochs in saved]
        if same:
            parts = [part for left in of_ranks if left is not None for part in left.parts or ()]
            if parts:
                reshard(parts, len(parts))  # refuses samples that two readers have
            own = of_ranks[rank]
            if own is not None and own.parts and len(parts) == size * count:
                own = EpochLeft(
                    number, own.batches, tuple(with_counts(parts, count)[rank * count : (rank + 1) * count])
                )
            if own is not None and any(epoch.number == number for epoch in saved[rank]):
                dealt.append(own)
            continue
        lefts = [
            _begun(number, old_rank, saved, begin) if left is None else left for old_rank, left in enumerate(of_ranks)
        ]
        parts = [part for left in lefts for part in left.parts or ()]
        batches = [batch for row in in_lock_step(left.batches for left in lefts) for batch in row]
        if parts or batches:
            readers = with_counts(reshard(parts, size * count), count) if parts else []
            own_parts = tuple(readers[rank * count : (rank + 1) * count]) or None
            dealt.append(EpochLeft(number, tuple(batches[rank::size]), own_parts))
    return dealt


def are_same_readers(saved: Sequence[Sequence[EpochLeft]], size: int, count: int) -> bool:
    """Return whether *size* ranks with *count* readers each continue what as many have saved: each its own."""
    return len(saved) == size and all(len(epochs[-1].parts or ()) == count for epochs in saved)


def _left_of(number: int, epochs: Sequence[EpochLeft]) -> EpochLeft | None:
    """Return the rest of an epoch on a rank; None where the rank has not begun it."""
    if number > epochs[-1].number:
        return None
    return next((epoch for epoch in epochs if epoch.number == number), EpochLeft(number))


def _begun(number: int, rank: int, saved: Sequence[Sequence[EpochLeft]], begin: EpochParts | None) -> EpochLeft:
    if begin is None:
        raise UsageError(
            f"data-parallel rank {rank} was in epoch {saved[rank][-1].number} and another in epoch {number}, and the source "
            f"does not say what a rank has in an epoch; resume on {len(saved)} ranks, load a step at which all were in the "
            "same epoch, or give the source epoch_parts()"
        )
    return EpochLeft(number, (), tuple(begin(number, rank, len(saved), len(saved[rank][-1].parts or ()))))
