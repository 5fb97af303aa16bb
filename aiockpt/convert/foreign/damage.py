"""Errors of damaged files: whatever is raised is reported as damage, and as nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiockpt.errors import CheckpointError, CorruptionError


@contextmanager
def told_as_damage(file: Path) -> Iterator[None]:
    """Turn what the block raises, unless it is an error of ours, into a `CorruptionError` that names *file*."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CorruptionError(f"{file} is damaged: {error!r}") from error
