"""Many ranks and several tiers: every rank copies its own files, rank 0 those that others leave, and all hear of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.ranks.crew import Crew
from tests.ranks.test_saving_together import equal, loaded, replicated

pytestmark = pytest.mark.timeout(60)


def test_all_ranks_hear_when_a_step_is_in_each_tier(tmp_path: Path) -> None:
    def tiers(rank: int) -> list[Any]:
        return [aiockpt.Tier(f"memory://{tmp_path.name}"), tmp_path / "disk", tmp_path / "far"]

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> list[str]:
        urls = []
        for step in (1, 2):
            future = ckpt.save(step, replicated(step))
            future.in_memory().result(30)
            urls += [future.result(30).url, future.committed(tmp_path / "far").result(30).url]
        return urls

    with Crew(3, tiers) as crew:
        expected = [f"file://{tmp_path}/disk", f"file://{tmp_path}/far"] * 2
        assert crew.on_all(save) == [expected] * 3
    for place in (f"memory://{tmp_path.name}", tmp_path / "disk", tmp_path / "far"):
        assert equal(loaded(place, replicated(2)), replicated(2))


def test_every_rank_copies_its_own_files(tmp_path: Path) -> None:
    created: dict[int, list[str]] = {}

    class Watched(FaultyBackend):
        def __init__(self, rank: int) -> None:
            super().__init__(LocalBackend(str(tmp_path / "far")), [])
            self._created = created.setdefault(rank, [])

        async def create(self, key: str, size: int) -> Any:
            self._created.append(key.rpartition("/")[2])
            return await super().create(key, size)

    with Crew(3, lambda rank: [tmp_path / "near", Watched(rank)]) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).committed(f"file://{tmp_path}/far").result(30))
    assert created == {rank: [f"r{rank:05d}-0000.safetensors"] for rank in range(3)}


def test_rank_0_copies_what_another_rank_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.engine.rung.PATIENCE_S", 0.5)

    def tiers(rank: int) -> list[Any]:
        broken = [Fault(do="fail", verb="create", match="*", times=None)] if rank == 1 else []
        return [tmp_path / "near", FaultyBackend(LocalBackend(str(tmp_path / "far")), broken)]

    with Crew(2, tiers) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result(30))
    assert equal(loaded(tmp_path / "far", replicated(1)), replicated(1))


def test_ranks_load_together_from_the_nearest_tier_that_has_the_newest_step(tmp_path: Path) -> None:
    tiers = [tmp_path / "near", tmp_path / "far"]
    with Crew(2, lambda rank: tiers) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).committed(tmp_path / "far").result(30))
    fresh = [tmp_path / "fresh", tmp_path / "far"]
    with Crew(3, lambda rank: fresh) as crew:

        def load(rank: int, ckpt: aiockpt.Checkpointer) -> bool:
            state = replicated(9)
            assert ckpt.load(state).result(30) is not None
            return equal(state, replicated(1))

        assert crew.on_all(load) == [True] * 3
