"""A tier of weights alone: a checkpoint for a bare model, made from a nearer tier, and never taken for a whole one."""

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import PromotionFailed, StepSkipped
from aiockpt.format.manifest import decode_manifest
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Gate
from tests.small_run import Run, small_checkpointer
from tests.tiers.test_tiers import flip, steps
from tests.watch import Watch


def save(tiers: list[Any], run: Run, *numbers: int, **options: Any) -> None:
    """Save *run* as each of *numbers*, trained one step further each time; return when every tier has what it takes."""
    with small_checkpointer(tiers, **options) as ckpt:
        for number in numbers:
            run.train()
            ckpt.save(number, run.state).result()


def weights(place: Any, **options: Any) -> aiockpt.Tier:
    return aiockpt.Tier(place, content="weights", **options)


def load(place: Any, state: dict[str, Any], step: int | None = None, **options: Any) -> aiockpt.LoadResult:
    with small_checkpointer(place) as ckpt:
        loaded = ckpt.load(state, step, **options).result()
    assert loaded is not None
    return loaded


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_its_checkpoint_loads_into_a_bare_model_and_has_nothing_else(near: Path, far: Path) -> None:
    run, bare = Run(1), Run(2).model
    save([near, weights(far)], run, 7)
    assert load(far, {"model": bare}).step == 7
    assert same(bare, run.model)
    with small_checkpointer(far) as ckpt:
        held = ckpt.describe(7).result()
        assert {tensor.name for tensor in held.tensors} == {f"model.{name}" for name in run.model.state_dict()}
        assert held.values == {"model": {"$": "module"}}
        assert held.per_rank == {}
        assert ckpt.verify(7).result().step == 7


def in_containers(value: float) -> dict[str, Any]:
    """Return a state with modules at every place where one may be, and other things beside them."""

    def net() -> torch.nn.Linear:
        made = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(made.weight, value)
        return made

    named = OrderedDict({"a": net(), "step": value})
    return {
        "model": net(),
        "nets": [net(), value, {"inner": net(), "count": value}, None, torch.full((2,), value)],
        "pair": (net(), [value, [net()]]),
        "named": named,
        "by number": {1: net(), 2: value},
        "log": [value, value],
    }


def modules_in(value: Any) -> list[torch.nn.Module]:
    if isinstance(value, torch.nn.Module):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [module for one in inside for module in modules_in(one)]


@pytest.mark.parametrize("how", ["a tier", "thinned"])
def test_modules_in_lists_tuples_and_dicts_of_any_kind_are_weights(near: Path, far: Path, how: str) -> None:
    saved, found = in_containers(1.0), in_containers(2.0)
    place, keep = far, aiockpt.Retention(last=9, optimizer=1)
    thins = how == "thinned"
    where = [aiockpt.Tier(place, keep=keep)] if thins else [aiockpt.Tier(near), weights(place)]
    with small_checkpointer(where) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, saved).result()
    with small_checkpointer(place) as ckpt:
        values: Any = ckpt.describe(1).result().values
        assert values.keys() == {"model", "nets", "pair", "named", "by number"}
    result = load(place, found, 1, strict=False)
    assert len(modules_in(saved)) == 7
    for one, other in zip(modules_in(saved), modules_in(found), strict=True):
        assert same(one, other)
    assert set(result.left_out) == {"nets[1]", "nets[3]", "nets[4]", "pair[1][0]"}
    assert found["nets"][1] == found["pair"][1][0] == 2.0
    assert torch.equal(found["nets"][4], torch.full((2,), 2.0))
    assert found["log"] == [2.0, 2.0]


def test_other_tools_open_its_files(near: Path, far: Path, run: Run, tmp_path: Path) -> None:
    save([near, weights(far)], run, 7)
    (file,) = tmp_path.glob("far/step-*/a-*/d/*.safetensors")
    found = safetensors.torch.load_file(file)
    assert found.keys() == run.model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in run.model.state_dict().items())
    assert not list(tmp_path.glob("far/step-*/a-*/c/*"))


def test_tensors_of_many_windows_and_files_arrive_whole(near: Path, far: Path, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({f"m{n}": torch.nn.Linear(97, 61 + n) for n in range(9)})
    model.register_buffer("low", torch.randn(12345).to(torch.bfloat16))
    model.register_buffer("none", torch.zeros(0, 4))
    model.register_buffer("scalar", torch.tensor(3.5))
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=20480, file_bytes=70_000)
    moments = {name: torch.randn_like(value, dtype=torch.float32) for name, value in model.state_dict().items()}
    state = {"before": moments, "model": model, "after": torch.randn(50_000)}
    with aiockpt.Checkpointer([near, weights(far)], limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.save(1, state).result()
    assert len(list(tmp_path.glob("far/step-*/a-*/d/*.safetensors"))) > 2
    bare = torch.nn.ModuleDict({f"m{n}": torch.nn.Linear(97, 61 + n) for n in range(9)})
    for name in ("low", "none", "scalar"):
        bare.register_buffer(name, torch.zeros_like(model.state_dict()[name]))
    load(far, {"model": bare})
    assert same(bare, model)


def test_modules_are_weights_and_tensors_beside_them_not(near: Path, far: Path) -> None:
    tied = torch.nn.Linear(4, 4)
    shared = torch.nn.Linear(3, 3)
    state = {
        "first": shared.weight,  # a bare name for what a module has too: the module's is kept
        "nested": {"a.b": shared, "$": torch.nn.Linear(2, 2), "note": "x"},
        "pair": torch.nn.ModuleList([tied, tied]),
        "loose": torch.zeros(5),
    }
    with small_checkpointer([near, weights(far)]) as ckpt:
        ckpt.save(1, state).result()
    with small_checkpointer(far) as ckpt:
        held = ckpt.describe(1).result()
    assert {tensor.name for tensor in held.tensors} == {
        *(rf"nested.a\.b.{name}" for name in ("weight", "bias")),
        *(f"nested.$.{name}" for name in ("weight", "bias")),
        *(f"pair.0.{name}" for name in ("weight", "bias")),
    }
    assert held.alias == {f"pair.1.{name}": f"pair.0.{name}" for name in ("weight", "bias")}
    bare = {"nested": {"a.b": torch.nn.Linear(3, 3), "$": torch.nn.Linear(2, 2)}}
    load(far, bare)
    assert same(bare["nested"]["a.b"], shared)


class Counting(torch.nn.Module):
    """A module with a value of its own, and a tensor in it."""

    count: dict[str, Any]

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.count = {"n": count, "t": torch.full((3,), float(count))}

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_extra_values_of_modules_are_weights(near: Path, far: Path) -> None:
    saved, bare = Counting(5), Counting(0)
    with small_checkpointer([near, weights(far)]) as ckpt:
        ckpt.save(1, {"model": saved, "step": 1}).result()
    load(far, {"model": bare})
    assert bare.count["n"] == 5
    assert torch.equal(bare.count["t"], saved.count["t"])


# ------------------------------------------------------------------------------------------------ not a whole one


def test_a_resume_passes_newer_weights_over_and_says_why(run: Run, near: Path, far: Path) -> None:
    save([aiockpt.Tier(near, keep=5), weights(far)], run, 1)
    first = run.digest()
    save([near, weights(far)], run, 2)
    shutil.rmtree(near / "step-00000002")  # the near tier lost its newest step
    watch, other = Watch(), Run(9)
    with small_checkpointer([near, weights(far)], observers=[watch]) as ckpt:
        assert ckpt.latest().result() == 1
        loaded = ckpt.load(other.state).result()
        assert loaded is not None
    assert (loaded.step, loaded.url) == (1, f"file://{near}")
    assert other.digest() == first
    ((step, reason),) = loaded.skipped
    assert step == "step-00000002"
    assert "weights only" in reason
    assert "optimizer" in reason
    assert [event.step for event in watch.of(StepSkipped)] == [2]


def test_a_state_that_wants_no_more_takes_the_newest_weights(near: Path, far: Path) -> None:
    run, bare = Run(1), Run(2).model
    save([near, weights(far)], run, 1, 2)
    shutil.rmtree(near / "step-00000002")
    loaded = load([near, far], {"model": bare})
    assert (loaded.step, loaded.url, loaded.skipped) == (2, f"file://{far}", ())
    assert same(bare, run.model)
    whole = Run(3)
    assert load([near, far], whole.state, only=["model"]).step == 2
    assert same(whole.model, run.model)


@pytest.mark.parametrize("strict", [True, False])
def test_a_resume_from_weights_says_what_lacks(near: Path, far: Path, strict: bool) -> None:
    save([near, weights(far)], Run(1), 1, 2)
    other = Run(9)
    before = other.digest()
    says = r"(?s)step-00000002 in \S+, which has its weights only.*optimizer.*only="
    with pytest.raises(aiockpt.StateMismatchError, match=says) as caught:
        load(far, other.state, strict=strict)
    assert any(problem.startswith("step:") for problem in caught.value.problems)
    assert isinstance(caught.value.__cause__, aiockpt.NoValidCheckpointError)
    assert other.digest() == before


def test_weights_that_were_asked_for_by_step_load_what_fits(near: Path, far: Path) -> None:
    run, other = Run(1), Run(9)
    save([near, weights(far)], run, 1)
    with pytest.raises(aiockpt.StateMismatchError, match="weights only"):
        load(far, other.state, 1)
    loaded = load(far, other.state, 1, strict=False)
    assert "optimizer" in loaded.missing
    assert same(other.model, run.model)


def test_a_whole_copy_is_taken_however_far(near: Path, far: Path, tmp_path: Path) -> None:
    run, other = Run(1), Run(9)
    save([far, weights(near)], run, 1)
    loaded = load([near, far], other.state, 1, strict=False)
    assert (loaded.url, loaded.missing) == (f"file://{tmp_path}/far", ())
    assert other.digest() == run.digest()


def test_blocks_of_weights_mend_no_whole_copy(run: Run, near: Path, far: Path) -> None:
    save([near, weights(far)], run, 1)
    spoil(near, 1, "model.0.weight")
    with pytest.raises(aiockpt.CorruptionError):
        load([near, weights(far)], Run(9).state, 1)


# ------------------------------------------------------------------------------------------------ how it is made


def test_it_is_no_commit(tmp_path: Path) -> None:
    run, memory = Run(1), MemoryBackend()
    with small_checkpointer([memory, weights(tmp_path / "w"), tmp_path / "full"]) as ckpt:
        future = ckpt.save(1, run.state)
        result = future.result()
        assert result.url == f"file://{tmp_path}/full"
        assert future.committed(tmp_path / "w").result().url == f"file://{tmp_path}/w"
    with small_checkpointer([memory, weights(tmp_path / "w")]) as ckpt:
        assert not ckpt.save(2, run.state).result().durable
    assert steps(tmp_path / "w") == [1, 2]


def test_a_whole_tier_behind_weights_gets_everything(near: Path, far: Path, tmp_path: Path) -> None:
    run, other = Run(1), Run(9)
    tiers = [near, weights(tmp_path / "w"), far]
    save(tiers, run, 1)
    load(far, other.state)
    assert other.digest() == run.digest()


def spoil(root: Path, step: int, name: str) -> None:
    """Flip a bit in the first byte of tensor *name*."""
    manifest = decode_manifest(next(root.glob(f"step-{step:08d}/MANIFEST-*.json")).read_bytes())
    flip(root, step, manifest.tensors[name].pieces[0].start)


def test_a_whole_copy_is_never_made_of_weights(tmp_path: Path) -> None:
    run, other = Run(1), Run(9)
    near, w, far = tmp_path / "near", tmp_path / "w", tmp_path / "far"
    save([near, weights(w)], run, 1)
    first = run.digest()
    save([near, weights(w)], run, 2)
    shutil.rmtree(near / "step-00000002")
    save([near, weights(w), far], run, 3)  # the first save brings what an earlier process could not
    assert steps(far) == [1, 3]
    load(far, other.state, 1)
    assert other.digest() == first


def test_a_block_that_only_weights_could_stand_in_for_is_bad(run: Run, tmp_path: Path) -> None:
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384, file_bytes=9000)
    near, w, far = tmp_path / "near", tmp_path / "w", Gate(LocalBackend(str(tmp_path / "far")))
    run.train()
    with aiockpt.Checkpointer([near, weights(w), far], limits=aiockpt.Limits(io=io)) as ckpt:
        future = ckpt.save(1, run.state)
        future.committed(w).result()
        last = max(near.glob("step-*/a-*/d/*"))
        data = last.read_bytes()
        last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        far.open_up()
        assert isinstance(future.committed(far).exception(), aiockpt.CorruptionError)


def test_damage_is_never_copied(run: Run, near: Path, far: Path) -> None:
    with small_checkpointer(near) as ckpt:
        ckpt.save(2, run.state).result()
    spoil(near, 2, "model.3.weight")
    watch = Watch()
    with small_checkpointer([near, weights(far, every=2)], observers=[watch]) as ckpt:
        ckpt.save(3, run.state).result()
        ckpt.save(4, run.state).result()
    assert steps(far) == [4]
    (failed,) = watch.of(PromotionFailed)
    assert (failed.step, failed.final) == (2, True)
    assert "is not what was saved" in failed.error


def test_a_copy_that_was_cut_short_is_taken_up_again(tmp_path: Path) -> None:
    run, bare = Run(1), Run(2).model
    io = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384, file_bytes=9000)
    cut = Fault(do="fail", verb="create", match="*-0001.safetensors", times=1)
    far = FaultyBackend(LocalBackend(str(tmp_path / "far")), [cut])
    with aiockpt.Checkpointer([tmp_path / "near", weights(far)], limits=aiockpt.Limits(io=io)) as ckpt:
        ckpt.save(1, run.state).committed(far).result()
    load(tmp_path / "far", {"model": bare})
    assert same(bare, run.model)


def test_copies_of_weights_are_made_up_for_once(run: Run, near: Path, far: Path) -> None:
    save([near], run, 2, 4, 5)
    save([near, weights(far, every=2)], run, 6)
    assert steps(far) == [4, 6]
    attempts = {path.name for path in far.glob("step-*/a-*")}
    save([near, weights(far, every=2)], run, 8)
    assert steps(far) == [4, 6, 8]
    assert attempts < {path.name for path in far.glob("step-*/a-*")}
    assert all(len(list(step.glob("MANIFEST-*"))) == 1 for step in far.glob("step-*"))


def test_a_state_without_modules_is_given_up_there_and_saved_elsewhere(near: Path, far: Path) -> None:
    with small_checkpointer([near, weights(far)]) as ckpt:
        future = ckpt.save(1, {"x": torch.zeros(4)})
        future.result()
        assert isinstance(future.committed(far).exception(), aiockpt.UsageError)
    assert steps(near) == [1]


def test_weights_need_a_nearer_tier_with_whole_steps(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match="put one before it"):
        aiockpt.Checkpointer([weights(tmp_path / "a"), tmp_path / "b"])
    with pytest.raises(aiockpt.UsageError, match="put one before it"):
        aiockpt.Checkpointer([aiockpt.Tier(tmp_path / "a", every=10), weights(tmp_path / "b", every=15)])
    with pytest.raises(aiockpt.UsageError, match="give one of 'full', 'weights'"):
        aiockpt.Tier(tmp_path, content="everything")  # type: ignore[arg-type]
    with aiockpt.Checkpointer([aiockpt.Tier(tmp_path / "a", every=5), weights(tmp_path / "b", every=15)]) as ckpt:
        future = ckpt.save(5, Run(1).state)
        assert isinstance(future.committed(tmp_path / "b").exception(), aiockpt.SaveSkippedError)
