"""Advice on a value that cannot be saved: one sentence, or the very line to write."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import random
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

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
"""Modules of the standard library whose objects stand for something of this process, or of its machine."""
_GENERATORS = {
    "torch._C.Generator": ("get_state()", "set_state()"),
    "numpy.random._generator.Generator": ("bit_generator.state", "bit_generator.state = …"),
    "numpy.random.mtrand.RandomState": ("get_state(legacy=False)", "set_state()"),
}
_PLAIN_BASES = (dict, list, set, frozenset, tuple, deque, bytearray, str, bytes, int, float, complex)


def advise(value: Any) -> str:
    """Return what to do about *value*, in a sentence."""
    cls = type(value)
    if (generator := _GENERATORS.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
        return _of_generator(*generator)
    if isinstance(value, random.Random):
        return _of_generator("getstate()", "setstate()")
    if hasattr(value, "state_dict") or hasattr(value, "load_state_dict"):
        return "Objects need state_dict() and load_state_dict(), and a place in a dict, list or tuple of the state."
    if cls.__module__ == "_io" and hasattr(value, "getvalue"):  # BytesIO, StringIO: no file, but its content
        name = cls.__name__
        line = f"aiockpt.register_codec('{name}', io.{name}, to_plain=io.{name}.getvalue, from_plain=io.{name})"
        return f"Save its getvalue() in its place, or register the class before you save or load: {line}"
    if _lives_here_only(value):
        return "It lives in this process only: leave it out of the state, and make it anew when the program starts."
    return f"Leave it out, convert it to plain values, or register its class before you save or load: {_line(cls)}"


def _lives_here_only(value: Any) -> bool:
    """Return whether a value means something in this process only."""
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
    """Return the functions that `register_codec` needs for a class, as they are written."""
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
