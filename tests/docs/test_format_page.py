"""What docs/format.md says is enough to read a checkpoint: a reader written from it alone finds every bit."""

import ast
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.docs import format_reader
from tests.docs.format_reader import Refused, read_newest
from tests.golden.columns_state import columns_state
from tests.golden.golden_state import golden_state
from tests.ranks.crew import Crew

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RELEASES = sorted(path for path in GOLDEN.glob("v*") if path.is_dir())
COLUMNS = sorted(path for path in (GOLDEN / "columns").glob("v*") if path.is_dir())


def to_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()
    }


def named(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model and its optimizer by the names that the page gives them."""
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    for parameter, slots in state["optimizer"].state.items():
        tensors |= {f"optimizer.state.model.{names[parameter]}.{key}": value for key, value in slots.items()}
    return tensors


def test_the_reader_knows_nothing_of_ours() -> None:
    tree = ast.parse(Path(format_reader.__file__).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"base64", "json", "math", "re", "stat", "pathlib", "typing", "xxhash"}


@pytest.mark.parametrize("release", RELEASES, ids=[path.name for path in RELEASES])
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_it_reads_the_golden_checkpoints(release: Path) -> None:
    state = golden_state()
    expected = named(state)
    expected |= {f"dtypes.{name}": tensor for name, tensor in state["dtypes"].items()}
    expected |= {f"shapes.{name}": tensor for name, tensor in state["shapes"].items()}
    expected["values.numbers[3]"] = torch.arange(3)
    _, tensors = read_newest(release)
    assert tensors == to_bytes(expected)


@pytest.mark.parametrize("release", COLUMNS, ids=[path.name for path in COLUMNS])
def test_it_reads_the_golden_checkpoints_whose_pieces_are_a_table(release: Path) -> None:
    manifest, tensors = read_newest(release)
    assert manifest["requires"] == ["parts"]
    assert tensors == to_bytes(columns_state())


def save(step: int, state: dict[str, Any], rank: int, ckpt: aiockpt.Checkpointer) -> object:
    return ckpt.save(step, state).result()


@pytest.fixture
def fresh(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """Return a place that this version has just written: three ranks, several blocks, two generations of the newest."""
    torch.manual_seed(0)
    state: dict[str, Any] = {
        "model": torch.nn.Linear(60, 70),
        "long": torch.randn(1000, 33).t(),
        "empty": torch.empty(3, 0, 2),
        "scalar": torch.tensor(7, dtype=torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex128),
    }
    with Crew(3, tmp_path / "run", io=aiockpt.IO(block_bytes=4096)) as crew:
        for step in (3, 5, 5):
            state["long"] += 1
            crew.on_all(partial(save, step, state))
    expected = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    return tmp_path / "run", to_bytes(expected | {name: state[name] for name in ("long", "empty", "scalar", "complex")})


def test_it_reads_what_is_written_today(fresh: tuple[Path, dict[str, bytes]]) -> None:
    place, expected = fresh
    manifest, tensors = read_newest(place)
    assert (manifest["step"], manifest["generation"], manifest["world_size"]) == (5, 2, 3)
    assert manifest["tensors"]["long"]["axes"] == [1, 0]
    assert {file["rank"] for file in manifest["files"]} == {0, 1, 2}
    assert tensors == expected


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DATA = "*/a-*/d/r00000-0000.safetensors"
FLIPS: dict[str, tuple[str, Callable[[int], int]]] = {
    "the header of a file": (DATA, lambda size: 20),
    "the padding of a file": (DATA, lambda size: 4090),
    "the payload of a file": (DATA, lambda size: size - 1),
    "the head of a manifest": ("*/MANIFEST-1.json", lambda size: 120),
    "the middle of a manifest": ("*/MANIFEST-1.json", lambda size: size // 2),
    "the seal of a manifest": ("*/MANIFEST-1.json", lambda size: size - 10),
    "a table": ("*/a-*/p/start-0000.bin", lambda size: 0),
}


@pytest.mark.parametrize("where", FLIPS)
def test_it_refuses_a_flipped_bit(where: str, tmp_path: Path) -> None:
    shutil.copytree(COLUMNS[-1] if where == "a table" else RELEASES[-1], tmp_path / "run")
    pattern, place = FLIPS[where]
    (path,) = (tmp_path / "run").glob(pattern)
    flip(path, place(path.stat().st_size))
    with pytest.raises((Refused, IndexError)):  # no step is left when the only manifest is bad
        read_newest(tmp_path / "run")


def test_it_falls_back_to_the_step_whose_head_holds(fresh: tuple[Path, dict[str, bytes]]) -> None:
    place, _ = fresh
    for manifest in (place / "step-00000005").glob("MANIFEST-*.json"):
        flip(manifest, 120)
    assert read_newest(place)[0]["step"] == 3
