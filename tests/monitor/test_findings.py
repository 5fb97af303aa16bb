"""What is wrong with a run, in words, the worst first, with where and since when, and nothing of a good run."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiockpt.events import (
    Alive,
    BarrierWaited,
    Closed,
    Committed,
    Event,
    Loaded,
    LoadFailed,
    NotFiniteFound,
    Promoted,
    PromotionFailed,
    Rewound,
    SaveStarted,
    StepDamaged,
    StepRepaired,
)
from aiockpt.monitor.findings import Finding, find_problems
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.run_log import RunLog, first_starts, start_numbers
from aiockpt.monitor.save_points import save_points, usual_interval_s
from aiockpt.monitor.spans import spans
from aiockpt.monitor.summary import summarize
from aiockpt.units import duration
from tests.monitor.synthetic_run import BEGUN_S, Fault, SyntheticRun, append_events, opened


def drawn(**facts: Any) -> SyntheticRun:
    return SyntheticRun(**{"saves": 20, "mesh": {"dp": 6, "tp": 2}, **facts})


def problems_in(folder: Path, later_s: float = 0.0) -> list[Finding]:
    """Return what is told of a run, so many seconds after its last word."""
    told = read_run(folder)
    summary = summarize(told, spans(told))
    return find_problems(told, summary, save_points(told), summary.ended_s + later_s)


def change_events(file: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Replace each event of a trace by what *change* makes of it; None drops it."""
    some = [change(msgspec.json.decode(line)) for line in file.read_bytes().splitlines()]
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in some if one is not None))


# ------------------------------------------------------------------ runs, each with the findings of it


def all_ranks(change: Callable[[int, dict[str, Any]], dict[str, Any] | None]) -> Callable[[Path], None]:
    """Return what changes the events of every rank; *change* is given the rank and each event."""

    def edit(folder: Path) -> None:
        for rank in range(12):
            change_events(folder / f"rank-{rank:05}.jsonl", partial(change, rank))

    return edit


def without(kinds: dict[str, int], step: int) -> Callable[[Path], None]:
    """Return what drops events of *step* on all ranks, or on one: kind → rank, -1 for all."""
    return all_ranks(
        lambda rank, event: None if event.get("step") == step and kinds.get(event["type"]) in (-1, rank) else event
    )


def append(folder: Path, other: Path, facts: dict[str, Any]) -> None:
    """Append what *other* ranks told, as another process with *facts*, to the traces of *folder*."""
    for file in sorted(other.glob("rank-*.jsonl")):
        copied = folder / "copied"
        copied.write_bytes(file.read_bytes())
        change_events(copied, lambda event: event | facts if "pid" in event else event)
        with (folder / file.name).open("ab") as trace:
            trace.write(copied.read_bytes())
        copied.unlink()


def read_beside(folder: Path) -> None:
    drawn(saves=0, mesh={"dp": 1}).write(folder / "reader")
    append(folder, folder / "reader", {"pid": 9, "world_size": 12})


def fail_to_load(folder: Path) -> None:
    for one in read_run(folder).processes:
        failed = LoadFailed(at_ns=one.opened.at_ns + 10**13, step=-1, error="NoValidCheckpointError: no", seconds=1.0)
        append_events(folder / f"rank-{one.opened.rank:05}.jsonl", failed)


def slow(ranks: Iterable[int], stage: str, factor: float, since: int = 0) -> Fault:
    return Fault(ranks=frozenset(ranks), stage=stage, factor=factor, since=since)


class Case(msgspec.Struct, frozen=True):
    """A run, what is changed in its traces, and the seconds after its last event at which it is looked at."""

    facts: dict[str, Any] = {}
    edit: Callable[[Path], object] = lambda _: None
    later_s: float = 0.0


NO_END = {"Committed": -1, "DataWritten": 5}
CASES = {
    "all well": Case(),
    "a slow disk in two stages of two ranks": Case(
        {"faults": (slow({8, 9}, "write", 4, 8), slow({8, 9}, "vote", 9, 8))}
    ),
    "a slow rank": Case({"faults": (slow({9}, "write", 4, 12),)}),
    "two slow ranks of one host": Case({"faults": (slow({8, 9}, "snapshot", 4),)}),
    "slower on all ranks": Case({"faults": (slow(range(12), "write", 4, 11),)}),
    "slower on one rank, told once": Case({"faults": (slow({9}, "write", 4, 11),)}),
    "held for long": Case({"faults": (slow(range(12), "snapshot", 40),)}),
    "the worst first": Case({"faults": (slow({9}, "write", 4),), "silent": frozenset({10}), "silent_after": 12}),
    "two failed saves": Case({"failing": frozenset({3, 4})}),
    "the last save failed": Case({"failing": frozenset({19})}),
    "nothing durable for long": Case({"failing": frozenset(range(15, 20))}),
    "nothing durable for seconds, in a quick run": Case({"failing": frozenset(range(15, 20)), "period_s": 1.0}),
    "never durable": Case({"failing": frozenset(range(20))}),
    "no save": Case({"saves": 0}),
    "restart and retries": Case({"restart_after": 9, "retried": frozenset({2, 7})}),
    "a silent rank": Case({"silent": frozenset({10}), "silent_after": 12}),
    "a rank without a trace": Case({}, lambda folder: (folder / "rank-00004.jsonl").unlink()),
    "a save without an end": Case({}, without(NO_END, 1900)),
    "a save that an earlier start lost": Case({"restart_after": 9}, without({"Committed": -1}, 800)),
    "loads that failed": Case({}, fail_to_load),
    "two jobs": Case({}, lambda folder: append(folder, folder, {"pid": 4242, "host": "elsewhere"})),
    "a reader beside the run": Case({}, read_beside),
    "killed a moment ago": Case({"killed": True}, later_s=100),
    "killed hours ago": Case({"killed": True}, later_s=3 * 3600),
    "closed hours ago": Case({}, later_s=3 * 3600),
    "killed after one save, within the hour": Case({"saves": 1, "killed": True}, later_s=3000),
    "killed after one save, later": Case({"saves": 1, "killed": True}, later_s=4000),
    "one rank did not end": Case(
        {},
        all_ranks(lambda rank, event: None if rank == 9 and event["type"] == "Closed" else event),
        7200,
    ),
}
GOLDEN = Path(__file__).with_name("findings.json")


def seen(problem: Finding) -> dict[str, Any]:
    """Return the fields of a finding that are set, its time in seconds since the run began."""
    told = {name: value for name, value in msgspec.structs.asdict(problem).items() if value not in (None, "")}
    return told | ({"since_s": round(told["since_s"] - BEGUN_S, 1)} if "since_s" in told else {})


@pytest.mark.parametrize("name", CASES)
def test_a_run_has_the_findings_of_the_golden_file(name: str, tmp_path: Path) -> None:
    """After a change that is meant: ``ACCEPT=1`` writes the file anew; read its diff."""
    case = CASES[name]
    drawn(**case.facts).write(tmp_path)
    case.edit(tmp_path)
    found = [seen(one) for one in problems_in(tmp_path, case.later_s)]
    golden: dict[str, Any] = msgspec.json.decode(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
    if os.environ.get("ACCEPT"):
        GOLDEN.write_bytes(msgspec.json.format(msgspec.json.encode(golden | {name: found}), indent=1) + b"\n")
    assert found == golden.get(name)


def test_the_golden_file_has_no_other_runs() -> None:
    assert msgspec.json.decode(GOLDEN.read_bytes()).keys() == CASES.keys()


def test_steps_that_a_repair_found_damaged_are_told_and_so_are_those_that_it_mended(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    (first,) = [one.opened for one in read_run(tmp_path).processes if one.opened.rank == 0]
    last: dict[str, Any] = {"at_ns": first.at_ns, "url": "file:///far"}

    def repaired(*found: Event) -> list[Finding]:
        append_events(tmp_path / "rank-00000.jsonl", *found)
        return problems_in(tmp_path)

    (bad,) = repaired(*(StepDamaged(step=step, problem="block 1 is bad", **last) for step in (300, 200, 300)))
    assert (bad.level, bad.step) == ("bad", 300)
    assert bad.what == "Steps 200, 300 in file:///far: damaged. block 1 is bad."
    bad, mended = repaired(StepRepaired(step=200, keys=("d",), bytes=1, **{**last, "at_ns": first.at_ns + 1}))
    assert bad.what == "Step 300 in file:///far: damaged. block 1 is bad."
    assert (mended.level, mended.step) == ("warning", 200)
    bad, _ = repaired(StepDamaged(step=200, problem="it is bad again", **{**last, "at_ns": first.at_ns + 10**9}))
    assert bad.what.startswith("Steps 200, 300 in file:///far: damaged.")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "12.3 ms"), (1.5, "1.5 s"), (90, "90 s"), (300, "5 min"), (8000, "2.22 h")]
)
def test_times_are_said_in_units_that_fit(value: float, text: str) -> None:
    assert duration(value) == text


# ------------------------------------------------------------------ starts and saves


def test_processes_that_began_together_are_of_one_start_also_when_fewer_came_back(tmp_path: Path) -> None:
    drawn(restart_after=9).write(tmp_path)
    for rank in (10, 11):
        file = tmp_path / f"rank-{rank:05}.jsonl"
        lines = file.read_bytes().splitlines()
        first = [at for at, line in enumerate(lines) if b'"Opened"' in line][1]
        file.write_bytes(b"\n".join(lines[first:]) + b"\n")  # they were not there in the first start
    told = read_run(tmp_path)
    assert len(first_starts(told)) == 2
    numbers = [
        (process.opened.rank, number) for process, number in zip(told.processes, start_numbers(told), strict=True)
    ]
    assert sorted(numbers) == sorted([(rank, 0) for rank in range(10)] + [(rank, 1) for rank in range(12)])


def test_a_second_checkpointer_of_a_process_is_no_start(tmp_path: Path) -> None:
    append_events(tmp_path / "t.jsonl", opened(BEGUN_S, 7), opened(BEGUN_S + 500, 7))
    assert start_numbers(read_run(tmp_path)) == [0, 0]


def test_a_save_has_the_figures_of_all_ranks(tmp_path: Path) -> None:
    slow = Fault(ranks=frozenset({9}), stage="snapshot", factor=10.0, since=19)
    drawn(faults=(slow,), failing=frozenset({4})).write(tmp_path)
    points = save_points(read_run(tmp_path))
    last = points[-1]
    assert (last.step, last.start, last.ranks, last.unwritten, last.open) == (1900, 0, 12, (), ())
    assert last.bytes == 12 * 1200 << 20
    assert last.most_pause_rank == 9
    assert last.most_pause_s > 5 * last.pause_s > 0
    assert last.durable_s is not None
    assert last.bytes_per_s == pytest.approx(last.bytes / last.durable_s)
    assert (points[4].durable_s, points[4].bytes_per_s) == (None, 0.0)
    assert "StorageFullError" in points[4].error
    assert usual_interval_s(points) == pytest.approx(60, abs=1)
    assert usual_interval_s(points[:1]) is None


def test_events_of_a_save_that_never_began_are_no_save(tmp_path: Path) -> None:
    drawn(saves=1).write(tmp_path)
    change_events(tmp_path / "rank-00000.jsonl", lambda event: event)
    all_ranks(lambda _, event: None if event["type"] == SaveStarted.__name__ else event)(tmp_path)
    assert Committed.__name__ in (tmp_path / "rank-00000.jsonl").read_text()
    assert save_points(read_run(tmp_path)) == []


# ---------------------------------------------------------------------- what lies


def test_a_start_with_the_same_process_number_is_told_apart_as_containers_have_it(tmp_path: Path) -> None:
    drawn(restart_after=9).write(tmp_path)
    for rank in range(12):
        token = iter(("first", "second"))
        change_events(
            tmp_path / f"rank-{rank:05}.jsonl",
            lambda event, token=token: event | {"pid": 7, "process": next(token)} if "pid" in event else event,  # type: ignore[misc]
        )
    assert [round(one.lost_s) for one in summarize(read_run(tmp_path), []).restarts] == [690]


def test_work_up_to_the_last_sign_of_life_is_lost_and_other_ranks_are_not_silent_for_giving_none(
    tmp_path: Path,
) -> None:
    drawn(mesh={"dp": 2}, killed=True).write(tmp_path)
    before = summarize(read_run(tmp_path), [])
    (first,) = [one for one in read_run(tmp_path).processes if one.opened.rank == 0]
    later_ns = max(event.at_ns for event in first.events)
    again = drawn(mesh={"dp": 2}, saves=0)
    trace = tmp_path / "rank-00000.jsonl"
    append_events(trace, *(Alive(at_ns=later_ns + seconds_later * 10**9) for seconds_later in (60, 900)))
    assert summarize(read_run(tmp_path), []).ended_s == pytest.approx(before.ended_s + 900)
    assert not [one for one in problems_in(tmp_path) if "any more" in one.what]
    following = msgspec.structs.replace(
        next(again.events_of(0)), time_ns=int((before.ended_s + 1000) * 1e9), pid=7, at_ns=later_ns + 10**12
    )
    append_events(trace, following)
    (restart,) = summarize(read_run(tmp_path), []).restarts
    assert restart.down_s == pytest.approx(100, abs=0.1)
    assert restart.lost_s > 900


def test_what_a_second_checkpointer_of_the_process_told_last_is_the_last_sign_of_life(tmp_path: Path) -> None:
    """The first one loads and is closed, the second saves for an hour, and a start follows a minute after its last word."""
    append_events(
        tmp_path / "t.jsonl",
        opened(BEGUN_S, 7),
        Closed(at_ns=int((BEGUN_S + 1) * 1e9)),
        opened(BEGUN_S + 2, 7),
        Committed(at_ns=int((BEGUN_S + 3600) * 1e9), step=5, bytes=1, seconds=2.0, generation=1),
        opened(BEGUN_S + 3660, 8),
        Loaded(at_ns=int((BEGUN_S + 3670) * 1e9), step=5, bytes=1, read_bytes=1, seconds=3.0),
        BarrierWaited(at_ns=int((BEGUN_S + 3700) * 1e9), step=5, seconds=7.0),
    )
    run = read_run(tmp_path)
    summary = summarize(run, spans(run))
    (restart,) = summary.restarts
    assert restart.down_s == pytest.approx(60)
    assert restart.lost_s == pytest.approx(2)
    assert not restart.after_close
    assert summary.effective == pytest.approx(1 - (60 + 2 + 3 + 7) / 3700)


def test_what_a_rewind_takes_back_is_not_trained(tmp_path: Path) -> None:
    """Of 100 s: from the save of step 5, called at 10, to the rewind at 40; again from its new save to 60."""
    how: dict[str, Any] = {"step": 5, "bad_step": 7, "reason": "", "bad_rank": 0, "skipped": 1, "seconds": 1.0}
    saved: dict[str, Any] = {"step": 5, "bytes": 1, "seconds": 2.0, "generation": 1}
    append_events(
        tmp_path / "t.jsonl",
        opened(BEGUN_S, 7),
        Committed(at_ns=int((BEGUN_S + 12) * 1e9), **saved),
        Rewound(at_ns=int((BEGUN_S + 40) * 1e9), **how),
        Committed(at_ns=int((BEGUN_S + 43) * 1e9), **saved),
        Rewound(at_ns=int((BEGUN_S + 60) * 1e9), **how),
        Alive(at_ns=int((BEGUN_S + 100) * 1e9)),
    )
    run = read_run(tmp_path)
    assert summarize(run, spans(run)).effective == pytest.approx(1 - (30 + 19) / 100)


def run_of_starts(folder: Path, count: int, *, foreign: bool = False) -> RunLog:
    """Return a run whose first start saves step 5 after 10 s; the others, 100 s apart, resume it; each is killed after 90 s.

    Args:
        foreign: whether each start first loads a checkpoint of something else.
    """
    told: list[Event] = []
    for start in range(count):
        at_ns = int((BEGUN_S + 100 * start) * 1e9)
        told.append(opened(BEGUN_S + 100 * start, start))
        if foreign:
            told.append(Loaded(at_ns=at_ns, step=-1, bytes=1, read_bytes=1, seconds=0.0))
        if start:
            told.append(Loaded(at_ns=at_ns, step=5, bytes=1, read_bytes=1, seconds=0.0))
        else:
            told.append(Committed(at_ns=at_ns + 10 * 10**9, step=5, bytes=1, seconds=0.0, generation=1))
        told.append(Alive(at_ns=at_ns + 90 * 10**9))
    append_events(folder / "t.jsonl", *told)
    return read_run(folder)


def test_work_that_several_starts_repeat_in_vain_is_lost_once(tmp_path: Path) -> None:
    run = run_of_starts(tmp_path, 4)
    summary = summarize(run, spans(run))
    assert [round(one.lost_s) for one in summary.restarts] == [80, 90, 90]
    assert [round(one.down_s) for one in summary.restarts] == [10, 10, 10]
    assert summary.effective == pytest.approx(100 / 390)


def test_a_copy_that_succeeds_when_it_is_retried_is_no_failure(tmp_path: Path) -> None:
    drawn(mesh={"dp": 1}, saves=2, killed=True).write(tmp_path)
    trace = tmp_path / "rank-00000.jsonl"
    last_ns = max(event.at_ns for event in read_run(tmp_path).processes[0].events)
    failed = PromotionFailed(at_ns=last_ns + 10**9, step=100, url="s3://far", error="down", final=False)
    copied = Promoted(at_ns=last_ns + 2 * 10**9, step=100, url="s3://far", bytes=1, seconds=3.0)
    append_events(trace, failed)
    assert [one.level for one in problems_in(tmp_path) if "down" in one.what] == ["bad"]
    append_events(trace, copied)
    assert not [one for one in problems_in(tmp_path) if "down" in one.what]


def test_numbers_that_are_not_finite_are_of_the_save_that_has_them(tmp_path: Path) -> None:
    """The run saves step 900 with NaN, and again, without, after it has gone back."""
    drawn(mesh={"dp": 1}, saves=10).write(tmp_path)
    trace = tmp_path / "rank-00000.jsonl"
    change_events(trace, lambda event: None if event["type"] == "Closed" else event)
    events = trace.read_bytes().splitlines(keepends=True)
    again = [one for one in events if b'"step":900' in one]
    found = NotFiniteFound(at_ns=msgspec.json.decode(again[0])["at_ns"], step=900, tensors={"w": 2})
    at = events.index(again[0]) + 1
    events.insert(at, msgspec.json.encode(found) + b"\n")
    trace.write_bytes(b"".join(events))
    assert [one.level for one in problems_in(tmp_path) if "NaN" in one.what] == ["bad"]
    trace.write_bytes(b"".join(events + again))
    assert [one.level for one in problems_in(tmp_path) if "NaN" in one.what] == ["note"]


def test_numbers_that_are_not_finite_count_from_the_last_step_that_has_none(tmp_path: Path) -> None:
    drawn(mesh={"dp": 1}, saves=10).write(tmp_path)
    trace, told = tmp_path / "rank-00000.jsonl", []
    for line in trace.read_bytes().splitlines(keepends=True):
        event = msgspec.json.decode(line)
        told.append(line)
        if event["type"] == "SaveStarted" and event["step"] in (300, 800, 900):
            found = NotFiniteFound(at_ns=event["at_ns"], step=event["step"], tensors={"w": 2})
            told.append(msgspec.json.encode(found) + b"\n")
    trace.write_bytes(b"".join(told))
    (bad,) = [one for one in problems_in(tmp_path) if "NaN" in one.what]
    assert bad.what.endswith("in every step since step 800.")
    assert bad.advice.startswith("Step 700 ")


def test_a_job_that_overlaps_the_longest_one_is_found_though_a_short_one_came_between(tmp_path: Path) -> None:
    for name, pid, begin_s, end_s in (("a", 1, 0, 100), ("b", 2, 10, 12), ("c", 3, 20, 90)):
        first, end_ns = opened(BEGUN_S + begin_s, pid), int((BEGUN_S + end_s) * 1e9)
        saving = SaveStarted(at_ns=first.at_ns, step=1, bytes=1, tensor_count=1, seconds=0.0)
        append_events(tmp_path / f"{name}.jsonl", first, saving, Alive(at_ns=end_ns))
    (found,) = [one for one in problems_in(tmp_path) if one.what.startswith("Two jobs saved to one place")]
    assert "at once for 70 s: process 1 on h and process 3 on h" in found.what


def test_a_start_that_begins_with_a_foreign_checkpoint_resumes_the_step_that_it_loads_then(tmp_path: Path) -> None:
    run = run_of_starts(tmp_path, 2, foreign=True)
    (restart,) = summarize(run, spans(run)).restarts
    assert (restart.resumed_from, round(restart.lost_s)) == (5, 80)


def test_a_step_that_is_saved_twice_in_one_start_counts_twice(tmp_path: Path) -> None:
    drawn(saves=2).write(tmp_path)
    all_ranks(lambda _, event: event | {"step": 0} if event.get("step") == 100 else event)(tmp_path)
    points = save_points(read_run(tmp_path))
    assert [(one.step, one.ranks, one.open) for one in points] == [(0, 12, ()), (0, 12, ())]
    assert points[1].begun_s - points[0].begun_s == pytest.approx(60, abs=1)


def test_a_job_whose_lowest_rank_left_no_trace_has_its_saves(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    (tmp_path / "rank-00000.jsonl").unlink()
    run = read_run(tmp_path)
    assert summarize(run, spans(run)).committed == 20
    assert problems_in(tmp_path)[0].what.startswith("There is no trace of rank 0, of 12")


def test_what_failed_is_no_time_of_a_stage(tmp_path: Path) -> None:
    drawn(failing=frozenset({4})).write(tmp_path)
    run = read_run(tmp_path)
    failed = {(one.operation, one.stage) for one in spans(run) if one.failed}
    assert failed
    (whole,) = [one for one in summarize(run, spans(run)).stages if one.stage == "whole" and one.operation == "save"]
    assert whole.count == 19 * 12
