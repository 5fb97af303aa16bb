"""Memory of the job's hosts: what a run goes on from when processes, hosts, copies and networks are lost."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends import shm
from aiockpt.errors import CheckpointError, SaveSkippedError, UsageError
from aiockpt.events import Event, Replicated
from aiockpt.monitor import Metrics
from aiockpt.pipeline.discover import list_step
from aiockpt.places.peers import keeper
from aiockpt.places.peers.hosts import FoundHosts
from aiockpt.places.tiers import tiers
from aiockpt.runtime.notes import NoteBoard
from tests.peers.cluster import Cluster, PeerCrew
from tests.ranks.test_save import equal, replicated
from tests.watch import until

WHOLE_BYTES = sum(value.nbytes for value in replicated(1).values() if isinstance(value, torch.Tensor))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def load(crew: PeerCrew, step: int) -> list[Any]:
    """Load on all ranks; check that it is *step*, bit by bit, and return the results."""

    def load_one(rank: int, ckpt: aiockpt.Checkpointer) -> Any:
        state = replicated(0)
        result = ckpt.load(state).result(100)
        assert result is not None
        assert (result.step, equal(state, replicated(step))) == (step, True)
        return result

    return crew.on_all(load_one)


def files(cluster: Cluster, host: str, step: int) -> list[str]:
    """Return which data files of a step a host has."""
    return sorted(path.name for path in cluster.memory(host).glob(f"step-{step:08d}/a-*/d/*"))


def count_copies(cluster: Cluster, hosts: str, step: int) -> list[int]:
    """Return how many hosts have each data file of a step."""
    held = [files(cluster, host, step) for host in hosts]
    return [sum(name in those for those in held) for name in sorted({name for those in held for name in those})]


def test_each_host_holds_its_own_files_and_its_partners(cluster: Cluster) -> None:
    with cluster.start("aabbcc") as crew:
        crew.save(1, replicated)
    held = {host: {int(name[1:6]) for name in files(cluster, host, 1)} for host in "abc"}
    assert {rank for ranks in held.values() for rank in ranks} == set(range(6))
    assert all(len(ranks) == 4 for ranks in held.values())
    assert all(sum(rank in ranks for ranks in held.values()) == 2 for rank in range(6))


def test_processes_that_start_again_read_their_own_hosts_memory_alone(cluster: Cluster) -> None:
    with cluster.start("aabb") as crew:
        crew.save(1, replicated)
        crew.save(2, replicated)
    with cluster.start("aabb") as crew:
        load(crew, 2)
        assert crew.received_bytes() == [0] * 4


@pytest.mark.parametrize("lost", "abc")
def test_a_lost_host_costs_nothing_that_was_replicated(cluster: Cluster, lost: str) -> None:
    with cluster.start("aabbcc", keep=3) as crew:
        for step in (1, 2, 3):
            crew.save(step, replicated)
    cluster.lose(lost)
    with cluster.start("aabbcc", keep=3) as crew:
        load(crew, 3)
        until(
            lambda: all(set(count_copies(cluster, "abc", step)) == {2} for step in (2, 3)),
            "the copies of the newest two are made again",
        )
    cluster.lose("abc"[("abc".index(lost) + 1) % 3])
    with cluster.start("aabbcc") as crew:
        load(crew, 3)


def test_a_host_and_its_partner_cost_what_no_disk_has(cluster: Cluster, tmp_path: Path) -> None:
    disk = [aiockpt.Tier(tmp_path / "disk", every=2)]
    with cluster.start("abcd", more=disk) as crew:
        for step in (2, 3):
            crew.save(step, replicated)
    cluster.lose("a", "c")
    with cluster.start("abcd", more=disk) as crew:
        results = load(crew, 2)
    assert all("step-00000003" in dict(result.skipped) for result in results)


def test_other_ranks_on_other_hosts_take_it_over(cluster: Cluster) -> None:
    with cluster.start("aabb") as crew:
        crew.save(1, replicated)
    cluster.lose("a")
    with cluster.start("cbb") as crew:
        load(crew, 1)


@pytest.mark.parametrize("hosts", ["acb", "bac"])
def test_what_a_host_brings_that_was_away_is_older_than_what_was_saved_meanwhile(
    cluster: Cluster, tmp_path: Path, hosts: str
) -> None:
    disk = [aiockpt.Tier(tmp_path / "disk", every=2)]
    with cluster.start("ab", more=disk, keep=4) as crew:
        for step in (2, 3, 5):
            crew.save(step, replicated)
    cluster.lose("a")
    with cluster.start("ac", more=disk, keep=4) as crew:
        load(crew, 2)
        crew.save(3, lambda step: replicated(13))
    with cluster.start(hosts, more=disk) as crew:

        def load_one(rank: int, ckpt: aiockpt.Checkpointer) -> tuple[int, bool]:
            state = replicated(0)
            result = ckpt.load(state).result(100)
            assert result is not None
            return result.step, equal(state, replicated(13))

        assert crew.on_all(load_one) == [(3, True)] * 3


def test_a_flipped_bit_is_read_from_the_other_copy(cluster: Cluster) -> None:
    with cluster.start("ab") as crew:
        crew.save(1, replicated)
        crew.save(2, replicated)
    _flip(cluster, "a", 2)
    with cluster.start("ab") as crew:
        load(crew, 2)


def test_a_bit_flipped_in_all_copies_costs_the_step(cluster: Cluster) -> None:
    with cluster.start("ab") as crew:
        crew.save(1, replicated)
        crew.save(2, replicated)
    _flip(cluster, "a", 2)
    _flip(cluster, "b", 2)
    with cluster.start("ab") as crew:
        results = load(crew, 1)
    assert all("step-00000002" in dict(result.skipped) for result in results)


def _flip(cluster: Cluster, host: str, step: int) -> None:
    path = next(cluster.memory(host).glob(f"step-{step:08d}/a-*/d/r00000-*"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def test_a_partner_that_is_away_is_told_and_costs_no_replicated_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest replicated step outlives the saves that retention counts, until a newer one is replicated."""
    monkeypatch.setattr(keeper, "LAGGING_S", 0.2)
    caplog.set_level(logging.WARNING)
    with cluster.start("ab") as crew:
        crew.save(1, replicated)
        away = _cut_off(monkeypatch)
        for step in (2, 3, 4):
            crew.save(step, replicated, replicated=False)
        until(lambda: "is not in other hosts' memory" in caplog.text, "the lag is told")
        first = crew.checkpointers[0]
        until(lambda: [info.step for info in first.steps().result()] == [4, 3, 1], "retention has spared step 1 alone")
    away.clear()
    cluster.lose("b")
    with cluster.start("ab") as crew:
        load(crew, 1)


def test_a_copy_that_failed_is_made_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LAGGING_S", 0.1)
    with cluster.start("ab") as crew:
        away = _cut_off(monkeypatch)
        futures = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)))
        for future in futures:
            future.result(100)
            with pytest.raises(TimeoutError):
                future.replicated().result(0.3)
        away.clear()
        for future in futures:
            future.replicated().result(100)
    assert count_copies(cluster, "ab", 1) == [2, 2]


def test_a_damaged_file_is_not_copied(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LAGGING_S", 0.1)
    with cluster.start("ab") as crew:
        away = _cut_off(monkeypatch)
        (future, _) = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)))
        future.result(100)
        _flip(cluster, "a", 1)
        away.clear()
        until(lambda: crew.received_bytes()[1] > WHOLE_BYTES, "it came and was refused")
        until(lambda: len(files(cluster, "a", 1)) == 2, "the other way a copy is made")
        with pytest.raises(TimeoutError):
            future.replicated().result(0.3)
    assert [name[:6] for name in files(cluster, "b", 1)] == ["r00001"]


def test_a_copy_is_made_of_the_copy_that_is_not_damaged(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "RANGE_BYTES", 8192)
    with cluster.start("abc", copies=2) as crew:
        crew.save(1, replicated)
    cluster.lose("c")
    _flip(cluster, "a", 1)
    with cluster.start("abc", copies=2):
        until(lambda: len(files(cluster, "c", 1)) == 3, "the copies are made again")
    name = files(cluster, "c", 1)[0]
    made, good = (next(cluster.memory(host).glob(f"step-*/a-*/d/{name}")).read_bytes() for host in "cb")
    assert made == good
    assert not list(cluster.memory("c").glob(".pulling/*"))


def test_own_files_and_copies_are_written_into_the_memory_of_removed_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "LEAST_SPARE_BYTES", 100_000)  # records are smaller

    found: dict[tuple[str, str], list[int]] = {}
    with cluster.start("ab", keep=1) as crew:
        for step in range(8):
            crew.save(step, replicated)
            for host in "ab":
                for path in cluster.memory(host).glob(f"step-{step:08d}/a-*/d/*"):
                    found.setdefault((host, path.name[:6]), []).append(path.stat().st_ino)
                until(lambda: len(list(cluster.memory(host).glob("step-*"))) <= 2, "older ones are removed")  # noqa: B023
                assert len(list(cluster.memory(host).glob(".tmp-spare*"))) <= 2
    assert len(found) == 4
    # Not at each step: a removal may run beside the copying.
    assert all(len(set(inodes)) < len(inodes) == 8 for inodes in found.values())
    assert not [path for host in "ab" for path in cluster.memory(host).glob(".tmp-*")]
    cluster.lose("a")
    with cluster.start("ab", keep=1) as crew:
        load(crew, 7)


def test_the_end_of_a_run_waits_for_the_copies_of_its_last_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = keeper.Keeper._pull

    async def pull_late(self: keeper.Keeper, manifest: Any, wanted: Any) -> None:
        await anyio.sleep(0.5)
        await pull(self, manifest, wanted)

    monkeypatch.setattr(keeper.Keeper, "_pull", pull_late)
    monkeypatch.setattr(keeper, "SETTLE_S", 100)
    with cluster.start("ab") as crew:
        crew.save(1, replicated, replicated=False)
    assert count_copies(cluster, "ab", 1) == [2, 2]


def test_a_step_that_is_saved_again_before_its_copy_is_counted_once_by_each_host(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[str] = []
    arrive = NoteBoard.arrive

    async def list_late(*arguments: Any) -> Any:
        await anyio.sleep(1)
        return await list_step(*arguments)

    async def arrive_noted(self: NoteBoard, key: str) -> int:
        if key.startswith("replicated/"):
            arrived.append(f"{key} of {self.rank}")
        return await arrive(self, key)

    monkeypatch.setattr(NoteBoard, "arrive", arrive_noted)
    monkeypatch.setattr(keeper, "list_step", list_late)
    with cluster.start("ab", on_exists="new_generation") as crew:
        crew.save(1, replicated, replicated=False)
        crew.save(1, replicated)
        crew.save(2, replicated)  # its copies come after those
    assert len(arrived) == len(set(arrived)), arrived


def _cut_off(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let no copy of data be made any more, until the list is emptied."""
    pull, away = keeper.Keeper._pull, [True]

    async def pull_not(self: keeper.Keeper, manifest: Any, wanted: Any) -> None:
        if away:
            raise CheckpointError("the network is down")
        await pull(self, manifest, wanted)

    monkeypatch.setattr(keeper.Keeper, "_pull", pull_not)
    return away


def test_a_host_without_room_fails_the_save_on_all_and_older_steps_stay(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.start("ab") as crew:
        crew.save(1, replicated)
        with monkeypatch.context() as patch:
            patch.setattr("aiockpt.backends.shm.available_bytes", lambda: 1000)
            errors = crew.errors(lambda rank, ckpt: ckpt.save(2, replicated(2)).result(100))
        assert all(isinstance(error, CheckpointError) for error in errors), errors
        crew.save(3, replicated)
    with cluster.start("ab") as crew:
        load(crew, 3)


def test_copies_are_apart_by_the_racks_that_hosts_name(cluster: Cluster) -> None:
    racks = dict(zip("abcd", ["left", "left", "right", "right"], strict=True))
    with cluster.start("abcd", apart=lambda rank: lambda: racks["abcd"[rank]]) as crew:
        crew.save(1, replicated)
    cluster.lose("a", "b")  # all of a rack
    with cluster.start("abcd") as crew:
        load(crew, 1)


def test_copies_in_one_rack_are_told(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with cluster.start("ab", apart=lambda rank: lambda: "one rack") as crew:
        crew.save(1, replicated)
    assert "in the same failure domain" in caplog.text


def test_ranks_on_one_host_are_told_that_nothing_is_copied(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with cluster.start("aa") as crew:
        crew.save(1, replicated)
    assert "all ranks are on one host" in caplog.text


def test_a_rank_that_never_comes_holds_up_no_end(cluster: Cluster) -> None:
    crew = cluster.start("ab")
    begun_s = time.monotonic()
    crew.checkpointers[0].close()
    assert time.monotonic() - begun_s < 30
    crew.checkpointers[1].close()


def test_an_environment_variable_that_is_missing_is_named(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="NO_SUCH_RACK"):
        cluster.start("ab", apart=lambda rank: "NO_SUCH_RACK")


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_two_steps_stay_unless_it_is_said_how_many(cluster: Cluster, hosts: str) -> None:
    with cluster.start(hosts, keep=None) as crew:
        for step in range(5):
            crew.save(step, replicated, replicated=len(hosts) > 1)
        first = crew.checkpointers[0]
        until(lambda: [info.step for info in first.steps().result()] == [4, 3], "older steps are deleted")


def test_without_copies_it_is_the_memory_of_each_host(cluster: Cluster) -> None:
    with cluster.start("ab", copies=0) as crew:
        crew.save(1, replicated)
    assert [len(files(cluster, host, 1)) for host in "ab"] == [1, 1]
    with cluster.start("ab", copies=0) as crew:
        load(crew, 1)


def test_two_copies_outlive_two_hosts(cluster: Cluster) -> None:
    with cluster.start("abc", copies=2) as crew:
        crew.save(1, replicated)
    cluster.lose("a", "c")
    with cluster.start("abc", copies=2) as crew:
        load(crew, 1)


def test_a_save_that_newer_ones_overtook_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LAGGING_S", 0.1)
    with cluster.start("ab", keep=1) as crew:
        away = _cut_off(monkeypatch)
        first = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)))
        for future in first:
            future.result(100)
        crew.save(2, replicated, replicated=False)
        until(lambda: [info.step for info in crew.checkpointers[0].steps().result()] == [2], "step 1 is deleted")
        away.clear()
        crew.save(3, replicated)
        assert all(isinstance(future.replicated().exception(100), SaveSkippedError) for future in first)


def test_each_rank_reports_when_a_step_is_replicated(cluster: Cluster) -> None:
    seen: list[list[Event]] = [[], []]

    class Seen:
        def __init__(self, into: list[Event]) -> None:
            self.into = into

        def on_event(self, event: Event) -> None:
            self.into.append(event)

    with cluster.start("ab") as crew:
        for rank, into in enumerate(seen):
            crew.checkpointers[rank]._engine.add_observer(Seen(into))
        crew.save(1, replicated)
        until(lambda: all(any(isinstance(one, Replicated) for one in into) for into in seen), "both report it")
    for into in seen:
        (told,) = (one for one in into if isinstance(one, Replicated))
        assert (told.step, told.url) == (1, "peer://run")
        assert told.seconds > 0


def test_a_replaced_run_is_never_mixed_with_the_new_one(cluster: Cluster) -> None:
    with cluster.start("ab", on_error=lambda future: None) as old:
        old.save(1, replicated)
        with cluster.start("ab") as new:
            load(new, 1)
            new.save(2, lambda step: replicated(20))
            old.errors(lambda rank, ckpt: ckpt.save(2, replicated(30)).result(100))
            new.save(3, lambda step: replicated(40))
    with cluster.start("ab") as crew:
        state = replicated(0)
        crew.on_all(lambda rank, ckpt: ckpt.load(state if rank else replicated(0)).result(100))
    assert equal(state, replicated(40))


def test_a_single_process_sees_its_own_host(cluster: Cluster) -> None:
    with cluster.start("a") as crew:
        crew.save(1, replicated)
    with cluster.start("a") as crew:
        load(crew, 1)


def test_memory_is_waited_for_though_a_disk_answers_at_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that come late must not have the run go on from what the disk has."""
    disk = [aiockpt.Tier(tmp_path / "disk", every=2)]
    with cluster.start("ab", more=disk) as crew:
        for step in (2, 3):
            crew.save(step, replicated)
    find, query, known = FoundHosts._find, tiers.query_tiers, []

    async def find_late(self: FoundHosts) -> Any:
        await anyio.sleep(0.3)
        return await find(self)

    async def query_and_note(places: Any, *rest: Any) -> Any:
        known.append(len(places[0].backend.hosts))
        return await query(places, *rest)

    monkeypatch.setattr(tiers, "query_tiers", query_and_note)
    monkeypatch.setattr(FoundHosts, "_find", find_late)
    with cluster.start("ab", more=disk) as crew:
        load(crew, 3)
    assert known
    assert set(known) == {1}, "a tier was asked before the other host was known"


def test_an_estimate_counts_what_this_host_holds(cluster: Cluster) -> None:
    with cluster.start("aabbccdd", keep=2) as crew:
        estimates = crew.on_all(lambda rank, ckpt: ckpt.estimate(replicated(1)).result(100))
    for estimate in estimates:
        (place,) = estimate.places
        assert place.step_bytes == round(estimate.disk_bytes / 2)  # of four hosts each holds two's
        assert place.kept_steps == 2 + 4  # being saved, being removed, being saved next; and the newest replicated one
        assert place.kept_bytes == (place.kept_steps or 0) * place.step_bytes


def test_metrics_say_what_is_replicated_and_how_far_it_lags(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    with cluster.start("ab", observers=[Metrics(registry)]) as crew:

        def read(name: str, **more: str) -> float | None:
            value: float | None = registry.get_sample_value(f"aiockpt_{name}", {"url": "peer://run", **more})
            return value

        away = _cut_off(monkeypatch)
        crew.save(1, replicated, replicated=False)
        until(lambda: read("copies_waiting") == 1, "it waits")
        away.clear()
        crew.save(2, replicated)
        until(lambda: read("copies_waiting") == 0, "the newer one has ended its wait")
