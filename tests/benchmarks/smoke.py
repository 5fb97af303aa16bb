"""A smoke run of the benchmarks, as somebody at a terminal has it."""

import tempfile
from pathlib import Path

from benchmarks import report
from tests.run_python import run_python

CHECKOUT = Path(__file__).resolve().parents[2]


def smoke(out: Path, *arguments: str) -> tuple[report.Report, str]:
    """Return the report of a smoke run, and what it printed. On the checkout's disk: a memory file system is never cold."""
    (CHECKOUT / ".bench").mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=CHECKOUT / ".bench"))
    command = "-m", "benchmarks", "run", "--smoke", "--out", out, "--work", work, *arguments
    done = run_python(*command, cwd=CHECKOUT, timeout=None)
    assert not any(work.iterdir()), "a run leaves nothing behind"
    work.rmdir()
    found = report.read(out)
    assert found.failures == []
    return found, done.stdout
