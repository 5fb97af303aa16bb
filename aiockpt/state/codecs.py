"""Codecs of values that JSON has no word for: those without parts, and objects of the user's own classes.

Guarantees:

- A checkpoint cannot cause an import or the lookup of an attribute: a name that is not registered is refused, by
  name.
- A class has one codec and a name means one class, so a value is loaded as the class that was saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import math
import pathlib
import random
import types
import uuid
import weakref
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from aiockpt.errors import UsageError

# Values without parts, written as the fields of one tagged object.
#
# Covers big integers, nan and infinities, complex numbers, ranges, decimals, dates and times, UUIDs and paths. Each pair
# of functions is an exact inverse. `write_*` raise `ValueError` with the reason when a value cannot be written, `read_*`
# raise `KeyError`, `TypeError`, `ValueError` or `ArithmeticError` for fields that were never written.


Fields = dict[str, Any]

MAX_INT_DIGITS = 1 << 16
"""Hex digits of the largest integer; beyond 4,300 decimal digits Python itself refuses to print one."""

PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def field(node: Mapping[str, Any], name: str, cls: type) -> Any:
    """Return a field of a tagged object, of exactly that type.

    Raises:
        KeyError, TypeError: it is missing, or of another type.
    """
    value = node[name]
    if type(value) is not cls:
        raise TypeError(f"{name!r} is a {type(value).__name__}, not a {cls.__name__}")
    return value


def check_text(text: str) -> str:
    """Return *text* when UTF-8 can hold it.

    Raises:
        ValueError: it has a lone surrogate.
    """
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text holds a lone surrogate, which UTF-8 cannot store; save its bytes instead")
    return text


def decode_base64(text: str) -> bytes:
    """Return the bytes that *text* stands for.

    Raises:
        ValueError: it is not base64.
    """
    return b64decode(text, validate=True)


def write_int(value: int) -> Any:
    """Return an integer of 64 bits as it is, a larger one as hex digits."""
    if -(2**63) <= value < 2**63:
        return value
    digits = hex(value)
    if len(digits) > MAX_INT_DIGITS:
        raise ValueError(f"an integer of {len(digits)} hex digits, more than {MAX_INT_DIGITS}; save it as bytes")
    return {"$": "int", "value": digits}


def _read_int(node: Mapping[str, Any]) -> int:
    digits = field(node, "value", str)
    if len(digits) > MAX_INT_DIGITS:
        raise ValueError("an integer that long was never saved")
    return int(digits, 16)


def write_float(value: float) -> Any:
    """Return a finite number as it is, the others by name."""
    if math.isfinite(value):
        return value
    sign = "-" if math.copysign(1, value) < 0 else ""
    return {"$": "float", "value": sign + ("nan" if math.isnan(value) else "inf")}


def _read_float(node: Mapping[str, Any]) -> float:
    # A new NaN each time: as keys they are distinguished by identity.
    named = {"nan": float("nan"), "-nan": -math.nan, "inf": math.inf, "-inf": -math.inf}
    return named[field(node, "value", str)]


def _read_complex(node: Mapping[str, Any]) -> complex:
    real, imag = (_read_float(part) if type(part) is dict else part for part in (node["real"], node["imag"]))
    return complex(real, imag)


def _write_range(value: range) -> Fields:
    parts = [write_int(part) for part in (value.start, value.stop, value.step)]
    if not all(type(part) is int for part in parts):
        raise ValueError("a range beyond 64 bits; save its ends instead")
    return {"$": "range", "parts": parts}


def _read_range(node: Mapping[str, Any]) -> range:
    start, stop, step = field(node, "parts", list)
    return range(start, stop, step)


def _write_time(value: dt.datetime | dt.time) -> Fields:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise ValueError(f"a time in the zone {value.tzinfo}; convert it to a fixed offset, such as datetime.UTC")
    return {"$": type(value).__name__, "value": value.isoformat(), "fold": value.fold}


def _read_time(node: Mapping[str, Any]) -> dt.datetime | dt.time:
    cls = dt.datetime if node["$"] == "datetime" else dt.time
    return cls.fromisoformat(field(node, "value", str)).replace(fold=field(node, "fold", int))


def _read_timedelta(node: Mapping[str, Any]) -> dt.timedelta:
    days, seconds, microseconds = field(node, "parts", list)
    return dt.timedelta(days, seconds, microseconds)


WRITERS: dict[type, Callable[[Any], Any]] = {
    int: write_int,
    float: write_float,
    complex: lambda value: {"$": "complex", "real": write_float(value.real), "imag": write_float(value.imag)},
    range: _write_range,
    decimal.Decimal: lambda value: {"$": "Decimal", "value": str(value)},
    dt.datetime: _write_time,
    dt.time: _write_time,
    dt.date: lambda value: {"$": "date", "value": value.isoformat()},
    dt.timedelta: lambda value: {"$": "timedelta", "parts": [value.days, value.seconds, value.microseconds]},
    uuid.UUID: lambda value: {"$": "UUID", "value": value.hex},
    **dict.fromkeys(
        PATHS.values(), lambda value: {"$": "path", "class": type(value).__name__, "value": check_text(str(value))}
    ),
}

READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "complex": _read_complex,
    "range": _read_range,
    "Decimal": lambda node: decimal.Decimal(field(node, "value", str)),
    "datetime": _read_time,
    "time": _read_time,
    "date": lambda node: dt.date.fromisoformat(field(node, "value", str)),
    "timedelta": _read_timedelta,
    "UUID": lambda node: uuid.UUID(hex=field(node, "value", str)),
    "path": lambda node: PATHS[field(node, "class", str)](field(node, "value", str)),
}


# Codecs for objects of the user's own classes, registered by the user under a name.

T = TypeVar("T")


def class_name(cls: type) -> str:
    """Return the name of a class in checkpoints."""
    return f"{cls.__module__}.{cls.__qualname__}"


class Codec(msgspec.Struct, frozen=True):
    """One class: its name in checkpoints, and its conversions to plain values and back."""

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
            from_plain: makes an instance from what *to_plain* returned. Its input is from the checkpoint: check it.

        Raises:
            UsageError: the name or class is registered already, or the class needs the two functions.
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
        # A union of members has no name of its own.
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
    """Return the two functions for a dataclass: it is made with the fields of its ``__init__``, the others are set."""
    fields = {field.name: field.init for field in dataclasses.fields(cls)}

    def make(plain: dict[str, Any]) -> Any:
        value = cls(**{name: part for name, part in plain.items() if fields.get(name, True)})
        for name, part in plain.items():
            if not fields.get(name, True):
                # A frozen dataclass refuses `setattr`.
                object.__setattr__(value, name, part)
        return value

    return (lambda value: {name: getattr(value, name) for name in fields if hasattr(value, name)}), make


DEFAULT_CODECS = CodecRegistry()
"""The registry of `aiockpt.register_codec`; used wherever no other registry is passed."""

register_codec = DEFAULT_CODECS.register_codec


# Advice on a value that cannot be saved: one sentence, or the very line to write.


_HERE_ONLY = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    functools.partial,
    type,
    memoryview,
    weakref.ReferenceType,
)
_HERE_ONLY_MODULES = {
    *("_thread", "threading", "_io", "io", "tempfile", "socket", "_socket", "ssl", "select", "selectors", "subprocess"),
    *("queue", "_queue", "asyncio", "_asyncio", "concurrent", "multiprocessing", "contextvars", "_contextvars"),
    *("mmap", "logging", "sqlite3", "signal"),
}
"""Modules of the standard library whose objects stand for resources of this process, or of its machine."""
_GENERATORS = {
    "torch._C.Generator": ("get_state()", "set_state()"),
    "numpy.random._generator.Generator": ("bit_generator.state", "bit_generator.state = …"),
    "numpy.random.mtrand.RandomState": ("get_state(legacy=False)", "set_state()"),
}
_DEPTH_OF_ADVICE = 8
_PLAIN_BASES = (dict, list, set, frozenset, tuple, deque, bytearray, str, bytes, int, float, complex)


def advise(value: Any, codecs: CodecRegistry) -> str:
    """Return advice on *value*, which cannot be saved with *codecs*, in a sentence."""
    cls = type(value)
    if (generator := _GENERATORS.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
        return _of_generator(*generator)
    if isinstance(value, random.Random):
        return _of_generator("getstate()", "setstate()")
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return (
            "Its state_dict() is called where it has a place in a dict, list or tuple of the state, and not inside a value "
            "that is saved as one. The mark of a rank's own stands on the object itself: {name: aiockpt.per_rank(value)}."
        )
    if hasattr(value, "state_dict") or hasattr(value, "load_state_dict"):
        return "Objects need state_dict() and load_state_dict(), and a place in a dict, list or tuple of the state."
    if cls.__module__ == "_io" and hasattr(value, "getvalue"):  # BytesIO, StringIO: content without a file
        name = cls.__name__
        line = f"aiockpt.register_codec('{name}', io.{name}, to_plain=io.{name}.getvalue, from_plain=io.{name})"
        return f"Save its getvalue() in its place, or register the class before you save or load: {line}"
    if _lives_here_only(value):
        return "It lives in this process only: leave it out of the state, and make it anew when the program starts."
    lines = "; ".join(_line(one) for one in dict.fromkeys(_classes_in(value)) if codecs.for_class(one) is None)
    return f"Leave it out, convert it to plain values, or register its class before you save or load: {lines}"


def _classes_in(value: Any, depth: int = 0) -> Iterator[type]:
    """Yield the class of *value*, and those of its parts that need a codec, too: of known form, or of the same module."""
    yield type(value)
    parts = [*getattr(value, "__dict__", {}).values(), *(value if isinstance(value, tuple) else ())]
    while parts and depth < _DEPTH_OF_ADVICE and not isinstance(value, enum.Enum):
        part = parts.pop(0)
        if type(part) is dict:
            parts += part.values()
        elif type(part) in (list, tuple, set):
            parts += part
        elif is_known_form(type(part)) or (type(part).__module__ == type(value).__module__ != "builtins"):
            yield from _classes_in(part, depth + 1)


def _lives_here_only(value: Any) -> bool:
    """Return whether a value is meaningful in this process only."""
    if isinstance(value, _HERE_ONLY):
        return True
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        return True
    return any(base.__module__.partition(".")[0] in _HERE_ONLY_MODULES for base in type(value).__mro__)


def _of_generator(read: str, write: str) -> str:
    return (
        f"Save its .{read} in its place, and give that back with .{write} after the load; "
        "aiockpt.RNG() has the generators of the process."
    )


def _line(cls: type) -> str:
    """Return the line that registers *cls*."""
    own = cls.__module__ in ("__main__", "builtins") or "<locals>" in cls.__qualname__
    name = cls.__name__ if own else f"{cls.__module__}.{cls.__qualname__}"
    return f"aiockpt.register_codec({name!r}, {', '.join([name, *_functions(cls, name)])})"


def _functions(cls: type, name: str) -> list[str]:
    """Return the arguments with the functions that `register_codec` needs for a class, as source text."""
    if is_known_form(cls):
        return []
    if callable(getattr(cls, "to_dict", None)) and callable(getattr(cls, "from_dict", None)):
        return [f"{name}.to_dict", f"{name}.from_dict"]
    base = next((base for base in _PLAIN_BASES if issubclass(cls, base)), None)
    if base is not None:
        return ["list" if base is deque else base.__name__, name]
    return ["to_plain=…", "from_plain=…"]


def is_known_form(cls: type) -> bool:
    """Return whether a class needs no functions to be registered, because its parts are known."""
    return (
        issubclass(cls, enum.Enum | argparse.Namespace | types.SimpleNamespace)
        or dataclasses.is_dataclass(cls)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )
