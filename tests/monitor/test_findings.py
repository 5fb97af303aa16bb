"""Is what is wrong with a run told in words, the worst first, with where and since when, and nothing of a good run?"""

from __future__ import annotations

from collections.abc import Callable
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
    Opened,
    SaveStarted,
    StepDamaged,
    StepRepaired,
)
from aiockpt.monitor.finding import Finding
from aiockpt.monitor.findings import find_problems
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.run_starts import first_starts, start_numbers
from aiockpt.monitor.save_points import save_points, usual_interval_s
from aiockpt.monitor.spans import spans
from aiockpt.monitor.summary import summarize
from aiockpt.units import duration
from tests.monitor.synthetic_run import BEGUN_S, Fault, SyntheticRun


def drawn(**facts: Any) -> SyntheticRun:
    return SyntheticRun(**{"saves": 20, "mesh": {"dp": 6, "tp": 2}, **facts})


def problems_in(folder: Path, later_s: float = 0.0) -> list[Finding]:
    """Return what is told of a run, so many seconds after its last word."""
    told = read_run(folder)
    summary = summarize(told, spans(told))
    return find_problems(told, summary, save_points(told), summary.ended_s + later_s)


def problems(folder: Path, run: SyntheticRun) -> list[Finding]:
    run.write(folder)
    return problems_in(folder)


def change_events(file: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Replace each event of a trace by what *change* makes of it; None drops it."""
    some = [change(msgspec.json.decode(line)) for line in file.read_bytes().splitlines()]
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in some if one is not None))


def test_of_a_run_in_which_all_went_well_nothing_is_told(tmp_path: Path) -> None:
    assert problems(tmp_path, drawn()) == []


def test_a_slow_disk_is_told_once_whatever_stages_and_ranks_it_shows_in(tmp_path: Path) -> None:
    ranks = frozenset({8, 9})
    slow = tuple(
        Fault(ranks=ranks, stage=stage, factor=factor, since=8) for stage, factor in (("write", 4), ("vote", 9))
    )
    (found,) = [one for one in problems(tmp_path, drawn(faults=slow)) if "slow:" in one.what]
    assert found.what.startswith("2 ranks of host node-001 are slow: write takes ")
    assert found.advice.endswith(" Vote is slow, too. It is ranks 8, 9.")


def test_a_slow_rank_is_told_with_its_host_and_since_when(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, drawn(faults=(Fault(ranks=frozenset({9}), stage="write", factor=4.0, since=12),)))
    assert found.what.startswith("Rank 9 (node-001) is slow: write takes 3.")
    assert "since step 1200" in found.what
    assert "slow network" in found.advice
    assert (found.level, found.rank, found.stage) == ("warning", 9, "save write")
    assert found.since_s == pytest.approx(BEGUN_S + 13 * 60, abs=1)


def test_several_slow_ranks_of_one_host_are_one_finding(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, drawn(faults=(Fault(ranks=frozenset({8, 9}), stage="snapshot", factor=4.0),)))
    assert "2 ranks of host node-001" in found.what
    assert "ranks 8, 9" in found.advice


def test_failures_of_one_kind_are_one_finding_and_bad_only_while_nothing_was_durable_since(tmp_path: Path) -> None:
    (found,) = problems(tmp_path / "a", drawn(failing=frozenset({3, 4})))
    assert (found.level, found.step, found.advice) == ("warning", 400, "Later steps are durable.")
    assert found.what == "2 steps were not saved: StorageFullError('no space left on node-000') on 12 ranks."
    failing, *_ = problems(tmp_path / "b", drawn(failing=frozenset({19})))
    assert (failing.level, failing.step) == ("bad", 1900)


def test_steps_that_a_scrub_found_damaged_are_told_and_so_are_those_that_it_mended(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    (opened,) = [one.opened for one in read_run(tmp_path).processes if one.opened.rank == 0]
    last: dict[str, Any] = {"at_ns": opened.at_ns, "url": "file:///far"}

    def scrub(*found: Event) -> list[Finding]:
        with (tmp_path / "rank-00000.jsonl").open("ab") as trace:
            trace.writelines(msgspec.json.encode(event) + b"\n" for event in found)
        return problems_in(tmp_path)

    (bad,) = scrub(*(StepDamaged(step=step, problem="block 1 is bad", **last) for step in (300, 200, 300)))
    assert (bad.level, bad.step) == ("bad", 300)
    assert bad.what == "Steps 200, 300 in file:///far: damaged. block 1 is bad."
    bad, mended = scrub(StepRepaired(step=200, keys=("d",), bytes=1, **{**last, "at_ns": opened.at_ns + 1}))
    assert bad.what == "Step 300 in file:///far: damaged. block 1 is bad."
    assert (mended.level, mended.step) == ("warning", 200)


def test_a_load_that_failed_on_many_ranks_is_told_once(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    for one in read_run(tmp_path).processes:
        failed = LoadFailed(at_ns=one.opened.at_ns + 10**13, step=-1, error="NoValidCheckpointError: no", seconds=1.0)
        with (tmp_path / f"rank-{one.opened.rank:05}.jsonl").open("ab") as trace:
            trace.write(msgspec.json.encode(failed) + b"\n")
    (told,) = (one for one in problems_in(tmp_path) if "load" in one.what)
    assert told.level == "bad"
    assert told.what == "The load of the newest step failed on 12 ranks: NoValidCheckpointError: no"


def test_it_is_bad_when_nothing_has_become_durable_for_long(tmp_path: Path) -> None:
    overdue, *_ = problems(tmp_path, drawn(failing=frozenset(range(15, 20))))
    assert overdue.level == "bad"
    assert "since step 1400" in overdue.what
    assert "Nothing has become durable for 5.96 min" in overdue.what
    never, *_ = problems(tmp_path / "never", drawn(failing=frozenset(range(20))))
    assert never.what.startswith("No step has become durable")


def test_a_rank_that_tells_nothing_any_more_is_named(tmp_path: Path) -> None:
    found = problems(tmp_path, drawn(silent=frozenset({10}), silent_after=12))
    assert [(one.level, one.rank) for one in found] == [("bad", 10)]
    assert "rank 10 (node-001)" in found[0].what
    assert found[0].since_s == pytest.approx(BEGUN_S + 13 * 60, abs=5)


def test_a_rank_without_a_trace_is_named(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    (tmp_path / "rank-00004.jsonl").unlink()
    (found,) = problems_in(tmp_path)
    assert "no trace of rank 4, of 12" in found.what


def test_a_save_that_has_not_ended_names_whose_data_is_missing(tmp_path: Path) -> None:
    drawn().write(tmp_path)

    def without_the_end(rank: int) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
        gone = {"Committed", "DataWritten"} if rank == 5 else {"Committed"}
        return lambda event: None if event["step"] == 1900 and event["type"] in gone else event

    for rank in range(12):
        change_events(tmp_path / f"rank-{rank:05}.jsonl", without_the_end(rank))
    (found,) = problems_in(tmp_path)
    assert "step 1900 has not ended on 12 of 12 ranks, and rank 5 (node-000) has not written its data" in found.what
    assert (found.rank, found.step) == (5, 1900)


def test_a_save_that_was_lost_in_an_earlier_start_is_not_under_way(tmp_path: Path) -> None:
    drawn(restart_after=9).write(tmp_path)
    for rank in range(12):
        change_events(
            tmp_path / f"rank-{rank:05}.jsonl",
            lambda event: None if event["type"] == "Committed" and event["step"] == 800 else event,
        )
    assert [one.what for one in problems_in(tmp_path) if "has not ended" in one.what] == []


def test_saves_that_have_become_slower_on_all_ranks_are_told_and_not_told_twice(tmp_path: Path) -> None:
    everyone = Fault(ranks=frozenset(range(12)), stage="write", factor=4.0, since=11)
    (found,) = problems(tmp_path / "all", drawn(faults=(everyone,)))
    assert found.what.startswith("Saves take 5.8 s until they are durable, not 2.38 s, since step 1100")
    one = Fault(ranks=frozenset({9}), stage="write", factor=4.0, since=11)
    assert len(problems(tmp_path / "one", drawn(faults=(one,)))) == 1


def test_restarts_and_retries_are_told_with_what_they_cost(tmp_path: Path) -> None:
    restarted, retried = problems(tmp_path, drawn(restart_after=9, retried=frozenset({2, 7})))
    assert "begun anew once: 90 s of work lost, 60 s down" in restarted.what
    assert "from step 900" in restarted.advice
    assert (retried.level, retried.what) == (
        "note",
        "2 calls to storage were made again, most of them put, 2 on rank 1.",
    )


def test_training_that_is_held_for_long_is_told_with_the_longest_pause(tmp_path: Path) -> None:
    slow = Fault(ranks=frozenset(range(12)), stage="snapshot", factor=40.0)
    (found,) = problems(tmp_path, drawn(faults=(slow,)))
    assert found.what.startswith("Training was held for 5.")
    assert "Longest: 3." in found.advice


def test_the_worst_comes_first(tmp_path: Path) -> None:
    slow = Fault(ranks=frozenset({9}), stage="write", factor=4.0)
    levels = [one.level for one in problems(tmp_path, drawn(faults=(slow,), silent=frozenset({10}), silent_after=12))]
    assert levels == ["bad", "warning"]


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
    def line(event: Event) -> bytes:
        return msgspec.json.encode(event) + b"\n"

    def opened(time_s: float) -> Opened:
        return Opened(at_ns=0, time_ns=int(time_s * 1e9), pid=7, host="h", rank=0, world_size=1, urls=())

    (tmp_path / "t.jsonl").write_bytes(line(opened(BEGUN_S)) + line(opened(BEGUN_S + 500)))
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
    for rank in range(12):
        change_events(
            tmp_path / f"rank-{rank:05}.jsonl", lambda event: None if event["type"] == SaveStarted.__name__ else event
        )
    assert Committed.__name__ in (tmp_path / "rank-00000.jsonl").read_text()
    assert save_points(read_run(tmp_path)) == []


# ---------------------------------------------------------------------- what lies


def test_a_run_that_was_killed_or_hangs_is_told_when_it_has_been_silent_for_long_and_one_that_was_closed_is_not(
    tmp_path: Path,
) -> None:
    drawn(killed=True).write(tmp_path)
    assert problems_in(tmp_path, later_s=100) == [], "a save begins every minute"
    (found,) = problems_in(tmp_path, later_s=3 * 3600)
    assert found.level == "bad"
    assert found.what == "The run has told nothing for 3 h, and was not closed: it was killed, or hangs."
    drawn().write(tmp_path)
    assert problems_in(tmp_path, later_s=3 * 3600) == []


def test_of_a_run_that_has_saved_once_an_hour_of_silence_is_told(tmp_path: Path) -> None:
    drawn(saves=1, killed=True).write(tmp_path)
    assert problems_in(tmp_path, later_s=3000) == []
    (found,) = problems_in(tmp_path, later_s=4000)
    assert "told nothing for 66.7 min" in found.what


def test_who_has_not_ended_while_the_others_have_is_named(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    change_events(tmp_path / "rank-00009.jsonl", lambda event: None if event["type"] == "Closed" else event)
    (found,) = problems_in(tmp_path, later_s=7200)
    assert found.what.startswith("The others have ended in order; rank 9 has told nothing for 2.0")
    assert "node-001" in found.advice


def test_a_run_without_a_save_is_told_as_such(tmp_path: Path) -> None:
    drawn(saves=0).write(tmp_path)
    (found,) = problems_in(tmp_path)
    assert (found.level, found.what) == ("note", "No save was made.")


def test_two_jobs_in_one_place_are_told(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    for rank in range(12):
        file = tmp_path / f"rank-{rank:05}.jsonl"
        other = tmp_path / "other.jsonl"
        other.write_bytes(file.read_bytes())
        change_events(other, lambda event: event | {"pid": 4242, "host": "elsewhere"} if "pid" in event else event)
        file.write_bytes(file.read_bytes() + other.read_bytes())
        other.unlink()
    found = problems_in(tmp_path)[0]
    assert found.level == "bad"
    assert found.what.startswith(
        "Two jobs saved to one place at once for 21 min: process 1000 on node-000 and process 4242"
    )


def test_a_reader_beside_the_run_is_no_second_job(tmp_path: Path) -> None:
    drawn().write(tmp_path)
    drawn(saves=0).write(tmp_path / "reader")
    change_events(
        tmp_path / "reader" / "rank-00000.jsonl", lambda event: event | {"pid": 9} if "pid" in event else event
    )
    with (tmp_path / "rank-00000.jsonl").open("ab") as file:
        file.write((tmp_path / "reader" / "rank-00000.jsonl").read_bytes())
    assert not [one for one in problems_in(tmp_path) if "Two jobs" in one.what]


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
    with (tmp_path / "rank-00000.jsonl").open("ab") as trace:
        for seconds_later in (60, 900):
            trace.write(msgspec.json.encode(Alive(at_ns=later_ns + seconds_later * 10**9)) + b"\n")
    assert summarize(read_run(tmp_path), []).ended_s == pytest.approx(before.ended_s + 900)
    assert not [one for one in problems_in(tmp_path) if "any more" in one.what]
    opened = msgspec.structs.replace(
        next(again.events_of(0)), time_ns=int((before.ended_s + 1000) * 1e9), pid=7, at_ns=later_ns + 10**12
    )
    with (tmp_path / "rank-00000.jsonl").open("ab") as trace:
        trace.write(msgspec.json.encode(opened) + b"\n")
    (restart,) = summarize(read_run(tmp_path), []).restarts
    assert restart.down_s == pytest.approx(100, abs=0.1)
    assert restart.lost_s > 900


def test_what_a_second_checkpointer_of_the_process_told_last_is_the_last_sign_of_life(tmp_path: Path) -> None:
    """The first one loads and is closed, the second saves for an hour, and a start follows a minute after its last word."""

    def opened(time_s: float, pid: int) -> Opened:
        at_ns = int(time_s * 1e9)
        return Opened(at_ns=at_ns, time_ns=at_ns, pid=pid, host="h", rank=0, world_size=1, urls=())

    told: list[Event] = [
        opened(BEGUN_S, 7),
        Closed(at_ns=int((BEGUN_S + 1) * 1e9)),
        opened(BEGUN_S + 2, 7),
        Committed(at_ns=int((BEGUN_S + 3600) * 1e9), step=5, bytes=1, seconds=2.0, generation=1),
        opened(BEGUN_S + 3660, 8),
        Loaded(at_ns=int((BEGUN_S + 3670) * 1e9), step=5, bytes=1, read_bytes=1, seconds=3.0),
        BarrierWaited(at_ns=int((BEGUN_S + 3700) * 1e9), step=5, seconds=7.0),
    ]
    (tmp_path / "t.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in told))
    run = read_run(tmp_path)
    summary = summarize(run, spans(run))
    (restart,) = summary.restarts
    assert restart.down_s == pytest.approx(60)
    assert restart.lost_s == pytest.approx(2)
    assert not restart.after_close
    assert summary.effective == pytest.approx(1 - (60 + 2 + 3 + 7) / 3700)


def test_a_step_that_is_saved_twice_in_one_start_counts_twice(tmp_path: Path) -> None:
    drawn(saves=2).write(tmp_path)
    for rank in range(12):
        change_events(
            tmp_path / f"rank-{rank:05}.jsonl",
            lambda event: event | {"step": 0} if event.get("step") == 100 else event,
        )
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
