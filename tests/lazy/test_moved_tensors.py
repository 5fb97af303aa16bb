"""Tensors that move between the call and the end of its copy: noticed before anything is read from where they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.pipeline import snapshot as copying
from aiockpt.pipeline.device_copy import on_host
from aiockpt.pipeline.snapshot import AddressCheck
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from tests.lazy.copy_gate import CopyGate
from tests.lazy.test_lazy import SMALL


def pair(sizes: int = 1, *, strided: bool = False) -> dict[str, Any]:
    parameters = [nn.Parameter(torch.ones(8, 9)[:, :8] if strided else torch.ones(8, 8)) for _ in range(sizes)]
    return {"model": nn.ParameterList(parameters), "optimizer": torch.optim.SGD(parameters, lr=0.1)}


def move(parameter: torch.Tensor) -> None:
    storage = parameter.untyped_storage()
    storage.resize_(2 * storage.nbytes())


def error_of(save: aiockpt.SaveFuture) -> aiockpt.TornSnapshotError:
    error = save.exception()
    assert isinstance(error, aiockpt.TornSnapshotError)
    return error


@pytest.mark.parametrize("strided", [False, True])
def test_a_storage_resized_while_the_save_waits_is_noticed(
    strided: bool, tmp_path: Path, gate: CopyGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(), pair(strided=strided)
    read: list[torch.Tensor] = []

    def read_host(tensor: torch.Tensor) -> torch.Tensor:
        read.append(tensor)
        return on_host(tensor)

    monkeypatch.setattr(copying, "on_host", read_host)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", on_error="warn") as ckpt:
        ckpt.save(1, first)
        waits = ckpt.save(2, second)
        assert gate.reached.wait(250)
        move(second["model"][0])
        gate.open.set()
        assert error_of(waits).tensors == ("model.0",)
    assert not read


def test_a_storage_resized_during_preparation_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pair()
    prepare = copying.CopyProgram.__init__

    def prepare_late(self: copying.CopyProgram, *arguments: Any) -> None:
        move(state["model"][0])
        prepare(self, *arguments)

    monkeypatch.setattr(copying.CopyProgram, "__init__", prepare_late)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", on_error="warn") as ckpt:
        assert error_of(ckpt.save(1, state)).tensors == ("model.0",)


def test_no_window_is_copied_from_a_former_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(16 * 1024)) for _ in range(4)]
    state = {"model": nn.ParameterList(parameters), "optimizer": torch.optim.SGD(parameters, lr=0.1)}
    copied: list[int] = []
    copy = copying._copy_beside

    def copy_and_move(base: int, moves: Any, number: int) -> None:
        copied.append(number)
        copy(base, moves, number)
        if len(copied) == 1:
            move(parameters[3])

    monkeypatch.setattr(copying, "_copy_beside", copy_and_move)
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL), on_error="warn") as ckpt:
        assert error_of(ckpt.save(1, state)).tensors == ("model.3",)
    assert len(copied) < 4


def test_the_digests_leave_storages_as_they_are(tmp_path: Path) -> None:
    state = pair()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", lazy=aiockpt.Lazy(debug="digest")) as ckpt:
        ckpt.save(1, state).result()
    move(state["model"][0])


def test_all_that_moved_are_named_and_those_that_stayed_are_not() -> None:
    tensors = [torch.ones(4) for _ in range(4)]
    places = AddressCheck(
        [TensorShard(f"t{n}", "F32", (4,), (Box.whole((4,)),), data) for n, data in enumerate(tensors)]
    )
    places.check()
    move(tensors[1])
    move(tensors[2])
    places.check([0, 3])
    for some in (None, [0, 1, 2]):
        with pytest.raises(aiockpt.TornSnapshotError) as caught:
            places.check(some)
        assert list(caught.value.tensors) == ["t1", "t2"]
