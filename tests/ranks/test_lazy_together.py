"""The promises of lazy saves of many ranks: one step or none, the state at the call, and no rank held for ever."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.ranks.crew import Crew
from tests.small_run import OneLayer


@pytest.mark.parametrize(
    "io", [{}, {"io": aiockpt.IO(pool_bytes=1 << 14, slab_bytes=1 << 14, block_bytes=1 << 12, read_bytes=1 << 14)}]
)
def test_a_save_every_step_holds_the_weights_of_its_step(tmp_path: Path, io: Any) -> None:
    ranks = [OneLayer(64) for _ in range(3)]
    weights: list[torch.Tensor] = []
    # Gradients are reduced before a step. Without that, the step of one thread waits for the copies of those that are ahead.
    reduced = threading.Barrier(3)
    with Crew(3, tmp_path, snapshot="lazy", **io) as crew:

        def train(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            for step in range(6):
                if rank == 0:
                    weights.append(ranks[0].model.weight.detach().clone())
                ckpt.save(step, ranks[rank].state)
                reduced.wait(250)
                ranks[rank].step()
            ckpt.wait()

        crew.on_all(train)
    fresh = OneLayer(64)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert [found.step for found in ckpt.steps().result()] == [5, 4, 3, 2, 1, 0]
        for step in range(6):
            ckpt.load(fresh.state, step).result()
            assert torch.equal(fresh.model.weight, weights[step])


def test_a_rank_that_skips_lets_the_optimizers_of_the_others_go(tmp_path: Path) -> None:
    ranks = [OneLayer(64) for _ in range(2)]
    with Crew(2, tmp_path, snapshot="lazy", on_error="warn") as crew:

        def train(rank: int, ckpt: aiockpt.Checkpointer) -> BaseException | None:
            if rank == 1:
                with pytest.raises(aiockpt.UnsupportedStateError):
                    ckpt.save(1, {"model": object})
                ranks[rank].step()
                return None
            save = ckpt.save(1, ranks[rank].state)
            ranks[rank].step()
            return save.exception()

        told, _ = crew.on_all(train)
        assert isinstance(told, aiockpt.RankError)
        crew.on_all(lambda rank, ckpt: ckpt.save(2, ranks[rank].state).result())
