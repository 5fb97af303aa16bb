"""One clock for the ranks of a run, whatever the clocks of their hosts say."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from hypothesis import given, strategies

from aiockpt.events import Committed, Event, Opened, StageEnded
from aiockpt.monitor.read_run import align_clocks, read_run
from aiockpt.monitor.run_log import ProcessLog, RunLog
from tests.monitor.synthetic_run import append_events

S = 10**9
BEGUN_S = 1_795_500_000


class Save(msgspec.Struct, frozen=True):
    """When things truly happened in a save, in seconds from the begin of the run."""

    voted: float
    begun: float
    ended: float
    heard: float


def told(rank: int, saves: list[Save], skew_s: float, pid: int = 1) -> ProcessLog:
    """Return what *rank* tells, whose wall clock is *skew_s* ahead, and whose monotonic clock began somewhere."""
    zero = 7 * S * (rank + 1)
    opened = Opened(
        at_ns=zero,
        time_ns=round((BEGUN_S + skew_s) * S),
        pid=pid,
        host=f"h{rank}",
        rank=rank,
        world_size=4,
        urls=("s3://bucket/run",),
    )
    return ProcessLog(opened, list(_events(rank, saves, zero)))


def _events(rank: int, saves: list[Save], zero: int) -> Iterator[Event]:
    for step, save in enumerate(saves):
        yield _stage("vote", save.voted, 0.01, step, zero)
        if rank == 0:
            yield _stage("commit", save.ended, save.ended - save.begun, step, zero)
        yield Committed(at_ns=zero + round(save.heard * S), step=step, bytes=1, seconds=1.0, generation=1)


def _stage(stage: str, at_s: float, seconds: float, step: int, zero: int) -> StageEnded:
    return StageEnded(at_ns=zero + round(at_s * S), step=step, operation="save", stage=stage, seconds=seconds)


def save(at_s: float, there_s: float = 0.02, back_s: float = 0.02) -> Save:
    return Save(at_s, at_s + there_s, at_s + there_s + 0.05, at_s + there_s + 0.05 + back_s)


def shifts(*processes: ProcessLog) -> list[float]:
    return [one.shift_ns / S for one in align_clocks(RunLog(list(processes))).processes]


def test_a_host_whose_clock_is_wrong_is_laid_where_its_saves_say() -> None:
    saves = [save(10.0 * number) for number in range(1, 6)]
    found = shifts(told(0, saves, 0), told(1, saves, 3.0), told(2, saves, -0.5))
    assert found[0] == 0
    assert abs(found[1] + 3.0) < 0.03
    assert abs(found[2] - 0.5) < 0.03


def test_clocks_that_no_save_contradicts_are_left_as_they_are() -> None:
    saves = [save(10.0 * number, there_s=0.2, back_s=0.2) for number in range(1, 6)]
    assert shifts(told(0, saves, 0), told(1, saves, 0.1)) == [0, 0]


def test_of_many_saves_the_quickest_say_the_most() -> None:
    slow, quick = save(10, there_s=2.0, back_s=0.1), save(20, there_s=0.01, back_s=0.01)
    _, shift = shifts(told(0, [slow, quick], 0), told(1, [slow, quick], 60.0))
    assert abs(shift + 60) < 0.02


def test_without_a_save_in_common_or_with_saves_in_which_another_rank_committed_nothing_is_said() -> None:
    saves = [save(10)]
    assert shifts(told(0, [], 0), told(1, saves, 9.0)) == [0, 0]
    impatient = told(1, saves, 9.0)
    impatient.events.append(_stage("commit", 10.0, 0.01, 0, 14 * S))
    assert shifts(told(0, saves, 0), impatient) == [0, 0]


def test_bounds_that_contradict_each_other_move_nothing() -> None:
    first, other = told(0, [save(10), save(20)], 0), told(1, [save(10), save(25)], 9.0)
    assert shifts(first, other) == [0, 0]


def test_each_start_is_laid_on_its_own_first_rank() -> None:
    saves = [save(10.0 * number) for number in range(1, 4)]
    later = [told(rank, saves, 600 + skew, pid=2) for rank, skew in ((0, 0.0), (1, 5.0))]
    _, one, _, two = shifts(told(0, saves, 0), told(1, saves, 2.0), *later)
    assert abs(one + 2) < 0.03
    assert abs(two + 5) < 0.03


def test_a_rank_that_had_several_checkpointers_is_laid_by_the_saves_of_all_of_them() -> None:
    saves = [save(10.0 * number) for number in range(1, 4)]
    readers = [told(rank, [], skew) for rank, skew in ((0, 0.0), (1, 2.0))]  # they load, and are closed
    _, reader, _, trainer = shifts(*readers, told(0, saves, 0), told(1, saves, 2.0))
    assert abs(reader + 2) < 0.03
    assert reader == trainer


def test_what_is_read_is_aligned(tmp_path: Path) -> None:
    saves = [save(10.0 * number) for number in range(1, 4)]
    for process in (told(0, saves, 0), told(1, saves, 30.0)):
        append_events(tmp_path / f"rank-{process.opened.rank:05}.jsonl", process.opened, *process.events)
    first, other = read_run(tmp_path).processes
    assert abs(first.wall_s(first.events[0].at_ns) - other.wall_s(other.events[0].at_ns)) < 0.03


ways = strategies.floats(0.001, 1.0)


@given(strategies.lists(strategies.tuples(ways, ways), min_size=1, max_size=8), strategies.floats(-1000, 1000))
def test_afterwards_nothing_is_heard_before_it_is_said(delays: list[tuple[float, float]], skew_s: float) -> None:
    saves = [save(10.0 * number, there_s, back_s) for number, (there_s, back_s) in enumerate(delays, 1)]
    first, other = align_clocks(RunLog([told(0, saves, 0), told(1, saves, skew_s)])).processes
    for step, one in enumerate(saves):
        begun, heard = BEGUN_S + one.begun, BEGUN_S + one.ended
        vote, commit = (other.wall_s(event.at_ns) for event in other.events if event.step == step)
        assert vote <= begun + 1e-5
        assert commit >= heard - 1e-5
    assert first.shift_ns == 0
    quickest = min(there_s for there_s, _ in delays) + min(back_s for _, back_s in delays)
    assert abs(other.shift_ns / S + skew_s) <= quickest + 1e-5
