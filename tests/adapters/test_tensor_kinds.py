"""The table of tensor kinds: a kind that the package does not know works by its entry alone, and no code asks a class."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.tensor_kinds import KINDS, PLAIN, TensorKind, tensor_kind
from tests.docs.pages import ROOT, blocks, section

Halves = Any


@pytest.fixture
def halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the example of the documentation as it stands; return its class."""
    monkeypatch.chdir(tmp_path)
    before = list(KINDS)
    (code,) = blocks(section(ROOT / "docs" / "architecture.md", "Add a tensor kind"), "python")
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/architecture.md", "exec"), scope)
    yield scope["Halves"]
    KINDS[:] = before


def make(cls: Any, seed: int) -> Halves:
    generator = torch.Generator().manual_seed(seed)
    return cls(torch.randn(64, 3, generator=generator), torch.randn(64, 5, generator=generator))


def bits(halves: Halves) -> bytes:
    return b"".join(part.numpy().tobytes() for part in (halves.left, halves.right))


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize("immutable", [[], ["weight"]])
def test_a_made_up_kind_is_loaded_bit_by_bit(halves: Any, tmp_path: Path, snapshot: Any, immutable: list[str]) -> None:
    saved, target = make(halves, 1), make(halves, 2)
    lazy = aiockpt.Lazy(immutable=immutable)
    with aiockpt.Checkpointer(tmp_path / "run", snapshot=snapshot, lazy=lazy) as ckpt:
        ckpt.save(1, {"weight": saved}).result()
        ckpt.load({"weight": target}).result()
        first = bits(saved)
        assert bits(target) == first
        saved.left.add_(1)
        saved.right = torch.zeros(64, 5)
        ckpt.save(2, {"weight": saved}).result()
        ckpt.load({"weight": target}).result()
    assert bits(target) == bits(saved) != first


def test_a_made_up_kind_is_stored_whole(halves: Any, tmp_path: Path) -> None:
    saved, plain = make(halves, 1), torch.zeros(64, 8)
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"weight": saved}).result()
        ckpt.load({"weight": plain}).result()
    assert torch.equal(plain, torch.cat([saved.left, saved.right], dim=1))


def test_a_part_that_changes_while_a_lazy_save_copies_is_reported(halves: Any) -> None:
    from aiockpt.lazy.version_check import VersionCheck, VersionSources
    from aiockpt.runtime.cuda import Cuda

    saved = make(halves, 1)
    check = VersionCheck(VersionSources(StateWalker().walk({"weight": saved}).tensors, Cuda()))
    check.check()
    saved.right.add_(1)
    with pytest.raises(aiockpt.CheckpointError, match="weight"):
        check.check()


def test_a_replaced_part_ends_the_cached_walk(halves: Any) -> None:
    walker, state = StateWalker(), {"weight": make(halves, 1), "module": nn.Linear(2, 2)}
    walker.walk(state)
    walker.walk(state)
    assert walker.cold_walks == 1
    state["weight"].left = torch.zeros(64, 3)
    walker.walk(state)
    assert walker.cold_walks == 2


def test_a_value_made_anew_is_spread_like_the_present_one(halves: Any) -> None:
    made = tensor_kind(make(halves, 1)).empty_like(make(halves, 1), torch.float64, None)
    assert type(made) is halves
    assert [part.dtype for part in tensor_kind(made).local_tensors(made)] == [torch.float64] * 2


def test_the_first_entry_that_claims_a_tensor_is_its_kind(halves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = make(halves, 1)
    mine = tensor_kind(tensor)
    assert mine.name == "Halves"
    other = msgspec.structs.replace(mine, name="earlier")
    monkeypatch.setattr("aiockpt.adapters.tensor_kinds.KINDS", [other, *KINDS])
    assert tensor_kind(tensor) is other


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.zeros(2), "tensor"),
        (nn.Parameter(torch.zeros(2)), "tensor"),
        (nn.Linear(2, 2), "tensor"),
        (torch.eye(2).to_sparse(), "tensor in parts"),
        (aiockpt.Shards((2,), {(0,): torch.zeros(2)}), "Shards"),
    ],
)
def test_each_tensor_has_one_kind(value: object, name: str) -> None:
    kind = tensor_kind(value)
    assert kind.name == name
    assert isinstance(kind, TensorKind)
    assert (kind is PLAIN) is (name == "tensor")


ASKED = re.compile(
    r"(?<!def )\bis_(dtensor|sharded_tensor|torchs|composite|fsdp1|foreign_tensor|spread|plain_tensor)\("
    r"|isinstance\([^)]*\b(DTensor|ShardedTensor|Shards|FullyShardedDataParallel)\b"
)
"""Questions about the kind of a tensor."""
BEHIND_THE_TABLE = ("tensor_kinds.py", "dtensors.py", "sharded_tensors.py", "composites.py")


def questions(folder: Path) -> list[str]:
    """Return the lines below *folder* that ask a tensor for its kind, except in the table and the modules of its entries."""
    files = [path for path in sorted(folder.rglob("*.py")) if path.name not in BEHIND_THE_TABLE]
    return [
        f"{path.relative_to(folder)}:{number}: {line.strip()}"
        for path in files
        if "integrations" not in path.parts  # these speak of the tensors of their own frameworks
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ASKED.search(line)
    ]


def test_all_modules_ask_the_table_of_kinds(tmp_path: Path) -> None:
    assert questions(ROOT / "aiockpt") == []
    (tmp_path / "module.py").write_text("if is_dtensor(one):\n    pass\nif isinstance(one, (Shards, int)):\n    pass\n")
    assert len(questions(tmp_path)) == 2
