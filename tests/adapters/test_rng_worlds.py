"""Does each rank get a stream of random numbers of its own, whatever the number of ranks becomes?"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from aiockpt.adapters.rng import RNG, derive_state
from aiockpt.errors import StateMismatchError, UsageError
from tests.adapters.worlds import World


def draw() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


class OnRank(RNG):
    """The generators as one of several ranks left them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.kept = super().state_dict()
        self.next = draw()

    def state_dict(self) -> dict[str, Any]:
        return self.kept


def resume(saved: World, size: int) -> list[tuple[float, ...]]:
    """Return what each rank of another world draws first."""
    drawn = []
    for rank in range(size):
        saved.load_one({"rng": RNG()}, rank, size)
        drawn.append(draw())
    return drawn


def save(size: int, step: int = 1, seed: int = 0) -> tuple[World, list[tuple[float, ...]]]:
    ranks = [OnRank(seed + rank) for rank in range(size)]
    return World([{"rng": rank} for rank in ranks], step=step), [rank.next for rank in ranks]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_were_there_go_on_with_their_own_numbers(size: int) -> None:
    saved, expected = save(3)
    assert resume(saved, size) == expected[:size]


def test_no_new_rank_draws_what_another_draws() -> None:
    saved, expected = save(2)
    drawn = resume(saved, 7)
    assert drawn[:2] == expected
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 7


def test_a_new_rank_draws_the_same_after_each_load_and_something_else_after_another_step_or_state() -> None:
    first, again, other_step, other_state = save(2), save(2), save(2, step=2), save(2, seed=9)
    new = [resume(saved, 3)[2] for saved, _ in (first, again, other_step, other_state)]
    assert new[0] == new[1]
    assert len(set(new)) == 3


def test_a_new_rank_depends_on_the_saved_rank_of_its_number_modulo_theirs() -> None:
    ranks = [OnRank(seed) for seed in (1, 2)]
    saved = World([{"rng": rank} for rank in ranks], step=4)
    saved.load_one({"rng": RNG()}, 3, 4)
    RNG().load_state_dict(derived := derive_state(ranks[1].kept, 3, 4))
    expected = draw()
    saved.load_one({"rng": RNG()}, 3, 4)
    assert draw() == expected
    assert derived != derive_state(ranks[0].kept, 3, 4)


def test_every_device_gets_a_seed_of_its_own() -> None:
    state = {**RNG().state_dict(), "cuda": [b"\0" * 16, b"\1" * 16]}
    seeds = derive_state(state, 2, 1)["cuda"]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_new_rank_of_a_checkpoint_without_any_state_says_so() -> None:
    with pytest.raises(StateMismatchError, match="rng: in the state but not in the checkpoint"):
        World([{"step": 1}]).load_one({"rng": RNG()}, 1, 2)


def test_nothing_is_derived_from_what_is_no_state() -> None:
    with pytest.raises(UsageError, match="no stream of random numbers"):
        derive_state({"torch": b""}, 1, 1)
