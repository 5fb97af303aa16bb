"""All the ways in which torch spreads tensors over ranks, to the neutral language and back, and through the whole engine.
With real processes.

All checks of one world share its processes; they are in the modules that `tests.ranks.adapters_worker.MODULES` names.
"""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.adapters_worker import MODULES
from tests.ranks.forked import run_forked

WORLD_S = 900
"""For all checks of a world, on two cores that others keep busy, too: there they have taken 320."""
CHECKS = [
    (ast.literal_eval(decorator.args[0]), function.name)
    for module in MODULES
    for function in ast.parse((Path(__file__).parent / f"{module}.py").read_text()).body
    if isinstance(function, ast.FunctionDef)
    for decorator in function.decorator_list
    if isinstance(decorator, ast.Call)
]


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a world once; return each rank's outcomes, and what it printed."""
    outcomes: dict[int, list[tuple[dict[str, str], str]]] = {}

    def run(world: int) -> list[tuple[dict[str, str], str]]:
        if world not in outcomes:
            outcomes[world] = _run_world(world, tmp_path_factory.mktemp(f"world{world}"))
        return outcomes[world]

    return run


def _run_world(world: int, folder: Path) -> list[tuple[dict[str, str], str]]:
    run_forked("tests.ranks.all_checks", world, folder, WORLD_S)
    return [_read(folder, rank) for rank in range(world)]


def _read(folder: Path, rank: int) -> tuple[dict[str, str], str]:
    found = folder / f"{rank}.json"
    return json.loads(found.read_text()) if found.exists() else {}, (folder / f"{rank}.log").read_text()


@pytest.mark.timeout(WORLD_S + 40)
@pytest.mark.parametrize(("world", "name"), CHECKS, ids=[f"{world}-{name}" for world, name in CHECKS])
def test_spread_over_ranks(run_world: Any, world: int, name: str) -> None:
    for rank, (outcomes, printed) in enumerate(run_world(world)):
        failure = outcomes.get(name, f"it did not end\n{printed[-3000:]}")
        assert not failure, f"rank {rank}: {failure}"
