"""Renaming of leaves between state and checkpoint: ``map=`` from state to checkpoint, ``rename=`` the other way.

Guarantees:

- An entry of ``map=`` that renames nothing is refused, and similar names are listed: it is a typing error, or its sides
  were exchanged.
- A rule of ``rename=`` may rename nothing: a script keeps its rules when its checkpoints already have the new names.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from aiockpt.errors import UsageError, kind_in_words
from aiockpt.format.names import dotted, join_name, prefixes, split_name
from aiockpt.state.tree import Path


class Rules:
    """Rules that turn old names into new ones.

    Args:
        rules: a function of a name; or pairs of a regular expression and its replacement, as for `re.sub`, each
            applied to the result of the one before.

    Raises:
        UsageError: a rule is not such a pair.
    """

    def __init__(self, rules: Sequence[tuple[str, str]] | Callable[[str], str]) -> None:
        self._function = rules if callable(rules) else None
        self._pairs: list[tuple[re.Pattern[str], str]] = []
        if not callable(rules) and not isinstance(rules, Sequence):
            raise UsageError(f"rename= takes a list of pairs, or a function of a name, and not {kind_in_words(rules)}")
        for pair in () if callable(rules) else rules:
            try:
                old, new = pair
                compiled = re.compile(old)
                # This parses the replacement: a group that does not exist is refused now, not at the first match.
                compiled.sub(new, "")
                self._pairs.append((compiled, new))
            except (TypeError, ValueError, re.error, IndexError) as error:
                raise UsageError(
                    f"rename= takes pairs of a regular expression and what takes its place, and {pair!r} is none: {error}"
                ) from error

    def __call__(self, name: str) -> str:
        """Return the new name."""
        if self._function is not None:
            return _check_name("rename=", self._function(name))
        for old, new in self._pairs:
            name = old.sub(new, name)
        return name


def _check_name(argument: str, name: object) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{argument} goes from names to names, and {name!r:.80} is none: give text")
    return name


Rename = Callable[[str], str] | Mapping[str, str] | Rules
Renames = Sequence[tuple[str, str]] | Callable[[str], str]
"""What a user gives as ``rename=``."""
_DIRECTION = "map= goes from names in the state to names in the checkpoint"


class Renaming:
    """Renames the leaves of one state, and records them.

    Args:
        rename: a function of a name, or a mapping that renames by its longest prefix that is a name.

    Raises:
        UsageError: *rename* is neither.
    """

    argument = "map="

    def __init__(self, rename: Rename) -> None:
        if not (callable(rename) or isinstance(rename, Mapping)):
            raise UsageError(f"map= takes a dict, or a function of a name, and not a {type(rename).__name__}")
        for name in (*rename.keys(), *rename.values()) if isinstance(rename, Mapping) else ():
            _check_name("map=", name)
        self._mapping = rename if isinstance(rename, Mapping) else None
        self._function = rename if callable(rename) else None
        self._seen: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return what the leaf *name* of the state is called in the checkpoint."""
        if self._function is not None:
            return _check_name("map=", self._function(name))
        if self._mapping is not None:
            for prefix in prefixes(name):
                if prefix in self._mapping:
                    return self._mapping[prefix] + name[len(prefix) :]
        return name

    def keys(self, here: str, own: Collection[str], there: str, saved: Collection[str]) -> dict[str, str]:
        """Return saved key → key of the state, of a dict in the state of an object: see `Renamed.keys`."""
        pairs = [(key, self(name), name) for key in own if (name := f"{here}.{key}")]
        if self._mapping is not None:
            self._seen.update(part for _, _, name in pairs for part in prefixes(name))
        return {old[len(there) + 1 :]: key for key, old, name in pairs if old != name and old.startswith(f"{there}.")}

    def note_path(self, path: Path) -> None:
        """Note that the state has a leaf at *path*, whether it is loaded or not."""
        if self._mapping is not None:
            self._seen.update(prefixes(join_name(path)))

    def refuse_idle(self, stored: Collection[str], where: str, *, state_is_whole: bool) -> None:
        """Refuse a mapping with entries that have no leaf on one of their sides.

        Args:
            stored: every name of the checkpoint; prefixes of them are names too.
            where: the name of the checkpoint in messages.
            state_is_whole: False where other ranks have leaves that this rank lacks.

        Raises:
            UsageError: there are such entries; the message lists them.
        """
        if idle := list(self._idle_entries(stored, state_is_whole=state_is_whole)):
            raise UsageError(f"{where}: {'; '.join(idle)}")

    def _idle_entries(self, stored: Collection[str], *, state_is_whole: bool) -> Iterator[str]:
        if not self._mapping:
            return
        # Also as `keys` sees them: with only dots between the parts of a key.
        names = {*stored, *map(dotted, stored)}
        there = {prefix for name in names for prefix in prefixes(name)}
        for here, target in self._mapping.items():
            faults = []
            if state_is_whole and here not in self._seen:
                faults.append(f"{here!r} is no name in the state{near(here, self._seen)}")
            if target not in there:
                faults.append(f"{target!r} is no name in the checkpoint{near(target, there)}")
            if faults:
                turned = target in self._seen and here in there
                advice = f"; swap its sides: {{{target!r}: {here!r}}}" if turned else ""
                yield f"{_DIRECTION}, and in {{{here!r}: {target!r}}} {' and '.join(faults)}{advice}"


class Renamed:
    """The names of a checkpoint under rules; maps the name of a leaf of the state to its old name.

    Args:
        names: every name of the checkpoint.
    """

    argument = "rename="

    def __init__(self, rules: Rules, names: Collection[str]) -> None:
        self._rules = rules
        self._new = {name: new for name in names if (new := rules(name)) != name}
        self._old: dict[str, list[str]] = defaultdict(list)
        for name, new in self._new.items():
            self._old[new].append(name)
        # Containers get new names, too: modules and optimizers are looked up by the names of their own.
        for part in {part for name in names for part in prefixes(name)} - set(names):
            if (new := rules(part)) != part:
                self._old[new].append(part)
        self._asked: set[str] = set()
        self._given: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return what the leaf *name* of the state is called in the checkpoint.

        Raises:
            UsageError: the rules rename two names of the checkpoint to this one.
        """
        for part in prefixes(name):
            old = self._old.get(part, ())
            if len(old) > 1:
                raise UsageError(f"rename= makes {part!r} of {' and '.join(map(repr, sorted(old)))}: which is meant?")
            if old:
                found = old[0] + name[len(part) :]
                self._given.add(found)
                return found
        self._asked.add(name)
        return name

    def keys(self, here: str, own: Collection[str], there: str, saved: Collection[str]) -> dict[str, str]:
        """Return saved key → key of the state, of a dict in the state of an object that the rules rename.

        Args:
            here: the name of the dict in the state, with dots only; *own* are its keys.
            there: that in the checkpoint; *saved* are its keys.
        """
        new = ((key, self._rules(f"{there}.{key}")) for key in saved)
        return {key: name[len(here) + 1 :] for key, name in new if name.startswith(f"{here}.")}

    def note_path(self, path: Path) -> None:
        """Does nothing: a rule may have nothing to rename."""

    def refuse_idle(self, stored: Collection[str], where: str, *, state_is_whole: bool) -> None:
        """Does nothing: a rule may have nothing to rename."""

    def used(self, names: Collection[str]) -> dict[str, str]:
        """Return the new name of each of the checkpoint's *names* that has one."""
        return {name: self._new[name] for name in sorted(names) if name in self._new}

    def asked_twice(self) -> Iterator[tuple[str, str]]:
        """Yield each name of the state that the rules assign to another part of it, with the name of that part."""
        for name in sorted(self._asked & self._given & set(self._new)):
            yield name, self._new[name]


def refuse_idle(option: str, idle: Collection[str], names: Collection[str], says: str = "names nothing") -> None:
    """Refuse the *idle* names given in an *option*; list those of the state's *names* that are similar.

    Raises:
        UsageError: there are such names.
    """
    if idle:
        unknown = ", ".join(f"{name!r}{near(name, names)}" for name in sorted(idle))
        raise UsageError(f"{option}={unknown} {says} in the state; give keys of it, or prefixes of its names")


def near(name: str, names: Collection[str]) -> str:
    """Return in brackets the *names* that are similar to *name*, which may be a typing error; else an empty text."""
    close = difflib.get_close_matches(name, sorted(names), n=3)
    return f" (near it: {', '.join(map(repr, close))})" if close else ""


def near_key(name: str, names: Collection[str]) -> str:
    """Return the same, from the *names* that differ from *name* in the last part alone."""
    *parents, key = split_name(name)
    keys = {}
    for other in names:
        *others, last = split_name(other)
        if others == parents and isinstance(last, str):
            keys[last] = other
    close = difflib.get_close_matches(str(key), sorted(keys), n=3)
    return f" (near it: {', '.join(repr(keys[one]) for one in close)})" if close else ""
