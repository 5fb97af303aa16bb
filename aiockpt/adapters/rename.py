"""What is a leaf of the state called in the checkpoint? The ``map=`` of a load: from here to there.

Guarantee: an entry of a mapping that renames nothing is told, with the names it may have meant; it is a slip of the pen,
or the two sides were exchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping

from aiockpt.errors import UsageError
from aiockpt.format.names import join_name, prefixes, split_name
from aiockpt.state.tree import Path

Rename = Callable[[str], str] | Mapping[str, str]
_DIRECTION = "map= goes from names in the state to names in the checkpoint"


class Renaming:
    """Renames the leaves of one state, and remembers which there were.

    Args:
        rename: a function of a name, or a mapping that renames by its longest prefix that is a name.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, rename: Rename) -> None:
        if not (callable(rename) or isinstance(rename, Mapping)):
            raise UsageError(f"map= takes a dict, or a function of a name, and not a {type(rename).__name__}")
        self._mapping = rename if isinstance(rename, Mapping) else None
        self._function = rename if callable(rename) else None
        self._met: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return what the leaf *name* of the state is called in the checkpoint."""
        if self._function is not None:
            return self._function(name)
        if self._mapping is not None:
            for prefix in prefixes(name):
                if prefix in self._mapping:
                    return self._mapping[prefix] + name[len(prefix) :]
        return name

    def meet(self, path: Path) -> None:
        """Note that the state has a leaf at *path*, also one that is not loaded."""
        if self._mapping is not None:
            self._met.update(prefixes(join_name(path)))

    def refuse_idle(self, stored: Collection[str], where: str, *, state_is_whole: bool) -> None:
        """Refuse a mapping with entries that have no leaf on one of their sides.

        Args:
            stored: every name of the checkpoint; prefixes of them are names too.
            where: what to call the checkpoint.
            state_is_whole: False where other ranks have leaves that this one has not.

        Raises:
            UsageError: says which.
        """
        if idle := list(self._idle_entries(stored, state_is_whole=state_is_whole)):
            raise UsageError(f"{where}: {'; '.join(idle)}")

    def _idle_entries(self, stored: Collection[str], *, state_is_whole: bool) -> Iterator[str]:
        if not self._mapping:
            return
        there = {prefix for name in stored for prefix in prefixes(name)}
        for here, target in self._mapping.items():
            faults = []
            if state_is_whole and here not in self._met:
                faults.append(f"{here!r} is no name in the state{near(here, self._met)}")
            if target not in there:
                faults.append(f"{target!r} is no name in the checkpoint{near(target, there)}")
            if faults:
                turned = target in self._met and here in there
                advice = f"; turn it round: {{{target!r}: {here!r}}}" if turned else ""
                yield f"{_DIRECTION}, and in {{{here!r}: {target!r}}} {' and '.join(faults)}{advice}"


def near(name: str, names: Collection[str]) -> str:
    """Return in brackets the *names* that *name* may be a slip of; nothing where there are none."""
    close = difflib.get_close_matches(name, sorted(names), n=3)
    return f" (near it: {', '.join(map(repr, close))})" if close else ""


def near_key(name: str, names: Collection[str]) -> str:
    """Return in brackets those of *names* whose last part *name* may be a slip of, and all parts before it the same."""
    *parents, key = split_name(name)
    keys = {}
    for other in names:
        *others, last = split_name(other)
        if others == parents and isinstance(last, str):
            keys[last] = other
    close = difflib.get_close_matches(str(key), sorted(keys), n=3)
    return f" (near it: {', '.join(repr(keys[one]) for one in close)})" if close else ""
