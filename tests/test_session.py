"""What does a test that hangs do to the others? Nothing, and a session of nothing but such tests ends by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.absent_servers import name_server, say_what_was_skipped

CHECKOUT = Path(__file__).resolve().parents[1]
HANGS = """
import time
import pytest

@pytest.mark.timeout(0.5)
@pytest.mark.parametrize("number", range({count}))
def test_that_hangs(number):
    time.sleep(30)

def test_behind_it():
    pass
"""


def run_session(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run *tests* with our conftest in a session of their own."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    command += ["--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=False)


def test_a_test_that_hangs_fails_alone(tmp_path: Path) -> None:
    done = run_session(tmp_path, HANGS.format(count=1))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed in" in done.stdout


def test_a_test_that_hangs_in_a_worker_fails_alone_and_says_where_it_hung(tmp_path: Path) -> None:
    done = run_session(tmp_path, HANGS.format(count=1), "-n", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed in" in done.stdout
    assert "time.sleep(30)" in done.stdout


def test_the_third_test_that_hangs_ends_the_session(tmp_path: Path) -> None:
    done = run_session(tmp_path, HANGS.format(count=9))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_some.py::test_that_hangs[2] hung" in done.stdout
    assert "3 failed in" in done.stdout, "the ones behind it did not run"


def test_what_shows_the_contract_runs_first_and_what_is_short_last() -> None:
    files = ["tests/benchmarks/test_smoke.py", "tests/test_public_names.py", "tests/crash/test_damage.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=False)
    found = list(dict.fromkeys(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line))
    assert found == [files[2], files[0], files[1]]


def test_a_session_says_which_servers_were_not_there(tmp_path: Path) -> None:
    skip = "import pytest\n\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n):\n    pytest.skip('no HDFS: no java')\n"
    done = run_session(tmp_path, skip)
    assert "not there, and skipped for it: HDFS (4 tests; make test-hdfs fetches what it needs)" in done.stdout


def test_a_skip_for_another_reason_names_no_server() -> None:
    assert name_server("Skipped: the index is one object") is None
    assert say_what_was_skipped({}) == ""
