"""The campaign of faults at its small end, and what its judge takes for a broken promise."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiockpt.events import Committed, Loaded, Promoted, Replicated, Rewound
from aiockpt.tools.examples.child import StepDone
from tests.campaigns.faults import Promises
from tests.campaigns.test_campaigns import PROCESSES_S, nothing_found
from tests.monitor.synthetic_run import opened


@pytest.mark.timeout(PROCESSES_S + 20)
def test_a_job_that_loses_a_host_beside_a_bad_batch_ends_as_it_should(tmp_path: Path) -> None:
    report = nothing_found(tmp_path, "faults", "--first-seed", "32")
    assert '"0 restarts' not in report


def told(*happened: tuple[str, int]) -> Promises:
    """Return what is promised after *happened*: events of a rank with their step, or faults."""
    kinds: dict[str, Callable[..., Any]] = {
        "committed": partial(Committed, bytes=1, seconds=1.0, generation=1),
        "replicated": partial(Replicated, url="", seconds=1.0),
        "promoted": partial(Promoted, url="", bytes=1, seconds=1.0),
        "rewound": partial(Rewound, bad_step=9, reason="", bad_rank=0, skipped=1, seconds=1.0),
        "trained": partial(StepDone, loss=1.0, seconds=1.0),
        "loaded": partial(Loaded, bytes=1, read_bytes=1, seconds=1.0),
    }
    promises = Promises()
    for kind, step in happened:
        if kind in kinds:
            if kind == "loaded":
                promises.take(0, opened(0.0, 1))
            promises.take(0, kinds[kind](at_ns=0, step=step))
        else:
            promises.take(-1, (kind, step))
    return promises


def test_a_start_that_goes_on_from_less_than_was_promised_is_a_finding() -> None:
    saved = [("trained", 4), ("committed", 4), ("replicated", 3), ("promoted", 2)]
    assert told(*saved, ("kill", -1), ("loaded", 4)).lost == [0, 0]
    assert told(*saved, ("host", -1), ("loaded", 3)).lost == [0, 1]
    assert told(*saved, ("host", -1), ("host", -1), ("loaded", 2)).lost == [0, 2]
    assert told(*saved, ("flip", 4), ("loaded", 3)).lost == [0, 1]
    assert told(*saved, ("rewound", 1), ("kill", -1), ("loaded", 1)).lost == [0, 0]
    for less in (
        [("kill", -1), ("loaded", 3)],
        [("host", -1), ("loaded", 2)],
        [("host", -1), ("host", -1), ("loaded", 1)],
        [("flip", 3), ("loaded", 3)],
        [("rewound", 1), ("kill", -1), ("loaded", 0)],
    ):
        with pytest.raises(AssertionError, match="was promised"):
            told(*saved, *less)
