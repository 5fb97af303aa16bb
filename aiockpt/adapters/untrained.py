"""Which batches are with training, handed out and not trained yet? Those come again after a resume.

`Untrained` knows a batch by its number, counted from 0 by each loader, or as the very object that was handed out.
Not thread-safe: its loader holds a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from aiockpt.errors import UsageError, kind_in_words
from aiockpt.state.samples import LoaderPart

_UNCHANGING = (bool, int, float, complex, str, bytes, type(None))
_NOBODY = object()


class HandedOut(msgspec.Struct, frozen=True):
    """A batch that is with training.

    Attributes:
        epoch: the number of the epoch that it belongs to.
        batch: as the source gave it, to be saved as it is; `Untrained.NOTHING` where *part* says how to read it again.
        part: its samples, where they can be read again.
        given: the object that training knows it by; `Untrained.NOTHING` where that is its number.
    """

    epoch: int
    batch: Any
    part: LoaderPart | None
    given: Any


class Untrained:
    """The batches that are with training, in the order in which they were handed out."""

    NOTHING = _NOBODY

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
        """Note that a batch is with training; return its number.

        Raises:
            UsageError: the source has filled an object again that is with training.
        """
        self._refuse_same(one.batch, "a batch is saved as it is until it is trained, so give another object each time")
        self._refuse_same(one.given, "iterate over numbered(), which tells them apart")
        number, self._next = self._next, self._next + 1
        self._waiting[number] = one
        for held in self._objects(one):
            self._numbers.setdefault(id(held), deque()).append(number)
        return number

    def remove(self, batch: Any) -> None:
        """Note that the batch that is this very object is trained.

        Raises:
            UsageError: none is.
        """
        numbers = self._numbers.get(id(batch), ())
        number = next((number for number in numbers if self._waiting[number].given is batch), None)
        if number is None:
            raise UsageError(
                f"{kind_in_words(batch)} is no batch that waits to be trained: it was trained before, it was handed out "
                "before a load(), or it is not the very object that the loader gave. Where batches are changed or sent "
                "on their way, iterate over loader.numbered() and call loader.trained(number=…)"
            )
        self.remove_number(number)

    def remove_number(self, number: int) -> None:
        """Note that the batch of this number is trained.

        Raises:
            UsageError: it was before, or no such batch was handed out since the last load.
        """
        one = self._waiting.pop(number, None)
        if one is None:
            raise UsageError(self._why_not(number))
        for held in self._objects(one):
            numbers = self._numbers[id(held)]
            numbers.remove(number)
            if not numbers:
                del self._numbers[id(held)]

    def forget(self) -> None:
        """Forget all: the state is another one, and the numbers go on."""
        self._waiting.clear()
        self._numbers.clear()
        self._first = self._next

    def _why_not(self, number: object) -> str:
        if type(number) is not int or not 0 <= number < self._next:
            return f"trained(number={number!r}): give a number that numbered() gave; the next one is {self._next}"
        if number < self._first:
            return f"batch {number} was handed out before the load(), and comes again under another number; drop it"
        return f"batch {number} was trained before; call trained() once for each batch"

    def _refuse_same(self, held: Any, advice: str) -> None:
        if held is _NOBODY or isinstance(held, _UNCHANGING) or id(held) not in self._numbers:
            return
        number = self._numbers[id(held)][0]
        raise UsageError(
            f"the source gave {kind_in_words(held)} again that is batch {number}, not trained yet; {advice}"
        )

    def _objects(self, one: HandedOut) -> list[Any]:
        """Return what is kept of a batch, each object once."""
        return list({id(held): held for held in (one.given, one.batch) if held is not _NOBODY}.values())
