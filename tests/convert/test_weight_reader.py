"""The weights of a step, read where they lie by the calls of safetensors, however they were cut."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.convert import open_weights
from aiockpt.convert.weight_reader import Weights
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.cli.small_checkpoints import flip
from tests.convert.small_models import Tied, all_same, save_model
from tests.small_run import small_checkpointer


def test_names_and_tensors_are_those_of_the_module(root: Path) -> None:
    model = Tied(1)
    with small_checkpointer(root) as ckpt:
        weights = open_weights(ckpt)
        assert weights.step == 7
        assert weights.ties == {"head.weight": "embed.weight"}
        assert list(weights) == weights.keys() == [name for name in model.state_dict() if name != "head.weight"]
        assert len(weights) == 7
        assert "head.weight" in weights
        assert "head" not in weights
        assert all_same({name: weights[name] for name in [*weights, "head.weight"]}, model.state_dict())
        with pytest.raises(aiockpt.StateMismatchError, match="head: in no part of its weights"):
            weights.get_tensor("head")


@pytest.mark.parametrize("ahead_bytes", [1, 3000, 1 << 30])
def test_all_of_them_come_one_after_the_other(root: Path, ahead_bytes: int) -> None:
    model = Tied(1)
    with small_checkpointer(root) as ckpt:
        found = list(open_weights(ckpt, 7, prefix="model").items(ahead_bytes=ahead_bytes))
    names = [name for name in model.state_dict() if name != "head.weight"]
    assert [name for name, _ in found] == names
    assert all_same(dict(found), {name: model.state_dict()[name] for name in names})


def test_no_more_is_read_ahead_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches are held at once: the one that is yielded, and the next."""
    started: list[int] = []
    start = Weights._start

    def noted(weights: Weights, some: Any) -> Any:
        started.append(sum(weight.nbytes for weight in some))
        return start(weights, some)

    monkeypatch.setattr(Weights, "_start", noted)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(9))
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model}).result()
        assert len(list(open_weights(ckpt).items(ahead_bytes=1024))) == 9
    assert max(map(sum, pairwise(started))) <= 1024


def test_a_slice_reads_as_one_of_safetensors_does(root: Path) -> None:
    whole = Tied(1).state_dict()["embed.weight"]
    with small_checkpointer(root) as ckpt:
        weights = open_weights(ckpt)
        part = weights.get_slice("embed.weight")
        assert part.get_shape() == [301, 20]
        assert part.get_dtype() == "F32"
        for key in (
            slice(3, 9),
            slice(None),
            slice(-4, None),
            (slice(2, 4), slice(1, 3)),
            5,
            (5, 2),
            slice(0, 9, 2),
            ...,
        ):
            assert torch.equal(part[key], whole[key]), key
        assert torch.equal(weights.get_slice("scale")[...], Tied(1).scale)


def test_what_several_ranks_have_saved_is_put_together(tmp_path: Path) -> None:
    whole = torch.randn(10, 6)
    boxes = [((0, 0), whole[:3]), ((3, 0), whole[3:])]
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"net": {"w": aiockpt.Shards((10, 6), boxes), "b": torch.ones(2)}}).result()
        weights = open_weights(ckpt, prefix="net")
        assert torch.equal(dict(weights.items())["w"], whole)
        assert torch.equal(weights.get_slice("w")[2:5], whole[2:5])


def test_a_step_that_comes_later_changes_nothing(root: Path) -> None:
    with small_checkpointer(root) as ckpt:
        weights = open_weights(ckpt)
        save_model(root, 8, seed=5)
        assert torch.equal(weights["embed.weight"], Tied(1).embed.weight)
        with pytest.raises(aiockpt.StepNotFoundError):
            open_weights(ckpt, 99)


def test_a_step_that_is_saved_anew_does_not_mix_its_weights_with_those_that_are_open(root: Path) -> None:
    model = Tied(1)
    # The clean-up of the second save would remove the first one's files, sooner or later.
    place = FaultyBackend(LocalBackend(str(root)), [Fault(do="fail", verb="delete", times=None)])
    with small_checkpointer(place, on_exists="new_generation", on_error="warn") as ckpt:
        weights = open_weights(ckpt, 7)
        ckpt.save(7, {"model": Tied(5)}).result()
        for found in (dict(weights.items()), {name: weights[name] for name in weights}):
            assert all_same(found, {name: model.state_dict()[name] for name in weights})
        assert torch.equal(weights.get_slice("embed.weight")[2:5], model.embed.weight[2:5])
        assert torch.equal(open_weights(ckpt, 7)["embed.weight"], Tied(5).embed.weight)


def test_weights_that_the_save_left_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.Linear(3, 3)}, exclude=["model.bias"]).result()
        weights = open_weights(ckpt)
        assert weights.left_out == ("bias",)
        assert "step-00000001 is opened without bias: left out when the step was saved" in caplog.text
        with pytest.raises(aiockpt.StateMismatchError, match="bias: left out when the step was saved"):
            weights.get_tensor("bias")


def test_damage_is_raised_by_the_weight_that_has_it(root: Path) -> None:
    path = min(root.glob("step-*/a-*/d/*.safetensors"))
    flip(path, path.stat().st_size - 5)
    with small_checkpointer(root) as ckpt:
        weights = open_weights(ckpt)
        with pytest.raises(aiockpt.CorruptionError):
            list(weights.items())


def test_a_model_is_filled_from_the_iterator_as_engines_do_it(root: Path) -> None:
    model: nn.Module = Tied(3)
    with small_checkpointer(root) as ckpt:
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in open_weights(ckpt).items():
            own[name].data.copy_(tensor)
    assert all_same(model.state_dict(), Tied(1).state_dict())
