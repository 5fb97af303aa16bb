"""The guide to the guards: its table is the code's, and each kind of tensor in it is one that occurs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aiockpt.adapters.native import StateWalker
from aiockpt.errors import TornSnapshotError
from aiockpt.lazy import mutability as mutability_module
from aiockpt.lazy import version_check
from aiockpt.lazy.guards import CHANGES, COMPARED, KINDS, Guard, render
from aiockpt.lazy.mutability import Mutability, _in_short
from aiockpt.runtime.cuda import Cuda

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "lazy.md"


def test_the_page_has_the_table_of_the_code() -> None:
    lines = [line for line in PAGE.read_text().splitlines(keepends=True) if line.startswith("|")]
    assert "".join(lines) == render()


def test_kinds_and_changes_are_told_apart_by_their_keys() -> None:
    for keys in ([kind.key for kind in KINDS], [change.key for change in CHANGES]):
        assert len(set(keys)) == len(keys)


def test_every_kind_is_treated_as_the_table_says() -> None:
    model = nn.ModuleDict(
        {
            "owned": nn.Linear(2, 2),
            "rows": nn.Embedding(9, 4, max_norm=1.0),
            "norm": nn.BatchNorm1d(2),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
            "named": nn.Linear(2, 2),
            "torn": nn.Linear(2, 2),
        }
    )
    flat = torch.zeros(20)
    near = nn.Parameter(flat[:10])
    with torch.inference_mode():
        uncounted = torch.ones(3)
    optimizer = torch.optim.SGD([*(p for p in model.parameters() if p.requires_grad), near], lr=0.1)
    state: dict[str, Any] = {
        "model": model,
        "near": near,
        "beside": flat[10:],
        "uncounted": uncounted,
        "optimizer": optimizer,
    }
    walker, mutability = StateWalker(), Mutability(["model.named"], ["model.frozen"])
    mutability.distrust(["model.torn.bias"])
    walked = walker.walk(state)
    split = mutability.split(walked, state, trusting=False)
    still, kinds = split.copy(walked, reuse=True), split.kinds
    expected = {
        "model.owned.weight": "owned",
        "model.rows.weight": "unhooked",
        "model.norm.running_mean": "other",
        "model.frozen.bias": "immutable",
        "model.named.bias": "named",
        "model.torn.bias": "torn",
        "model.torn.weight": "owned",
        "near": "near",
        "beside": "other",
        "uncounted": "uncounted",
    }
    assert {name: kinds[name] for name in expected} == expected
    assert set(kinds.values()) == {kind.key for kind in KINDS}
    copied = {kind.key for kind in KINDS if kind.copied}
    for live, held in zip(walked.tensors, still.tensors, strict=True):
        assert (live is not held) == (kinds[live.name] in copied), live.name
        assert (live in split.in_place) == (live is held)


def add_to(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def add_uncounted(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def resize(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(1 << 20)


@pytest.mark.parametrize(("guard", "change"), [("counter", add_to), ("sample", add_uncounted), ("place", resize)])
@pytest.mark.parametrize("named", [True, False])
def test_tensors_left_in_place_are_compared_by_the_table(
    guard: Guard, change: Callable[[torch.Tensor], None], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: frozenset[Guard] = frozenset({guard}) if named else frozenset()
    assert guard in COMPARED["host"]
    monkeypatch.setitem(COMPARED, "host", alone)
    tensor = torch.ones(64)
    shards = StateWalker().walk({"tensor": tensor}).tensors
    check = version_check.VersionCheck(version_check.VersionSources(shards, Cuda()))
    check.check()
    change(tensor)
    if named:
        with pytest.raises(TornSnapshotError, match="tensor"):
            check.check()
    else:
        check.check()


def test_the_first_kind_of_the_table_that_fits_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"tensor": torch.ones(3)}
    for kinds, expected in ((KINDS, "named"), (KINDS[::-1], "other")):
        monkeypatch.setattr(mutability_module, "KINDS", kinds)
        mutability = Mutability(["tensor"])
        assert mutability.split(StateWalker().walk(state), state, trusting=False).kinds == {"tensor": expected}


@pytest.mark.parametrize(
    ("torn", "known", "line"),
    [
        (["model.a.w", "model.a.b"], ["model.a.w", "model.a.b", "model.c.w"], ["model.a"]),
        (["model.a.w"], ["model.a.w", "model.a.b"], ["model.a.w"]),
        (["model.a.w", "model.c.w"], ["model.a.w", "model.c.w"], ["model"]),
        ([f"m.l{n}.w" for n in range(30)], [f"m.l{n}.{part}" for n in range(30) for part in "wb"], ["m"]),
        (["some[0]", "some[1]"], ["some[0]", "some[1]", "some[2]"], ["some[0]", "some[1]"]),
    ],
)
def test_the_line_that_names_what_tore_is_short(torn: list[str], known: list[str], line: list[str]) -> None:
    assert _in_short(torn, known) == line
