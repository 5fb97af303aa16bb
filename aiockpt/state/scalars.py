"""Values without parts that JSON has no word for, written as the fields of one tagged object.

Covers big integers, nan and infinities, complex numbers, ranges, decimals, dates and times, UUIDs and paths. Each pair
of functions is an exact inverse. `write_*` raise `ValueError` with the reason when a value cannot be written, `read_*`
raise `KeyError`, `TypeError`, `ValueError` or `ArithmeticError` for fields that were never written.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import pathlib
import uuid
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

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
        KeyError, TypeError: it is not there, or of another type.
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
    # A new NaN each time: as keys they are told apart by identity.
    named = {"nan": float("nan"), "-nan": -math.nan, "inf": math.inf, "-inf": -math.inf}
    return named[field(node, "value", str)]


def _write_complex(value: complex) -> Fields:
    return {"$": "complex", "real": write_float(value.real), "imag": write_float(value.imag)}


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


def _write_timedelta(value: dt.timedelta) -> Fields:
    return {"$": "timedelta", "parts": [value.days, value.seconds, value.microseconds]}


def _read_timedelta(node: Mapping[str, Any]) -> dt.timedelta:
    days, seconds, microseconds = field(node, "parts", list)
    return dt.timedelta(days, seconds, microseconds)


def _write_path(value: pathlib.PurePath) -> Fields:
    return {"$": "path", "class": type(value).__name__, "value": check_text(str(value))}


def _read_path(node: Mapping[str, Any]) -> pathlib.PurePath:
    return PATHS[field(node, "class", str)](field(node, "value", str))


WRITERS: dict[type, Callable[[Any], Any]] = {
    int: write_int,
    float: write_float,
    complex: _write_complex,
    range: _write_range,
    decimal.Decimal: lambda value: {"$": "Decimal", "value": str(value)},
    dt.datetime: _write_time,
    dt.time: _write_time,
    dt.date: lambda value: {"$": "date", "value": value.isoformat()},
    dt.timedelta: _write_timedelta,
    uuid.UUID: lambda value: {"$": "UUID", "value": value.hex},
    **dict.fromkeys(PATHS.values(), _write_path),
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
    "path": _read_path,
}
