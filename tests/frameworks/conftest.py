"""What needs an environment of its own is left to `tests/frameworks/run`, which names it."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = os.environ.get("AIOCKPT_FRAMEWORK", "")
"""The framework that `tests/frameworks/run` is about to test; empty in `make test`."""

collect_ignore = [f"test_{one.stem}.py" for one in (HERE / "requirements").glob("*.txt") if one.stem != NAME]
