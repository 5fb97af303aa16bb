"""The ranks of an incarnation that was replaced: they can do nothing to the one that replaced it."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from tests.gates import Gate
from tests.ranks.crew import Crew


def state_at(value: float) -> dict[str, Any]:
    return {f"w{index}": torch.full((300, 33), float(value + index)) for index in range(3)}


STOPS: dict[str, tuple[str, str]] = {
    "create": ("create", "step-00000002/*"),
    "decision": ("put_new", "step-00000002/*DECISION*"),
    "manifest": ("put_new", "step-00000002/MANIFEST*"),
}


@pytest.mark.parametrize("stop", STOPS)
def test_replaced_ranks_neither_commit_nor_harm_newer_saves(tmp_path: Path, stop: str) -> None:
    """The processes of the old incarnation stop in the middle of step 2, until they are told to go on."""
    zombies = [Gate(LocalBackend(str(tmp_path)), *STOPS[stop]) for _ in range(2)]
    with Crew(2, zombies.__getitem__, on_error=lambda future: None) as old, ThreadPoolExecutor(1) as threads:
        saving = threads.submit(old.errors, lambda rank, ckpt: ckpt.save(2, state_at(1)).result())
        assert zombies[0].reached.wait(250)
        with Crew(3, tmp_path) as new:
            saved = new.on_all(lambda rank, ckpt: ckpt.save(2, state_at(2)).result())
        for zombie in zombies:
            zombie.open_up()
        errors = saving.result()
    assert isinstance(errors[0], aiockpt.CommitConflictError), errors
    assert isinstance(errors[1], aiockpt.CommitConflictError | aiockpt.RankFailedError), errors
    manifests = sorted((tmp_path / "step-00000002").glob("MANIFEST-*.json"))
    assert [json.loads(path.read_text())["world_size"] for path in manifests] == [3]
    assert {result.generation for result in saved} == {1}
    state = state_at(0)
    with aiockpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.verify(2).result()
        checkpointer.load(state, 2).result()
    assert all(torch.equal(tensor, state_at(2)[name]) for name, tensor in state.items())
