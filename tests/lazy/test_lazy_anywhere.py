"""A lazy save is right wherever it is called: in a closure, on any thread, beside other checkpointers, in a callback."""

import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.events import SnapshotTaken
from aiockpt.options import Snapshot
from tests.gates import Gate
from tests.lazy.copy_gate import CopyGate
from tests.watch import Watch

SMALL = aiockpt.IO(pool_bytes=64 * 1024, slab_bytes=64 * 1024, block_bytes=64 * 1024, read_bytes=64 * 1024)
SOON_S = 250


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, 128)
        self.norm = nn.BatchNorm1d(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.first(x))
        return out


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}


def is_saved(ckpt: aiockpt.Checkpointer, save: aiockpt.SaveFuture, expected: dict[str, torch.Tensor]) -> bool:
    save.result(SOON_S)
    return all(torch.equal(ckpt.read(save.step, name).result(SOON_S), value) for name, value in expected.items())


@pytest.mark.parametrize("snapshot", ["lazy", "device"])
@pytest.mark.parametrize("where", ["closure", "hook", "lbfgs"])
@pytest.mark.parametrize("in_loop", [False, True], ids=["sync", "event loop"])
def test_a_save_inside_a_step_is_copied_at_once(
    tmp_path: Path, where: str, snapshot: Snapshot, in_loop: bool, gate: CopyGate
) -> None:
    model, x, watch = Net(), torch.randn(8, 64), Watch()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    saved: list[tuple[aiockpt.SaveFuture, dict[str, torch.Tensor]]] = []

    def save() -> None:
        if not saved:
            saved.append((ckpt.save(0, {"model": model}, snapshot=snapshot), values(model)))

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if where != "hook":
            save()
        return float(loss.detach())

    if where == "hook":
        optimizer.register_step_pre_hook(lambda *_: save())

    async def step() -> None:
        optimizer.step(closure)

    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL), observers=[watch]) as ckpt:
        before = values(model)
        anyio.run(step) if in_loop else optimizer.step(closure)
        gate.open.set()
        future, expected = saved[0]
        assert not torch.equal(values(model)["model.first.weight"], before["model.first.weight"])
        assert is_saved(ckpt, future, expected)
    taken = watch.of(SnapshotTaken)[0]
    assert taken.snapshot == "eager"
    assert "inside the step of an optimizer" in taken.reason


@pytest.mark.parametrize("how", ["load", "mutating", "barrier", "wait_mutable"])
def test_a_change_by_hand_waits_for_the_copies_of_all_checkpointers(tmp_path: Path, how: str, gate: CopyGate) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with (
        aiockpt.Checkpointer(tmp_path / "near", limits=aiockpt.Limits(io=SMALL)) as near,
        aiockpt.Checkpointer(tmp_path / "far", limits=aiockpt.Limits(io=SMALL), snapshot="lazy") as far,
    ):
        near.save(0, state).result(SOON_S)
        nn.init.ones_(model.first.weight)
        save, expected = far.save(1, state), values(model)

        def change() -> None:
            if how == "load":
                near.load(state, 0).result(SOON_S)
            elif how == "mutating":
                with near.mutating():
                    nn.init.zeros_(model.first.weight)
            else:
                near.barrier() if how == "barrier" else anyio.run(near.wait_mutable)
                nn.init.zeros_(model.first.weight)

        changing = threading.Thread(target=change)
        changing.start()
        changing.join(0.2)
        assert changing.is_alive()
        gate.open.set()
        changing.join(SOON_S)
        assert is_saved(far, save, expected)
        assert not torch.equal(model.first.weight.data, expected["model.first.weight"])


def test_no_checkpointer_saves_where_this_thread_changes_the_state_by_hand(tmp_path: Path) -> None:
    with (
        aiockpt.Checkpointer(tmp_path / "near", limits=aiockpt.Limits(io=SMALL)) as near,
        aiockpt.Checkpointer(tmp_path / "far", limits=aiockpt.Limits(io=SMALL)) as far,
    ):
        with near.mutating(), pytest.raises(aiockpt.UsageError, match="inside mutating"):
            far.save(0, {"x": torch.ones(3)})
        elsewhere: list[aiockpt.SaveFuture] = []
        with near.mutating():  # of a state that another thread's checkpointer need not know
            other = threading.Thread(target=lambda: elsewhere.append(far.save(0, {"x": torch.ones(3)})))
            other.start()
            other.join(SOON_S)
        elsewhere[0].result(SOON_S)
        far.save(1, {"x": torch.ones(3)}).result(SOON_S)


@pytest.mark.parametrize("snapshot", ["lazy", "eager"])
def test_threads_with_models_of_their_own_share_a_checkpointer(tmp_path: Path, snapshot: Snapshot) -> None:
    saves: list[tuple[aiockpt.SaveFuture, dict[str, torch.Tensor]]] = []
    interval_s = sys.getswitchinterval()

    def train(number: int) -> None:
        model = Net(8 * (1 + number))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(25):
            save = ckpt.save(step * 3 + number, {"model": model, "optimizer": optimizer})
            saves.append((save, values(model)))
            model(torch.randn(16, 8 * (1 + number))).sum().backward()
            optimizer.step()

    sys.setswitchinterval(1e-5)
    try:
        with aiockpt.Checkpointer(
            tmp_path,
            snapshot=snapshot,
            limits=aiockpt.Limits(io=SMALL, max_in_flight=8),
            lazy=aiockpt.Lazy(debug="digest"),
        ) as ckpt:
            threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON_S)
            assert len(saves) == 75
            assert [save.step for save, expected in saves if not is_saved(ckpt, save, expected)] == []
            assert ckpt.statistics().pool.used_slabs == 0
    finally:
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("call", ["save", "barrier", "step", "steps"])
def test_what_would_wait_for_itself_in_a_callback_is_refused(tmp_path: Path, call: str, gate: CopyGate) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    model(torch.randn(8, 64)).sum().backward()
    refused: list[Exception] = []
    told = threading.Event()
    commit = Gate(LocalBackend(str(tmp_path)), "put_new")  # a future that is done calls back at once, in this thread
    with aiockpt.Checkpointer(commit, snapshot="lazy", limits=aiockpt.Limits(io=SMALL)) as ckpt:

        def again(_: object) -> None:
            try:
                match call:
                    case "save":
                        ckpt.save(2, state)
                    case "barrier":
                        ckpt.barrier()
                    case "step":
                        optimizer.step()
                    case _:
                        ckpt.steps()
            except aiockpt.BlockingCallError as error:
                refused.append(error)
            told.set()

        first = ckpt.save(0, state, snapshot="eager")
        second = ckpt.save(1, state)
        first.add_done_callback(again)
        commit.open_up()
        assert told.wait(SOON_S)
        gate.open.set()
        second.result(SOON_S)
    assert len(refused) == 1
    assert "aiockpt's own thread" in str(refused[0])


async def test_tensors_in_lists_are_saved_lazily_and_loaded(tmp_path: Path) -> None:
    held = {"lists": [torch.ones(2), {"deep": [torch.full((3,), 4.0)]}]}
    async with aiockpt.Checkpointer(tmp_path, snapshot="lazy", lazy=aiockpt.Lazy(immutable=["own.lists"])) as ckpt:
        await ckpt.save(1, {"own": aiockpt.per_rank(held)})
        assert (await ckpt.read(1, "own.lists[1].deep[0]@rank0")).tolist() == [4.0, 4.0, 4.0]
        found: dict[str, Any] = {"own": aiockpt.per_rank({"lists": [torch.zeros(2), {"deep": [torch.zeros(3)]}]})}
        await ckpt.load(found)
    assert found["own"].value["lists"][1]["deep"][0].tolist() == [4.0, 4.0, 4.0]
