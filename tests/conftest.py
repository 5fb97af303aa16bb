"""What holds for every test: how many examples a property draws, what runs first, what a hang does, what was not there.

- Hypothesis never judges by time: the machine may be busy. ``pytest --hypothesis-profile=NAME`` chooses how many examples
  are drawn: ``quick``, ``ci`` (the default) or ``campaign``; `tests.example_counts` has the factors.
- The contract runs first: backends, format, crashes. What fails early is what matters most. Then comes what takes long, and
  short files last: workers that take a file at a time end together.
- A test that hangs fails alone, with its traceback. It may have left threads behind that hold what the next ones need, and
  each of those would wait for its own timeout: so the third one ends the session. One whose `with` block or fixture then
  hangs, too, or that is deaf to signals, ends its process, which tells all threads' tracebacks; where the main thread stood
  is the report of the test.
- All tests of HDFS run in one process of ``pytest -n``, in which they share a server: it is two of Java, and several such
  pairs on two cores leave each other without an answer for minutes.
- The last line says which servers were not there, and how many tests that skipped.
"""

import faulthandler
import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import settings

from aiockpt import redaction
from tests.absent_servers import name_server, say_what_was_skipped
from tests.example_counts import PROFILES
from tests.warm.popen import install

pytest_plugins = ["tests.checkpointers"]
if find_spec("botocore"):  # the environments of `tests/real/run` have no S3 client
    pytest_plugins += ["tests.servers.s3_fixtures"]  # one server for all folders

# Programs that tests start run this checkout, and torch without its compiler, which makes starting one half as dear.
# Frameworks are tried with all of torch.
ROOT = Path(__file__).parents[1]
_paths = [str(ROOT)] if "AIOCKPT_FRAMEWORK" in os.environ else [str(ROOT / "tests" / "light_torch"), str(ROOT)]
_given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_paths, *filter(None, _given)]))
if "AIOCKPT_FRAMEWORK" not in os.environ:
    install()
# Workers of `pytest -n` are told the width of the runner's terminal; what is tested prints as wide as into a pipe.
os.environ.pop("COLUMNS", None)
for _name in PROFILES:
    settings.register_profile(_name, deadline=None)  # an example of 200 ms on a busy machine would be a failure
settings.load_profile("ci")

FIRST = ("backends/test_conformance.py", "crash/", "format/", "engine/test_save_load.py", "property/", "backends/")
LONG = (
    "ranks/",
    "campaigns/",
    "worker/",
    "lazy/test_lazy",
    "examples/",
    "benchmarks/",
    "pairs/",
    "cli/",
    "real/",
    "stress/",
)
HANGS_ALLOWED = 2
STUCK_S = 180.0
"""How long after its timeout a test may still be ending."""
_hangs = pytest.StashKey[int]()
_last_words = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    """Open what the process writes to when it is ended: its standard error, or a file that outlives a worker."""
    worker: dict[str, str] | None = getattr(config, "workerinput", None)
    config.stash[_last_words] = os.fdopen(os.dup(2), "w") if worker is None else _words_of(worker).open("w")


def _words_of(worker: dict[str, str]) -> Path:
    return Path(tempfile.gettempdir(), f"aiockpt-tests-{worker['testrunuid']}-{worker['workerid']}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Remove the file of a worker that ended by itself: it is empty."""
    if error is None:
        _words_of(node.workerinput).unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Report where our frames of each thread were; the main thread is the last."""
    with suppress(OSError):
        words = (file := _words_of(report.node.workerinput)).read_text().splitlines()
        file.unlink()
        report.longrepr = "\n".join([*(line for line in words if "site-packages" not in line), report.longrepr])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what shows the contract first, and then what takes long; the rest stays in order."""
    items.sort(key=_importance)


def pytest_collection_finish() -> None:
    """Have the collector pass over the 600,000 objects that collection made, and that live until the end.

    Each full collection would look at all of them, and so would each search for optimizers (`gc.get_referrers`): tests of
    lazy saves take 44 s of processor, not 105.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out a file at a time, and what needs an HDFS together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class OneHdfs(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "hdfs" if "hdfs" in nodeid.lower() else super()._split_scope(nodeid)

    return OneHdfs(config, log)


@pytest.fixture(autouse=True)
def _forgets_secrets() -> None:
    """A password that one test opened a URL with is an ordinary word to the next one.

    Without `monkeypatch`, which would then be undone after all other fixtures of a test.
    """
    redaction._seen.clear()


def _importance(item: pytest.Item) -> int:
    path = item.path.as_posix().rpartition("/tests/")[2]
    places = (place for place, start in enumerate(FIRST + LONG) if path.startswith(start))
    return next(places, len(FIRST + LONG))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def _end_when_stuck(item: pytest.Item) -> Generator[None]:
    """End the process when one phase of a test has not ended long after the test's timeout."""
    marker = item.get_closest_marker("timeout")
    limits = item.config.getoption("timeout", None), item.config.getini("timeout")
    limit_s = float(marker.args[0] if marker and marker.args else next(filter(None, limits), 0))
    faulthandler.dump_traceback_later(limit_s + STUCK_S, file=item.config.stash[_last_words], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _end_when_stuck


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the tests that hang; end the session when it is no longer about one of them."""
    if call.excinfo is not None and "Timeout (>" in str(call.excinfo.value):
        hangs = item.config.stash[_hangs] = item.config.stash.get(_hangs, 0) + 1
        if hangs > HANGS_ALLOWED:
            item.session.shouldfail = (
                f"{item.nodeid} hung, the {hangs}rd test that did: what they left may hold the others"
            )
    try:
        return (yield)
    except SystemError:
        # CPython 3.11.7 parses for a traceback while another thread parses what it imports: "AST constructor recursion depth
        # mismatch" (gh-106905) would end the session, and with it the names of all that failed.
        return pytest.TestReport.from_item_and_call(item, call)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name at once what fails: a session that is ended from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()
        sys.stdout.write(f"\nFAILED {report.nodeid} ({report.when}): {lines[-1] if lines else ''}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which servers were not there."""
    absent: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple) and (server := name_server(report.longrepr[2])):
            absent[server] += 1
    if line := say_what_was_skipped(absent):
        terminalreporter.write_line(line, yellow=True)
