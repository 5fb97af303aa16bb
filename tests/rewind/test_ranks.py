"""Ranks that go back together from the bad step of one of them, killed and started again: each batch is trained once."""

import logging
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.peers.cluster import Cluster
from tests.preemption.programs import Program, start_ranks
from tests.ranks.crew import Crew
from tests.rewind.jobs import Bad, Job, Kill, Plan, StartCrew
from tests.watch import Lines


def in_folder(world_size: int, folder: Path) -> StartCrew:
    return lambda **options: Crew(world_size, folder, **options)


@pytest.mark.parametrize("seed", range(6))
def test_what_each_rank_becomes_is_what_it_is_without_the_bad_batches(tmp_path: Path, seed: int) -> None:
    plan = Plan.draw(random.Random(seed), 2 + seed % 2)
    job = Job(plan, in_folder(plan.world_size, tmp_path))
    job.run()
    job.check()


@pytest.mark.parametrize("seed", range(100, 102))
def test_so_it_is_over_the_memory_of_the_hosts(tmp_path: Path, seed: int) -> None:
    plan, cluster = Plan.draw(random.Random(seed)), Cluster(tmp_path)
    disk = aiockpt.Tier(tmp_path / "disk", every=4 * plan.every)

    def start(**options: Any) -> Crew:
        return cluster.start("ab", keep=4, more=[disk], **options)

    job = Job(plan, start)
    job.run()
    job.check()


@pytest.mark.parametrize("snapshot", ["lazy", "device"])
def test_so_it_is_with_snapshots_that_are_copied_later(tmp_path: Path, snapshot: str) -> None:
    bad = {4: Bad((1,), "nan"), 9: Bad((0,), "spike"), 10: Bad((0, 1), "nan")}
    job = Job(Plan(2, "bad", bad=bad), lambda **options: Crew(2, tmp_path, snapshot=snapshot, **options))
    job.run()
    job.check()
    assert len(job.rewinds) == 3


@pytest.mark.parametrize("calls", [8, 9, 10])
def test_a_start_on_the_hosts_memory_that_ends_between_the_alarm_and_the_way_back_is_gone_on_with(
    tmp_path: Path, calls: int
) -> None:
    """The ninth call of rank 1 is bad: the ranks are killed before it, in the moment after its alarm, or a call later."""
    cluster = Cluster(tmp_path)
    disk = aiockpt.Tier(tmp_path / "disk", every=4)
    plan = Plan(2, "bad", bad={8: Bad((1,), "nan")}, kills=(Kill(calls=calls), Kill(calls=1)))
    job = Job(plan, lambda **options: cluster.start("ab", keep=4, more=[disk], **options))
    job.run()
    assert job.killed == 2
    job.check()


@pytest.mark.parametrize("source", ["sampler", "stream"])
def test_so_it_is_with_workers_that_read_ahead(tmp_path: Path, source: Any) -> None:
    bad = {5: Bad((1,), "nan"), 11: Bad((0,), "spike")}
    job = Job(Plan(2, "bad", source, workers=1, every=2, bad=bad), in_folder(2, tmp_path))
    job.run()
    job.check()


def test_ranks_of_which_one_dies_in_the_rewind_go_on_from_the_good_step(tmp_path: Path) -> None:
    kills = (Kill(rewind=0, ranks=(1,)), Kill(rewind=0, ranks=(0,)))
    job = Job(Plan(2, "bad", every=2, bad={9: Bad((0,), "nan")}, kills=kills), in_folder(2, tmp_path))
    job.run()
    assert job.killed == 2
    job.check()


def test_a_bad_last_step_of_one_rank_is_not_saved_and_ends_with_an_error(tmp_path: Path) -> None:
    plan = Plan(2, "bad", bad={})
    last = plan.total - 1
    plan = Plan(2, "bad", bad={last: Bad((1,), "nan")})
    job = Job(plan, in_folder(2, tmp_path))
    with pytest.raises(aiockpt.RewindExhaustedError, match="the run ends with step 17, which is bad"):
        job.run()
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest().result() == last - 1


@pytest.mark.parametrize("new_size", [1, 3])
def test_other_numbers_of_ranks_leave_out_the_same_samples(tmp_path: Path, new_size: int) -> None:
    plan = Plan(2, "bad", every=4, bad={7: Bad((1,), "nan")})  # gone back to step 4, of nine in this epoch
    _go_back_and_stop(plan, tmp_path)
    trained: list[int] = []

    def train(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        loader = Plan(new_size, "bad").loader(rank)
        ckpt.resume({"loader": loader})
        for batch in loader:
            trained.extend(batch.tolist())

    with Crew(new_size, tmp_path) as crew:
        crew.on_all(train)
    batches = [plan.batches(rank) for rank in range(2)]
    expected = [sample for of_rank in batches for number in (5, 6, 8) for sample in of_rank[number]]
    assert sorted(trained) == sorted(expected)


def test_other_ranks_are_told_of_what_is_skipped_in_the_next_epoch(tmp_path: Path) -> None:
    _go_back_and_stop(Plan(2, "bad", every=7, bad={10: Bad((1,), "nan")}), tmp_path)
    with Lines(logging.WARNING) as lines, Crew(1, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.resume({"loader": Plan(1, "bad").loader(rank)}))
    assert any("they come again" in line for line in lines.said)


def test_other_readers_of_a_stream_are_told_that_batches_come_again(tmp_path: Path) -> None:
    plan = Plan(2, "bad", "stream", every=7, bad={10: Bad((1,), "nan")})
    _go_back_and_stop(plan, tmp_path)
    with Lines(logging.WARNING) as lines, Crew(1, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.resume({"loader": Plan(1, "bad", "stream").loader(rank)}))
    assert any("they come again" in line for line in lines.said)


def _go_back_and_stop(plan: Plan, folder: Path) -> None:
    """Train until all ranks have gone back, and end there."""

    def train(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        loader = plan.loader(rank)
        state, number = {"loader": loader}, 0
        step = ckpt.resume(state)
        while True:
            for _ in loader:
                bad = plan.bad.get(number)
                loss = float("nan") if bad is not None and rank in bad.ranks else 1.0
                before, step = step, ckpt.advance(step, state, metrics={"loss": loss})
                number += 1
                if step <= before:
                    return

    options: dict[str, Any] = {"every": plan.every, "rewind": aiockpt.Rewind(skip="bad"), "save_last": False}
    with Crew(plan.world_size, folder, **options) as crew:
        crew.on_all(train)


# ------------------------------------------------------------------ real processes


TRAIN_TOGETHER = """
import math
from torch.utils.data import DataLoader

sampler = aiockpt.ShardedSampler(120, 2, seed=5)
loader = aiockpt.Loader(DataLoader(torch.arange(120), batch_sampler=sampler))
state = {"weight": torch.zeros(50), "loader": loader}


def end(rewound):
    say("back")
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


rewind = aiockpt.Rewind(on_rewind=end)
deadlines = aiockpt.Deadlines(ranks_s=100, commit_s=100, takeover_s=20, close_s=100)
small = aiockpt.Limits(io=small.io, deadlines=deadlines)
with aiockpt.Checkpointer(root, every=2, limits=small, rewind=rewind, on_preempt="save", worker=WORKER) as ckpt:
    step = ckpt.resume(state)
    for batch in loader:
        is_bad = BAD in batch.tolist()
        gradient = batch.float().sum() + (math.nan if is_bad else 0.0)
        torch.distributed.all_reduce(gradient)
        state["weight"] += gradient
        if is_bad and TOLD or step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        step = ckpt.advance(step, state, metrics={"loss": math.nan if is_bad else 1.0})
with open(f"{root}-{rank}", "w") as out:
    out.write(f"{step} {state['weight'].unique().tolist()} {loader.skipped_count}")
"""


def together(
    folder: Path, *, bad: int, killed: int = -1, stop_at: int = -1, told: bool = False, worker: str = "thread"
) -> list[Program]:
    words = {"BAD": bad, "KILLED": killed, "STOP_AT": stop_at, "TOLD": told, "WORKER": repr(worker)}
    script = TRAIN_TOGETHER
    for word, value in words.items():
        script = script.replace(word, str(value))
    return start_ranks(folder, script, 2)


BATCHES = [list(aiockpt.ShardedSampler(120, 2, rank=rank, size=2, seed=5)) for rank in range(2)]
BAD = BATCHES[1][12][0]


def check_end(folder: Path, done: list[Program]) -> None:
    """Compare what ranks hold that have ended with all batches but the bad one."""
    assert [program.end() for program in done] == [0, 0], done[0].log
    expected = sum(sum(batch) for of_rank in BATCHES for number, batch in enumerate(of_rank) if number != 12)
    for rank in range(2):
        assert (folder / f"run-{rank}").read_text() == f"29 [{float(expected)}] 1"


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_processes_go_back_from_a_nan_of_one_and_after_a_kill_in_the_rewind(tmp_path: Path, worker: str) -> None:
    first = together(tmp_path, bad=BAD, killed=0, worker=worker)  # with rank 0 dies the store
    assert first[0].end() == -signal.SIGKILL, first[0].log
    first[1].process.kill()
    first[1].end()
    stopped = together(tmp_path, bad=BAD, stop_at=20, worker=worker)
    assert [program.end() for program in stopped] == [75, 75], stopped[0].log
    check_end(tmp_path, together(tmp_path, bad=BAD, worker=worker))


def test_a_run_that_is_told_to_end_in_the_call_of_its_bad_step_saves_none_that_is_bad(tmp_path: Path) -> None:
    stopped = together(tmp_path, bad=BAD, told=True)
    ends = [program.end() for program in stopped]
    assert set(ends) <= {75, 76}, stopped[0].log + stopped[1].log
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        saved: dict[str, Any] = {"weight": torch.zeros(50)}
        ckpt.load(saved).result()
        assert saved["weight"].isfinite().all()
    check_end(tmp_path, together(tmp_path, bad=BAD))
