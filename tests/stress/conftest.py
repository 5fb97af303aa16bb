"""A place to measure, and a plan of a second."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.storage.backend import Backend, Listing
from aiockpt.tools.stress.plan import BLOCK_BYTES, StressPlan


class _Changed:
    """A backend with some verbs replaced."""

    def __init__(self, inner: Any, **verbs: Any) -> None:
        self._inner = inner
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        return self._verbs.get(name) or getattr(self._inner, name)


def changed(inner: Any, **verbs: Any) -> Any:
    """Return a backend, or an upload, that is *inner* with some verbs replaced."""
    return _Changed(inner, **verbs)


def left_in(folder: Path) -> list[Path]:
    """Return what lies in *folder*."""
    return list(folder.iterdir())


async def names_in(backend: Backend) -> Sequence[str]:
    """Return what lies at the top of *backend*."""
    listing: Listing = await backend.list("")
    return [*(stat.key for stat in listing.objects), *listing.folders]


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def plan() -> StressPlan:
    """Files of one short block, and of two of which the second is short."""
    sizes = (5000, BLOCK_BYTES + 12345)
    return StressPlan(sizes=sizes, concurrency=(1, 3), seconds=0.02, most_bytes=2 * sizes[-1])
