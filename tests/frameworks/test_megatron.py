"""Megatron-core's own GPT and optimizers, saved under one parallelism and loaded under another."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import aiockpt
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks.mcore.job import BATCH, WORDS, Job, start, unwrapped
from tests.frameworks.mcore.ranks import CHECKS, SHAPES, resume, whole_state
from tests.frameworks.mcore.train import go_on
from tests.frameworks.proving import TORCHRUN, assert_same
from tests.ranks.forked import outcomes_of

megatron: Any = import_module("aiockpt.integrations.megatron")  # now that Megatron runs on the CPU
core: Any = import_module("megatron.core.dist_checkpointing")
core_optimizer: Any = import_module("megatron.core.optimizer.distrib_optimizer")
dict_utils: Any = import_module("megatron.core.dist_checkpointing.dict_utils")
mapping: Any = import_module("megatron.core.dist_checkpointing.mapping")
state_dict_utils: Any = import_module("megatron.core.dist_checkpointing.state_dict_utils")
bridge: Any = import_module("aiockpt.integrations.megatron.bridge")
locate: Any = import_module("aiockpt.integrations.megatron.checkpointing").locate

CHECKOUT = Path(__file__).parents[2]
DIGESTS = {
    "extract_matching_values": "4fc977a45d68e83f",
    "merge": "2c920bc70105ee8c",
    "ShardedTensor": "f1a1e3f8cd178f3e",
    "ShardedTensorFactory": "0126aa8a306b731c",
    "ShardedObject": "adbb350c1bdd3244",
    "apply_factory_merges": "6fbf7b2606032bad",
    "load_preprocess": "63ca8b11f615868f",
    "DistributedOptimizer._build_model_gbuf_param_range_map": "1b18aad4bcd76b06",
    "DistributedOptimizer._build_optimizer_group_ranges": "c0ccc7598123b087",
    "DistributedOptimizer._build_model_and_main_param_groups": "1b9f0ec06718f817",
}

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """What each rank has found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("megatron")
    module = "tests.frameworks.mcore.ranks"
    return {size: outcomes_of(module, size, folder / str(size), 450) for size in SHAPES}


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize(("world_size", "shape"), [(size, shape) for size, of_it in SHAPES.items() for shape in of_it])
def test_on_ranks(check: str, world_size: int, shape: str, outcomes: dict[int, list[dict[str, str]]]) -> None:
    for rank, found in enumerate(outcomes[world_size]):
        assert found.get(f"{check} {shape}") == "", f"rank {rank}: {found.get(f'{check} {shape}', 'never got there')}"


# ---------------------------------------------------------------------- one rank


@pytest.fixture(scope="module", autouse=True)
def a_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    start(0, 1, str(tmp_path_factory.mktemp("store") / "store"))
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    megatron.wait()


def tensor(key: str, data: torch.Tensor, **more: Any) -> Any:
    """Return a leaf that has all of a tensor."""
    return mapping.ShardedTensor.from_rank_offsets(key, data, **more)


def test_calls_have_megatrons_signatures() -> None:
    for ours, theirs in ((megatron.save, core.save), (megatron.load, core.load)):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize(
    ("folder", "place"),
    [
        ("/runs/7/iter_0000100", ("/runs/7", 100)),
        ("s3://bucket/7/iter_0000003/", ("s3://bucket/7", 3)),
        ("iter_0000003", (".", 3)),
        ("/runs/release", ("/runs/release", None)),
    ],
)
def test_a_folder_of_megatron_is_a_step_of_a_place(folder: str, place: tuple[str, int | None]) -> None:
    assert locate(folder) == place


def test_each_kind_of_leaf_comes_back(places: Path) -> None:
    args = argparse.Namespace(lr=0.1, sizes=[1, (2, 3)], inner=argparse.Namespace(x=None))
    saved = {
        "w": tensor("w", torch.arange(6.0).view(2, 3)),
        "scalar": tensor("scalar", torch.tensor(2.5)),
        "inner": [{"object": mapping.ShardedObject("o", {"t": torch.ones(2), "n": 1}, (2,), (1,))}],
        "buffer": mapping.ShardedObject("b", io.BytesIO(b"abc"), (1,), (0,)),
        "here": mapping.LocalNonpersistentObject("not saved"),
        "args": args,
        "step": 3,
        "list": [1, {"a": torch.ones(1)}],
    }
    megatron.save(saved, places / "x", content_metadata={"version": 2})
    asked = {
        "w": tensor("w", torch.zeros(2, 3)),
        "scalar": tensor("scalar", torch.tensor(0.0)),
        "inner": [{"object": mapping.ShardedObject("o", None, (2,), (1,))}],
        "buffer": mapping.ShardedObject("b", None, (1,), (0,)),
        "here": mapping.LocalNonpersistentObject("of this rank"),
    }
    found = megatron.load(asked, places / "x")
    assert torch.equal(found["w"], saved["w"].data)
    assert found["w"].data_ptr() == asked["w"].data.data_ptr()
    assert float(found["scalar"]) == 2.5
    assert found["inner"][0]["object"]["n"] == 1
    assert torch.equal(found["inner"][0]["object"]["t"], torch.ones(2))
    assert found["buffer"].read() == b"abc"
    assert (found["here"], found["args"], found["step"]) == ("of this rank", args, 3)
    assert torch.equal(found["list"][1]["a"], torch.ones(1))
    assert found["content_metadata"] == {"version": 2}
    assert isinstance(saved["w"], mapping.ShardedTensor)


def test_only_the_main_replica_saves_an_object(places: Path) -> None:
    megatron.save({"o": mapping.ShardedObject("o", 1, (1,), (0,), replica_id=(0, 0, 1))}, places / "x")
    with pytest.raises(aiockpt.StateMismatchError, match="o/shard_0_1: not in the checkpoint"):
        megatron.load({"o": mapping.ShardedObject("o", None, (1,), (0,))}, places / "x")


def test_two_leaves_of_one_part_are_stored_once_and_both_filled(places: Path) -> None:
    megatron.save({"a": tensor("w", torch.ones(3)), "b": tensor("w", torch.ones(3), replica_id=1)}, places / "x")
    for expected in ([1, 1, 1], [1, 1, 1, 0], [1, 1]):
        here = torch.full((len(expected),), 5.0)
        asked = {name: tensor("w", here.clone(), allow_shape_mismatch=True) for name in "ab"}
        found = megatron.load(asked, places / "x")
        assert found["a"].tolist() == found["b"].tolist() == expected


def test_keys_that_mean_two_things_are_refused(places: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"w: torch\.float32 .* in another: a key names one tensor"):
        megatron.save({"a": tensor("w", torch.ones(3)), "b": tensor("w", torch.ones(4))}, places / "x")
    for keys in (("w", "w.inner"), ("w.inner", "w")):
        with pytest.raises(aiockpt.UsageError, match=r"model\.w is a tensor and a prefix of"):
            megatron.save({key: tensor(key, torch.ones(3)) for key in keys}, places / "x")


def test_what_has_no_plain_form_is_refused_by_name(places: Path) -> None:
    with pytest.raises(aiockpt.UnsupportedStateError, match="args"):
        megatron.save({"args": {"function": object()}}, places / "x")


def test_strategies_are_refused(places: Path) -> None:
    for given in ((object(), None), (None, object())):
        for call in (megatron.save, megatron.load):
            with pytest.raises(aiockpt.UsageError, match="the engine is the strategy"):
                call({}, places / "x", *given)


def test_strict_says_what_becomes_of_keys_that_do_not_fit(places: Path, caplog: pytest.LogCaptureFixture) -> None:
    megatron.save({"a": tensor("a", torch.ones(2)), "b": tensor("b", torch.ones(2))}, places / "x")

    def asked() -> dict[str, Any]:
        return {"a": tensor("a", torch.zeros(2)), "c": tensor("c", torch.zeros(2))}

    for strict in (None, "assume_ok_unexpected", "raise_unexpected"):
        one = asked()
        with pytest.raises(aiockpt.StateMismatchError, match="c: not in the checkpoint") as refused:
            megatron.load(one, places / "x", strict=strict)
        assert "only in the checkpoint" not in str(refused.value)
        assert one["a"].data.tolist() == [0, 0]
    with pytest.raises(aiockpt.StateMismatchError, match=r"model\.b: only in the checkpoint"):
        megatron.load(asked(), places / "x", strict="raise_all")
    assert not caplog.records
    for strict, told in (("log_unexpected", 1), ("log_all", 2), ("ignore_all", 2)):
        found = megatron.load(asked(), places / "x", strict=strict)
        assert found["a"].tolist() == [1, 1]
        assert "c" not in found
        assert len(caplog.records) == told
    assert "model.b" in caplog.text
    found, missing, unexpected = megatron.load(asked(), places / "x", strict="return_all")
    assert (missing, unexpected) == ({"model.b"}, {"c"})
    found, missing, unexpected = megatron.load(asked(), places / "x", strict="return_unexpected")
    assert (missing, unexpected) == (set(), {"c"})


def test_another_shape_is_refused_and_nothing_is_overwritten(places: Path) -> None:
    megatron.save({key: tensor(key, torch.ones(2)) for key in ("a", "b", "padded")}, places / "x")
    asked = {"a": tensor("a", torch.zeros(2)), "b": tensor("b", torch.zeros(3))}
    asked["padded"] = tensor("padded", torch.full((3,), 5.0), allow_shape_mismatch=True)
    with pytest.raises(aiockpt.StateMismatchError, match=r"tensors\.b"):
        megatron.load(asked, places / "x")
    assert asked["a"].data.tolist() == [0, 0]
    assert asked["padded"].data.tolist() == [5, 5, 5]


@pytest.mark.parametrize("padded", [WORDS - 8, WORDS + 8])
def test_a_vocabulary_may_be_padded_otherwise(places: Path, padded: int) -> None:
    saved, other = Job(), Job(padded=padded, seed=8)
    megatron.save({"model": unwrapped(saved).sharded_state_dict()}, places / "x")
    megatron.load({"model": unwrapped(other).sharded_state_dict()}, places / "x")
    found, expected = (unwrapped(job).embedding.word_embeddings.weight.detach() for job in (other, saved))
    assert torch.equal(found[:WORDS], expected[:padded])
    assert not found[WORDS:].any()


def test_another_precision_is_converted(places: Path) -> None:
    saved, other = Job(), Job(bf16=True, seed=8)
    megatron.save({"model": unwrapped(saved).sharded_state_dict()}, places / "x")
    megatron.load({"model": unwrapped(other).sharded_state_dict()}, places / "x")
    for found, expected in zip(other.model.parameters(), saved.model.parameters(), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected.bfloat16())


def test_an_asynchronous_save_is_a_future_and_wait_waits_for_it(places: Path) -> None:
    weights = torch.ones(3)
    saving = megatron.save({"w": tensor("w", weights)}, places / "iter_0000004", async_sharded_save=True)
    weights.zero_()
    assert isinstance(saving, aiockpt.SaveFuture)
    megatron.wait()
    assert saving.done()
    assert megatron.latest(places) == 4
    assert megatron.load({"w": tensor("w", torch.zeros(3))}, places)["w"].tolist() == [1, 1, 1]


def test_options_are_those_of_the_first_call(places: Path) -> None:
    megatron.open_place(places / "x", retention=aiockpt.Retention(last=1))
    with pytest.raises(aiockpt.UsageError, match=r"call open_place\(…, worker=…\) before"):
        megatron.open_place(places / "x", worker="process")
    for step in (1, 2):
        megatron.save({"step": step}, places / "x" / f"iter_{step:07}")
    megatron.wait()
    assert [info.step for info in megatron.open_place(places / "x").steps().result()] == [2]


def test_nothing_there_is_an_error_that_latest_foresees(places: Path) -> None:
    assert megatron.latest(places / "x") is None
    for folder in ("x", "x/iter_0000003"):
        with pytest.raises(aiockpt.StepNotFoundError):
            megatron.load({}, places / folder)


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("distributed", "steps"),
    [(False, 2), (False, 0), (True, 2), (True, 0)],
    ids=["plain", "plain, before its first step", "distributed", "distributed, before its first step"],
)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_an_optimizer_goes_on_as_it_was(places: Path, distributed: bool, bf16: bool, steps: int) -> None:
    job = Job(distributed=distributed, bf16=bf16)
    for number in range(steps):
        job.step(number)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.02
    megatron.save(whole_state(job), places / "x")
    straight = [job.step(number) for number in (2, 3)]
    other = Job(distributed=distributed, bf16=bf16, seed=8)
    resume(other, places / "x")
    assert [other.step(number) for number in (2, 3)] == straight
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.02}
    assert_same(other.weights(), job.weights())


class Named(nn.Module):
    """A module with parameters of given names and shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *parents, last = name.split(".")
            inner: nn.Module = self
            for parent in parents:
                if parent not in dict(inner.named_children()):
                    inner.add_module(parent, nn.Module())
                inner = inner.get_submodule(parent)
            inner.register_parameter(last, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_a_plain_module_and_optimizer_take_it_and_it_takes_theirs(places: Path, bf16: bool) -> None:
    job = Job(bf16=bf16)
    for number in range(2):
        job.step(number)
    megatron.save(whole_state(job, 2), places / "megatron" / "iter_0000002")
    megatron.wait()
    straight = [job.step(number) for number in (2, 3)]
    weights = "main_params" if bf16 else "model"
    with aiockpt.Checkpointer(places / "megatron", ranks=aiockpt.Ranks()) as ckpt:
        found = {tensor.name: tensor.shape for tensor in ckpt.describe().result().tensors}
        module = Named({name.removeprefix("model."): found[name] for name in found if name.startswith("model.")})
        optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
        ckpt.load({"model": module, "optimizer": optimizer}, map={"model": weights} if bf16 else None).result()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.detach(), ckpt.read(2, f"{weights}.{name}").result()), name
            escaped = name.replace(".", "\\.")
            for key in ("exp_avg", "exp_avg_sq"):
                saved = ckpt.read(2, f"optimizer.state\\.{escaped}\\.{key}").result()
                assert saved.any()
                assert torch.equal(optimizer.state[parameter][key], saved), name
            assert float(optimizer.state[parameter]["step"]) == 2
    assert optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]
    with aiockpt.Checkpointer(places / "plain", ranks=aiockpt.Ranks()) as ckpt:
        ckpt.save(2, {"model": module, "optimizer": optimizer})
    other = Job(bf16=bf16, seed=8)
    for group in other.optimizer.param_groups:
        group["lr"] = 0.5
    resume(other, places / "plain" / "iter_0000002", same_places=False)
    assert [other.step(number) for number in (2, 3)] == straight
    assert_same(other.weights(), job.weights())


def test_another_optimizer_of_megatron_refuses_what_another_framework_has_saved(places: Path) -> None:
    job = Job(distributed=False)
    module = Named({"w": (2,)})
    with aiockpt.Checkpointer(places / "plain", ranks=aiockpt.Ranks()) as ckpt:
        ckpt.save(1, {"model": module, "optimizer": torch.optim.AdamW(module.parameters())})
    with pytest.raises(aiockpt.UsageError, match="fits Megatron's distributed one alone"):
        resume(job, places / "plain" / "iter_0000001", same_places=False)


def test_an_optimizer_of_a_model_that_is_not_given_is_refused() -> None:
    with pytest.raises(aiockpt.UsageError, match=r"a parameter of shape .* is not in model_sharded_state_dict"):
        megatron.optimizer_state(Job().optimizer, {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: setattr(one.config, "use_precision_aware_optimizer", True), "use_precision_aware_optimizer keeps"),
        (lambda one: setattr(one.ddp_config, "use_megatron_fsdp", True), "Megatron FSDP keeps DTensors"),
    ],
)
def test_what_keeps_its_state_otherwise_is_refused(change: Any, says: str) -> None:
    job = Job()
    change(job.optimizer.chained_optimizers[0])
    with pytest.raises(aiockpt.UsageError, match=says):
        megatron.optimizer_state(job.optimizer, unwrapped(job).sharded_state_dict())


def test_steps_that_differ_are_refused() -> None:
    job = Job()
    job.step(0)
    next(iter(job.optimizer.chained_optimizers[0].optimizer.state.values()))["step"].fill_(9)
    with pytest.raises(aiockpt.UsageError, match=r"have made \[1, 9\] steps"):
        megatron.optimizer_state(job.optimizer, unwrapped(job).sharded_state_dict())


def test_settings_that_differ_within_a_group_are_refused() -> None:
    job = Job()
    for rate, group in enumerate(job.optimizer.param_groups):
        group |= {"wd_mult": 1.0, "lr": 0.1 * rate}
    with pytest.raises(aiockpt.UsageError, match=r"experts have another lr than the rest of wd_mult=1\.0"):
        megatron.optimizer_state(job.optimizer, unwrapped(job).sharded_state_dict())


def test_a_factory_that_does_not_cut_into_runs_is_refused() -> None:
    job = Job()
    model = unwrapped(job).sharded_state_dict()
    (name, *_) = (name for name, base in model.items() if isinstance(base, mapping.ShardedTensorFactory))
    model[name].build_fn = lambda key, data, replica, flat: [tensor(key, data.t().clone(), replica_id=replica)]
    with pytest.raises(aiockpt.UsageError, match="its factory does not cut it into runs of elements"):
        megatron.optimizer_state(job.optimizer, model, is_loading=True)


class TestContract(IntegrationSuite):
    ATTACHES = False
    FALLS_BACK = False
    PROGRAM = (sys.executable, "-m", "tests.frameworks.mcore.train")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", "-m", "tests.frameworks.mcore.train", "tp=2")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        return go_on(Job(dropout=0.1), str(place), until, 1, step)


# ---------------------------------------------------------------------- Megatron-Bridge


class TrainState:
    """What Megatron-Bridge counts, as it saves it: a tensor for each number."""

    def __init__(self) -> None:
        self.step = self.consumed_train_samples = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            setattr(self, name, value.item())


class BridgeRun:
    """What Megatron-Bridge hands to its checkpoint manager, by the names that it documents; it is not installed here."""

    def __init__(self, seed: int = 7, **config: Any) -> None:
        self.job = Job(dropout=0.1, seed=seed)
        settings = {"save": "runs", "load": "runs", "async_save": True, "most_recent_k": -1, "ckpt_step": None}
        settings |= dict.fromkeys(("save_optim", "save_rng", "load_optim", "load_rng"), True) | {"finetune": False}
        self.manager = bridge.BridgeManager(SimpleNamespace(**settings | config))
        scheduler = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler(
            self.job.optimizer, 0.0, 1e-2, 1e-3, 2, 20, "linear", 0.1, 0.1, 20, "constant"
        )
        self.state = SimpleNamespace(train_state=TrainState())
        self.context = {
            "state": self.state,
            "model": [self.job.model],
            "optimizer": self.job.optimizer,
            "opt_param_scheduler": scheduler,
        }

    def save(self) -> None:
        flops = 1000 * self.state.train_state.step
        more = {
            "num_floating_point_operations_so_far": flops,
            "train_data_iterator": None,
            "non_persistent_ckpt": False,
        }
        self.manager.save(SimpleNamespace(**self.context, **more), None)

    def load(self, *, strict: bool = True, skip: bool = False) -> tuple[int, int]:
        loaded: tuple[int, int] = self.manager.load(
            SimpleNamespace(**self.context, strict=strict, skip_load_to_model_and_opt=skip)
        )
        return loaded

    def train(self, until: int) -> list[float]:
        losses = []
        for number in range(self.state.train_state.step + 1, until + 1):
            losses.append(self.job.step(number))
            self.context["opt_param_scheduler"].step(1)
            self.state.train_state.step = number
            self.state.train_state.consumed_train_samples += 2 * BATCH
            self.manager.finalize_async_saves(state=self.state)
        return losses


@pytest.fixture
def microbatches() -> Iterator[None]:
    calculator = import_module("megatron.core.num_microbatches_calculator")
    calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    yield
    calculator.destroy_num_microbatches_calculator()


@pytest.mark.usefixtures("microbatches")
def test_a_run_of_megatron_bridge_goes_on_bit_by_bit(places: Path) -> None:
    run = BridgeRun()
    assert run.manager.find_latest() == -1
    assert run.load() == (0, 0)
    run.train(2)
    run.save()
    losses = run.train(5)
    run.manager.finalize_async_saves(state=run.state, blocking=True, terminate=True)
    again = BridgeRun(seed=8)
    assert again.manager.find_latest() == 2
    assert again.manager.checkpointing_context["local_checkpoint_manager"].find_latest() == 2
    assert again.load() == (2, 2000)
    assert again.state.train_state.consumed_train_samples == 8
    assert again.train(5) == losses
    assert_same(again.job.weights(), run.job.weights())


@pytest.mark.usefixtures("microbatches")
def test_settings_of_megatron_bridge_are_heeded(places: Path) -> None:
    run = BridgeRun(most_recent_k=2, async_save=False)
    for step in (1, 2, 3):
        run.train(step)
        run.save()
        assert megatron.latest("runs") == step
    run.manager.finalize_async_saves(state=run.state, blocking=True, terminate=True)
    assert sorted(path.name for path in Path("runs").glob("step-*")) == ["step-00000002", "step-00000003"]
    older = BridgeRun(seed=8, ckpt_step=2, load_optim=False)
    assert older.load() == (2, 2000)
    assert not older.job.optimizer.chained_optimizers[0].optimizer.state
    tuned = BridgeRun(seed=8, finetune=True)
    assert tuned.load() == (0, 0)
    assert_same(tuned.job.weights(), run.job.weights())
    assert tuned.state.train_state.step == 0
    skipped = BridgeRun(seed=8)
    before = skipped.job.weights()
    assert skipped.load(skip=True) == (3, 3000)
    assert_same(skipped.job.weights(), before)
    assert BridgeRun(load=None).load() == (0, 0)


@pytest.mark.usefixtures("microbatches")
def test_a_resumed_run_of_megatron_bridge_keeps_its_rule_until_it_ends(places: Path) -> None:
    def kept() -> list[str]:
        return sorted(path.name.removeprefix("step-0000000") for path in Path("runs").glob("step-*"))

    def go_on(run: BridgeRun, *steps: int) -> None:
        for step in steps:
            run.train(step)
            run.save()
        run.manager.finalize_async_saves(state=run.state, terminate=True)

    first = BridgeRun(most_recent_k=2)
    assert first.load() == (0, 0)  # looks into the place before anything is saved
    go_on(first, 1, 2, 3)
    assert kept() == ["2", "3"]
    second = BridgeRun(seed=8, most_recent_k=1)
    assert second.load() == (3, 3000)
    go_on(second, 4)
    assert kept() == ["4"]
    assert first.load() == (4, 4000)
    go_on(first, 5, 6, 7)
    assert kept() == ["6", "7"]


@pytest.mark.usefixtures("microbatches")
def test_what_a_checkpoint_of_megatron_bridge_lacks_is_told(places: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = BridgeRun(save_optim=False, save_rng=False)
    run.train(1)
    run.save()
    run.manager.finalize_async_saves(state=run.state, blocking=True)
    with pytest.raises(aiockpt.StateMismatchError, match=r"optimizer\.state\.exp_avg"):
        BridgeRun().load()
    assert BridgeRun(load_optim=False, load_rng=False).load() == (1, 1000)
    assert "random numbers" not in caplog.text
    assert BridgeRun(load_optim=False).load() == (1, 1000)
    assert "step 1 has no bridge.rng/shard_0.0.0_1.1.1: the present random numbers go on" in caplog.text


@pytest.mark.usefixtures("microbatches")
def test_a_save_of_megatron_bridge_that_failed_is_told(places: Path) -> None:
    run = BridgeRun()
    (places / "runs").write_text("in the way")
    run.save()
    with pytest.raises(aiockpt.CheckpointError):
        run.manager.finalize_async_saves(state=run.state, blocking=True)


# ---------------------------------------------------------------------- the page, and what is relied on


def named_as_saved() -> nn.Module:
    """Return a plain module with the parameters that the page has saved."""
    with aiockpt.Checkpointer("runs/7", ranks=aiockpt.Ranks()) as ckpt:
        tensors = ckpt.describe().result().tensors
    return Named({one.name.removeprefix("model."): one.shape for one in tensors if one.name.startswith("model.")})


def test_the_page_runs() -> None:
    job = Job()
    job.step(0)
    scope = {"model": unwrapped(job), "optimizer": job.optimizer, "train": lambda: job.step(1), "Net": named_as_saved}
    run_page("frameworks/megatron.md", scope)
    assert scope["iteration"] == 100


def test_what_is_relied_on_is_as_it_was_read() -> None:
    distributed = core_optimizer.DistributedOptimizer
    used = [
        dict_utils.extract_matching_values,
        dict_utils.merge,
        mapping.ShardedTensor,
        mapping.ShardedTensorFactory,
        mapping.ShardedObject,
        mapping.apply_factory_merges,
        state_dict_utils.load_preprocess,
        distributed._build_model_gbuf_param_range_map,
        distributed._build_optimizer_group_ranges,
        distributed._build_model_and_main_param_groups,
    ]
    found = {one.__qualname__: hashlib.sha256(inspect.getsource(one).encode()).hexdigest()[:16] for one in used}
    assert found == DIGESTS
