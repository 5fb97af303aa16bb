"""Random numbers go on where they were."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.rng import RNG, derive_state, per_rank
from aiockpt.errors import StateMismatchError, UsageError
from tests.adapters.conftest import Thing
from tests.adapters.worlds import World


def draw() -> tuple[float, ...]:
    return (
        torch.rand(1).item(),
        torch.randn(3).sum().item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    )


def test_every_generator_goes_on_where_it_was(save: Any) -> None:
    draw()
    saved = save({"rng": RNG()})
    expected = draw()
    draw()
    saved.load({"rng": RNG()})
    assert draw() == expected


def test_generators_are_set_after_everything_else(save: Any) -> None:
    class Draws(Thing):
        def load_state_dict(self, state: Any) -> None:
            draw()

    state = {"rng": RNG(), "draws": Draws()}
    saved = save(state)
    expected = draw()
    saved.load(state)
    assert draw() == expected


def test_the_state_is_small_and_belongs_to_the_rank() -> None:
    walked = StateWalker().walk({"rng": RNG()})
    assert walked.tensors == ()
    assert walked.values == {"rng": {"$": "per_rank"}}
    assert len(msgspec.json.encode(walked.per_rank)) < 16_000


@pytest.mark.parametrize("state", [{}, {**RNG().state_dict(), "torch": b"short"}, {**RNG().state_dict(), "python": 1}])
def test_a_state_that_is_not_one_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="random generators"):
        RNG().load_state_dict(state)


def test_random_state_that_was_never_saved_is_missing(save: Any) -> None:
    saved = save({"step": 1})
    with pytest.raises(StateMismatchError, match="rng: in the state but not in the checkpoint"):
        saved.load({"rng": RNG()})


def test_values_of_one_rank_come_back_in_their_holder(save: Any) -> None:
    saved = save({"seen": per_rank([1, (2,)]), "deep": {"t": per_rank({"w": torch.arange(3)})}})
    assert list(saved.bytes) == ["deep.t.w@rank0"]
    assert saved.stored.values["seen"] == {"$": "per_rank"}
    found: dict[str, Any] = {"seen": per_rank(None), "deep": {"t": per_rank(None)}}
    saved.load(found)
    assert found["seen"].value == [1, (2,)]
    assert torch.equal(found["deep"]["t"].value["w"], torch.arange(3))


def test_tensors_of_two_ranks_have_different_names() -> None:
    names = {StateWalker(rank=rank).walk({"x": per_rank(torch.ones(1))}).tensors[0].name for rank in (0, 1)}
    assert names == {"x@rank0", "x@rank1"}


class OfARank(Thing):
    aiockpt_per_rank = True


class Data(Thing, torch.utils.data.Dataset[int]):
    pass


@pytest.mark.parametrize("make", [OfARank, Data, lambda state=None: per_rank(OfARank(state))])
def test_what_reads_data_belongs_to_its_rank(save: Any, make: Any) -> None:
    saved, found = save({"loader": make({"position": 5})}), make()
    assert saved.stored.values == {"loader": {"$": "per_rank"}}
    saved.load({"loader": found})
    assert getattr(found, "value", found).state == {"position": 5}


# Each rank gets a stream of its own, whatever the number of ranks becomes.


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


def save_all(size: int, step: int = 1, seed: int = 0) -> tuple[World, list[tuple[float, ...]]]:
    ranks = [OnRank(seed + rank) for rank in range(size)]
    return World([{"rng": rank} for rank in ranks], step=step), [rank.next for rank in ranks]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_were_there_go_on_with_their_own_numbers(size: int) -> None:
    saved, expected = save_all(3)
    assert resume(saved, size) == expected[:size]


def test_no_new_rank_draws_what_another_draws() -> None:
    saved, expected = save_all(2)
    drawn = resume(saved, 7)
    assert drawn[:2] == expected
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 7


def test_a_new_rank_draws_by_step_and_state() -> None:
    first, again, other_step, other_state = save_all(2), save_all(2), save_all(2, step=2), save_all(2, seed=9)
    new = [resume(saved, 3)[2] for saved, _ in (first, again, other_step, other_state)]
    assert new[0] == new[1]
    assert len(set(new)) == 3


def test_a_new_rank_depends_on_one_saved_rank() -> None:
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
