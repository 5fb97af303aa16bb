"""Is what a save was said to take what it takes?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizer_module
from hypothesis import HealthCheck, given, settings, strategies

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.sizing.to_come import find_state_to_come
from aiockpt.storage.backend import Space
from tests.small_run import SMALL


def tensor_bytes(root: Path, step: int) -> int:
    with aiockpt.Checkpointer(root, io=SMALL) as ckpt:
        return sum(tensor.bytes for tensor in ckpt.describe(step).result().tensors)


def make(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 10))
    return {"model": model, "optimizer": optimizer(model.parameters(), **options), "step": 0}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(4, 300)).square().mean().backward()
    state["optimizer"].step()


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_before_the_first_step_it_says_what_is_there_after_it(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    state = make(kind, **options)
    with aiockpt.Checkpointer(tmp_path, io=SMALL) as ckpt:
        before = ckpt.estimate(state, probe_bytes=0).result()
        train(state)
        after = ckpt.estimate(state, probe_bytes=0).result()
        ckpt.save(1, state).result()
    assert after.to_come == ()
    assert after.step_bytes == tensor_bytes(tmp_path, 1)
    assert before.step_bytes == pytest.approx(after.step_bytes, abs=64), "counts of steps are small"
    assert before.rank_bytes == before.step_bytes
    assert after.files == len(list(tmp_path.glob("step-*/a-*/d/*")))


def test_estimating_touches_nothing_of_the_optimizer() -> None:
    state = make()
    seen: list[object] = []
    handle = optimizer_module.register_optimizer_step_pre_hook(lambda *args: seen.append(args))
    try:
        (one,) = find_state_to_come(state)
    finally:
        handle.remove()
    assert not seen
    assert not state["optimizer"].state
    assert one.rank_bytes == one.bytes > 0
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    assert find_state_to_come({"a": [torch.optim.AdamW(frozen.parameters())]}) == []


class Strange(torch.optim.Optimizer):
    """One that cannot be tried."""

    def __init__(self, parameters: Any, must: str) -> None:
        super().__init__(parameters, {})
        assert must == "be given"

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def test_one_that_cannot_be_tried_without_memory_is_said_to_be_unknown() -> None:
    (one,) = find_state_to_come(make(torch.optim.Adafactor))
    assert one.rank_bytes is None


def test_what_cannot_be_found_is_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    state = {"model": model, "parts": {"optimizer": Strange(model.parameters(), "be given")}}
    with aiockpt.Checkpointer(tmp_path, io=SMALL) as ckpt:
        found = ckpt.estimate(state, probe_bytes=0).result()
    assert [(one.name, one.rank_bytes) for one in found.to_come] == [("parts.optimizer", None)]
    assert "estimate again after the first step" in str(found)


def test_the_rules_of_retention_say_how_much_lies_there_at_most(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1000)}
    rules = aiockpt.Retention(last=2, best=aiockpt.Best("loss"))
    with aiockpt.Checkpointer(tmp_path, io=SMALL, retention=rules, max_in_flight=1) as ckpt:
        (place,) = ckpt.estimate(state, probe_bytes=0).result().places
        most = 0
        for step in range(30):
            ckpt.save(step, state, metrics={"loss": math.sin(step)}).result()
            most = max(most, len(list(tmp_path.glob("step-*"))))
            ckpt.wait()
    assert place.steps == 2 + 1 + 1 + 1
    assert place.bytes == 5 * 4000
    assert most <= place.steps
    for every, words in ((None, ""), (100, "each multiple of 100 for ever")):
        with aiockpt.Checkpointer(tmp_path, retention=aiockpt.Retention(last=1, every=every)) as ckpt:
            assert ckpt.estimate(state, probe_bytes=0).result().places[0].grows == words


class Small(LocalBackend):
    async def space(self) -> Space:
        return Space(10_000, 10_000)


def test_what_does_not_fit_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.zeros(1000)}
    with aiockpt.Checkpointer(Small(tmp_path), io=SMALL) as ckpt:
        (problem,) = ckpt.estimate(state, probe_bytes=0).result().problems
        assert "9.8 KiB free, keeps every step, and takes 2 of them: give Retention" in problem
    with aiockpt.Checkpointer(Small(tmp_path), io=SMALL, retention=aiockpt.Retention(last=1)) as ckpt:
        found = ckpt.estimate(state, probe_bytes=0).result()
        assert "9.8 KiB free, and 4 steps take 15.6 KiB" in found.problems[0]
        assert "problem: " in str(found)
    monkeypatch.setattr("aiockpt.sizing.estimate.available_bytes", lambda: 100 << 20)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        large = {"x": torch.zeros(20 << 20)}
        found = ckpt.estimate(large, probe_bytes=0).result()
        assert found.memory_bytes == 16 << 20
        assert "a quarter of the memory to spare" in found.problems[0]


def test_the_probe_is_timed_in_durable_places_and_removed(tmp_path: Path) -> None:
    tiers = [aiockpt.Tier("memory://sizing"), aiockpt.Tier(tmp_path)]
    with aiockpt.Checkpointer(tiers) as ckpt:
        found = ckpt.estimate({"x": torch.zeros(1 << 20)}, probe_bytes=1 << 20).result()
        assert found.places[0].bytes_per_s is None
        assert found.places[1].bytes_per_s
        assert found.durable_s == pytest.approx((4 << 20) / found.places[1].bytes_per_s)
        assert found.pause_s > 0
        text = str(found)
    assert "durable after" in text
    assert "of them on this rank" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_found_before_the_first_step(tmp_path: Path) -> None:
    class Full(LocalBackend):
        async def create(self, key: str, size: int) -> Any:
            raise aiockpt.StorageFullError("no space left")

    with aiockpt.Checkpointer(Full(tmp_path)) as ckpt, pytest.raises(aiockpt.StorageFullError):
        ckpt.estimate({"x": torch.zeros(10)}).result()


def test_only_what_is_saved_is_counted(tmp_path: Path) -> None:
    state = make()
    tied = torch.zeros(1000)
    with aiockpt.Checkpointer(tmp_path, io=SMALL, only="model") as ckpt:
        assert ckpt.estimate({**state, "tied": [tied, tied]}, probe_bytes=0).result().to_come == ()
    with aiockpt.Checkpointer(tmp_path, io=SMALL) as ckpt:
        assert ckpt.estimate({"tied": [tied, tied]}, probe_bytes=0).result().step_bytes == 4000


SHAPES = strategies.lists(strategies.lists(strategies.integers(0, 5), max_size=3), max_size=6)
DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SHAPES, DTYPES)
def test_whatever_the_tensors_are_their_bytes_are_those_of_the_step(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype
) -> None:
    root = tmp_path_factory.mktemp("sizes")
    state = {f"t{number}": torch.zeros(shape).to(dtype) for number, shape in enumerate(shapes)}
    with aiockpt.Checkpointer(root, io=SMALL) as ckpt:
        found = ckpt.estimate(state, probe_bytes=0).result()
        ckpt.save(1, state).result()
    assert found.step_bytes == tensor_bytes(root, 1)
