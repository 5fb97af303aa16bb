"""The checks of optimizers whose parameters, groups or state differ by rank, through the whole engine."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from aiockpt.adapters.native import StateWalker
from tests.ranks.adapters_checks import train
from tests.ranks.adapters_worker import check, gather, mesh_of
from tests.ranks.engine_checks import DEADLINES, shared_folder

State = dict[str, Any]
LAYERS = 4


def some_ranks(count: int, name: str) -> aiockpt.Ranks | None:
    """Return the first *count* ranks of this world as a job of their own; None on the others."""
    c10d: Any = dist.distributed_c10d
    if dist.get_rank() >= count:
        return None
    return (
        aiockpt.Ranks(dist.get_rank(), count, c10d.PrefixStore(name, c10d._get_default_store()))
        if count > 1
        else aiockpt.Ranks()
    )


class Stage(nn.Module):
    """Some layers of one model, called as in the whole one; the last stage has the head."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in layers})
        if LAYERS - 1 in layers:
            self.head = nn.Linear(3, 2)


def stage(rank: int, count: int, seed: int) -> State:
    """Return what stage *rank* of *count* has: weights and biases in groups of their own, and the head in a third."""
    torch.manual_seed(seed)
    per_stage = LAYERS // count
    model = Stage(range(rank * per_stage, (rank + 1) * per_stage))
    kinds: dict[str, list[nn.Parameter]] = {"head": [], "bias": [], "weight": []}
    for name, parameter in model.named_parameters():
        kinds["head" if "head" in name else name.rpartition(".")[2]].append(parameter)
    rates = {"weight": 0.1, "bias": 0.2, "head": 0.3}
    groups: list[Any] = [
        {"params": some, "lr": rates[kind], "weight_decay": 0.5 if kind == "weight" else 0.0}
        for kind, some in kinds.items()
        if some
    ]
    return {"model": model, "optimizer": torch.optim.AdamW(groups, lr=seed)}


def train_alone(state: State, steps: int) -> None:
    """Make steps whose gradients follow from the values, whatever other ranks there are."""
    for _ in range(steps):
        for parameter in state["model"].parameters():
            parameter.grad = parameter.detach() * 2 + 1
        state["optimizer"].step()


def held(state: State) -> dict[str, Any]:
    """Return what a stage has of each parameter: itself, its moments, and what its group says."""
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    found = {}
    for group in state["optimizer"].param_groups:
        said = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            entry = state["optimizer"].state[parameter]
            found[names[parameter]] = [parameter.tolist(), {key: value.tolist() for key, value in entry.items()}, said]
    return found


@check(4)
def groups_of_pipeline_stages_follow_their_parameters_from_two_stages_to_one_to_four() -> None:
    root = shared_folder()
    whole = stage(0, 1, 1)
    train_alone(whole, 2)
    for step, count in enumerate((2, 1, 4)):
        ranks = some_ranks(count, f"pp{count}")
        if ranks is not None:
            with aiockpt.Checkpointer(root, ranks=ranks, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
                state = first_stage_of(ranks.rank, count) if step == 0 else stage(ranks.rank, count, 7)
                if step:
                    ckpt.load(state, step - 1).result()
                found, expected = held(state), held(whole)
                assert found == {name: expected[name] for name in found}
                train_alone(state, 1)
                ckpt.save(step, state).result()
        train_alone(whole, 1)
        dist.barrier()


def first_stage_of(rank: int, count: int) -> State:
    """Return a stage that has trained as the whole model has."""
    state, whole = stage(rank, count, 1), stage(0, 1, 1)
    for name, parameter in state["model"].named_parameters():
        parameter.data.copy_(whole["model"].get_parameter(name))
    train_alone(state, 2)
    return state


@check(2)
def a_parameter_that_two_ranks_have_must_have_the_same_values_on_both() -> None:
    root, ranks = shared_folder(), some_ranks(2, "shared")
    state = stage(0, 1, 1)
    state["optimizer"].param_groups[0]["lr"] = 0.1 + dist.get_rank()
    with aiockpt.Checkpointer(
        root, ranks=ranks, limits=aiockpt.Limits(deadlines=DEADLINES), on_error=lambda future: None
    ) as ckpt:
        error = ckpt.save(1, state).exception()
    text = str(error)
    assert "optimizer: lr of model.head.weight (0.1 on rank 0, 1.1 on rank 1)" in text, text
    assert "per_rank" in text


# ------------------------------------------------------------------------------------------- state beside what is spread


class Blocks(nn.Module):
    """Weights of several shapes, uneven rows, a row that one rank alone has, and a tensor without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.row = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu()) * self.row


class Stepped(torch.optim.Optimizer):
    """An optimizer that is one function of a parameter, its gradient and its state."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # FSDP1 gives none to those that lie on other ranks
                    self.update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def update(self, parameter: Any, gradient: Any, state: State, lr: float) -> None:
        raise NotImplementedError


class Preconditioned(Stepped):
    """Like Shampoo: keeps a plain matrix of a shape of its own beside each parameter, and a list of tensors."""

    def update(self, parameter: Any, gradient: Any, state: State, lr: float) -> None:
        if not state:
            state["statistics"] = torch.eye(3)
            state["powers"] = [torch.ones(2), torch.zeros(1)]
            state["momentum"] = torch.zeros_like(parameter)
        state["statistics"] += 0.5
        state["powers"][0] += 1
        state["momentum"].add_(gradient)
        parameter.add_(state["momentum"], alpha=-lr * float(state["statistics"][0, 0]))


class Local(Stepped):
    """Keeps its moments as plain local tensors beside DTensors; gathered ones, too, for parameters of two axes."""

    def update(self, parameter: Any, gradient: Any, state: State, lr: float) -> None:
        full = here = parameter
        if isinstance(parameter, DTensor):
            gradient, here, full = gradient.to_local(), parameter.to_local(), parameter.full_tensor()
        if not state:
            state["moment"] = torch.zeros_like(here)
            state["mean"] = torch.zeros(parameter.shape)
            state["count"] = 0
        state["moment"].lerp_(gradient, 0.5)
        state["mean"].lerp_(full, 0.5)
        state["count"] += 1
        here.sub_(state["moment"], alpha=lr)


class Adafactors(Stepped):
    """Like Adafactor as users write it: a row and a column of second moments for a matrix, all of them for a vector."""

    def update(self, parameter: Any, gradient: Any, state: State, lr: float) -> None:
        square = gradient * gradient + 1e-6
        if parameter.dim() < 2:
            state["all"] = state.get("all", torch.zeros_like(parameter)).lerp(square, 0.5)
            scale = state["all"].sqrt()
        else:
            for key, axis in (("row", -1), ("column", -2)):
                mean = square.mean(axis, keepdim=True)
                mean = mean.redistribute(placements=[Replicate()]) if isinstance(mean, DTensor) else mean
                state[key] = mean if key not in state else state[key].lerp(mean, 0.5)
            scale = (state["row"] * state["column"]).sqrt()
        change = gradient / (scale + 1)
        if isinstance(change, DTensor):
            change = change.redistribute(placements=parameter.placements)
        parameter.sub_(change, alpha=lr)


def muon(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        [parameter for parameter in parameters if parameter.dim() == 2 and len(parameter) > 1], lr=0.05
    )


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.25),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "Preconditioned": Preconditioned,
    "Local": Local,
    "Adafactors": Adafactors,
    "Muon": muon,
}


def fsdp1(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=mesh_of(dist.get_world_size()))
    return net


def plain(net: nn.Module) -> nn.Module:
    return net


def job(kind: str, wrap: Callable[[nn.Module], nn.Module], seed: int) -> State:
    torch.manual_seed(seed)
    model = wrap(Blocks())
    return {"model": model, "optimizer": KINDS[kind](list(model.parameters()))}


CANNOT_STEP = {("Adafactor", fsdp2), ("Rprop", fsdp2), ("Muon", fsdp1)}
"""Torch has no such operations on DTensors, and FSDP1's flat slices are no matrices."""


def saved_and_loaded(one: State, other: State) -> None:
    """Save one state, and load it into the other."""
    root = shared_folder()
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
        ckpt.save(1, one).result()
        loaded = ckpt.load(other).result()
    assert loaded is not None
    assert not loaded.differences, loaded.differences


def forms(state: State) -> dict[tuple[str, str], Any]:
    """Return what this rank has of the optimizer's state, as it lies: the types count."""
    names = {parameter: name for name, parameter in state["model"].named_parameters()}

    def show(value: Any) -> Any:
        if isinstance(value, DTensor):
            return ("DTensor", str(value.placements), value.to_local().tolist())
        if isinstance(value, list):
            return list(map(show, value))
        return ("Tensor", value.tolist()) if isinstance(value, torch.Tensor) else value

    return {
        (names[parameter], key): show(value)
        for parameter, entry in state["optimizer"].state.items()
        for key, value in entry.items()
    }


@check(2)
def state_of_optimizers_of_every_kind_goes_on_beside_sharded_parameters() -> None:
    for kind in KINDS:
        for wrap in (fsdp2, fsdp1):
            if (kind, wrap) in CANNOT_STEP:
                continue
            one, other = job(kind, wrap, 1), job(kind, wrap, 2)
            for _ in range(3):
                train(one["model"], one["optimizer"])
            saved_and_loaded(one, other)
            assert forms(one) == forms(other), (kind, wrap)
            assert train(one["model"], one["optimizer"]) == train(other["model"], other["optimizer"]), (kind, wrap)
            assert forms(one) == forms(other), (kind, wrap)
            begun = job(kind, wrap, 3)
            train(begun["model"], begun["optimizer"])
            saved_and_loaded(one, begun)
            assert forms(one) == forms(begun), (kind, wrap)


def refusal(state: State) -> str:
    """Return why a save fails on this rank; it fails on all, and there is no checkpoint."""
    root = shared_folder()
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES), on_error=lambda future: None) as ckpt:
        error = ckpt.save(1, state).exception()
        assert error is not None
        assert ckpt.steps().result() == ()
    return str(error)


def stepped(kind: str, wrap: Callable[[nn.Module], nn.Module]) -> State:
    state = job(kind, wrap, 1)
    train(state["model"], state["optimizer"])
    return state


@check(2)
def state_of_a_shape_of_its_own_that_differs_by_rank_is_refused_by_name() -> None:
    for wrap in (fsdp2, fsdp1):
        state = stepped("Preconditioned", wrap)
        entry = state["optimizer"].state[state["model"].up.bias]  # FSDP1's cut goes through it
        entry["statistics"] += dist.get_rank()
        text = refusal(state)
        assert "optimizer.state.model.up.bias.statistics" in text, text
        assert "on rank 0" in text, text
        assert "on rank 1" in text, text
        assert "per_rank" in text, text
        entry["statistics"] -= dist.get_rank()
        entry["powers"][1] += dist.get_rank()
        text = refusal(state)
        assert "optimizer.state.model.up.bias.powers[1]" in text, text


@check(2)
def state_of_the_local_shape_for_some_parameters_only_must_be_the_same_on_all_ranks() -> None:
    state = stepped("NAdam", fsdp2)
    weight = state["model"].down.weight
    state["optimizer"].state[weight]["exp_avg"] = torch.full(tuple(weight.to_local().shape), 1.0 + dist.get_rank())
    assert "optimizer.state.model.down.weight.exp_avg" in refusal(state)
    state["optimizer"].state[weight]["exp_avg"].fill_(3)
    other = job("NAdam", fsdp2, 2)
    saved_and_loaded(state, other)
    assert forms(state) == forms(other)


@check(2)
def a_tensor_of_a_group_that_differs_by_rank_is_refused_by_name() -> None:
    torch.manual_seed(1)
    model = plain(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1 + dist.get_rank()), foreach=False)
    text = refusal({"model": model, "optimizer": optimizer})
    assert "optimizer.groups[0].lr" in text, text


@check(2)
def step_counts_come_from_ranks_that_hold_elements() -> None:
    for kind, wrap in (("Adagrad", fsdp1), ("Adagrad", fsdp2), ("Local", fsdp1), ("ASGD", fsdp1)):
        one, other = job(kind, wrap, 1), job(kind, plain, 2)
        for _ in range(3):
            train(one["model"], one["optimizer"])
        saved_and_loaded(one, other)
        counts = {key: value for (_, key), value in forms(other).items() if key in ("step", "count")}
        assert {str(value) for value in counts.values()} <= {"('Tensor', 3.0)", "3"}, (kind, counts)
        train(other["model"], other["optimizer"])


@check(2)
def a_rank_without_elements_says_nothing_of_the_state() -> None:
    state = job("Adagrad", fsdp1, 1)
    train(state["model"], state["optimizer"])
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    wanted = set()
    for parameter, entry in state["optimizer"].state.items():
        entry["count"] = dist.get_rank() if parameter.numel() == 0 else 7
        if parameter.numel():
            wanted.add(f"optimizer.state.model.{names[parameter]}.step".replace("_fsdp_wrapped_module.", ""))
    assert len(wanted) < len(names), "each rank has parameters that lie on the other one"
    walked = StateWalker(rank=dist.get_rank()).walk(state)
    assert {shard.name for shard in walked.tensors if shard.name.endswith(".step")} == wanted
    other = job("Adagrad", plain, 2)
    saved_and_loaded(state, other)
    assert {value for (_, key), value in forms(other).items() if key == "count"} == {7}


@check(2)
def plain_local_state_reshards_to_a_plain_job_and_back() -> None:
    one, whole, back = job("Local", fsdp2, 1), job("Local", plain, 2), job("Local", fsdp2, 3)
    for _ in range(2):
        train(one["model"], one["optimizer"])
    train(back["model"], back["optimizer"])  # what lies there says how it is to lie: a plain job does not know
    saved_and_loaded(one, whole)
    saved_and_loaded(whole, back)
    assert forms(one) == forms(back)


# ------------------------------------------------------------------------------------------- optimizers of optimizers


def zero(seed: int, kind: Any = torch.optim.AdamW, **how: Any) -> State:
    torch.manual_seed(seed)
    model = Blocks()
    groups = [{"params": list(model.up.parameters()), "lr": 0.1}, {"params": [model.down.weight, model.row], "lr": 0.2}]
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(groups, kind, lr=0.3, **how)}


@check(2)
def a_zero_redundancy_optimizer_saves_and_loads_what_each_rank_has() -> None:
    for how in ({}, {"parameters_as_bucket_view": True}):
        one, other = zero(1, **how), zero(2, **how)
        for _ in range(2):
            train(one["model"], one["optimizer"])
        one["optimizer"].param_groups[0]["lr"] = 0.05
        walker = StateWalker()
        walker.walk(one)
        walker.walk(one)
        assert walker.cold_walks == 1
        saved_and_loaded(one, other)
        kept = {id(parameter) for group in other["optimizer"].optim.param_groups for parameter in group["params"]}
        assert {id(parameter) for parameter in other["optimizer"].optim.state} == kept, (
            "what is on other ranks is not here"
        )
        for _ in range(2):
            assert train(one["model"], one["optimizer"]) == train(other["model"], other["optimizer"])
        walker.walk(one)
        assert walker.cold_walks == 1
        gather(one).equals(gather(other))


@check(2)
def a_zero_redundancy_optimizer_and_the_one_it_wraps_load_each_other() -> None:
    one, whole = zero(1), zero(2)
    whole["optimizer"] = torch.optim.AdamW(
        [{key: group[key] for key in ("params", "lr")} for group in whole["optimizer"].param_groups]
    )
    train(one["model"], one["optimizer"])
    saved_and_loaded(one, whole)
    assert train(one["model"], one["optimizer"]) == train(whole["model"], whole["optimizer"])
    back = zero(3)
    saved_and_loaded(whole, back)
    gather(whole).equals(gather(back))


@check(2)
def a_zero_redundancy_optimizer_of_another_class_is_a_mismatch() -> None:
    one, other = zero(1, torch.optim.SGD, momentum=0.9), zero(2)
    train(one["model"], one["optimizer"])
    with pytest.raises(aiockpt.StateMismatchError, match=r"AdamW in the state .*SGD in the checkpoint"):
        saved_and_loaded(one, other)


class Scales(nn.Module):
    """Parameters of one shape, of which all ranks but the first hold no element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.scale, self.shift = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(1))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(data) * self.scale + self.shift)


@check(2)
def parameters_without_elements_here_are_told_apart_beside_a_state_dict() -> None:
    def sharded(seed: int, steps: int) -> State:
        torch.manual_seed(seed)
        model = Scales()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(steps):
            model.shift.requires_grad_(step > 0)
            train(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    one, other = sharded(1, 3), sharded(2, 1)
    saved_and_loaded({**one, "model": one["model"].state_dict()}, {**other, "model": other["model"].state_dict()})
    assert forms(other) == forms(one)
    shift = other["optimizer"].state[other["model"].shift]
    assert [shift["step"].item(), other["optimizer"].state[other["model"].scale]["step"].item()] == [2, 3]


@check(2)
def a_zero_redundancy_optimizer_that_steps_in_backward_says_what_to_do() -> None:
    model = DistributedDataParallel(Blocks())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(aiockpt.UnsupportedStateError, match="consolidate_state_dict"):
        StateWalker().walk({"model": model, "optimizer": optimizer})


def in_backward(wrap: Callable[[nn.Module], nn.Module], seed: int, form: str) -> State:
    """Return a job with an optimizer for each parameter, as for a step in backward."""
    torch.manual_seed(seed)
    model = wrap(Blocks())
    made = {name: torch.optim.AdamW([parameter], lr=0.1) for name, parameter in model.named_parameters()}
    return {"model": model, "optimizers": list(made.values()) if form == "list" else made}


@check(2)
def optimizers_of_one_parameter_each_are_a_state_in_a_list_and_in_a_dict() -> None:
    for wrap in (fsdp2, plain):
        for form in ("list", "dict"):
            one, other = in_backward(wrap, 1, form), in_backward(wrap, 2, form)
            both = [
                list(state["optimizers"].values()) if form == "dict" else state["optimizers"] for state in (one, other)
            ]
            for optimizer in both[0]:
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            saved_and_loaded(one, other)
            gather(one).equals(gather(other))


@check(2)
def an_optimizer_of_each_rank_comes_back_as_it_lay() -> None:
    def own(kind: str, wrap: Callable[[nn.Module], nn.Module], seed: int) -> tuple[State, State]:
        state = job(kind, wrap, seed)
        return state, {"model": state["model"], "optimizer": aiockpt.per_rank(state["optimizer"])}

    for kind, wrap in (("Preconditioned", fsdp2), ("Preconditioned", fsdp1), ("Adafactors", fsdp2), ("NAdam", fsdp2)):
        (one, saved), (other, loaded) = own(kind, wrap, 1), own(kind, wrap, 2)
        train(one["model"], one["optimizer"])
        for entry in one["optimizer"].state.values():
            if "statistics" in entry:
                entry["statistics"] += dist.get_rank()
        one["optimizer"].param_groups[0]["lr"] = 0.01 * (1 + dist.get_rank())
        train(other["model"], other["optimizer"])
        saved_and_loaded(saved, loaded)
        assert forms(one) == forms(other), (kind, wrap)
        assert other["optimizer"].param_groups[0]["lr"] == 0.01 * (1 + dist.get_rank())
        train(one["model"], one["optimizer"])
        train(other["model"], other["optimizer"])
        assert forms(one) == forms(other), (kind, wrap)


@check(2)
def an_optimizer_of_each_rank_is_not_resharded() -> None:
    one, other = job("NAdam", fsdp2, 1), job("NAdam", plain, 2)
    train(one["model"], one["optimizer"])
    states = [{"model": state["model"], "optimizer": aiockpt.per_rank(state["optimizer"])} for state in (one, other)]
    with pytest.raises(aiockpt.StateMismatchError, match="what belongs to one rank is not resharded"):
        saved_and_loaded(states[0], states[1])
