"""Figures without the storage: memory and disk of this machine, as a reference for the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import numpy as np

from aiockpt.format.checksum import hash_block
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.testing.disk import measure_disk
from aiockpt.tools.stress.lab import Lab
from aiockpt.tools.stress.payload import new_buffer
from aiockpt.tools.stress.report import Floor

_COPIED_BYTES = 64 << 20
_REPEATS = 5
_DISK_BYTES = 256 << 20


async def measure_floors(lab: Lab) -> None:
    """Measure what is cheap to measure, and record what was not."""
    lab.watch("floors: memory and disk")
    working = Limiter("floors", 1)
    lab.report.floors.append(Floor("memory copy", await run_blocking(working, _copy_bytes_per_s)))
    lab.report.floors.append(Floor("checksum (xxh3)", await run_blocking(working, _hash_bytes_per_s)))
    scheme, _, path = lab.backend.url.partition("://")
    if scheme != "file":
        lab.skip("raw disk", f"{scheme}:// is not a folder of this machine")
        return
    size = min(_DISK_BYTES, lab.plan.most_bytes)
    try:
        kinds: tuple[Literal["write", "read"], ...] = ("write", "read")
        for kind in kinds:
            found = await run_blocking(working, partial(measure_disk, Path(unquote(path)), size, 2, kind=kind))
            name = f"raw disk, {kind} ({'O_DIRECT' if found.direct else 'page cache'}, one thread)"
            lab.report.floors.append(Floor(name, max(found.bytes_per_s)))
    except OSError as error:
        lab.skip("raw disk", str(error))


def _copy_bytes_per_s() -> float:
    source, target = (np.frombuffer(new_buffer(_COPIED_BYTES), np.uint8) for _ in range(2))
    return _COPIED_BYTES / statistics.median(_time(lambda: np.copyto(target, source)) for _ in range(_REPEATS))


def _hash_bytes_per_s() -> float:
    source = new_buffer(_COPIED_BYTES)
    return _COPIED_BYTES / statistics.median(_time(lambda: hash_block(source)) for _ in range(_REPEATS))


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
