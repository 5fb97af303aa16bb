"""Everything that the program may change, held still, whatever changes it. What only steps change is left in place."""

import functools
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.lazy.mutability import Mutability, SplitState
from aiockpt.lazy.optimizer_owned import is_announced
from tests.lazy.copy_gate import CopyGate

State = dict[str, Any]


class Holder:
    """Walks a state and holds it still, as a lazy save does."""

    def __init__(self) -> None:
        self.walker, self.mutability = StateWalker(), Mutability()

    def moving(self, state: State) -> set[str]:
        """Return the names of what is copied in the call."""
        walked = self.walker.walk(state)
        still = self.mutability.split(walked, state, trusting=False).copy(walked, reuse=True)
        return {live.name for live, held in zip(walked.tensors, still.tensors, strict=True) if live is not held}


def moving(state: State) -> set[str]:
    return Holder().moving(state)


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


# --- what forward changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_renormalising_embedding_is_saved_as_at_the_call(
    kind: Callable[..., nn.Module], tmp_path: Path, gate: CopyGate
) -> None:
    model = nn.Sequential(kind(50, 4, max_norm=0.1), nn.Linear(4, 2))
    optimizer, weight = sgd(model), model.get_parameter("0.weight")
    expected = weight.detach().clone()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        save = ckpt.save(1, {"model": model, "optimizer": optimizer})
        assert gate.reached.wait(250)
        model(torch.arange(50).view(50, 1))
        assert not torch.equal(weight, expected)
        gate.open.set()
        save.result()
        assert torch.equal(ckpt.read(1, "model.0.weight").result(), expected)


def test_only_what_is_renormalised_is_copied() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4), nn.Linear(4, 2))
    assert moving({"model": model, "optimizer": sgd(model)}) == {"model.0.weight"}


def test_a_weight_tied_to_a_renormalised_one_moves() -> None:
    embedding, head = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 9, bias=False)
    head.weight = embedding.weight
    assert moving({"head": head, "optimizer": sgd(head)}) == {"head.weight"}


def test_a_renormalised_weight_is_found_where_the_state_has_no_module() -> None:
    embedding = nn.Embedding(9, 4, max_norm=1.0)
    state = {"weight": embedding.weight, "optimizer": sgd(embedding)}
    assert moving(state) == {"weight"}


def test_a_module_with_such_a_limit_is_an_embedding() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head, self.max_norm = nn.Parameter(torch.ones(9, 4)), nn.Linear(4, 2), 1.0

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(nn.functional.embedding(index, self.rows, max_norm=self.max_norm))
            return found

    model = Rows()
    assert moving({"model": model, "optimizer": sgd(model)}) == {"model.rows"}


def test_a_limit_that_is_set_later_is_noticed() -> None:
    embedding = nn.Embedding(9, 4)
    state, holder = {"model": embedding, "optimizer": sgd(embedding)}, Holder()
    assert holder.moving(state) == set()
    embedding.max_norm = 1.0
    assert holder.moving(state) == {"model.weight"}


def test_the_scale_of_a_learned_quantisation_moves() -> None:
    observer = torch.ao.quantization.MovingAverageMinMaxObserver
    quantisation = _LearnableFakeQuantize(observer, 0, 255)  # type: ignore[no-untyped-call]
    model = nn.Sequential(quantisation, nn.Linear(4, 2))
    found = moving({"model": model, "optimizer": sgd(model)})
    assert {"model.0.scale", "model.0.zero_point"} <= found
    assert not found & {"model.1.weight", "model.1.bias"}


# --- who owns what --------------------------------------------------------------------------------------------------


class Unhooked(torch.optim.Optimizer):
    """An optimizer that leaves out ``Optimizer.__init__``, so that torch puts no hooks around its ``step``."""

    def __init__(self, params: Any, inner: torch.optim.Optimizer | None = None) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state, self.defaults = {}, {}  # type: ignore[assignment]
        self.optimizer = inner

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"lr": 0.1, "params": list(range(len(self.param_groups[0]["params"])))}]}

    def load_state_dict(self, state_dict: Any) -> None: ...

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1)


def names(module: nn.Module) -> set[str]:
    return {f"model.{name}" for name, _ in module.named_parameters()}


def test_what_an_optimizer_without_hooks_owns_is_copied(
    tmp_path: Path, gate: CopyGate, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = Unhooked(model.parameters())
    expected = model.weight.detach().clone()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt, caplog.at_level(logging.WARNING):
        save = ckpt.save(1, {"model": model, "optimizer": optimizer})
        optimizer.step()
        gate.open.set()
        save.result()
        assert torch.equal(ckpt.read(1, "model.weight").result(), expected)
    assert "Unhooked steps without torch's hooks" in caplog.text


def test_parameters_shared_with_an_optimizer_without_hooks_move() -> None:
    model = nn.Linear(4, 4)
    silent = Unhooked(model.parameters())
    assert moving({"model": model, "optimizer": sgd(model)}) == names(model)
    assert silent.param_groups


def test_a_step_that_was_replaced_is_not_trusted() -> None:
    model = nn.Linear(4, 4)
    optimizer, holder = sgd(model), Holder()
    state = {"model": model, "optimizer": optimizer}
    assert holder.moving(state) == set()
    step = optimizer.step
    optimizer.step = functools.wraps(step)(lambda: step())  # type: ignore[method-assign,assignment]
    assert holder.moving(state) == names(model)
    del optimizer.step
    assert holder.moving(state) == set()


def test_a_step_of_the_class_that_was_replaced_is_not_trusted() -> None:
    class Own(torch.optim.SGD): ...

    model = nn.Linear(4, 4)
    state, holder = {"model": model, "optimizer": Own(model.parameters(), lr=0.1)}, Holder()
    assert holder.moving(state) == set()
    Own.step = lambda self, closure=None: None  # type: ignore[method-assign]
    assert holder.moving(state) == names(model)


def test_wrappers_of_schedulers_and_compilers_call_the_hooks() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, compiled = sgd(model), sgd(other)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compiled.step = torch.compile(compiled.step, backend="eager")  # type: ignore[method-assign]
    assert "step" in vars(optimizer)
    assert moving({"model": model, "optimizer": optimizer}) == set()
    assert moving({"model": other, "optimizer": compiled}) == set()
    assert scheduler.last_epoch == 0


def test_a_known_wrapper_of_a_step_is_trusted() -> None:
    class AcceleratedOptimizer(Unhooked):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert self.optimizer is not None
            self.optimizer.step(closure)

    AcceleratedOptimizer.__module__, AcceleratedOptimizer.__qualname__ = "accelerate.optimizer", "AcceleratedOptimizer"

    class Changed(AcceleratedOptimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Unhooked.step(self)

    model, other, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    wrapper = AcceleratedOptimizer(model.parameters(), sgd(model))
    assert moving({"model": model, "optimizer": wrapper}) == set()
    assert moving({"model": other, "optimizer": Changed(other.parameters(), sgd(other))}) == names(other)
    silent = AcceleratedOptimizer(third.parameters(), Unhooked(third.parameters()))
    assert moving({"model": third, "optimizer": silent}) == names(third)
    assert is_announced(wrapper)
    assert not is_announced(silent)


def test_what_an_optimizer_owned_moves_once_that_is_gone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer, holder = sgd(model), Holder()
    assert holder.moving({"model": model}) == set()
    del optimizer
    optimizer = sgd(model[1])
    assert holder.moving({"model": model}) == {"model.0.weight", "model.0.bias"}
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_that_comes_later_is_found() -> None:
    model, holder = nn.Linear(4, 4), Holder()
    assert holder.moving({"model": model}) == names(model)
    optimizer = sgd(model)
    assert holder.moving({"model": model}) == set()
    silent = Unhooked(model.parameters())
    assert holder.moving({"model": model}) == names(model)
    assert optimizer.param_groups
    assert silent.param_groups


def test_a_parameter_that_leaves_its_groups_moves() -> None:
    model, holder = nn.Linear(4, 4), Holder()
    optimizer = sgd(model)
    assert holder.moving({"model": model}) == set()
    optimizer.param_groups[0]["params"].pop()
    assert holder.moving({"model": model}) == {"model.bias"}


def test_memory_that_a_parameter_has_left_moves() -> None:
    parameter, holder = nn.Parameter(torch.ones(4)), Holder()
    optimizer, state = torch.optim.SGD([parameter], lr=0.1), {"some": [parameter.detach()]}
    assert holder.moving(state) == set()
    parameter.data = torch.zeros(4)
    assert holder.moving(state) == {"some[0]"}
    assert optimizer.param_groups


def test_nobody_is_looked_for_twice_while_nobody_came_or_went(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # garbage of other tests, which may go at any moment
    looks: list[int] = []
    find = gc.get_referrers

    def find_and_count(*classes: type) -> list[Any]:
        looks.append(1)
        return find(*classes)

    monkeypatch.setattr(gc, "get_referrers", find_and_count)
    tensors, holder = [torch.ones(2) for _ in range(3)], Holder()
    for _ in range(5):
        assert len(holder.moving({"some": tensors})) == 3
    assert len(looks) == 1


def test_gaps_of_a_parameter_are_not_owned_with_it() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(16, 8)
            self.weight = nn.Parameter(flat[:, :7])
            self.register_buffer("beside", flat[:12, 7])

    model = Flat()
    assert moving({"model": model, "optimizer": sgd(model)}) == {"model.beside", "model.weight"}


def test_a_turned_part_of_a_parameter_is_owned_too() -> None:
    parameter = nn.Parameter(torch.randn(4, 6).t())
    state = {"some": [parameter.detach().t()[1:3]], "whole": parameter.detach()}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert moving(state) == set()
    assert optimizer.param_groups


def test_small_tensors_of_every_kind_are_copied_together() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8, torch.float64]
    state: State = {"some": [torch.arange(1, 4).to(kind) for kind in kinds] + [torch.tensor(7.0), torch.empty(0)]}
    state["some"] += [torch.ones(1000), torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.complex64).conj()]
    walker, mutability = StateWalker(), Mutability()
    held = []
    for turn in range(4):
        if turn == 2:  # other memory, and another order in it
            state["some"][0].data = torch.ones(3, 2)[:, 0]
            state["some"][-2].data = torch.zeros(2, 3).t()
        for tensor in state["some"]:
            tensor.fill_(turn)
        walked = walker.walk(state)
        still = mutability.split(walked, state, trusting=False).copy(walked, reuse=True).tensors
        held.append([shard.data.data_ptr() for shard in still])
        expected = [tensor.clone() for tensor in state["some"]]
        for tensor in state["some"]:
            tensor.fill_(1 - turn % 2)
        assert all(map(torch.equal, (shard.data for shard in still), expected))
    assert held[0] == held[1] == held[2] == held[3]


def test_copies_are_kept_of_one_state_at_a_time() -> None:
    walkers, mutability = [StateWalker(), StateWalker()], Mutability()
    walked = [walker.walk({"x": torch.zeros(3)}) for walker in walkers]
    for one in walked:
        mutability.split(one, {}, trusting=False)
    kept = [one.known.find(SplitState, (False, frozenset())) is not None for one in walked]
    assert kept == [False, True]
