"""What each framework saves loads under each other one: weights and optimizer by name, bit by bit.

The table that is found is benchmarks/results/frameworks/matrix.json, which PUBLISH_MATRIX=1 writes anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.ranks.forked import outcomes_of

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "frameworks" / "matrix.json"
PROGRAMS = {"torch-alone": ("torch", 1), "torch": ("torch", 4)} | {
    name: (name, 4) for name in ("megatron", "deepspeed", "huggingface")
}
"""Modules of ranks, and how many run."""
NAMES = [
    *("plain", "DDP", "FSDP1", "FSDP2", "HSDP", "TP", "FSDP2 and TP"),
    *("Megatron", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HF Trainer"),
]
EQUAL = "equal"

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What went wrong on each rank, by what was saved or loaded."""
    root = tmp_path_factory.mktemp("matrix")
    (root / "places").mkdir()
    found: dict[str, list[str]] = {}
    for phase in ("save", "load"):
        for program, (module, world_size) in PROGRAMS.items():
            name = f"tests.frameworks.matrix.{module}_ranks"
            for of_rank in outcomes_of(name, world_size, root / f"{phase}-{program}", 250):
                for pair, problem in of_rank.items():
                    found.setdefault(pair, []).append(problem)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_saves(name: str, outcomes: dict[str, list[str]]) -> None:
    assert set(outcomes.get(name, ["never got there"])) == {""}


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_what_one_saved_the_other_loads(source: str, target: str, outcomes: dict[str, list[str]]) -> None:
    assert set(outcomes.get(f"{source} -> {target}", ["never got there"])) == {""}


def test_the_published_table_is_what_was_found(outcomes: dict[str, list[str]]) -> None:
    found = {
        source: {
            target: EQUAL if set(outcomes.get(f"{source} -> {target}", ["?"])) == {""} else "fails" for target in NAMES
        }
        for source in NAMES
    }
    if os.environ.get("PUBLISH_MATRIX"):
        TABLE.write_text(json.dumps({"saved under, loaded under": found}, indent=2) + "\n")
    assert json.loads(TABLE.read_text())["saved under, loaded under"] == found
