"""Tests that hang: they do nothing to the others, and a session of nothing but such tests ends by itself."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.absent_servers import name_server, say_what_was_skipped
from tests.run_python import run_python

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
SKIPS = """
@pytest.mark.parametrize("number", range(4))
def test_that_is_skipped(number):
    pytest.skip("no HDFS: no java")
"""
WHERE = """
import time
import pytest

@pytest.mark.parametrize("name", {names})
def test_it(name):
    time.sleep(0.5)
"""


def run_session(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run *tests* with our conftest in a session of their own."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_some.py").write_text(tests)
    ours = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    return run_python("-m", "pytest", *options, *ours, status=1, cwd=CHECKOUT)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A session in one process: a test that hangs, one behind it, and some that are skipped."""
    return run_session(tmp_path_factory.mktemp("alone"), HANGS.format(count=1) + SKIPS)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A session of workers, with a test that hangs, and some that need an HDFS."""
    folder = tmp_path_factory.mktemp("spread")
    (folder / "test_hdfs_more.py").write_text(WHERE.format(names=["one", "two"]))
    (folder / "test_other.py").write_text(WHERE.format(names=["three", "HdfsFour"]))
    return run_session(folder, HANGS.format(count=1), "-n", "2", "--dist", "loadfile", "-v")


def test_a_test_that_hangs_fails_alone(alone: subprocess.CompletedProcess[str]) -> None:
    assert "1 failed, 1 passed, 4 skipped in" in alone.stdout


def test_a_test_that_hangs_in_a_worker_fails_alone_and_says_where_it_hung(
    spread: subprocess.CompletedProcess[str],
) -> None:
    assert "1 failed, 5 passed in" in spread.stdout
    assert "time.sleep(30)" in spread.stdout


def test_a_test_that_never_ends_ends_its_process_and_its_report_says_where_each_thread_was(tmp_path: Path) -> None:
    tests = HANGS.format(count=1).replace(
        "    time.sleep(30)", "    try:\n        time.sleep(30)\n    finally:\n        hang()"
    )
    tests = (
        f"import tests.conftest\ntests.conftest.STUCK_S = 1.0\n\ndef hang():\n    while True: time.sleep(1)\n{tests}"
    )
    done = run_session(tmp_path, tests, "-n", "1", "--max-worker-restart", "0")
    assert "crashed while running 'test_some.py::test_that_hangs[0]'" in done.stdout
    assert "in hang" in done.stdout


def test_the_third_test_that_hangs_ends_the_session(tmp_path: Path) -> None:
    done = run_session(tmp_path, HANGS.format(count=9))
    assert "test_some.py::test_that_hangs[2] hung" in done.stdout
    assert "3 failed in" in done.stdout, "the ones behind it did not run"


def test_what_shows_the_contract_runs_first_and_what_is_short_last() -> None:
    files = ["tests/benchmarks/test_smoke.py", "tests/test_public_names.py", "tests/crash/test_damage.py"]
    done = run_python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files, cwd=CHECKOUT)
    found = list(dict.fromkeys(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line))
    assert found == [files[2], files[0], files[1]]


def test_a_session_says_which_servers_were_not_there(alone: subprocess.CompletedProcess[str]) -> None:
    assert "not there, and skipped for it: HDFS (4 tests; make test-hdfs fetches what it needs)" in alone.stdout


def test_a_skip_for_another_reason_names_no_server() -> None:
    assert name_server("Skipped: the index is one object") is None
    assert say_what_was_skipped({}) == ""


def test_what_needs_an_hdfs_runs_in_one_process(spread: subprocess.CompletedProcess[str]) -> None:
    shown = re.findall(r"^\[(gw\d)\].*::test_it\[(\w+)\]", spread.stdout, re.MULTILINE)
    where = {name: worker for worker, name in shown}
    assert where["one"] == where["two"] == where["HdfsFour"] != where["three"]
