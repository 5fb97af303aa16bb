"""Checkpointers on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.storage.backend import Backend
from tests.small_run import SMALL, Run


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture(params=["direct", "buffered", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "memory":
        return MemoryBackend(f"test-{tmp_path}")
    return LocalBackend(tmp_path / "run", direct=None if request.param == "direct" else False)


@pytest.fixture
def ckpt(backend: Backend) -> Iterator[aiockpt.Checkpointer]:
    with aiockpt.Checkpointer(backend, io=SMALL) as checkpointer:
        yield checkpointer
