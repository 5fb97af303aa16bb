"""Fixtures: checkpointers on every backend, a small run to save, and a gate before its copy.

What needs torch is imported by the fixtures: sessions that are about pytest itself start in half the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from tests.lazy.copy_gate import CopyGate
    from tests.small_run import Run


@pytest.fixture
def run() -> Run:
    from tests.small_run import Run

    return Run()


@pytest.fixture(params=["direct", "buffered", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "memory":
        return MemoryBackend(f"test-{tmp_path}")
    return LocalBackend(tmp_path / "run", direct=None if request.param == "direct" else False)


@pytest.fixture
def ckpt(backend: Backend) -> Iterator[aiockpt.Checkpointer]:
    from tests.small_run import small_checkpointer

    with small_checkpointer(backend) as checkpointer:
        yield checkpointer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    from aiockpt.pipeline import snapshot as copying
    from tests.lazy.copy_gate import CopyGate

    gate = CopyGate()
    monkeypatch.setattr(copying, "_copy_beside", gate(copying._copy_beside))
    yield gate
    gate.open.set()
