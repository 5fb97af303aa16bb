"""Checkpoints with weights to convert."""

from pathlib import Path

import pytest

from tests.convert.small_models import save_model


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with step 7 of a small model, its optimizer and values."""
    save_model(tmp_path / "run", 7)
    return tmp_path / "run"
