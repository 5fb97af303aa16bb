"""A tensor that a load has to make lies in memory as the one that was saved: equal values are not enough.

A product of matrices that lie in another order is rounded otherwise, so an optimizer that keeps bases would not resume.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import aiockpt
from aiockpt.tools.cli.main import main

LAST = torch.channels_last


def columns(rows: int, width: int, value: float = 0.0) -> torch.Tensor:
    """Return a matrix that lies columns first."""
    return (torch.arange(rows * width, dtype=torch.float32) + value).view(width, rows).t()


def image(value: float = 0.0) -> torch.Tensor:
    return (torch.arange(120, dtype=torch.float32) + value).view(2, 3, 4, 5).contiguous(memory_format=LAST)


def saved_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of each layout, by how they come back."""
    return {
        "rows": torch.arange(12.0).view(3, 4),
        "columns": columns(3, 4),
        "image": image(),
        "three": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        "part of a larger one": torch.arange(24.0).view(4, 6)[:, ::2],
        "columns of a larger one": torch.arange(24.0).view(4, 6)[:, ::2].t(),
        "one row, expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "one column": torch.arange(5.0).view(1, 5).t(),
        "number": torch.tensor(2.0),
        "nothing": torch.empty(2, 0, 3).transpose(0, 2),
        "half": columns(4, 5).to(torch.bfloat16),
        "bytes": columns(4, 5).to(torch.float8_e4m3fn),
    }


def strides_again(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of what a load makes: those of the tensor where it is dense, else row-major ones."""
    dense = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.stride() if dense and tensor.numel() else torch.empty(tensor.shape).stride()


def same(found: torch.Tensor, saved: torch.Tensor) -> bool:
    """Say whether a tensor has the bits that were saved, and lies as they lay."""
    bits = found.contiguous().flatten().view(torch.uint8), saved.contiguous().flatten().view(torch.uint8)
    return found.stride() == strides_again(saved) and torch.equal(*bits)


HOW: list[dict[str, Any]] = [
    {"snapshot": "eager"},
    {"snapshot": "lazy"},
    {"worker": "process"},
]


@pytest.fixture(params=HOW, ids=["eager", "lazy", "writer process"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Save what each function returns, a step each, by one checkpointer."""
    how = dict(request.param)
    snapshot = how.pop("snapshot", "eager")

    def save_all(*makers: Callable[[], dict[str, Any]]) -> None:
        with aiockpt.Checkpointer(tmp_path / "run", **how) as ckpt:
            for step, make in enumerate(makers):
                ckpt.save(step, make(), snapshot=snapshot).result()

    return save_all


def load(folder: Path, state: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    with aiockpt.Checkpointer(folder / "run") as ckpt:
        assert ckpt.load(state, step).result() is not None
    return state


def test_what_is_made_for_nothing_lies_as_it_was_saved(save: Callable[..., None], tmp_path: Path) -> None:
    tensors = saved_tensors()
    save(lambda: {**tensors, "list": list(tensors.values()), "deep": {"er": ({"x": tensors["image"]},)}})
    state = load(tmp_path, {**dict.fromkeys(tensors), "list": [], "deep": None})
    assert {name: state[name].stride() for name in tensors} == {
        name: strides_again(tensor) for name, tensor in tensors.items()
    }
    assert all(same(state[name], tensor) for name, tensor in tensors.items())
    assert all(map(same, state["list"], tensors.values()))
    assert same(state["deep"]["er"][0]["x"], tensors["image"])


def test_a_layout_that_changes_between_saves_is_noticed(save: Callable[..., None], tmp_path: Path) -> None:
    model: Any = nn.Module()
    model.kernel = nn.Parameter(image())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "list": [None]}

    def lay(step: int) -> dict[str, Any]:
        matrix, kernel = columns(3, 4, step), image(step)
        in_order = step % 2 == 0
        state["matrix"] = matrix.contiguous() if in_order else matrix
        state["list"][0] = state["matrix"].clone()
        model.kernel.data = kernel.contiguous() if in_order else kernel
        optimizer.state[model.kernel]["momentum_buffer"] = torch.ones_like(model.kernel.data)
        return state

    save(*(partial(lay, step) for step in range(5)))
    for step in range(5):
        expected = lay(step)
        fresh = nn.Module()
        fresh.kernel = nn.Parameter(torch.zeros(2, 3, 4, 5))
        other = torch.optim.SGD(fresh.parameters(), lr=0.1)
        found = load(tmp_path, {"matrix": None, "list": None, "model": fresh, "optimizer": other}, step)
        assert same(found["matrix"], expected["matrix"])
        assert same(found["list"][0], expected["matrix"])
        (buffer,) = (one["momentum_buffer"] for one in other.state.values())
        assert same(buffer, optimizer.state[model.kernel]["momentum_buffer"])


def test_a_part_of_a_tensor_is_saved_as_is(save: Callable[..., None], tmp_path: Path) -> None:
    larger = torch.zeros(4, 6)
    state = {"part": larger[1:3, ::2], "beside": torch.zeros(3)}

    def fill(step: int) -> dict[str, Any]:
        larger.fill_(step)
        return state

    save(*(partial(fill, step) for step in range(3)))
    for step in range(3):
        assert torch.equal(
            load(tmp_path, {"part": None, "beside": None}, step)["part"], torch.full((2, 3), float(step))
        )


class Bases(torch.optim.Optimizer):
    """Keeps, beside what is like the parameter, a basis that lies columns first, and lists of such."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                size = parameter.shape[0]
                self.state[parameter].update(
                    like=torch.full_like(parameter.detach(), 1.0 + number),
                    rows=torch.full(parameter.shape, 2.0 + number),
                    basis=columns(size, size, number),
                    several=[columns(size, 3), None, torch.ones(size, 2)],
                    by_name={"left": columns(2, size)},
                )


class Stateful(Bases):
    """One with a say in its own state."""

    def state_dict(self) -> Any:
        return super().state_dict()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(columns(4, 5)), nn.Parameter(image()), nn.Parameter(torch.ones(3, 4))]


@pytest.mark.parametrize("kind", [Bases, Stateful])
def test_the_state_of_a_fresh_optimizer_lies_as_saved(
    save: Callable[..., None], tmp_path: Path, kind: Callable[[Any], torch.optim.Optimizer]
) -> None:
    saved, fresh = nn.ParameterList(parameters()), nn.ParameterList(parameters())
    optimizer, other = kind(saved), kind(fresh)
    optimizer.step()
    save(lambda: {"model": saved, "optimizer": optimizer})
    load(tmp_path, {"model": fresh, "optimizer": other})
    for one, two in zip(saved, fresh, strict=True):
        expected, found = optimizer.state[one], other.state[two]
        assert all(same(found[key], expected[key]) for key in ("like", "basis"))
        assert same(found["several"][0], expected["several"][0])
        assert same(found["several"][2], expected["several"][2])
        assert same(found["by_name"]["left"], expected["by_name"]["left"])
        assert torch.equal(found["rows"], expected["rows"])
        assert found["rows"].is_contiguous(), "row-major beside a parameter that is not"


class Grown(nn.Module):
    """Loads itself: its buffer is another one after each load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.basis = state_dict[prefix + "basis"]


def test_what_loads_itself_lies_as_it_was_saved(save: Callable[..., None], tmp_path: Path) -> None:
    saved, fresh = Grown(), Grown()
    saved.basis = columns(3, 7)
    save(lambda: {"model": saved})
    load(tmp_path, {"model": fresh})
    assert same(fresh.basis, saved.basis)


def test_arrays_of_numpy_lie_as_they_were_saved(save: Callable[..., None], tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    save(lambda: {"array": array, "rows": np.ascontiguousarray(array)})
    state = load(tmp_path, {"array": None, "rows": None})
    assert np.array_equal(state["array"], array)
    assert (state["array"].strides, state["rows"].strides) == (array.strides, (32, 8))


def test_what_is_there_is_filled_and_stays_as_it_lies(save: Callable[..., None], tmp_path: Path) -> None:
    save(lambda: {"columns": columns(3, 4), "rows": torch.arange(12.0).view(3, 4)})
    here = {"columns": torch.zeros(3, 4), "rows": torch.zeros(4, 3).t()}
    state = load(tmp_path, dict(here))
    assert all(state[name] is here[name] for name in here)
    assert (here["columns"].stride(), here["rows"].stride()) == ((4, 1), (1, 3))
    assert torch.equal(here["columns"], columns(3, 4))


def test_tied_tensors_are_made_once_and_lie_as_they_were_saved(save: Callable[..., None], tmp_path: Path) -> None:
    w = columns(3, 4)
    save(lambda: {"one": w, "two": w, "list": [w]})
    state = load(tmp_path, {"one": None, "two": None, "list": None})
    assert state["one"].data_ptr() == state["two"].data_ptr() == state["list"][0].data_ptr()
    assert same(state["two"], w)


def test_files_hold_rows_whatever_lay_in_memory(save: Callable[..., None], tmp_path: Path) -> None:
    save(lambda: {"columns": columns(3, 4), "image": image()})
    (path,) = (tmp_path / "run").glob("step-*/a-*/d/*.safetensors")
    found = load_file(path)
    assert torch.equal(found["columns"], columns(3, 4))
    assert torch.equal(found["image"], image())
    assert found["columns"].stride() == (4, 1)


def test_the_manifest_tells_of_another_order_of_axes(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, saved_tensors()).result()
        told = {tensor.name: tensor.axes for tensor in ckpt.describe(1).result().tensors}
    (path,) = (tmp_path / "run").glob("step-*/MANIFEST-1.json")
    written = {name: entry.get("axes") for name, entry in json.loads(path.read_text())["tensors"].items()}
    turned = {name: [1, 0] for name in ("columns", "half", "bytes", "one column")}
    expected = {**turned, "image": [0, 2, 3, 1], "three": [1, 2, 0]}
    assert written == {**dict.fromkeys(saved_tensors()), **expected}
    assert told == {name: None if axes is None else tuple(axes) for name, axes in written.items()}


def test_a_tensor_that_is_read_by_itself_is_row_major(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": columns(4, 6)}).result()
        whole, rows = ckpt.read(1, "w").result(), ckpt.read(1, "w", rows=slice(1, 3)).result()
    assert whole.is_contiguous()
    assert rows.is_contiguous()
    assert torch.equal(whole, columns(4, 6))
    assert torch.equal(rows, columns(4, 6)[1:3])


def test_steps_that_differ_in_layout_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": columns(4, 6)}).result()
        ckpt.save(2, {"w": columns(4, 6).contiguous()}).result()
    monkeypatch.setattr("sys.argv", ["aiockpt", "diff", str(tmp_path / "run"), "1", "2", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert {change["kind"] for change in json.loads(capsys.readouterr().out)} == {"same"}


def test_the_weights_alone_of_a_step_say_it_too(tmp_path: Path) -> None:
    model = nn.Module()
    model.kernel = nn.Parameter(image())
    tiers = [aiockpt.Tier(str(tmp_path / "run")), aiockpt.Tier(str(tmp_path / "weights"), content="weights")]
    with aiockpt.Checkpointer(tiers) as ckpt:
        ckpt.save(1, {"model": model, "other": columns(2, 3)}).result()
    with aiockpt.Checkpointer(tmp_path / "weights") as ckpt:
        assert [(one.name, one.axes) for one in ckpt.describe(1).result().tensors] == [("model.kernel", (0, 2, 3, 1))]
