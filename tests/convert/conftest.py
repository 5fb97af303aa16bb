"""Checkpoints with weights to convert, and the servers that conversions talk to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.small_models import save_model
from tests.servers.s3_fixtures import aws_environment, s3_url, seaweed

__all__ = ["aws_environment", "s3_url", "seaweed"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with step 7 of a small model, its optimizer and values."""
    save_model(tmp_path / "run", 7)
    return tmp_path / "run"
