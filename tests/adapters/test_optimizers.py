"""Training goes on bit by bit, whichever optimizer it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.optimizer_exact import device_for
from aiockpt.errors import ManifestError, StateMismatchError, UnsupportedStateError
from tests.adapters.compiled import DeepSpeedCPUAdam, FusedAdam, FusedLamb, FusedLion

State = dict[str, Any]
Make = Callable[..., torch.optim.Optimizer]


def build(make: Make, dtype: torch.dtype = torch.float32) -> State:
    """A model with a frozen parameter and two groups, and its optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 4, dtype=dtype), "b": nn.Linear(4, 2, dtype=dtype)})
    model["a"].bias.requires_grad_(False)
    return {"model": model, "optimizer": make(model)}


def two_groups(cls: Any, **options: Any) -> Make:
    return lambda model: cls(
        [{"params": list(model["a"].parameters())}, {"params": [*model["b"].parameters()]}], **options
    )


def train(state: State, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    dtype = state["model"]["a"].weight.dtype
    for _ in range(steps):
        data = torch.randn(8, 3, generator=generator).to(dtype)

        def loss(data: torch.Tensor = data) -> torch.Tensor:
            state["optimizer"].zero_grad()
            value: torch.Tensor = state["model"]["b"](state["model"]["a"](data)).square().mean()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        state["optimizer"].step(loss)
        if "scheduler" in state:
            state["scheduler"].step()


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": two_groups(torch.optim.Adadelta),
    "Adafactor": two_groups(torch.optim.Adafactor),
    "Adagrad": two_groups(torch.optim.Adagrad),
    "Adam amsgrad": two_groups(torch.optim.Adam, amsgrad=True),
    "AdamW foreach": two_groups(torch.optim.AdamW, foreach=True),
    "AdamW fused": two_groups(torch.optim.AdamW, fused=True),
    "AdamW one by one": two_groups(torch.optim.AdamW, foreach=False),
    "AdamW tensor lr": two_groups(torch.optim.AdamW, lr=torch.tensor(1e-3), foreach=False),
    "Adamax": two_groups(torch.optim.Adamax),
    "ASGD": two_groups(torch.optim.ASGD),
    "LBFGS": lambda model: torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad]),
    "Muon": lambda model: torch.optim.Muon([model["a"].weight, model["b"].weight]),
    "NAdam": two_groups(torch.optim.NAdam),
    "RAdam": two_groups(torch.optim.RAdam),
    "RMSprop": two_groups(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": two_groups(torch.optim.Rprop),
    "SGD": two_groups(torch.optim.SGD),
    "SGD momentum": two_groups(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD fused": two_groups(torch.optim.SGD, momentum=0.9, fused=True),
}


def check_goes_on(save: Any, build: Callable[[], State], *, begun: int = 0, steps: int = 2) -> tuple[State, State, Any]:
    """Train, save and go on; load into another one that has *begun*, and go on with that: both are the same."""
    state, found = build(), build()
    train(state, 3)
    saved = save(state)
    train(state, steps)
    train(found, begun)
    saved.load(found)
    assert saved.equals(found)
    train(found, steps)
    assert save(state).equals(found)
    return state, found, saved


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("begun", [0, 2], ids=["into a new one", "into one that has begun"])
def test_training_goes_on_as_if_never_interrupted(save: Any, name: str, begun: int) -> None:
    check_goes_on(save, lambda: build(OPTIMIZERS[name]), begun=begun)


def test_names_come_from_the_parameters_not_from_their_numbers() -> None:
    state = build(OPTIMIZERS["SGD momentum"])
    train(state, 1)
    names = [shard.name for shard in StateWalker().walk(state).tensors if shard.name.startswith("optimizer")]
    assert names == [f"optimizer.state.model.{name}.momentum_buffer" for name in ("a.weight", "b.weight", "b.bias")]


def test_state_finds_its_parameter_in_another_order_and_group(save: Any) -> None:
    state = build(lambda model: torch.optim.Adam(list(model.parameters())))
    turned = build(lambda model: torch.optim.Adam(list(model.parameters())[::-1]))
    train(state, 2)
    save(state).load(turned)
    for name in ("a.weight", "b.weight", "b.bias"):
        one, other = (each["optimizer"].state[each["model"].get_parameter(name)] for each in (state, turned))
        assert torch.equal(one["exp_avg"], other["exp_avg"])


@pytest.mark.parametrize("hooks", [False, True])
def test_moments_of_another_dtype_than_the_parameter_keep_it(save: Any, hooks: bool) -> None:
    state, found = (build(two_groups(torch.optim.AdamW), torch.bfloat16) for _ in range(2))
    train(state, 2)
    for entry in state["optimizer"].state.values():
        entry["exp_avg"] = entry["exp_avg"].float() + 1e-7
        entry["seen"] = torch.tensor([2**30 + 1])
    if hooks:
        found["optimizer"].register_load_state_dict_post_hook(lambda _: None)
    saved = save(state)
    saved.load(found)
    assert saved.equals(found)


def test_step_counters_of_a_torch_that_had_numbers_become_tensors(save: Any) -> None:
    state, found = (build(OPTIMIZERS["AdamW one by one"]) for _ in range(2))
    train(state, 2)
    for entry in state["optimizer"].state.values():
        entry["step"] = 2
    save(state).load(found)
    train(found, 1)
    assert all(entry["step"].item() == 3 for entry in found["optimizer"].state.values())


def test_live_state_is_filled_in_place_and_keeps_its_address(save: Any) -> None:
    def addresses() -> dict[int, int]:
        return {id(t): t.data_ptr() for entry in state["optimizer"].state.values() for t in entry.values()}

    state = build(OPTIMIZERS["AdamW fused"])
    fresh = save(build(OPTIMIZERS["AdamW fused"]))
    train(state, 1)
    saved, before = save(state), addresses()
    train(state, 1)
    saved.load(state)
    assert addresses() == before
    assert saved.equals(state)
    target = fresh.load(state)  # from before the first step
    assert not state["optimizer"].state
    assert "optimizer.state.model.a.weight.exp_avg" in target.written


def test_a_tensor_learning_rate_stays_the_tensor_it_is(save: Any) -> None:
    found = build(OPTIMIZERS["AdamW tensor lr"])
    rate = found["optimizer"].param_groups[0]["lr"]
    number = two_groups(torch.optim.AdamW, lr=0.25, foreach=False)
    for saved, expected in ((save(build(OPTIMIZERS["AdamW tensor lr"])), 1e-3), (save(build(number)), 0.25)):
        rate.fill_(7)
        saved.load(found)
        assert found["optimizer"].param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(expected)


def test_how_a_step_is_computed_stays_the_running_jobs_own(save: Any) -> None:
    state = build(OPTIMIZERS["AdamW fused"])
    train(state, 2)
    saved = save(state)
    found = build(OPTIMIZERS["AdamW one by one"])
    saved.load(found)
    group = found["optimizer"].param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, False)
    train(found, 1)
    assert found["optimizer"].state[found["model"]["a"].weight]["step"].item() == 3


@pytest.mark.parametrize("reads_it", [{"fused": True}, {"capturable": True}])
def test_the_step_counter_is_on_the_cpu(reads_it: dict[str, Any]) -> None:
    parameter = torch.ones(1, device="meta")  # stands for a GPU
    assert device_for(parameter, "step", {"fused": None, "capturable": False}) == torch.device("cpu")
    assert device_for(parameter, "step", reads_it) == torch.device("meta")
    assert device_for(parameter, "exp_avg", {}) is parameter


def test_values_of_groups_come_back_and_new_ones_keep_their_default(save: Any) -> None:
    state = build(two_groups(torch.optim.SGD, lr=0.5))
    state["optimizer"].param_groups[1].update(lr=0.25, note=("x", 1))
    saved = save(state)
    found = build(two_groups(torch.optim.SGD, lr=9.0))
    found["optimizer"].param_groups[0]["newer"] = 3
    saved.load(found)
    groups = found["optimizer"].param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    assert groups[1]["note"] == ("x", 1)
    assert groups[0]["newer"] == 3


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no module", r"^optimizer.groups\[0\].params\[0\]: .*in no module"),
        ("a value of a group", r"^optimizer.groups\[1\].schedule: "),
    ],
)
def test_what_cannot_be_saved_is_refused_by_group_and_place(where: str, message: str) -> None:
    state = build(OPTIMIZERS["SGD"])
    state["optimizer"].param_groups[1]["schedule"] = lambda step: step
    if where == "no module":
        del state["model"]
    with pytest.raises(UnsupportedStateError, match=message):
        StateWalker().walk(state)


class Metric(nn.Module):
    """A loss with a temperature and a head, which is in no module of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Parameter(torch.randn(2))


def build_with_loss(make: Make, *, seed: int = 1) -> State:
    """A model whose optimizer also steps the parameters of a loss."""
    loss = Metric()
    torch.manual_seed(seed)
    with torch.no_grad():
        loss.head.normal_()
    state = build(lambda model: make([{"params": model.parameters()}, {"params": loss.parameters(), "lr": 0.5}]))
    state["model"]["b"].register_forward_hook(lambda module, given, out: out * loss.head / loss.temperature)
    return state


def adamw_with_a_hook(groups: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups)
    optimizer.register_state_dict_pre_hook(lambda optimizer: None)
    return optimizer


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, adamw_with_a_hook])
def test_parameters_of_no_module_are_saved_with_the_optimizer(
    save: Any, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    seeds = iter((1, 5))
    state, resumed, _ = check_goes_on(save, lambda: build_with_loss(make, seed=next(seeds)), begun=1)
    for one, other in zip(*(each["optimizer"].param_groups[1]["params"] for each in (state, resumed)), strict=True):
        assert torch.equal(one, other)
    told = [record for record in caplog.records if "optimizer.parameters[1][0] ()" in record.message]
    assert len(told) == 2  # of the two optimizers, each of which was walked more than once


def test_parameters_of_no_module_that_do_not_fit_are_named(save: Any) -> None:
    state, other = build_with_loss(torch.optim.AdamW), build_with_loss(torch.optim.AdamW)
    alone = build(lambda model: torch.optim.AdamW(model.parameters()))
    train(state, 1)
    train(alone, 1)
    temperature, head = other["optimizer"].param_groups[1]["params"]
    head.data = torch.zeros(3)
    for source, target, message in (
        (state, alone, r"optimizer.parameters\[1\]\[0\]: in the checkpoint but not in the state"),
        (alone, state, r"optimizer.parameters\[1\]\[1\]: in the state but not in the checkpoint"),
        (state, other, r"optimizer.parameters\[1\]\[1\]: .*shape"),
        (state, {**other, "temperature": temperature}, "the optimizer of the checkpoint has no parameter temperature"),
    ):
        with pytest.raises(StateMismatchError, match=message):
            save(source).load(target)


def test_a_bare_tensor_gives_its_name_to_a_parameter() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    names = [shard.name for shard in StateWalker().walk({"o": optimizer, "w": weight}).tensors]
    assert names == ["o.state.w.momentum_buffer", "w"]


def test_a_parameter_has_the_name_of_its_module() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    for state, name in (
        ({"bare": model.weight, "net": model}, "net.weight"),
        ({"first": model.state_dict(), "second": model.state_dict()}, "first.weight"),
    ):
        walked = StateWalker().walk({**state, "o": optimizer})
        assert f"o.state.{name}.momentum_buffer" in [shard.name for shard in walked.tensors]


def test_a_parameter_that_the_checkpoints_optimizer_lacks_is_named(save: Any) -> None:
    saved = save(build(lambda model: torch.optim.SGD(model["a"].parameters())))
    with pytest.raises(StateMismatchError, match=r"optimizer.state.model.b.weight: .*no parameter model.b.weight"):
        saved.load(build(lambda model: torch.optim.SGD(model.parameters())))
    found = build(lambda model: torch.optim.SGD(model.parameters()))
    target = saved.load(found, strict=False)
    assert target.missing == ("optimizer.state.model.b.weight", "optimizer.state.model.b.bias")


def test_a_group_takes_what_the_groups_of_its_parameters_agree_on(save: Any) -> None:
    state = build(OPTIMIZERS["SGD momentum"])
    train(state, 2)
    saved = save(state)
    found = build(lambda model: torch.optim.SGD(model.parameters(), lr=9.0))
    saved.load(found)
    assert found["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]
    assert found["optimizer"].param_groups[0]["momentum"] == 0.9
    state["optimizer"].param_groups[1]["lr"] = 0.75
    saved = save(state)
    message = (
        r"optimizer.groups\[0\]: lr is 0.001 for model.a.weight and 0.75 for model.b.weight in the checkpoint; "
        "give them groups of their own"
    )
    with pytest.raises(StateMismatchError, match=message):
        saved.load(found)
    assert saved.load(found, strict=False).problems
    assert found["optimizer"].param_groups[0]["lr"] == 0.001
    turned = build(lambda model: torch.optim.SGD([{"params": model[key].parameters()} for key in ("b", "a")]))
    saved.load(turned)
    assert [group["lr"] for group in turned["optimizer"].param_groups] == [0.75, 0.001]


def test_groups_with_one_tensor_as_rate_agree(save: Any) -> None:
    def one_group(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(7.0), foreach=False)

    state = build(two_groups(torch.optim.AdamW, lr=torch.tensor(0.5), foreach=False))
    found = build(one_group)
    save(state).load(found)
    assert found["optimizer"].param_groups[0]["lr"].item() == 0.5
    state["optimizer"].param_groups[1]["lr"] = torch.tensor(0.25)
    with pytest.raises(StateMismatchError, match=r"groups\[0\]: lr is a tensor for model.a.weight and a tensor for"):
        save(state).load(found)


@pytest.mark.parametrize(
    ("source", "target"), [("SGD momentum", "AdamW one by one"), ("Adamax", "Adagrad"), ("Rprop", "ASGD")]
)
def test_an_optimizer_of_another_class_is_a_named_mismatch(save: Any, source: str, target: str) -> None:
    state = build(OPTIMIZERS[source])
    train(state, 1)
    found = build(OPTIMIZERS[target])
    train(found, 1)
    before = save(found)
    with pytest.raises(StateMismatchError) as raised:
        save(state).load(found)
    (problem,) = raised.value.problems
    for name, one in ((source, state), (target, found)):
        assert name.split()[0] in problem
        assert next(iter(one["optimizer"].state[one["model"]["b"].bias])) in problem
    target_of = save(state).load(found, strict=False)
    assert target_of.problems == (problem,)
    assert before.stored.values["optimizer"] == save(found).stored.values["optimizer"]
    train(found, 1)


class Mine(torch.optim.SGD):
    def __init__(self, parameters: Any, **how: Any) -> None:
        super().__init__(parameters, **how)
        self.defaults["mine"] = 1


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (two_groups(torch.optim.Adam), two_groups(torch.optim.AdamW)),
        (OPTIMIZERS["SGD momentum"], two_groups(Mine, momentum=0.5)),
    ],
)
def test_a_class_with_the_same_keys_and_a_subclass_go_on(save: Any, before: Make, now: Make) -> None:
    state, found = build(before), build(now)
    train(state, 1)
    save(state).load(found)
    assert save(found).bytes.keys() == save(state).bytes.keys()
    assert found["optimizer"].param_groups[0].get("decoupled_weight_decay", True), "AdamW stays what it is"


class Wrapped(torch.optim.Optimizer):
    """Hands all on to the optimizer inside, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)  # pyright: ignore[reportAssignmentType]
    param_groups = property(lambda self: self.inner.param_groups)  # pyright: ignore[reportAssignmentType]
    defaults = property(lambda self: self.inner.defaults)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Both(Wrapped):
    """Two wrappers around one another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(Wrapped(inner))


@pytest.mark.parametrize("wrap", [Wrapped, Both])
@pytest.mark.parametrize("how", ["both", "saved", "here", "stored by 0.1.0"])
def test_of_a_wrapped_optimizer_the_class_inside_is_compared(save: Any, wrap: Any, how: str) -> None:
    def made(name: str, *, wrapped: bool) -> State:
        state = build(OPTIMIZERS[name])
        train(state, 1)
        return {**state, "optimizer": wrap(state["optimizer"])} if wrapped else state

    for name, other in (("AdamW one by one", "SGD momentum"), ("SGD momentum", "AdamW one by one")):
        saved = save(made(name, wrapped=how != "here"))
        if how == "stored by 0.1.0":
            saved.stored.values["optimizer"]["class"] = f"{__name__}.{wrap.__qualname__}"
        saved.load(made(name, wrapped=how != "saved"))
        with pytest.raises(StateMismatchError, match=f"{other.split()[0]} in the state"):
            saved.load(made(other, wrapped=how != "saved"))


ADAMS = [torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam]


@pytest.mark.parametrize("source", ADAMS)
@pytest.mark.parametrize("target", ADAMS)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("as_dict", [False, True])
def test_adams_of_torch_and_deepspeed_exchange_states(
    save: Any, source: Any, target: Any, begun: bool, as_dict: bool
) -> None:
    state = build(two_groups(source))
    train(state, 2)
    saved = save({**state, "optimizer": state["optimizer"].state_dict()} if as_dict else state)
    found = build(two_groups(target))
    train(found, 3 * begun)
    saved.load(found)
    train(state, 2)
    train(found, 2)
    for name, weight in state["model"].state_dict().items():
        torch.testing.assert_close(found["model"].state_dict()[name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [
        (FusedAdam, torch.optim.SGD, {}),
        (torch.optim.SGD, DeepSpeedCPUAdam, {}),
        (FusedAdam, FusedLamb, {}),
        (FusedAdam, FusedLion, {}),
        (FusedLion, FusedAdam, {}),
        (torch.optim.RAdam, FusedAdam, {}),
        (torch.optim.AdamW, FusedAdam, {"amsgrad": True}),
        (torch.optim.AdamW, FusedAdam, {"maximize": True}),
        (FusedAdam, torch.optim.AdamW, {"bias_correction": False}),
    ],
)
def test_an_adam_that_computes_something_else_is_refused(save: Any, source: Any, target: Any, how: Any) -> None:
    state = build(two_groups(source, **how))
    with pytest.raises(
        StateMismatchError, match=f"{target.__name__} in the state.*{source.__name__} in the checkpoint"
    ):
        save(state).load(build(two_groups(target)))


def test_a_checkpoint_without_a_class_is_judged_by_groups(save: Any) -> None:
    state, other = build(OPTIMIZERS["SGD momentum"]), build(OPTIMIZERS["AdamW fused"])
    train(state, 1)
    saved = save(state)
    assert saved.load(other, only=["model"]).problems == ()
    with pytest.raises(StateMismatchError, match="AdamW in the state"):
        saved.load(other, only=["optimizer.groups"])
    for key in ("class", "keys"):
        del saved.stored.values["optimizer"][key]
    saved.load(build(OPTIMIZERS["SGD"]))
    for group in saved.stored.values["optimizer"]["groups"]:
        group["values"]["of a scheduler"] = 1
    saved.load(build(OPTIMIZERS["SGD"]))
    with pytest.raises(StateMismatchError, match=r"AdamW in the state .*, an optimizer of another class in"):
        saved.load(other)


@pytest.mark.parametrize("how", [{}, {"optimizer_state": "by_parameter"}])
@pytest.mark.parametrize("hooks", [False, True])
def test_state_that_belongs_to_no_parameter_becomes_what_was_saved(save: Any, hooks: bool, how: dict[str, Any]) -> None:
    state, found, without = (build(OPTIMIZERS["SGD"]) for _ in range(3))
    for one in (state, found, without) if hooks else ():
        one["optimizer"].register_load_state_dict_post_hook(lambda _: None)
    state["optimizer"].state["global"] = {"count": 3, "mean": torch.ones(2)}
    found["optimizer"].state["later"] = {"count": 1}
    for saved in (save(state), save(without)):
        saved.load(found, only=["model"], **how)
        assert not saved.equals(found)
        saved.load(found, **how)
        assert saved.equals(found)


def test_state_of_no_parameter_outlives_a_loaded_dict(save: Any) -> None:
    state, found = build(OPTIMIZERS["SGD"]), build(OPTIMIZERS["SGD"])
    found["optimizer"].state["global"] = {"count": 3}
    save({**state, "optimizer": state["optimizer"].state_dict()}).load(found)
    assert found["optimizer"].state["global"] == {"count": 3}


def test_live_state_whose_elements_share_memory_is_replaced(save: Any) -> None:
    state, found = build(OPTIMIZERS["SGD momentum"]), build(OPTIMIZERS["SGD momentum"])
    train(state, 1)
    train(found, 2)
    buffers = found["optimizer"].state[found["model"]["a"].weight]
    buffers["momentum_buffer"] = torch.zeros(1).expand(4, 3)
    saved = save(state)
    saved.load(found)
    assert saved.equals(found)


class Own(torch.optim.SGD):
    """Saves its momentum at half its value."""

    def state_dict(self) -> Any:
        state = copy.deepcopy(super().state_dict())
        for entry in state["state"].values():
            entry["momentum_buffer"] /= 2
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        for entry in state_dict["state"].values():
            entry["momentum_buffer"] = entry["momentum_buffer"] * 2
        super().load_state_dict(state_dict)


class OtherForm(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {"rates": [group["lr"] for group in self.param_groups]}

    def load_state_dict(self, state_dict: Any) -> None:
        for group, rate in zip(self.param_groups, state_dict["rates"], strict=True):
            group["lr"] = rate


def hooked(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.register_state_dict_post_hook(lambda _, state: state["param_groups"][0].update(hooked=True))
    return optimizer


@pytest.mark.parametrize("make", [two_groups(Own, momentum=0.9), hooked], ids=["overridden", "hooked"])
def test_an_optimizer_with_a_say_has_names(save: Any, make: Make) -> None:
    _, _, saved = check_goes_on(save, lambda: build(make), steps=1)
    assert "optimizer.state.model.b.bias.momentum_buffer" in saved.bytes


def test_what_an_optimizer_converts_is_not_replaced(save: Any) -> None:
    state, found = (build(two_groups(Own, momentum=0.9), torch.bfloat16) for _ in range(2))
    train(state, 2)
    for entry in state["optimizer"].state.values():
        entry["momentum_buffer"] = entry["momentum_buffer"].float()
    save(state).load(found)
    entries = [list(each["optimizer"].state.values()) for each in (state, found)]
    for one, other in zip(*entries, strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"].float())


def test_an_optimizer_is_saved_in_its_own_form(save: Any) -> None:
    found = build(two_groups(OtherForm, lr=1.0))
    save(build(two_groups(OtherForm, lr=0.5))).load(found)
    assert [group["lr"] for group in found["optimizer"].param_groups] == [0.5, 0.5]


def test_only_a_part_of_the_state_can_be_loaded(save: Any) -> None:
    def moments(one: State) -> list[torch.Tensor]:
        return [one["optimizer"].state[one["model"][key].weight]["momentum_buffer"].clone() for key in ("a", "b")]

    state = build(two_groups(torch.optim.SGD, lr=0.5, momentum=0.9))
    found = build(two_groups(torch.optim.SGD, lr=0.1, momentum=0.9))
    train(state, 1)
    train(found, 2)
    before = moments(found)
    save(state).load(found, only=["optimizer.state.model.b"])
    assert torch.equal(moments(found)[0], before[0])
    assert torch.equal(moments(found)[1], moments(state)[1])
    assert found["optimizer"].param_groups[0]["lr"] == 0.1


def test_a_node_that_no_optimizer_wrote_is_refused_as_damage(save: Any) -> None:
    state = build(OPTIMIZERS["SGD momentum"])
    train(state, 1)
    for change in ({"groups": 5}, {"state": [{"keys": ["x"], "params": [99]}]}, {"values": [[1]]}):
        saved = save(state)
        saved.stored.values["optimizer"].update(change)
        with pytest.raises(ManifestError, match="optimizer is not an optimizer"):
            saved.open(state)
    saved = save(state)
    del saved.stored.tensors["optimizer.state.model.a.weight.momentum_buffer"]
    with pytest.raises(ManifestError, match="not there"):
        saved.open(state)


@pytest.mark.parametrize("how", [{}, {"optimizer_state": "by_parameter"}])
def test_groups_without_parameters_get_their_settings_back(save: Any, how: dict[str, Any]) -> None:
    """A trainer makes a group for each kind of parameter, and a scheduler goes on from all of them."""

    def make(lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        groups: Any = [{"params": []}, {"params": [*model.parameters()]}, {"params": [], "weight_decay": lr}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        return {"model": model, "optimizer": optimizer}

    state, found = make(0.5), make(0.25)
    for number, group in enumerate(state["optimizer"].param_groups):
        group["lr"] = 0.1 * number
    save(state).load(found, **how)
    assert [(group["lr"], group["weight_decay"]) for group in found["optimizer"].param_groups] == [
        (group["lr"], group["weight_decay"]) for group in state["optimizer"].param_groups
    ]


@pytest.mark.parametrize("there", ["object", "dict"])
@pytest.mark.parametrize("first", ["model", "optimizer", "hooked optimizer"])
@pytest.mark.parametrize("now", [lambda: nn.Linear(3, 2), lambda: nn.Linear(2, 2, dtype=torch.bfloat16)])
def test_state_of_an_unfitting_parameter_is_refused(
    save: Any, now: Callable[[], nn.Module], first: str, there: str
) -> None:
    """Else the next step fails, or goes by what another tensor has learnt."""
    source, target = nn.Linear(2, 2), now()
    optimizers = [torch.optim.AdamW(module.parameters(), foreach=False) for module in (source, target)]
    for module, optimizer in zip((source, target), optimizers, strict=True):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state: dict[str, Any] = {"model": source, "optimizer": optimizers[0]}
    saved = save(state if there == "object" else {key: one.state_dict() for key, one in state.items()})
    found: dict[str, Any] = {"model": target, "optimizer": optimizers[1]}
    if first != "model":
        found = dict(reversed(found.items()))
    if first == "hooked optimizer":
        optimizers[1].register_load_state_dict_post_hook(lambda _: None)
    kept = {id(parameter): dict(state) for parameter, state in optimizers[1].state.items()}
    with pytest.raises(StateMismatchError, match=r"optimizer\.state\.model\.weight: of a parameter of "):
        saved.load(found)
    problems = saved.load(found, strict=False).problems
    assert any(problem.startswith("optimizer.state.model.weight: of a parameter of ") for problem in problems)
    assert {id(one) for one in optimizers[1].state} == kept.keys()
    for one, values in optimizers[1].state.items():
        if one.shape != (2,) or one.dtype != torch.float32:  # the bias fits where the model is float32
            assert all(values[key] is value for key, value in kept[id(one)].items())
    optimizers[1].step()


def test_state_of_a_self_loading_parameter_is_taken(save: Any) -> None:
    class Bank(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.arange(float(size)))

        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **named: Any) -> None:
            self.rows.data = torch.zeros_like(state_dict[f"{prefix}rows"])
            super()._load_from_state_dict(state_dict, prefix, *args, **named)

    (source, one), (target, other) = ((bank, torch.optim.Adam(bank.parameters())) for bank in (Bank(5), Bank(2)))
    source.rows.grad = torch.ones(5)
    one.step()
    save({"model": source, "optimizer": one}).load({"model": target, "optimizer": other})
    assert torch.equal(target.rows, source.rows)
    assert torch.equal(other.state[target.rows]["exp_avg"], one.state[source.rows]["exp_avg"])
