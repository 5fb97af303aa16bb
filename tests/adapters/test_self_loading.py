"""Modules that load themselves get what is stored, and only they. Through the public API."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import aiockpt
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.module import ModulePart
from aiockpt.adapters.watch import Watch
from aiockpt.errors import StateMismatchError, UnsupportedStateError
from tests.adapters.conftest import Through

seq: Any = nn.Sequential
named: Any = nn.ModuleDict
listed: Any = nn.ModuleList


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(
        torch.equal(mine[key], theirs[key]) if isinstance(mine[key], torch.Tensor) else mine[key] == theirs[key]
        for key in mine
    )


class Bank(nn.Module):
    """A memory bank whose buffer grows while training, as users write them."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.register_buffer("rows", torch.zeros(0, 2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.rows = torch.empty_like(state_dict[prefix + "rows"], device=self.rows.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class LaterKeys(nn.Module):
    """A module some of whose buffers only appear while training."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def see(self, name: str) -> None:
        self.register_buffer(name, torch.randn(3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in state_dict:
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and "." not in name and name not in ("w", *self._buffers):
                self.register_buffer(name, torch.empty(3))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def test_a_buffer_resized_by_its_hook_comes_back(through: Through) -> None:
    trained, fresh = seq(nn.Linear(2, 2), Bank()), seq(nn.Linear(2, 2), Bank())
    trained[1].rows = torch.randn(7, 2)
    untouched = fresh[0].weight
    result = through({"model": trained}, {"model": fresh})
    assert same(trained, fresh)
    assert fresh[0].weight is untouched
    assert result.missing == result.unexpected == result.differences == ()


def test_keys_that_appear_while_training_are_given_to_the_module(through: Through) -> None:
    trained, fresh = named({"a": LaterKeys()}), named({"a": LaterKeys()})
    trained["a"].see("first")
    trained["a"].see("second")
    through({"net": {"model": trained}}, {"net": {"model": fresh}})
    assert same(trained, fresh)


def test_observers_of_torch_ao_come_back(through: Through) -> None:
    from torch.ao.quantization import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

    def make() -> Any:
        return listed([PerChannelMinMaxObserver(), MinMaxObserver(), HistogramObserver()])

    trained, fresh = make(), make()
    for observer in trained:
        observer(torch.randn(5, 4))
    through({"model": trained}, {"model": fresh})
    assert same(trained, fresh)


def test_a_lazy_layer_is_made_by_the_checkpoint(through: Through) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = seq(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        return model, torch.optim.Adam(model.parameters())

    (trained, optimizer), (fresh, other) = make(), make()
    trained(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    through({"model": trained, "optimizer": optimizer}, {"model": fresh, "optimizer": other})
    assert same(trained, fresh)
    assert fresh[0].weight.shape == (3, 5)
    for model, one in ((trained, optimizer), (fresh, other)):
        one.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        one.step()
    assert same(trained, fresh)


def test_a_lazy_layer_without_a_shape_is_refused(through: Through) -> None:
    with pytest.raises(UnsupportedStateError, match=r"model.0.weight: a lazy parameter has no shape yet"):
        through({"model": seq(nn.LazyLinear(2))}, {})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("how", ["script", "trace", "inside"])
def test_torchscript_is_saved_and_loaded_by_its_state_dict(through: Through, how: str) -> None:
    def make() -> Any:
        plain = seq(nn.Linear(2, 3), nn.BatchNorm1d(3))
        if how == "trace":
            return torch.jit.trace(plain.eval(), torch.ones(4, 2))  # type: ignore[no-untyped-call]
        scripted = torch.jit.script(plain)
        return scripted if how == "script" else seq(nn.Linear(2, 2), scripted)

    trained, fresh = make(), make()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (trained, fresh)]
    trained(torch.randn(4, 2)).sum().backward()
    optimizers[0].step()
    through({"model": trained, "optimizer": optimizers[0]}, {"model": fresh, "optimizer": optimizers[1]})
    assert same(trained, fresh)
    assert torch.equal(trained(torch.ones(4, 2)), fresh(torch.ones(4, 2)))
    states = [[one["momentum_buffer"] for one in optimizer.state.values()] for optimizer in optimizers]
    assert len(states[0]) == len(list(trained.parameters()))
    assert all(map(torch.equal, *states))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_and_its_module_load_each_other(through: Through) -> None:
    plain = seq(nn.Linear(2, 3), nn.BatchNorm1d(3))
    scripted = torch.jit.script(seq(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    through({"model": plain}, {"model": scripted})
    assert same(plain, scripted)


class Refuses(nn.Linear):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this layer has moved on")


def test_what_a_module_refuses_is_a_mismatch_that_says_partly_overwritten(through: Through) -> None:
    saved, found = seq(nn.Linear(2, 2), nn.Linear(2, 2)), seq(nn.Linear(2, 2), Refuses(2, 2))
    with pytest.raises(StateMismatchError, match=r"(?s)model.1: .*Refuses refused.*moved on.*partly overwritten"):
        through({"model": saved}, {"model": found})


def test_a_shape_is_refused_by_the_module_itself(through: Through) -> None:
    class Hooked(nn.Linear):
        pass

    def make(width: int) -> Any:
        model: Any = Hooked(width, 2)
        model.register_load_state_dict_pre_hook(lambda *args: None)
        return model

    with pytest.raises(StateMismatchError, match=r"(?s)size mismatch for weight.*partly overwritten"):
        through({"model": make(3)}, {"model": make(2)})


def test_another_dtype_is_refused_before_anything_changes(through: Through) -> None:
    found = seq(Bank(), nn.Linear(2, 2))
    before = copy.deepcopy(found)
    with pytest.raises(StateMismatchError, match=r"model.0.proj.weight: torch.float32 in the state, torch.float64"):
        through({"model": seq(Bank(), nn.Linear(2, 2)).double()}, {"model": found})
    assert same(found, before)


def test_a_module_with_nothing_stored_is_missing(through: Through) -> None:
    found = seq(nn.Linear(2, 2), Bank())
    before = copy.deepcopy(found)
    with pytest.raises(StateMismatchError, match=r"model.1.rows: in the state but not in the checkpoint"):
        through({"model": seq(nn.Linear(2, 2))}, {"model": found})
    assert same(found, before)


def test_only_the_part_with_the_hook_loads_as_a_whole(through: Through) -> None:
    saved, found = seq(nn.Linear(2, 2), Bank()), seq(nn.Linear(2, 2), Bank())
    saved[1].rows = torch.randn(4, 2)
    before = found[0].weight.clone()
    through({"model": saved}, {"model": found}, only=["model.1"])
    assert same(saved[1], found[1])
    assert torch.equal(found[0].weight, before)


class Versioned(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kw: Any) -> None:
        if local_metadata.get("version", 0) < 2:  # was stored as a logarithm
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kw)


def test_a_module_is_told_the_version_that_was_saved(through: Through) -> None:
    old = seq(Versioned())
    old[0].__class__ = type("Versioned", (Versioned,), {"_version": 1})
    fresh = seq(Versioned())
    through({"model": old}, {"model": fresh})
    assert torch.equal(fresh[0].scale, torch.ones(2).exp())
    again = seq(Versioned())
    through({"model": fresh}, {"model": again})
    assert same(fresh, again)


class TakesNoStrict(nn.Linear):
    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict({key: value + 1 for key, value in state_dict.items()})


def test_a_child_with_load_state_dict_is_asked(through: Through) -> None:
    saved, found = seq(TakesNoStrict(2, 2)), seq(TakesNoStrict(2, 2))
    through({"model": saved}, {"model": found})
    assert torch.equal(found[0].weight, saved[0].weight + 1)


def test_a_tie_across_the_border_of_what_loads_itself_is_checked(through: Through) -> None:
    def tied() -> Any:
        model = seq(nn.Linear(2, 2), Bank())
        model[1].proj.weight = model[0].weight
        return model

    saved, found = tied(), tied()
    through({"model": saved}, {"model": found})
    assert same(saved, found)
    with pytest.raises(StateMismatchError, match="shares its memory with"):
        through({"model": seq(nn.Linear(2, 2), Bank())}, {"model": tied()})


class Unpacks(nn.Module):
    """A module whose ``state_dict()`` gives tensors made for it, as packed parameters do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.packed = [value] * 1000

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        made = kwargs.get("destination")
        made = {} if made is None else made
        made[kwargs.get("prefix", "") + "scale"] = torch.tensor(self.packed)
        return made

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.packed = state_dict[prefix + "scale"].tolist()


def test_short_lived_tensors_are_no_tie(through: Through) -> None:
    saved, found = (seq(*(Unpacks(sign * number) for number in range(20))) for sign in (1.0, -1.0))
    through({"model": saved}, {"model": found})
    assert [member.packed[0] for member in found] == list(map(float, range(20)))


def test_a_renamed_module_that_loads_itself_is_found(through: Through) -> None:
    saved, found = Bank(), Bank()
    saved.rows = torch.randn(3, 2)
    through({"old": seq(saved)}, {"new": seq(found)}, map={"new": "old"})
    assert same(saved, found)


def nested() -> Any:
    return seq(seq(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1), Bank())


def wrapped(prefix: str) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {prefix + key: value for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "as_saved",
    [
        lambda model: model.state_dict(),
        lambda model: dict(model.state_dict()),
        wrapped("module."),
        wrapped("_orig_mod."),
        wrapped("_orig_mod.module."),
        get_model_state_dict,
    ],
    ids=["state_dict", "dict", "DDP", "compiled", "compiled DDP", "DCP"],
)
def test_a_saved_state_dict_loads_into_the_module(through: Through, as_saved: Callable[[nn.Module], Any]) -> None:
    import torch.distributed.checkpoint.state_dict

    trained, fresh = nested(), nested()
    trained[2].rows = torch.randn(3, 2)
    result = through({"model": as_saved(trained), "step": 3}, {"model": fresh, "step": 0})
    assert same(trained, fresh)
    assert result.missing == result.unexpected == result.differences == ()


def test_a_saved_module_loads_into_a_state_dict(through: Through) -> None:
    trained, fresh = nested(), nested()
    state: dict[str, Any] = {"nets": {"g": fresh.state_dict()}}
    here = state["nets"]["g"]["0.0.weight"]
    through({"nets": {"g": trained}}, state)
    assert same(trained, fresh)  # a state_dict() shares its memory
    assert state["nets"]["g"]["0.0.weight"] is here


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.extra: dict[str, Any] = {}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_goes_both_ways(through: Through) -> None:
    trained, fresh = seq(Counts()), seq(Counts())
    trained[0].extra = {"seen": 5, "mean": torch.ones(2)}
    through({"model": trained.state_dict()}, {"model": fresh})
    assert fresh[0].extra["seen"] == 5
    assert torch.equal(fresh[0].extra["mean"], torch.ones(2))
    state: dict[str, Any] = {"model": seq(Counts()).state_dict()}
    through({"model": trained}, state)
    assert state["model"]["0._extra_state"]["seen"] == 5


def test_what_only_one_side_has_is_still_a_difference(through: Through) -> None:
    small, large = seq(nn.Linear(2, 2)), seq(nn.Linear(2, 2), nn.Linear(2, 2))
    for saved, found, told in (
        ({"m": large.state_dict()}, {"m": small}, r"m.1\\.weight: in the checkpoint but not in the state"),
        ({"m": small.state_dict()}, {"m": large}, r"m.1.weight: in the state but not in the checkpoint"),
        ({"m": large}, {"m": small.state_dict()}, r"m.1.weight: in the checkpoint but not in the state"),
        ({"m": small}, {"m": large.state_dict()}, r"m.1\\.weight: in the state but not in the checkpoint"),
    ):
        with pytest.raises(StateMismatchError, match=told):
            through(saved, found)


def test_each_save_has_what_its_module_says_then(tmp_path: Path) -> None:
    model, fresh = seq(nn.Linear(2, 2), Bank()), seq(nn.Linear(2, 2), Bank())
    with aiockpt.Checkpointer(tmp_path / "run", snapshot="lazy") as ckpt:
        for step in range(3):
            model[1].rows = torch.randn(step + 1, 2)
            ckpt.save(step, {"model": model}).result()
        ckpt.load({"model": fresh}).result()
    assert same(model, fresh)


def test_a_self_saving_module_cut_by_fsdp1_is_refused() -> None:
    class Saves(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().state_dict(*args, **kwargs)

    plan: Any = SimpleNamespace(watch=Watch(), choice=None)
    slice_of = FlatRange((2, 2), 0, 2)
    with pytest.raises(UnsupportedStateError, match=r"m.0: .*Saves has its own state_dict\(\), and FSDP1 has cut"):
        ModulePart(seq(Saves(2, 2)), ("m",), lambda tensor: slice_of, plan)


class RenamesByHook(nn.Linear):
    """A layer that takes what was called otherwise before; it keeps what no copy can have."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.seen: list[str] = []
        self._register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    def _rename(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen.append(prefix)
        for new, old in (("weight", "kernel"), ("bias", "offset")):
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)


class RenamesItself(nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
            state_dict[prefix + "bias"] = state_dict.pop(prefix + "offset")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Kernel(nn.Module):
    """The same layer, as it was."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        inner = nn.Linear(rows, columns)
        self.kernel, self.offset = inner.weight, inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.kernel, self.offset)


def trained(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(3)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def old_norm(rows: int, columns: int) -> Any:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(nn.Linear(rows, columns))


def new_norm(rows: int, columns: int) -> Any:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(rows, columns))


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize(
    ("old", "new"),
    [(old_norm, new_norm), (Kernel, RenamesByHook), (Kernel, RenamesItself)],
    ids=lambda made: made.__name__,  # an address would differ between the workers that run the tests
)
def test_the_optimizer_follows_a_parameter_under_another_key(
    through: Through, old: Any, new: Any, first: str, as_dict: bool
) -> None:
    saved, found = seq(old(3, 2), nn.Linear(2, 2)), seq(new(3, 2), nn.Linear(2, 2))
    before, after = trained(saved), torch.optim.AdamW(found.parameters())
    state = {"model": found, "optimizer": after} if first == "model" else {"optimizer": after, "model": found}
    result = through({"model": saved.state_dict() if as_dict else saved, "optimizer": before}, state)
    assert (result.missing, result.differences) == ((), ())
    for one, other in zip(saved.parameters(), found.parameters(), strict=True):
        order = before.state[one], after.state[other]
        assert torch.equal(one, other)
        assert all(torch.equal(order[0][key], order[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_module_without_a_copy_renames_nothing(through: Through) -> None:
    saved, found = Kernel(3, 2), RenamesItself(3, 2)
    vars(found)["lock"] = threading.Lock()
    weight = found.weight.clone()
    optimizer = torch.optim.AdamW(found.parameters())
    with pytest.raises(StateMismatchError, match=r"has no parameter model\.weight"):
        through({"model": saved, "optimizer": trained(saved)}, {"model": found, "optimizer": optimizer})
    assert torch.equal(found.weight, weight)


def test_looking_for_renames_does_not_touch_the_module(through: Through) -> None:
    saved, found = Kernel(3, 2), RenamesByHook(3, 2)
    optimizer = trained(saved)
    state = {"model": found, "optimizer": torch.optim.AdamW(found.parameters())}
    with pytest.raises(StateMismatchError, match="other"):
        through({"model": saved, "optimizer": optimizer}, {**state, "other": 1})
    assert found.seen == []
