"""Ranks slower than their peers, named with their stage and since when, and no others."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from rich.console import Console

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import Event, Opened, SnapshotTaken, StageEnded, StragglerFound
from aiockpt.monitor import Heartbeat
from aiockpt.monitor.live_job import JobWatch
from aiockpt.monitor.run_log import ProcessLog, RunLog
from aiockpt.monitor.spans import TimeSpan
from aiockpt.monitor.stragglers import KEPT_STEPS, STEPS, PeerTimes, RankTimes, Straggler, stage_times
from aiockpt.monitor.stragglers import stragglers as compare
from aiockpt.tools.cli.live_view import view
from tests.watch import Watch


def opened(rank: int = 0, url: str = "file:///runs/7", world_size: int = 4, time_ns: int = 0) -> Opened:
    return Opened(at_ns=0, time_ns=time_ns, pid=rank, host=f"h{rank}", rank=rank, world_size=world_size, urls=(url,))


def stragglers(found: list[TimeSpan], url: str = "file:///runs/7") -> list[Straggler]:
    return compare(stage_times(RunLog([ProcessLog(opened(url=url), [])]), found))


def written(rank: int, step: int, seconds: float, **facts: Any) -> TimeSpan:
    named = {"operation": "save", "stage": "write", **facts}
    return TimeSpan(process=rank, rank=rank, host=f"h{rank}", step=step, begin_s=step, seconds=seconds, **named)


def all_written(seconds: Callable[[int, int], float], steps: int = 10, ranks: int = 4, **facts: Any) -> list[TimeSpan]:
    """Return what each rank took in each step; *seconds* is given both."""
    return [written(rank, step, seconds(rank, step), **facts) for rank in range(ranks) for step in range(steps)]


def test_a_rank_that_is_slow_in_most_steps_is_named_with_stage_and_cause() -> None:
    some = [written(rank, step, 0.1 + 0.3 * (rank == 2 and step >= 4)) for rank in range(4) for step in range(12)]
    (slow,) = stragglers(some)
    assert (slow.rank, slow.host, slow.stage, slow.since, slow.steps) == (2, "h2", "write", 4, 8)
    assert slow.factor == pytest.approx(4)
    assert slow.extra_s == pytest.approx(0.3)
    assert "disk" in slow.cause
    (slow,) = stragglers(some, "s3://bucket/run")
    assert "network" in slow.cause


@pytest.mark.parametrize("busy", [{"hash_s": 0.05}, {"stage": "snapshot"}])
def test_a_rank_whose_processor_is_as_slow_lacks_processor_time_whatever_stage_shows_it(busy: dict[str, Any]) -> None:
    some = []
    for rank in range(4):
        slower = 3 if rank == 2 else 1
        for step in range(10):
            facts = {key: value * slower if key == "hash_s" else value for key, value in busy.items()}
            some.append(written(rank, step, 0.1 * slower, **{key: facts[key] for key in facts if key != "stage"}))
            if "stage" in facts:
                some.append(written(rank, step, 0.01 * slower, stage="snapshot"))
    slow = stragglers(some)
    assert {one.rank for one in slow} == {2}
    assert all("processor" in one.cause for one in slow)


def test_a_processor_that_is_slow_by_a_few_milliseconds_is_not_what_makes_writing_slow() -> None:
    """Hashing a megabyte takes as long as the machine is busy; beside half a second of a slow line that is nothing."""
    some = [
        written(rank, step, 0.1 + 0.5 * (rank == 2), hash_s=0.002 * (3 if rank == 2 else 1))
        for rank in range(4)
        for step in range(10)
    ]
    (slow,) = stragglers(some, "s3://bucket/run")
    assert "network" in slow.cause


def test_one_hiccup_of_the_processor_beside_a_slow_disk_is_not_the_cause() -> None:
    some = [written(rank, step, 0.1 + 0.3 * (rank == 2)) for rank in range(4) for step in range(10)]
    some += all_written(lambda rank, step: 0.01 + 5.0 * (rank == 2 and step == 4), stage="snapshot")
    (slow,) = stragglers(some)
    assert "disk" in slow.cause


def test_where_the_others_are_often_slow_too_it_takes_more_steps_than_where_they_are_not() -> None:
    """On a machine with more ranks than cores, five steps in a row are chance."""

    def found(steps: int) -> list[int]:
        some = all_written(
            lambda rank, step: 0.1 + 0.3 * ((step + rank) % 4 == 0 or (rank == 2 and step >= 24 - steps)), 24
        )
        return [one.rank for one in stragglers(some)]

    assert found(6) == []
    assert found(14) == [2]


def test_who_makes_up_in_other_stages_for_what_takes_it_longer_is_not_slow() -> None:
    """A small file that is flushed may wait for the large ones of the others: first come, first served."""

    def found(saved_s: float) -> list[str]:
        some = all_written(lambda rank, _: 0.5 - saved_s * (rank == 0))
        some += all_written(lambda rank, _: 0.01 + 0.06 * (rank == 0), stage="vote")
        return [one.stage for one in stragglers(some)]

    assert found(saved_s=0.05) == []
    assert found(saved_s=0.0) == ["vote"]


def test_one_that_became_slow_late_in_a_long_run_is_named_with_that_step() -> None:
    odd = {0, 3}  # slow twice before, by chance
    slow = {rank: {*odd, *range(90, 100)} if rank == 2 else {7} for rank in range(4)}
    some = [written(rank, step, 0.1 + 0.3 * (step in slow[rank])) for rank in slow for step in range(100)]
    (found,) = stragglers(some)
    assert (found.rank, found.since, found.steps) == (2, 90, 10)
    assert found.factor == pytest.approx(4)


def test_one_that_was_slow_and_recovered_is_not_named() -> None:
    some = [written(rank, step, 0.1 + 0.3 * (rank == 2 and step < 10)) for rank in range(4) for step in range(30)]
    assert stragglers(some) == []


def test_several_files_of_a_step_count_together() -> None:
    files = [written(rank, step, 0.1 + 0.05 * (rank == 2)) for rank in range(4) for step in range(6) for _ in range(2)]
    (found,) = stragglers(files)
    assert found.extra_s == pytest.approx(0.1)


def test_what_failed_is_not_compared() -> None:
    hung = [written(rank, step, 0.1 + 5 * (rank == 2), failed=rank == 2) for rank in range(4) for step in range(10)]
    assert stragglers(hung) == []


def test_the_slowest_comes_first_and_a_stage_without_a_known_cause_says_so() -> None:
    some = all_written(lambda rank, _: 0.1 + 0.2 * (rank == 2), stage="vote")
    some += all_written(lambda rank, _: 0.1 + 0.4 * (rank == 2), stage="new")
    assert [(one.stage, one.cause == "unknown") for one in stragglers(some)] == [("new", True), ("vote", False)]


def test_outliers_small_stages_few_steps_and_waiting_name_nobody() -> None:
    once = all_written(lambda rank, step: 0.1 + 5.0 * (rank == 2 and step == 4))
    small = all_written(lambda rank, _: 1e-4 * (1 + 9 * (rank == 2)))
    few = all_written(lambda rank, _: 0.1 + (rank == 2), STEPS - 1)
    waiting = all_written(lambda rank, _: 0.1 + (rank == 2), stage="wait")
    pair = all_written(lambda rank, _: 0.1 + (rank == 1), ranks=2)
    for some in (once, small, few, waiting, pair):
        assert stragglers(some) == []


# ---------------------------------------------------------------------- while the job runs


def saves(rank: int, steps: range, slow: int) -> list[StageEnded | SnapshotTaken]:
    """Return what *rank* tells of *steps*, in which *slow* takes four times as long."""
    told: list[StageEnded | SnapshotTaken] = []
    for step in steps:
        told.append(SnapshotTaken(at_ns=0, step=step, bytes=1, pause_s=0.01, copy_s=0.01))
        told.append(
            StageEnded(at_ns=0, step=step, operation="save", stage="write", seconds=0.4 if rank == slow else 0.1)
        )
    return told


def test_ranks_tell_each_other_and_the_first_one_says_who_is_slow_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emitted: list[Event] = []
    hearts = [Heartbeat(str(tmp_path), every_s=0.01) for _ in range(4)]

    async def main() -> None:
        told = anyio.Event()

        def take(event: Event) -> None:
            emitted.append(event)
            told.set()

        hearts[0].set_emitter(take)
        with anyio.fail_after(250):
            async with anyio.create_task_group() as tasks:
                for rank, heart in enumerate(hearts):
                    heart.on_event(opened(rank))
                    for event in saves(rank, range(10), slow=2):
                        heart.on_event(event)
                    tasks.start_soon(heart.run)
                await told.wait()
                await anyio.sleep(0.5)  # many more comparisons
                for heart in hearts:
                    await heart.aclose()

    anyio.run(main)
    (found,) = emitted
    assert isinstance(found, StragglerFound)
    assert (found.rank, found.host, found.stage, found.step, found.steps) == (2, "h2", "write", 0, 10)
    assert caplog.text.count("rank 2 (h2) is slow: write takes 4.0 ×, 0.3 s more each save") == 1
    job = anyio.run(JobWatch(LocalBackend(tmp_path)).poll)
    assert job is not None
    assert [one.rank for one in job.slow] == [2]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(view(str(tmp_path), job, height=40))
    assert "rank 2 (h2) is slow: write takes 4.0 ×" in captured.get()


def test_it_reaches_all_observers_of_a_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Straggler(
        rank=3,
        host="h3",
        operation="save",
        stage="write",
        factor=2.0,
        extra_s=1.0,
        steps=6,
        since=40,
        cause="slow disk",
    )

    async def compare(self: PeerTimes, *_: object) -> list[Straggler]:
        return [slow]

    monkeypatch.setattr(PeerTimes, "compare", compare)
    watch = Watch()
    with aiockpt.Checkpointer(tmp_path, observers=[watch, Heartbeat(every_s=0.001)]) as ckpt:
        ckpt.save(1, {"x": 1}).result()
        watch.wait_for(StragglerFound)
    found = watch.of(StragglerFound)[0]
    assert (found.rank, found.step, found.cause) == (3, 40, "slow disk")


async def compared(backend: MemoryBackend, times: PeerTimes, **given: Any) -> list[int]:
    return [one.rank for one in await times.compare(backend, opened(**given))]


async def publish_all(backend: MemoryBackend, ranks: list[PeerTimes], steps: range, slow: int) -> None:
    for rank, times in enumerate(ranks):
        for event in saves(rank, steps, slow):
            times.receive(event)
        await times.publish(backend, opened(rank))


async def test_who_recovered_and_is_slow_again_is_told_again() -> None:
    backend, ranks = MemoryBackend(), [PeerTimes() for _ in range(4)]

    async def go_on(steps: range, slow: int) -> list[int]:
        await publish_all(backend, ranks, steps, slow)
        return await compared(backend, ranks[0])

    assert await go_on(range(10), slow=1) == [1]
    assert await go_on(range(10, 12), slow=1) == []
    assert await go_on(range(12, 40), slow=-1) == []
    assert ranks[0].slow == []
    assert await go_on(range(40, 60), slow=1) == [1]


async def test_what_an_earlier_start_or_a_larger_job_has_left_is_not_compared() -> None:
    backend, ranks = MemoryBackend(), [PeerTimes() for _ in range(6)]
    await publish_all(backend, ranks, range(10), slow=5)
    assert await compared(backend, ranks[0], world_size=6) == [5]
    assert await compared(backend, PeerTimes(), world_size=5) == []
    assert await compared(backend, PeerTimes(), world_size=6, time_ns=time.time_ns() + 10**12) == []


async def test_what_cannot_be_read_is_no_rank_and_only_the_last_steps_are_told() -> None:
    backend, times = MemoryBackend(), PeerTimes()
    for event in saves(0, range(100), slow=-1):
        times.receive(event)
    times.receive(StageEnded(at_ns=0, step=99, operation="save", stage="write", seconds=9.0, failed=True))
    await times.publish(backend, opened(0))
    told = msgspec.json.decode(await backend.get("monitor/times-00000.json", 1 << 20), type=RankTimes)
    assert {row[2] for row in told.rows} == set(range(100 - KEPT_STEPS, 100))
    assert max(row[3] for row in told.rows) == 0.1
    await backend.put("monitor/times-00001.json", b"of another version")
    assert await compared(backend, times) == []


# ---------------------------------------------------------------------- all that a rank does


def test_who_is_a_little_slow_in_all_is_named_with_the_stage_that_adds_most() -> None:
    """Sums vary less than single stages: 1.3 times as long is told there, and not in one stage."""
    some = all_written(lambda rank, _: 0.05 * (1.3 if rank == 2 else 1.0), stage="snapshot")
    some += all_written(lambda rank, _: 0.2 * (1.3 if rank == 2 else 1.0))
    some += all_written(lambda rank, _: 0.01 * (1.3 if rank == 2 else 1.0), stage="vote")
    (slow,) = stragglers(some)
    assert (slow.rank, slow.stage, slow.since, slow.steps) == (2, "write", 0, 10)
    assert slow.factor == pytest.approx(1.3)
    assert slow.extra_s == pytest.approx(0.078)
    assert "processor" in slow.cause, "its snapshots are as slow"
    only_write = [one for one in some if one.stage == "write"]
    (slow,) = stragglers(only_write)
    assert "disk" in slow.cause
    slightly = [written(rank, step, 0.2 * (1.15 if rank == 2 else 1.0)) for rank in range(4) for step in range(10)]
    assert stragglers(slightly) == []


def test_who_is_named_for_a_stage_is_not_named_again_for_all() -> None:
    some = [written(rank, step, 0.1 + 0.3 * (rank == 2)) for rank in range(4) for step in range(10)]
    assert [one.stage for one in stragglers(some)] == ["write"]
