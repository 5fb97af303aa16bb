"""Which differences does a load raise, and which does it only report? The ``strict=`` of a load, for parts of the state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from aiockpt.adapters.rename import near
from aiockpt.errors import UsageError
from aiockpt.format.names import prefixes

Strict = bool | Mapping[str, bool]
OptimizerState = Literal["by_optimizer", "by_parameter"]


class Strictness:
    """Says of each name of the state whether a difference there is raised.

    Args:
        strict: for all of it, or for parts: the longest entry that a name begins with decides, and what has none is strict.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, strict: Strict) -> None:
        self._parts = dict(strict) if isinstance(strict, Mapping) else {}
        self._rest = True if isinstance(strict, Mapping) else strict
        if not all(type(name) is str for name in self._parts) or not all(
            type(one) is bool for one in (self._rest, *self._parts.values())
        ):
            raise UsageError(
                f'strict= takes True, False, or which for parts of the state, {{"model": False}}: {strict!r}'
            )

    def __call__(self, name: str) -> bool:
        """Return whether a difference at *name* is raised."""
        return next((self._parts[part] for part in prefixes(name) if part in self._parts), self._rest)

    def refuse_idle(self, met: Collection[str]) -> None:
        """Refuse entries that are nothing here.

        Args:
            met: the name of every leaf of the state, or that only the checkpoint has in it, and of all that they are in.

        Raises:
            UsageError: says which.
        """
        if idle := sorted(set(self._parts) - set(met)):
            told = ", ".join(f"{name!r}{near(name, met)}" for name in idle)
            raise UsageError(f"strict={told} is nothing in the state; give keys of it, or prefixes of its names")
