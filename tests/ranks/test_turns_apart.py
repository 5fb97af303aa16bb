"""Ranks that are not in step with each other: one far ahead, one far behind, one that has failed already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import World
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.ranks.crew import Crew

pytestmark = pytest.mark.timeout(60)
IMPATIENT = aiockpt.Deadlines(ranks_s=2, commit_s=10, takeover_s=5, close_s=60)


def state_at(value: float) -> dict[str, Any]:
    """Return a state that every rank has alike."""
    return {f"w{index}": torch.full((300, 33), float(value + index)) for index in range(3)}


class SlowOn(FaultyBackend):
    """A backend whose uploads of one step take their time."""

    def __init__(self, root: Path, match: str, seconds: float) -> None:
        super().__init__(LocalBackend(str(root), world=World()))
        self._match, self._seconds = match, seconds

    async def create(self, key: str, size: int) -> Any:
        if self._match in key:
            await anyio.sleep(self._seconds)
        return await super().create(key, size)


def test_the_save_after_a_failed_one_works_on_ranks_that_have_not_heard_of_the_failure(tmp_path: Path) -> None:
    fail = Fault(do="fail", verb="upload.finish", match="step-00000002/*", times=None)

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(tmp_path), world=World())
        return FaultyBackend(inner, [fail]) if rank == 1 else inner

    def save_all(rank: int, ckpt: aiockpt.Checkpointer) -> int:
        state = {"w": torch.zeros(2500, 1024)}  # more than a block: cut by rows
        ckpt.save(1, state).result(30)
        second = ckpt.save(2, state)
        if rank == 1:
            assert second.exception(30) is not None
        return ckpt.save(3, state).result(30).step

    with Crew(2, backend, deadlines=IMPATIENT, on_error=lambda future: None) as crew:
        sharing = crew.checkpointers[0]._engine.sharing
        assert sharing is not None
        give_up = sharing.give_up

        async def give_up_late(*args: Any) -> None:
            await anyio.sleep(0.5)
            await give_up(*args)

        sharing.give_up = give_up_late  # type: ignore[method-assign]
        assert crew.on_all(save_all) == [3, 3]


def test_a_manifest_that_is_gone_for_one_rank_is_left_by_all(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step)).result()

    class Blind(FaultyBackend):
        async def get(self, key: str, max_bytes: int) -> bytes:
            if "step-00000002/" in key:
                raise aiockpt.errors.ObjectNotFoundError("deleted meanwhile", key=key)
            return await super().get(key, max_bytes)

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(tmp_path), world=World())
        return Blind(inner) if rank == 1 else inner

    with Crew(2, backend, deadlines=IMPATIENT) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(state_at(0)).result(30))
    assert [result.step for result in results if result] == [1, 1]
