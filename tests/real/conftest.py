"""What needs an environment of its own is left to `tests/real/run`, which names it; and what was run is counted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.real import small

HERE = Path(__file__).resolve().parent
NAME = os.environ.get("AIOCKPT_REAL_NAME", "")
"""What `tests/real/run` is about to prove; empty in `make test`."""
REPORT = os.environ.get("AIOCKPT_REAL_REPORT", "")
"""Where the count goes, as JSON; empty for nowhere."""

_BEGUN = time.monotonic()
_REFUSED: dict[str, str] = {}
_FAILED: list[str] = []

collect_ignore = [f"test_{one.stem}.py" for one in (HERE / "requirements").glob("*.txt") if one.stem != NAME]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    short = report.nodeid.partition("::")[2]
    if report.when == "call" and hasattr(report, "wasxfail"):
        _REFUSED[short] = report.wasxfail.removeprefix("reason: ")
    elif report.failed:
        _FAILED.append(short)
    return report


def pytest_sessionfinish() -> None:
    if not REPORT:
        return
    found = {
        "name": NAME,
        "certificates": small.certified,
        "refused": _REFUSED,
        **({"compared": small.compared} if small.compared else {}),
        "failed": _FAILED,
        "seconds": round(time.monotonic() - _BEGUN, 1),
        "versions": _versions(),
    }
    Path(REPORT).write_text(json.dumps(found, indent=2) + "\n")


def _versions() -> dict[str, str]:
    wanted = HERE / "requirements" / f"{NAME}.txt"
    lines = wanted.read_text().splitlines() if wanted.exists() else []
    packages = [line.partition("==")[0] for line in lines if line and not line.startswith("#")]
    return {"python": sys.version.split()[0]} | {one: metadata.version(one) for one in ["torch", *packages]}
