"""Whatever state a program holds, and however it loads it: what comes back is what the guide to states says.

The same cases by seed, as many as one likes: ``make campaign KIND=states COUNT=100000``.
"""

import random
import uuid

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import aiockpt
from tests.campaigns.states import IO, WAYS, Saved
from tests.example_counts import examples
from tests.simulated.state_model import facts_of, first_difference
from tests.simulated.states import Blueprint, blueprints, build


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(blueprints(), st.integers(0, 2**32), st.sampled_from(WAYS))
def test_any_state_comes_back_in_any_way_it_is_loaded(blueprint: Blueprint, seed: int, way: object) -> None:
    assert callable(way)
    with aiockpt.Checkpointer(f"memory://{uuid.uuid4().hex}", limits=aiockpt.Limits(io=IO)) as ckpt:
        way(Saved(ckpt, blueprint, seed, random.Random(seed)), random.Random(seed))


@examples(60)
@given(blueprints(), st.integers(0, 2**32))
def test_a_seed_always_builds_the_same_state(blueprint: Blueprint, seed: int) -> None:
    assert facts_of(build(blueprint, seed)) == facts_of(build(blueprint, seed))


def test_the_model_tells_what_equality_does_not() -> None:
    nan, other = float("nan"), float("nan")
    assert facts_of([nan]) == facts_of([other])
    assert facts_of(0.0) != facts_of(-0.0)
    assert facts_of(1) != facts_of(True)
    assert facts_of([1]) != facts_of((1,))
    assert facts_of({"a": 1, "b": 2}) != facts_of({"b": 2, "a": 1})
    assert facts_of(torch.zeros(2)) != facts_of(torch.zeros(2, dtype=torch.float64))
    assert facts_of(torch.zeros(2, 3)) == facts_of(torch.zeros(3, 2).t())


def test_the_first_difference_is_named_by_its_place() -> None:
    saved = {"a": [1, {"b": 2}], "c": 3}
    assert first_difference(saved, {"a": [1, {"b": 2}], "c": 3}) is None
    found = first_difference(saved, {"a": [1, {"b": 5}], "c": 3})
    assert found == "('a', 1, 'b'): it is int 5, not int 2"
