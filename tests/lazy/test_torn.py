"""Changes that torch can see, never published, whatever makes them and whenever. Programs that do what trainers do."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from tests.gates import Gate
from tests.lazy.copy_gate import CopyGate
from tests.watch import until

SMALL = aiockpt.IO(slab_bytes=64 * 1024, block_bytes=64 * 1024, read_bytes=64 * 1024)


class Run:
    """A model with the state of its optimizer."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 200), nn.Linear(200, 100), nn.Linear(100, 4))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.train()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 32)).square().mean().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}


def is_torn(save: aiockpt.SaveFuture) -> list[str]:
    """Return what tore of a save, which has published nothing."""
    error = save.exception()
    assert isinstance(error, aiockpt.TornSnapshotError), error
    return list(error.tensors)


def saved(ckpt: aiockpt.Checkpointer, step: int) -> dict[str, torch.Tensor]:
    model = Run().model
    ckpt.load({"model": model}, step).result()
    return dict(model.state_dict())


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class Averaging(torch.optim.Optimizer):
    """Keeps two weights for each parameter, and puts one or the other in place, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["z"] = parameter.detach().clone()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["z"].sub_(parameter.grad, alpha=0.1)
                parameter.lerp_(self.state[parameter]["z"], 0.5)

    @torch.no_grad()
    def eval(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.lerp_(self.state[parameter]["z"], 0.3)

    @torch.no_grad()
    def train(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.lerp_(self.state[parameter]["z"], -0.4)


class TwoSteps(torch.optim.Optimizer):
    """Climbs before it steps, as SAM does: ``first_step`` calls no hook."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=0.05)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Duck:
    """Looks like an optimizer, and is none of torch's."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.params:
            parameter.sub_(0.1)


def load_earlier(run: Run) -> None:
    run.model.load_state_dict({name: weight + 1 for name, weight in run.model.state_dict().items()})


def back_to_training(run: Run) -> None:
    assert isinstance(run.optimizer, Averaging)
    run.optimizer.train()


def promotion(run: Run) -> None:
    assert isinstance(run.optimizer, TwoSteps)
    run.backward()
    run.optimizer.first_step()


def step_beside(run: Run) -> None:
    Duck(run.model.parameters()).step()


def add_by_hand(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1)


HABITS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[Run], None]]] = {
    "load_state_dict": (torch.optim.AdamW, load_earlier),
    "an averaging optimizer goes back to training": (Averaging, back_to_training),
    "the first of two steps": (TwoSteps, promotion),
    "an optimizer that is none beside an idle one": (torch.optim.AdamW, step_beside),
    "by hand": (torch.optim.SGD, add_by_hand),
}


@pytest.mark.parametrize("habit", HABITS)
def test_what_trainers_change_before_the_copy_is_never_published(
    habit: str, tmp_path: Path, gate: CopyGate, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, change = HABITS[habit]
    run = Run(optimizer)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", on_error="warn", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        first = ckpt.save(1, run.state)
        assert gate.reached.wait(250)
        change(run)
        gate.open.set()
        assert set(is_torn(first)) == {f"model.{name}" for name in run.weights()}
        assert ckpt.latest().result() is None
        gate.open.clear()
        before = run.weights()
        second = ckpt.save(2, run.state)
        change(run)
        gate.open.set()
        second.result()
        assert equal(saved(ckpt, 2), before)
    (warned,) = [record.getMessage() for record in caplog.records if "from the start" in record.getMessage()]
    assert "Checkpointer(lazy=Lazy(mutable=['model" in warned


def test_changes_during_a_failed_save_are_copied_next_time(tmp_path: Path, gate: CopyGate) -> None:
    run = Run(torch.optim.SGD)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", on_error="warn", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        first = ckpt.save(1, run.state)
        assert gate.reached.wait(250)
        add_by_hand(run)
        assert first.cancel()
        gate.open.set()
        until(first.done, "the end of the save")
        gate.open.clear()
        before = run.weights()
        second = ckpt.save(2, run.state)
        add_by_hand(run)
        gate.open.set()
        second.result()
        assert equal(saved(ckpt, 2), before)


# --- an operation that is under way when the copy ends -----------------------------------------------------------------


def begin(weight: torch.Tensor) -> None:
    """Begin to change *weight*, not where a sample is taken: torch counts a change when it is done."""
    weight.data.view(-1)[0] += 1


def end(weight: torch.Tensor) -> None:
    """End what was begun."""
    torch.autograd.graph.increment_version(weight)


def wait_in_a_loop(ckpt: aiockpt.Checkpointer, save: aiockpt.SaveFuture) -> None:
    async def wait() -> None:
        await save.snapshotted()

    asyncio.run(wait())


def change_in_a_loop(ckpt: aiockpt.Checkpointer, save: aiockpt.SaveFuture) -> None:
    async def wait() -> None:
        await ckpt.wait_mutable()
        async with ckpt.mutating():
            pass

    asyncio.run(wait())


def change_in_a_block(ckpt: aiockpt.Checkpointer, save: aiockpt.SaveFuture) -> None:
    with ckpt.mutating():
        pass


def another_optimizer(ckpt: aiockpt.Checkpointer, save: aiockpt.SaveFuture) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()


def other_save(ckpt: aiockpt.Checkpointer, save: aiockpt.SaveFuture) -> None:
    ckpt.save(save.step + 1, {"nothing": 1})


HOOKS: dict[str, Callable[[aiockpt.Checkpointer, aiockpt.SaveFuture], object]] = {
    "step of an optimizer": another_optimizer,
    "save": other_save,
    "load": lambda ckpt, save: ckpt.load({"nothing": 1}).result(),
    "barrier": lambda ckpt, save: ckpt.barrier(),
    "mutating": change_in_a_block,
    "wait_mutable and mutating in a loop": change_in_a_loop,
    "wait for snapshotted": lambda ckpt, save: save.snapshotted().result(),
    "exception of snapshotted": lambda ckpt, save: save.snapshotted().exception(),
    "wait for snapshotted in a loop": wait_in_a_loop,
    "a look at snapshotted": lambda ckpt, save: save.snapshotted().done(),
    "a look at the stage": lambda ckpt, save: save.stage,
}


class LocalShards:
    """A lazy save whose copy is over, while its storage takes nothing yet."""

    def __init__(self, ckpt: aiockpt.Checkpointer, run: Run, gate: CopyGate) -> None:
        self.save = ckpt.save(1, run.state)
        self.weight = run.model.get_parameter("0.weight")
        assert gate.reached.wait(250)
        begin(self.weight)
        gate.open.set()
        snapshotted = self.save._save.snapshotted  # asked in the back of those who compare
        host_copied = [copy.host_copied for copy in ckpt._copies._unchecked.values()]  # resolved a moment later
        until(lambda: snapshotted.is_settled and host_copied[0].is_settled, "the end of the copy")


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_changes_found_after_the_copy_reach_the_next_hook(hook: str, ends: bool, gate: CopyGate) -> None:
    run, writes = Run(), Gate(MemoryBackend(f"torn-{uuid.uuid4()}"), verb="create")
    with aiockpt.Checkpointer(writes, snapshot="lazy", on_error="warn", limits=aiockpt.Limits(max_in_flight=3)) as ckpt:
        held = LocalShards(ckpt, run, gate)
        if ends:
            end(held.weight)
        with suppress(aiockpt.TornSnapshotError):
            HOOKS[hook](ckpt, held.save)
        end(held.weight)  # nobody's affair any more
        writes.open_up()
        if ends:
            assert is_torn(held.save) == ["model.0.weight"]
        else:
            held.save.result()


def test_without_a_hook_late_changes_are_found_before_receipts(gate: CopyGate) -> None:
    run, writes = Run(), Gate(MemoryBackend(f"torn-{uuid.uuid4()}"), verb="create")
    with aiockpt.Checkpointer(writes, snapshot="lazy", on_error="warn") as ckpt:
        held = LocalShards(ckpt, run, gate)
        end(held.weight)
        writes.open_up()
        assert is_torn(held.save) == ["model.0.weight"]
        assert ckpt.latest().result() is None


def test_who_waits_for_a_torn_snapshot_is_told_once(gate: CopyGate) -> None:
    run, writes = Run(), Gate(MemoryBackend(f"torn-{uuid.uuid4()}"), verb="create")
    with aiockpt.Checkpointer(writes, snapshot="lazy") as ckpt:
        held = LocalShards(ckpt, run, gate)
        end(held.weight)
        with pytest.raises(aiockpt.TornSnapshotError, match=r"model\.0\.weight changed"):
            held.save.snapshotted().result()
        assert isinstance(held.save.snapshotted().exception(), aiockpt.TornSnapshotError)
        writes.open_up()
        until(held.save.done, "the end of the save")
        ckpt.save(2, run.state).result()


def test_copies_made_in_inference_mode_serve_outside_it(tmp_path: Path) -> None:
    average = torch.zeros(4)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy") as ckpt:
        with torch.inference_mode():
            save = ckpt.save(1, {"average": average})
        save.result()
        ckpt.wait()  # so that the copy of then is written again
        average.add_(1)
        ckpt.save(2, {"average": average}).result()
        assert torch.equal(ckpt.read(2, "average").result(), torch.ones(4))
