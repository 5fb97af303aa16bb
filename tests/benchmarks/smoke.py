"""A smoke run of the benchmarks, as somebody at a terminal has it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import report

CHECKOUT = Path(__file__).resolve().parents[2]


def smoke(out: Path, *arguments: str) -> tuple[report.Report, str]:
    """Return the report of a smoke run, and what it printed. On the checkout's disk: a memory file system is never cold."""
    (CHECKOUT / ".bench").mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=CHECKOUT / ".bench"))
    command = [sys.executable, "-m", "benchmarks", "run", "--smoke", "--out", str(out), "--work", str(work), *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(work.iterdir()), "a run leaves nothing behind"
    work.rmdir()
    found = report.read(out)
    assert found.failures == []
    return found, done.stdout
