"""Codecs for objects of the user's own classes, registered by the user under a name.

Guarantees:

- Nothing is imported and no attribute is looked up because a checkpoint says so: a name that is not registered is
  refused, by name.
- A class has one codec and a name means one class, so what was saved comes back as what it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from aiockpt.errors import UsageError

T = TypeVar("T")


def class_name(cls: type) -> str:
    """Return the name under which a class stands in checkpoints."""
    return f"{cls.__module__}.{cls.__qualname__}"


class Codec(msgspec.Struct, frozen=True):
    """One class: its name in checkpoints, how it becomes plain values, and how it comes back."""

    name: str
    cls: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


class CodecRegistry:
    """The classes that may appear in a state besides the built-in ones, by name."""

    def __init__(self) -> None:
        self._by_class: dict[type, Codec] = {}
        self._by_name: dict[str, Codec] = {}

    def __repr__(self) -> str:
        return f"CodecRegistry({sorted(self._by_name)})"

    def register_codec(
        self,
        name: str,
        cls: type[T],
        to_plain: Callable[[T], Any] | None = None,
        from_plain: Callable[[Any], T] | None = None,
    ) -> None:
        """Let instances of exactly *cls* be saved, under *name*.

        Args:
            name: written into checkpoints; choose one that outlives the class's place in your code.
            to_plain: returns values (and tensors) that can be saved. May be left out, with *from_plain*, for an Enum
                (its member's name), a dataclass (a dict of its fields), a named tuple (a list of its fields) and a
                namespace (``argparse.Namespace``, a dict of its attributes).
            from_plain: makes an instance of what *to_plain* returned. It gets data from the checkpoint: check them.

        Raises:
            UsageError: the name or class is taken by another, or the class needs the two functions.
        """
        if to_plain is None or from_plain is None:
            if to_plain is not from_plain:
                raise UsageError(f"codec {name!r}: give both to_plain and from_plain, or neither")
            to_plain, from_plain = _known_form(name, cls)
        codec = Codec(name, cls, to_plain, from_plain)
        taken = self._by_name.get(name) or self._by_class.get(cls)
        if taken is not None and (taken.name, taken.cls) != (name, cls):
            raise UsageError(f"codec {name!r} for {cls!r}: {taken.name!r} for {taken.cls!r} is registered already")
        self._by_name[name] = self._by_class[cls] = codec

    def for_class(self, cls: type) -> Codec | None:
        """Return the codec of exactly *cls*, or None."""
        return self._by_class.get(cls)

    def for_name(self, name: str) -> Codec | None:
        """Return the codec that is registered as *name*, or None."""
        return self._by_name.get(name)


def _known_form(name: str, cls: type[Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the two functions for the kinds of class whose parts are known."""
    if issubclass(cls, enum.Flag):
        # What is a union of members has no name of its own.
        return (lambda flag: flag.value), (lambda plain: cls[plain] if isinstance(plain, str) else cls(plain))
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), (lambda member_name: cls[member_name])
    if dataclasses.is_dataclass(cls):
        return _dataclass_form(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return list, (lambda plain: cls(*plain))
    if issubclass(cls, argparse.Namespace | types.SimpleNamespace):
        return (lambda value: dict(vars(value))), (lambda plain: cls(**plain))
    raise UsageError(
        f"codec {name!r}: {cls!r} is no Enum, dataclass, named tuple or namespace; give to_plain and from_plain"
    )


def _dataclass_form(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the two functions for a dataclass: it is made with the fields that it takes, the others are set."""
    fields = {field.name: field.init for field in dataclasses.fields(cls)}

    def make(plain: dict[str, Any]) -> Any:
        value = cls(**{name: part for name, part in plain.items() if fields.get(name, True)})
        for name, part in plain.items():
            if not fields.get(name, True):
                object.__setattr__(value, name, part)
        return value

    return (lambda value: {name: getattr(value, name) for name in fields if hasattr(value, name)}), make


DEFAULT_CODECS = CodecRegistry()
"""What `aiockpt.register_codec` fills; used wherever no other registry is given."""

register_codec = DEFAULT_CODECS.register_codec
