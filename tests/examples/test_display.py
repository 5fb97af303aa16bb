"""Display of the demo, on a terminal and in a log, and its results."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from aiockpt.events import Committed, SaveStarted, SnapshotTaken
from aiockpt.tools.examples import elastic
from aiockpt.tools.examples.child import DemoEvent, RankRecord, StepDone
from aiockpt.tools.examples.demo import DIFFERENT, EXACT, DemoOptions, conclude
from aiockpt.tools.examples.display import ENOUGH_STEPS, Display, about
from aiockpt.tools.examples.figures import Figures

STORY: tuple[DemoEvent, ...] = (
    StepDone(at_ns=0, step=10, loss=2.5, seconds=0.1),
    SaveStarted(at_ns=0, step=10, bytes=39_000_000, tensor_count=50),
    SnapshotTaken(at_ns=0, step=10, bytes=39_000_000, pause_s=0.0031, copy_s=0.003),
    Committed(at_ns=0, step=10, bytes=39_000_000, seconds=0.039, generation=1),
    SaveStarted(at_ns=0, step=14, bytes=39_000_000, tensor_count=50),
    StepDone(at_ns=0, step=20, loss=2.25, seconds=0.1),
)
COST: Figures = {
    "steps": 125,
    "saves": 24,
    "pause_median_s": 0.0031,
    "pause_max_s": 0.0125,
    "commit_median_s": 0.039,
    "commit_max_s": 0.1,
    "save_bytes_per_s": 1e9,
    "disk_bytes_per_s": 2e9,
    "disk_direct": True,
    "blocked_s": 0.0815,
    "run_s": 20.5,
    "slowed_s": 0.0042,
    "timed_steps": 100,
    "plain_s": 20.0,
    "saving_s": 20.3,
    "step_s": 0.2,
    "noise_fraction": 0.05,
    "blocked_fraction": 0.0815 / 20.5,
    "overhead_fraction": 0.015,
    "overhead_is_measurable": False,
    "slowed_is_measurable": True,
}


def recovery(resumed_loss: float) -> Figures:
    difference = {"run": "resumed", "step": 66, "expected": 2.0, "actual": resumed_loss}
    return {
        "exact": resumed_loss == 2.0,
        "killed_in_save_of": 70,
        "written_bytes": 16_800_000,
        "save_bytes": 39_100_000,
        "newest_committed": 65,
        "resumed_from": 65,
        "lost_steps": 6,
        "lost_s": 1.0,
        "compared_steps": 120,
        "differences": [] if resumed_loss == 2.0 else [difference],
        "samples": [{"step": 66, "reference": 2.0, "killed": 2.0, "resumed": resumed_loss}],
    }


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_display_shows_loss_pause_bytes_speed_saves_in_flight_and_the_time_left_in_80_columns() -> None:
    console, record, now_s = terminal(), RankRecord(), itertools.count()
    with Display(console, {"first": 40, "second": 20}, plain=False) as display:
        display.get_time = lambda: float(next(now_s))
        display.begin("first")
        for told in (*[STORY[0]] * ENOUGH_STEPS, *STORY):
            record.add(told)
            display.show(record, told, 40)
        display.refresh()
        display.finish("all is well")
    for expected in (
        "  step  20/40",
        "loss 2.2500",
        "pause 3.1 ms",
        "37.2 MiB",
        "953.7 MiB/s",
        "1 in flight",
        " to go",
    ):
        assert expected in printed(console)
    assert "✓ first all is well" in printed(console)
    without_escapes = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(console))
    assert max(len(line) for line in without_escapes.splitlines()) <= 80


def test_the_plain_display_prints_a_few_lines_a_phase_and_the_time_left_without_escape_sequences() -> None:
    console, record = Console(file=io.StringIO(), width=200), RankRecord()
    with Display(console, {"first": 60, "second": 20}, plain=True) as display:
        display.get_time = lambda: 10.0 * len(record[StepDone])
        display.begin("first")
        steps = [msgspec.structs.replace(STORY[0], step=step) for step in range(11, 20)]
        for told in (*STORY[:5], *steps, STORY[5]):
            record.add(told)
            display.show(record, told, 60)
        display.finish("all is well")
    assert "\x1b" not in printed(console)
    lines = printed(console).splitlines()
    assert [line.split("   ")[0] for line in lines] == [
        "first: step  10/60",
        "first: all of it will take about 12 minutes from here",
        "first: step  20/60",
        "first: all is well",
    ]
    assert "save 10: pause 3.1 ms" in lines[2]


def test_steps_that_a_phase_did_not_take_are_not_to_come() -> None:
    now_s, record = itertools.count(), RankRecord()
    with Display(Console(file=io.StringIO()), {"first": 40, "second": 20}, plain=True) as display:
        display.get_time = lambda: float(next(now_s))
        display.begin("first")
        for _ in range(10):
            record.add(STORY[0])
            display.show(record, STORY[0], 40)
        before_s = display.left_s
        display.finish("killed")
        assert before_s is not None
        assert display.left_s == pytest.approx(before_s * 20 / 50, abs=1)


def test_a_time_is_told_no_more_exactly_than_it_is_known() -> None:
    told = [about(seconds) for seconds in (0.2, 44.6, 119, 150)]
    assert told == ["about 1 s", "about 45 s", "about 119 s", "about 2 minutes"]


FIRST: Figures = {
    "name": "FSDP2 on 2 ranks",
    "ranks": 2,
    "resumed_from": None,
    "load_s": 0.0,
    "needed_bytes": 0,
    "read_bytes": 0,
    "difference": 0.0,
    "exact": True,
    "passed": True,
}
LAST = FIRST | {"name": "TP on 4 ranks", "ranks": 4, "resumed_from": 5, "needed_bytes": 7 << 20, "read_bytes": 20 << 20}
APART = LAST | {"difference": 1.7e-7, "exact": False}
RESULTS: dict[str, tuple[int, Callable[[Console], int]]] = {
    "exact": (EXACT, lambda console: conclude(console, DemoOptions(), recovery(2.0), COST)),
    "beyond the noise": (
        EXACT,
        lambda console: conclude(
            console, DemoOptions(), recovery(2.0), COST | {"overhead_fraction": 0.1, "overhead_is_measurable": True}
        ),
    ),
    "below the noise": (
        EXACT,
        lambda console: conclude(
            console, DemoOptions(), recovery(2.0), COST | {"slowed_s": None, "slowed_is_measurable": False}
        ),
    ),
    "another loss": (
        DIFFERENT,
        lambda console: conclude(console, DemoOptions(), recovery(2.0000000000000004), COST),
    ),
    "elastic": (EXACT, lambda console: elastic.conclude(console, [FIRST, APART], as_json=False)),
    "elastic, another loss": (
        DIFFERENT,
        lambda console: elastic.conclude(console, [FIRST, APART | {"difference": 0.5, "passed": False}], as_json=False),
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_printed_as_recorded_in_80_columns(name: str) -> None:
    """As in results.txt; ``ACCEPT=1`` in the environment writes it."""
    console = Console(file=io.StringIO(), width=80)
    expected, show = RESULTS[name]
    assert show(console) == expected
    found = "\n".join(line.rstrip() for line in printed(console).splitlines())
    file = Path(__file__).parent / "results" / f"{name}.txt"
    if os.environ.get("ACCEPT"):
        file.write_text(f"{found}\n")
    assert f"{found}\n" == file.read_text()
    assert max(map(len, found.splitlines())) <= 80 or name.startswith("elastic")  # whose sentences end where they end
