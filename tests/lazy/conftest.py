"""Checkpointers on every backend, as in the tests of the engine."""

from __future__ import annotations

from tests.engine.conftest import backend, ckpt, gate, run

__all__ = ["backend", "ckpt", "gate", "run"]
