"""Modules are saved under the names of the bare module, whatever wraps or hooks them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.errors import StateMismatchError


def names(state: dict[str, Any]) -> list[str]:
    return [shard.name for shard in StateWalker().walk(state).tensors]


def small() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("none", None)


def test_names_are_keys_of_the_state_dict() -> None:
    model = small()
    assert names({"model": model}) == [f"model.{name}" for name in model.state_dict()]
    assert names({"m": Buffers()}) == ["m.kept"]  # no buffers that do not persist, no empty slots
    assert names({"m": nn.Sequential(SavesOnly(2, 3))}) == ["m.0.doubled"]


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_wrapped_and_bare_modules_load_each_other(save: Any) -> None:
    def wrapped(bare: Any) -> Any:
        bare[0] = torch.compile(bare[0], backend="eager")
        return torch.compile(nn.parallel.DistributedDataParallel(bare), backend="eager")

    one = small()
    saved = save({"model": wrapped(one)})
    bare = {"model": small()}
    assert [shard.name for shard in saved.walked.tensors] == names(bare)
    saved.load(bare)
    assert saved.equals(bare)
    again = {"model": wrapped(small())}
    save(bare).load(again)
    assert saved.equals(again)


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_kept_with_its_tensors(save: Any) -> None:
    extra: dict[str, Any] = {"scale": torch.arange(3.0), "steps": (1, 2)}
    found: dict[str, Any] = {"model": nn.Sequential(WithExtra(None))}
    saved = save({"model": nn.Sequential(WithExtra(extra))})
    assert "model.0._extra_state.scale" in saved.bytes
    saved.load(found)
    assert torch.equal(found["model"][0].extra.pop("scale"), extra["scale"])
    assert found["model"][0].extra == {"steps": (1, 2)}
    with pytest.raises(StateMismatchError, match=r"model._extra_state: in the state but not"):
        save({"model": nn.Linear(2, 2)}).load({"model": WithExtra(None)})


@pytest.mark.parametrize("source", ["module", "state_dict"])
@pytest.mark.parametrize("target", ["module", "state_dict"])
def test_extra_state_that_is_a_tensor_loads_into_each_form(save: Any, source: str, target: str) -> None:
    one, other = (WithExtra(torch.full((3,), value)) for value in (1.0, 2.0))
    held: Any = other if target == "module" else other.state_dict()
    save({"m": one if source == "module" else one.state_dict()}).load({"m": held})
    other.load_state_dict(other.state_dict() if target == "module" else held)
    assert torch.equal(other.extra, one.extra)


def test_extra_state_is_read_anew_on_every_walk() -> None:
    model, walker = WithExtra({"n": 1}), StateWalker()
    walker.walk({"m": model})
    model.extra = {"n": 2}
    assert walker.walk({"m": model}).values == {"m": {"$": "module", "values": {"_extra_state": {"n": 2}}}}
    assert walker.cold_walks == 1


class Renames(nn.Linear):
    """Has a form of its own for checkpoints."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {"doubled": state["weight"] * 2, "bias": state["bias"], "note": "doubled"}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        assert state_dict["note"] == "doubled"
        return super().load_state_dict({"weight": state_dict["doubled"] / 2, "bias": state_dict["bias"]})


class SavesMore(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "sum"] = self.weight.detach().sum()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        assert torch.equal(state_dict.pop(prefix + "sum"), state_dict[prefix + "weight"].sum())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class SavesOnly(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "doubled"] = self.weight.detach() * 2


class LoadsOnly(nn.Linear):
    _version = 3
    loaded = False

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.loaded = local_metadata["version"] == 3
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


def test_a_module_loads_its_way_and_knows_versions(save: Any) -> None:
    found: dict[str, Any] = {"m": nn.Sequential(LoadsOnly(2, 3))}
    saved = save({"m": nn.Sequential(LoadsOnly(2, 3))})
    saved.load(found)
    assert found["m"][0].loaded
    assert saved.equals(found)


def hooked() -> Any:
    model = small()
    model[0]._register_state_dict_hook(
        lambda module, state, prefix, _: state.update({prefix + "scaled": state.pop(prefix + "weight") * 8})
    )
    model[0].register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.update({prefix + "weight": state.pop(prefix + "scaled") / 8})
    )
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Renames(2, 3), "model.doubled"),
        (lambda: nn.ModuleDict({"a": SavesMore(2, 3)}), "model.a.sum"),
        (hooked, "model.0.scaled"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), "model.parametrizations.weight.original0"),
    ],
)
def test_a_module_that_wants_a_say_has_it(save: Any, make: Callable[[], nn.Module], expected: str) -> None:
    saved = save({"model": make()})
    assert expected in saved.bytes
    found: dict[str, Any] = {"model": make()}
    saved.load(found)
    assert saved.equals(found)


def test_a_compiled_child_keeps_its_bare_name(save: Any) -> None:
    def compiled() -> Any:
        model = hooked()
        model[1] = torch.compile(model[1], backend="eager")
        return model

    saved = save({"model": compiled()})
    assert not [name for name in saved.bytes if "_orig_mod" in name]
    for make in (hooked, compiled):
        found = {"model": make()}
        saved.load(found)
        assert saved.equals(found)


def test_a_module_with_a_say_loads_whole(save: Any) -> None:
    saved = save({"model": hooked(), "x": 1})
    with pytest.raises(ValueError, match=r"'model.0.bias' is a part of 'model.0', which loads as a whole"):
        saved.load({"model": hooked()}, only=["model.0.bias"])
    found: dict[str, Any] = {"model": hooked(), "x": 0}
    before = found["model"].state_dict()["0.bias"].clone()
    saved.load(found, only=["x"])
    assert torch.equal(found["model"].state_dict()["0.bias"], before)


def test_what_a_module_misses_is_no_garbage(save: Any) -> None:
    class Longer(Renames):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().state_dict(*args, **kwargs), "more": torch.ones(3)}

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            assert "more" not in state_dict
            return super().load_state_dict(state_dict)

    target = save({"model": Renames(2, 3)}).load({"model": Longer(2, 3)}, strict=False)
    assert target.missing == ("model.more",)


def test_a_state_dict_saved_in_part_fills_the_rest_of_a_module(tmp_path: Path) -> None:
    saved, model = small(), small()
    before = model[0].weight.detach().clone()
    with aiockpt.Checkpointer(tmp_path, exclude=r"model.0\.weight") as ckpt:
        ckpt.save(1, {"model": saved.state_dict()}).result()
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"model": model}).result() is not None
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].bias, saved[0].bias)


def test_a_self_loading_module_gets_its_own_keys(save: Any) -> None:
    more = {"seen": list(range(2000)), "bytes": b"x" * 100_000, "tensor": torch.ones(2)}

    class Nested(Renames):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().state_dict(*args, **kwargs), "more": more}

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            assert state_dict.keys() == {"doubled", "bias", "note", "more"}
            assert state_dict["more"]["seen"] == more["seen"]
            return super().load_state_dict(state_dict)

    save({"model": Nested(2, 3)}).load({"model": Nested(2, 3)})


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_tied_parameters_are_stored_once_and_stay_tied(save: Any) -> None:
    saved, found = save({"model": tied()}), {"model": tied()}
    assert list(saved.bytes) == ["model.embed.weight"]
    assert saved.walked.alias == {"model.head.weight": "model.embed.weight"}
    target = saved.load(found)
    assert len(target.wanted) == 1
    assert target.written == {"model.embed.weight", "model.head.weight"}
    assert saved.equals(found)


def test_a_tied_checkpoint_fills_an_untied_model(save: Any) -> None:
    shared, found = torch.arange(4.0), {"a": torch.zeros(4), "b": torch.zeros(4)}
    assert len(save({"a": shared, "b": shared}).load(found).wanted) == 2
    assert torch.equal(found["a"], shared)
    assert torch.equal(found["b"], shared)
    with pytest.raises(StateMismatchError, match="b: shares its memory with a, but the checkpoint has two tensors"):
        save({"a": torch.ones(4), "b": torch.ones(4)}).load({"a": shared, "b": shared})


def test_the_same_memory_seen_differently_is_stored_each_on_its_own() -> None:
    base = torch.arange(6.0)
    state = {"a": base, "b": base.view(2, 3), "c": base[:5], "d": base[1:], "e": base.view(torch.int32)}
    walked = StateWalker().walk(state)
    assert [shard.name for shard in walked.tensors] == ["a", "b", "c", "d", "e"]
    assert walked.alias == {}
    packed, empty = torch.ones(4, dtype=torch.uint8), torch.empty(0)
    for other in ({"a": packed, "b": packed.view(vars(torch)["uint4"])}, {"a": empty, "b": empty}):
        assert StateWalker().walk(other).alias == {}
