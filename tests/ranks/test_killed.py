"""A rank is killed before, in or after a save: the others are told which one, at once, though nobody said a word.

The ranks of all cases are processes that start together; each case is a job of its own.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import aiockpt
from aiockpt.backends.local import LocalBackend
from tests.gates import Around
from tests.ranks.crew import coordinator_of
from tests.ranks.forked import run_forked
from tests.ranks.test_save import equal, loaded, replicated
from tests.small_run import SMALL, steps

RANKS = 3
CASES: dict[str, tuple[int, str | None]] = {
    "before the first save": (1, None),
    "before a later save": (0, None),
    "in a save, rank 0": (0, "create"),
    "in a save, another": (1, "create"),
    "after its vote, rank 0": (0, "put_new"),
    "after its vote, another": (1, "put_new"),
    "in a load": (1, "get"),
}
"""Who is killed, and after its first call of what."""
PATIENT = aiockpt.Deadlines(ranks_s=500, commit_s=500, takeover_s=300, close_s=60)
WAIT_S = 250
WORLD_S = 200


def run_rank(number: int, world_size: int, folder: Path) -> None:
    """Be one rank of one case."""
    torch.set_num_threads(1)
    case, rank = list(CASES)[number // RANKS], number % RANKS
    place = folder / str(number // RANKS)
    store: Any = torch.distributed.FileStore(str(folder / f"store-{number // RANKS}"), RANKS)  # type: ignore[attr-defined]
    victim, verb = CASES[case]
    dying: list[str] = []

    async def die(called: str, key: str) -> None:
        if (
            dying
            and called == verb
            and ("LATEST" not in key)
            and (called != "put_new" or key.endswith(f"r{rank:05d}.json"))
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    ckpt = aiockpt.Checkpointer(
        Around(LocalBackend(str(place)), after=die),
        ranks=aiockpt.Ranks(rank, RANKS, store),
        limits=aiockpt.Limits(io=SMALL, deadlines=PATIENT),
        on_error=lambda future: None,
    )
    if "first" not in case:
        ckpt.save(1, replicated(1)).result(WAIT_S)
    else:  # who dies before it has said in which process it is, is known by the clock alone
        ckpt._loop.submit(coordinator_of(ckpt).rounds.register).result(WAIT_S)
    if rank == victim:
        if verb is None:
            store.get("all have come")
            os.kill(os.getpid(), signal.SIGKILL)
        dying.append(case)
    elif verb is None and store.add("survivors", 1) == RANKS - 1:
        store.set("all have come", b"")
    future: Any = ckpt.load(replicated(0), 1) if "load" in case else ckpt.save(2, replicated(2))
    error = future.exception(WAIT_S)
    outcome = {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}
    (folder / f"{number}.json").write_text(json.dumps(outcome))
    if store.add("told", 1) == RANKS - 1:
        store.set("all were told", b"")
    store.get("all were told")  # who ends before would be gone for the other one, too
    os._exit(0)  # what the end of the block says is tested elsewhere


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int | None]]:
    folder = tmp_path_factory.mktemp("killed")
    return folder, run_forked("tests.ranks.test_killed", RANKS * len(CASES), folder, WORLD_S)


@pytest.mark.timeout(WORLD_S + 40)
@pytest.mark.parametrize("case", CASES)
def test_the_others_are_told_which_rank_was_killed(outcomes: tuple[Path, list[int | None]], case: str) -> None:
    folder, codes = outcomes
    number = list(CASES).index(case)
    victim, verb = CASES[case]
    assert codes[RANKS * number + victim] == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        found = folder / f"{RANKS * number + rank}.json"
        assert found.exists(), (folder / f"{RANKS * number + rank}.log").read_text()[-3000:]
        outcome = json.loads(found.read_text())
        if verb == "put_new":  # it had done its part
            assert outcome["error"] == "NoneType", outcome
        else:
            assert outcome["error"] == "RankFailedError", outcome
            assert outcome["ranks"] == [victim], outcome
            assert f"rank {victim} is gone: its process" in outcome["message"]
    place, read = folder / str(number), partial(loaded, folder / str(number))
    whole = [2, 1] if verb == "put_new" else [] if "first" in case else [1]
    assert steps(place) == whole
    for step in whole:
        assert equal(read(replicated(step), step), replicated(step))
