"""Random numbers go on where they were."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aiockpt.adapters.native import RNG, StateWalker, per_rank
from aiockpt.errors import StateMismatchError, UsageError


def draw() -> list[float]:
    return [
        torch.rand(1).item(),
        torch.randn(3).sum().item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_every_generator_goes_on_where_it_was(save: Any) -> None:
    draw()
    saved = save({"rng": RNG()})
    expected = draw()
    draw()
    saved.load({"rng": RNG()})
    assert draw() == expected


def test_generators_are_set_after_everything_else(save: Any) -> None:
    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
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


class Loader:
    aiockpt_per_rank = True

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Data(torch.utils.data.Dataset[int]):
    state_dict = Loader.state_dict
    load_state_dict = Loader.load_state_dict
    position = 0


@pytest.mark.parametrize("make", [Loader, Data, lambda: per_rank(Loader())])
def test_what_reads_data_belongs_to_its_rank(save: Any, make: Any) -> None:
    state = {"loader": make()}
    getattr(state["loader"], "value", state["loader"]).position = 5
    saved = save(state)
    assert saved.stored.values == {"loader": {"$": "per_rank"}}
    found: dict[str, Any] = {"loader": make()}
    saved.load(found)
    assert getattr(found["loader"], "value", found["loader"]).position == 5
