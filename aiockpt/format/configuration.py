"""The configuration that a step was saved with, and its changes since, in words without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from aiockpt.redaction import redact

_SECRET = re.compile(r"pass(word|wd|phrase)?$|secret|token$|(api|access|private)_?key|credential", re.IGNORECASE)
_SHOWN = 80


def flatten(config: Any, name: str = "config") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each value of a configuration that is no dict, the keys joined by dots."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from flatten(value, f"{name}.{key}")
    elif config is not None or name != "config":
        yield name, config


def config_changes(was: Any, now: Any) -> tuple[str, ...]:
    """Return the differences between two configurations, a line each: ``config.lr: 0.1 → 0.2``."""
    old, new = dict(flatten(was)), dict(flatten(now))
    return tuple(_change(name, old, new) for name in {**old, **new} if not _same(name, old, new))


def shown_value(name: str, value: Any) -> Any:
    """Return the value *name* of a configuration as it may be shown."""
    return "***" if _SECRET.search(name) else redact(value) if isinstance(value, str) else value


def _same(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    # NaN equals itself here, and 1 is not True.
    return name in old and name in new and repr(old[name]) == repr(new[name])


def _change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    texts = [f"{shown_value(name, one[name])!r:.{_SHOWN}}" if name in one else "none" for one in (old, new)]
    return redact(f"{name}: {' → '.join(texts)}")
