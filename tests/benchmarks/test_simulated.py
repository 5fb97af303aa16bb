"""Simulated figures grow as they should, and the cadence holds its own against the best fixed interval."""

from functools import cache, partial

import msgspec
import pytest

from aiockpt.pipeline.receipts import PATIENCE_S, READS_AT_ONCE
from aiockpt.planning.groups import group_size, groups_of
from aiockpt.ranks.save import RELIST_S
from benchmarks.measure import cadence, gathering
from benchmarks.measure.network import STORE_ROUND_TRIP_S

LATENCY_S = 0.02
LISTINGS = 2
"""Of what was gathered, and of the data files."""
simulate = cache(gathering.simulate)


@pytest.mark.parametrize("ranks", [300, 600, 1200])
def test_no_process_reads_more_than_its_level_of_the_tree(ranks: int) -> None:
    flat, tree = (simulate(ranks, way, LATENCY_S) for way in (gathering.FLAT, gathering.TREE))
    groups = len(groups_of(ranks))
    looks = 2 + gathering.WRITING_S / RELIST_S  # while ranks still write rank 0 looks what is there
    assert tree["read_count"] <= max(group_size(ranks), groups) + LISTINGS + looks
    assert flat["read_count"] >= ranks


def test_the_time_to_commit_is_that_of_the_requests_in_line() -> None:
    ranks = 600
    tree = simulate(ranks, gathering.TREE, LATENCY_S)
    rounds = -(-group_size(ranks) // READS_AT_ONCE) + -(-len(groups_of(ranks)) // READS_AT_ONCE)
    written = ("gathered", "decision", "manifest")
    in_line = rounds + LISTINGS + len(written)
    woken_s = 0.2 + 10 * STORE_ROUND_TRIP_S  # the longest pause between two looks at the store
    assert tree["commit_s"] <= in_line * LATENCY_S + woken_s
    flat = simulate(ranks, gathering.FLAT, LATENCY_S)
    assert flat["commit_s"] > tree["commit_s"]


def test_gatherers_that_die_cost_patience_and_no_step() -> None:
    ranks = 300
    row = simulate(ranks, gathering.DYING, LATENCY_S)
    assert PATIENCE_S < row["commit_s"] < 3 * PATIENCE_S
    assert row["read_count"] < ranks


def test_what_ranks_hold_is_exchanged_with_calls_that_grow_with_the_ranks() -> None:
    few, many = gathering.exchange(50), gathering.exchange(200)
    assert many["store_count"] <= 4.5 * few["store_count"]
    assert many["store_of_all_count"] <= 6 * few["store_of_all_count"]


@pytest.mark.parametrize("name", list(cadence.KINDS)[:5])
def test_the_cadence_is_within_a_few_percent_of_the_best_fixed_interval(name: str) -> None:
    found, why = cadence.measure(msgspec.structs.replace(cadence.KINDS[name], hours=10), seeds=[7])
    assert found["failures_count"] >= 3
    assert found["regret_fraction"] < 0.03
    assert found["cadence_blocked_fraction"] < cadence.MAX_OVERHEAD
    assert "[rule: " in why


def test_all_contenders_meet_the_same_failures_and_the_same_seed_gives_the_same_run() -> None:
    kind = msgspec.structs.replace(cadence.KINDS["a short pause"], hours=20)
    first, again, rare = (cadence.runs_of(kind, partial(cadence.Every, steps), [5]) for steps in (10, 10, 100))
    assert cadence.summarize("x", first) == cadence.summarize("x", again)
    assert first[0].failures == rare[0].failures > 3


def test_writes_at_once_share_the_storage_or_do_not() -> None:
    for shared, seconds in ((True, 20.0), (False, 10.0)):
        kind = cadence.Kind(step_s=1, pause_s=0, write_s=10, noise=0, shared=shared, failing=False)
        run = cadence.Run(kind, partial(cadence.Every, 10**9), 1)
        run.save()
        run.step += 1
        run.save()
        run._pass(seconds - 0.01)
        assert run.committed == -1
        run._pass(0.02)
        assert run.committed == 1
