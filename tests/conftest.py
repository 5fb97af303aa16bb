"""Is a property wrong, or the machine slow? Hypothesis asks the first only: a test has its timeout for the second.

A test that ran into it may have left threads behind that hold what the next ones need. Each of those would wait for its own
timeout, for hours together: so the first one ends the session, with its traceback.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # an example of 200 ms on a busy machine would be a failure
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the session with the first test that hangs."""
    if call.excinfo is not None and "Timeout (>" in str(call.excinfo.value):
        item.session.shouldfail = f"{item.nodeid} hung"
    return (yield)
