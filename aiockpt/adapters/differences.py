"""What does not fit between a state and a checkpoint, and what of it is raised? Collected by leaf, judged at the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from aiockpt.adapters.rename import near_key
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.strictness import Strict, Strictness
from aiockpt.errors import StateMismatchError
from aiockpt.format.names import prefixes

ADVICE = "Change the state, rename with map= or rename=, choose with only=, or load what fits with strict=False."
OTHER_OPTIMIZER = (
    ' Where optimizers have changed their make-up, optimizer_state="by_parameter" has the state of each parameter follow it '
    "(docs/guide/optimizers.md)."
)


class _Problem(msgspec.Struct):
    """A difference at *name* of the state."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Judged(msgspec.Struct, frozen=True):
    """What did not fit, and is not raised: as the fields of `LoadTarget` say it."""

    unexpected: tuple[str, ...]
    unexpected_claimed: tuple[str, ...]
    problems: tuple[str, ...]


class Differences:
    """What is met while a state is matched. Names of the state are *places* here, *names* are those of the checkpoint.

    Attributes:
        is_strict: says of each place whether a difference there is raised.
        missing: places that the checkpoint does not have.
        optimizers: places at which there are optimizers.
        used: names that something of the state is filled from, or that it is known not to want.
    """

    def __init__(self, stored: Stored, strict: Strict) -> None:
        self.is_strict = Strictness(strict)
        self.missing: list[str] = []
        self.optimizers: set[str] = set()
        self.used: set[str] = set()
        self._judges_parts = isinstance(strict, Mapping)
        self._stored = stored
        self._problems: list[_Problem] = []
        self._places: set[str] = set()
        self._claimed: dict[str, str] = {}
        self._passed_over: set[str] = set()
        self._hints: list[tuple[_Problem, str]] = []

    def meet(self, place: str) -> None:
        """Note that the state has something there."""
        if self._judges_parts:
            self._places.update(prefixes(place))

    def add(self, place: str, text: str) -> None:
        """Note a difference, in words."""
        self._problems.append(_Problem(place, text))

    def miss(self, place: str, reason: str) -> None:
        """Note that the checkpoint has nothing for what is there, and why."""
        self.missing.append(place)
        self.add(place, reason)

    def hint(self, name: str) -> None:
        """Have the last difference say which unused names of the checkpoint are near *name*, which was looked for."""
        self._hints.append((self._problems[-1], name))

    def claim(self, name: str, place: str) -> None:
        """Say that what the checkpoint has below *name* belongs to *place*, so that a rest is a difference."""
        self._claimed[name] = place

    def pass_over(self, name: str) -> None:
        """Say that what the checkpoint has below *name* is known, and not all of it wanted: the rest is no difference."""
        self._passed_over.add(name)

    def known_names(self) -> set[str]:
        """Return all names of the checkpoint that something of the state has to do with, and what they are parts of."""
        return {part for name in (*self.used, *self._claimed, *self._passed_over) for part in prefixes(name)}

    def judge(self, scope: Collection[str] | None, *, state_is_whole: bool) -> Judged:
        """Return what did not fit.

        Args:
            scope: names in which the checkpoint may have what nobody wants, so that it is told; None for all.
            state_is_whole: False where other ranks may want what this one does not.

        Raises:
            StateMismatchError: something differs where that is strict.
            UsageError: ``strict`` names nothing.
        """
        unexpected = list(self._stored.unused(self.used, set(self._claimed), self._passed_over))
        if scope is not None:
            unexpected = [name for name in unexpected if not set(scope).isdisjoint(prefixes(name))]
        if self._hints and unexpected:
            self._add_hints(unexpected)
        spare = {name: place for name in unexpected if (place := self._place_of(name)) is not None}
        if self._judges_parts and state_is_whole:
            self.is_strict.refuse_idle(self._places | {part for place in spare.values() for part in prefixes(place)})
        strictly_spare = [name for name, place in spare.items() if self.is_strict(place)]
        problems = list(map(str, self._problems))
        raised = {str(problem): problem.name for problem in self._problems if self.is_strict(problem.name)}
        if state_is_whole:
            problems += map(_not_here, spare)
            raised |= {_not_here(name): spare[name] for name in strictly_spare}
        if raised:
            met = {part for place in raised.values() for part in prefixes(place)}
            advice = ADVICE if met.isdisjoint(self.optimizers) else ADVICE + OTHER_OPTIMIZER
            raise StateMismatchError(self._stored.where, sorted(raised), advice)
        return Judged(tuple(unexpected), tuple(strictly_spare), tuple(problems))

    def _place_of(self, name: str) -> str | None:
        """Return where in the state tensor or value *name* would be; None where nothing claims it."""
        part = next((part for part in prefixes(name) if part in self._claimed), None)
        return None if part is None else self._claimed[part] + name[len(part) :]

    def _add_hints(self, unexpected: Sequence[str]) -> None:
        """Add to what the checkpoint lacks the names that it has unused and that may be meant."""
        free = {part for name in unexpected for part in prefixes(name)}
        there = {part for name in self._stored.names() for part in prefixes(name)}
        told: dict[str, str] = {}
        for problem, name in self._hints:
            wrong = next((part for part in reversed(prefixes(name)) if part not in there), "")
            if wrong and wrong not in told:
                told[wrong] = near_key(wrong, free)
            problem.text += told.get(wrong, "")


def _not_here(name: str) -> str:
    return f"{name}: in the checkpoint but not in the state"
