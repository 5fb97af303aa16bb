"""Text forms of amounts, speeds and counts: binary units, the same in every log line and at every command."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([a-z]+)\s*")


def parse_seconds(given: object) -> float:
    """Return the seconds of ``"90s"``, ``"30min"``, ``"36h"``, ``"7d"`` or of a number; 0 for what is no time above 0."""
    if isinstance(given, str):
        found = _DURATION.fullmatch(given)
        return float(found[1]) * _UNITS_S.get(found[2], 0.0) if found else 0.0
    return given if isinstance(given, int | float) and not isinstance(given, bool) and given > 0 else 0.0


def size(count: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def speed(bytes_per_s: float) -> str:
    """Return bytes a second as people read them."""
    return f"{size(bytes_per_s)}/s"


def count(number: int, noun: str) -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def name_numbers(noun: str, numbers: Sequence[int], most: int) -> str:
    """Return ``step 3``, or ``steps 1, 2, 5 and 7 more``, at *most* so many of them."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    rest = len(numbers) - most
    shown = ", ".join(map(str, numbers[:most]))
    return f"{noun}s {shown}" + (f" and {rest} more" if rest > 0 else "")


def duration(seconds: float, at_least: float = 2.0) -> str:
    """Return a time as people say it, with three digits; in minutes and hours where it is *at_least* so many."""
    for unit, length_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= at_least * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    for unit, length_s in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"
