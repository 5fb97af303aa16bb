"""Does a session end with the first test that hangs? What that leaves behind would have the next ones hang, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TESTS = """
import time
import pytest

@pytest.mark.timeout(0.5)
def test_that_hangs():
    time.sleep(30)

def test_behind_it():
    pass
"""


def test_the_first_test_that_hangs_ends_the_session(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_two.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_two.py::test_that_hangs hung" in done.stdout
    assert "1 failed in" in done.stdout, "the test behind it did not run"
