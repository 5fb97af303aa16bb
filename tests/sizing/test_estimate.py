"""Estimates of a save, and what it then takes."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizer_module
from hypothesis import given

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.sizing.estimate import Estimate
from aiockpt.sizing.to_come import find_state_to_come
from aiockpt.storage.backend import Space
from tests.example_counts import examples
from tests.simulated import states
from tests.small_run import SMALL, small_checkpointer


def tensor_bytes(root: Path, step: int) -> int:
    with small_checkpointer(root) as ckpt:
        return sum(tensor.bytes for tensor in ckpt.describe(step).result().tensors)


def data_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


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
    with small_checkpointer(tmp_path) as ckpt:
        before = ckpt.estimate(state).result()
        train(state)
        after = ckpt.estimate(state).result()
        ckpt.save(1, state).result()
    assert after.to_come == ()
    assert after.step_bytes == tensor_bytes(tmp_path, 1)
    assert before.step_bytes == pytest.approx(after.step_bytes, abs=64), "counts of steps are small"
    assert before.rank_bytes == before.step_bytes
    files = list(tmp_path.glob("step-*/a-*/d/*"))
    assert before.files == after.files == len(files)
    assert before.rank_file_bytes == after.rank_file_bytes == data_bytes(tmp_path)
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("step-*/**/*") if file.is_file())
    assert after.disk_bytes == pytest.approx(on_disk, abs=2048)


def test_estimating_touches_nothing_of_the_optimizer() -> None:
    state = make()
    seen: list[object] = []
    handle = optimizer_module.register_optimizer_step_pre_hook(lambda *args: seen.append(args))
    try:
        (one,) = find_state_to_come(state, ())
    finally:
        handle.remove()
    assert not seen
    assert not state["optimizer"].state
    assert one.rank_bytes == one.bytes > 0
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    assert find_state_to_come({"a": [torch.optim.AdamW(frozen.parameters())]}, ()) == []
    assert [found.name for found in find_state_to_come({"a": [state["optimizer"]]}, ())] == ["a[0]"]


class Strange(torch.optim.Optimizer):
    """One that cannot be tried."""

    def __init__(self, parameters: Any, must: str) -> None:
        super().__init__(parameters, {})
        assert must == "be given"

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def test_one_that_cannot_be_tried_without_memory_is_said_to_be_unknown() -> None:
    (one,) = find_state_to_come(make(torch.optim.Adafactor), ())
    assert one.rank_bytes is None


def test_what_cannot_be_found_is_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    state = {"model": model, "parts": {"optimizer": Strange(model.parameters(), "be given")}}
    with small_checkpointer(tmp_path) as ckpt:
        found = ckpt.estimate(state).result()
    assert [(one.name, one.rank_bytes) for one in found.to_come] == [("parts.optimizer", None)]
    assert "estimate again after the first step" in str(found)


RULES = [
    aiockpt.Retention(last=2, best=aiockpt.Best("loss", count=2)),
    aiockpt.Retention(last=4, every=20, optimizer=2),
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_rules_of_retention_leave_as_much_as_they_were_said_to(tmp_path: Path, rules: aiockpt.Retention) -> None:
    model = torch.nn.Linear(1000, 4)
    state = {"model": model, "moments": [torch.zeros(8000), torch.zeros(2000)]}
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL, max_in_flight=1), retention=rules) as ckpt:
        found = ckpt.estimate(state).result()
        (place,) = found.places
        most = 0
        for step in range(1, 51):
            save = ckpt.save(step, state, metrics={"loss": math.sin(step)})
            save.result()
            most = max(most, data_bytes(tmp_path))
            ckpt.wait()
            if step == 1:
                ckpt.verify(1).result()
        left = {int(folder.name[5:]): data_bytes(folder) for folder in tmp_path.glob("step-*")}
    assert place.kept_steps is not None
    multiples = 0 if rules.every is None else 50 // rules.every
    allowed = place.kept_bytes + multiples * place.grows_bytes
    assert most <= allowed < 1.3 * most
    assert len(left) <= place.kept_steps + multiples
    if rules.every and rules.optimizer:
        assert left[20] == pytest.approx(place.grows_bytes, rel=0.2), "thinned to its weights"


def test_without_rules_all_is_kept(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path, retention=aiockpt.Retention(optimizer=1)) as ckpt:
        (place,) = ckpt.estimate({"x": torch.zeros(1000)}).result().places
    assert place.kept_steps is None
    assert place.grows_every is None
    assert 0 <= place.grows_bytes < place.step_bytes


class Small(LocalBackend):
    free_bytes = 1_000_000

    async def space(self) -> Space:
        return Space(self.free_bytes, self.free_bytes)


def test_what_does_not_fit_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.zeros(100_000)}
    with small_checkpointer(Small(tmp_path)) as ckpt:
        (problem,) = ckpt.estimate(state).result().problems
        assert "976.6 KiB free, keeps every step, and takes 2 of them: give Retention" in problem
    with small_checkpointer(Small(tmp_path), retention=aiockpt.Retention(last=1)) as ckpt:
        found = ckpt.estimate(state).result()
        assert "976.6 KiB free, and 4 steps take" in found.problems[0]
        assert "problem: " in str(found)
        ckpt.save(1, state).result()
        ckpt.wait()
        assert "1 of which are there" in ckpt.estimate(state).result().problems[0], "it needs no more room"
        monkeypatch.setattr(Small, "free_bytes", 1_650_000)
        assert ckpt.estimate(state).result().problems == ()
        assert ckpt.estimate({"x": torch.zeros(110_000)}).result().problems, "the records need room, too"
    monkeypatch.setattr("aiockpt.sizing.estimate.available_bytes", lambda: 100 << 20)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        large = {"x": torch.zeros(20 << 20)}
        found = ckpt.estimate(large).result()
        assert found.pool_bytes == 16 << 20
        assert "a quarter of the memory to spare" in found.problems[0]


def test_steps_that_keep_their_weights_alone_count_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1000, 100)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}  # 1.2 MB, of which 0.4 are weights

    def problems(free_bytes: int, **rules: Any) -> tuple[str, ...]:
        monkeypatch.setattr(Small, "free_bytes", free_bytes)
        with small_checkpointer(Small(tmp_path), retention=aiockpt.Retention(**rules)) as ckpt:
            for step in range(rules.get("last", 0) + 1):
                ckpt.save(step, state)
                ckpt.wait()
            return ckpt.estimate(state).result().problems

    assert problems(60_000_000, optimizer=1) == (), "a hundred take 42 MB"
    (problem,) = problems(30_000_000, optimizer=1)
    assert "takes 7" in problem
    (problem,) = problems(3_000_000, last=4, optimizer=1)
    assert "4 of which are there" in problem, "they have 2.4 MB, and three of 1.2 are to come"
    assert problems(4_500_000, last=4, optimizer=1) == ()


def test_memory_that_saves_and_tiers_need_and_the_host_has_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.sizing.estimate.available_bytes", lambda: 1 << 20)
    tiers = [aiockpt.Tier("memory://sizing-host", keep=3), aiockpt.Tier(tmp_path)]
    with small_checkpointer(tiers) as ckpt:
        problems = ckpt.estimate({"x": torch.zeros(1 << 18)}).result().problems
    assert any("1.0 MiB to spare" in problem and "memory tiers" in problem for problem in problems)


def test_before_the_first_save_nothing_is_written_to_find_how_long_it_takes(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        found = ckpt.estimate({"x": torch.zeros(1 << 20)}).result()
        assert found.durable_s is None
        assert found.pause_s == pytest.approx(2**22 / 2**32)
        text = str(found)
    assert "durable after" not in text
    assert "of them written by this rank" not in text
    assert list(tmp_path.iterdir()) == []


def test_while_a_run_goes_on_its_last_saves_say_how_long_they_take(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        seconds = [ckpt.save(step, {"x": torch.zeros(100)}).result().seconds for step in range(3)]
        found = ckpt.estimate({"x": torch.zeros(100)}).result()
    assert found.durable_s == pytest.approx(sorted(seconds)[1])
    assert found.places[0].found_steps == 3


def test_each_tier_has_its_own_share_of_the_network(tmp_path: Path) -> None:
    state = make()
    train(state)
    tiers = [
        aiockpt.Tier(tmp_path / "near", keep=2),
        aiockpt.Tier(tmp_path / "far", every=10),
        aiockpt.Tier(tmp_path / "weights", content="weights"),
    ]
    with small_checkpointer(tiers) as ckpt:
        found = ckpt.estimate(state).result()
        ckpt.save(10, state).result()
    near, far, weights = found.places
    for tier, place in zip(("near", "far", "weights"), found.places, strict=True):
        assert data_bytes(tmp_path / tier / "step-00000010") <= place.step_bytes
        assert place.step_bytes == pytest.approx(data_bytes(tmp_path / tier / "step-00000010"), rel=0.1)
    assert near.read_bytes == far.step_bytes // 10 + weights.step_bytes
    assert far.read_bytes == weights.read_bytes == 0
    assert "every 10 steps" in str(far)
    assert "read for farther places" in str(near)


def test_only_what_is_saved_is_counted(tmp_path: Path) -> None:
    state = make()
    tied = torch.zeros(1000)
    with small_checkpointer(tmp_path, only="model") as ckpt:
        assert ckpt.estimate({**state, "tied": [tied, tied]}).result().to_come == ()
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.estimate({"tied": [tied, tied]}).result().step_bytes == 4000


@examples(15)
@given(states.blueprints())
def test_whatever_a_state_is_its_files_have_the_bytes_that_were_said(blueprint: states.Blueprint) -> None:
    state = states.build(blueprint, 1)
    with tempfile.TemporaryDirectory() as folder, small_checkpointer(folder) as ckpt:
        found = ckpt.estimate(state).result()
        ckpt.save(1, state).result()
        coming = sum(one.bytes for one in found.to_come)
        assert found.step_bytes - coming == tensor_bytes(Path(folder), 1)
        if not coming:
            assert found.rank_file_bytes == data_bytes(Path(folder))
            records = list(Path(folder).rglob("*.json"))
            assert found.disk_bytes - found.rank_file_bytes == pytest.approx(
                sum(record.stat().st_size for record in records), abs=2048
            )


def test_what_a_lazy_save_copies_at_once_is_memory_beside_the_pool(tmp_path: Path) -> None:
    state = make()
    buffers = {"running": [torch.zeros(100_000), torch.zeros(50_000)]}
    train(state)
    with small_checkpointer(tmp_path, snapshot="lazy") as ckpt:
        alone, more = (ckpt.estimate(one).result() for one in (state, state | buffers))
    with small_checkpointer(tmp_path) as ckpt:
        eager = ckpt.estimate(state | buffers).result()
    assert beside_pool(more) - beside_pool(alone) == 600_000
    assert 0 < beside_pool(alone) - beside_pool(eager) < 4000, "statistics of BatchNorm"


def beside_pool(found: Estimate) -> int:
    return found.memory_bytes - found.pool_bytes


def test_a_load_takes_memory_for_what_cannot_be_read_into_place(tmp_path: Path) -> None:
    dense = torch.zeros(1000, 1000)
    with small_checkpointer(tmp_path) as ckpt:
        into_place, staged = (ckpt.estimate({"x": one}).result() for one in (dense, dense.t()))
    assert staged.load_bytes - into_place.load_bytes == dense.nbytes
    assert into_place.other_layout_bytes - into_place.load_bytes >= dense.nbytes, "one piece may be all of it"
    with small_checkpointer("memory://sizing-load") as ckpt:
        straight = ckpt.estimate({"x": dense}).result()
    assert straight.load_bytes < into_place.load_bytes, "the disk is read past the page cache"
    full = aiockpt.IO(block_bytes=4096, read_bytes=65536, verify="full")
    with aiockpt.Checkpointer("memory://sizing-load", limits=aiockpt.Limits(io=full)) as ckpt:
        assert ckpt.estimate({"x": dense}).result().load_bytes > straight.load_bytes, "all is compared first"
