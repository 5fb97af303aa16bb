"""One of several ranks, killed with SIGKILL at one of its file-system calls: all others end, and nothing is lost.

A case forks the ranks of a job, which meet in a file; one of them dies at a call. The survivors must end before their
deadlines: with the step committed, or with an error. Then a fresh process loads: the old step or the whole new one. A new
job of all ranks saves on. Seeds sweep ranks and calls; rank 0 between the last receipt and the manifest is among them.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.campaigns.sigkill import DEADLINE_S, NEVER_SAVED, SPREAD, end_of, fork, in_child
from tests.inline_process import TINY

WORLD_SIZE = 3
FIRST, SECOND, LAST = 1, 2, 3
GIVEN_UP = 7
"""What a rank returns whose save ended with one of our errors."""
QUICK = aiockpt.Deadlines(ranks_s=2.0, commit_s=3.0, takeover_s=0.3, close_s=30)
"""Of a job that loses a rank: the survivors wait for it."""
PATIENT = aiockpt.Deadlines(ranks_s=30, commit_s=30, takeover_s=10, close_s=30)
"""Of one that loses none: a slow machine is no finding."""


def state_of(rank: int, value: int) -> dict[str, Any]:
    """Return what a rank holds: something that all have, and something of its own."""
    return {
        "shared": torch.full((37, 31), float(value)),
        f"own{rank}": torch.arange(40) + value * 100 + rank,
        "value": value,
    }


def save(root: Path, store: Path, rank: int, step: int, kill_at: int | None, deadlines: aiockpt.Deadlines) -> int:
    """Save one rank's part of a step, dying at a call; return 0, or GIVEN_UP."""
    faults = [] if kill_at is None else [Fault(do="kill", at=kill_at)]
    backend = LocalBackend(root, world=World(files=FaultyFiles(OsFiles(), faults)))
    meeting = torch.distributed.FileStore(str(store), WORLD_SIZE)  # type: ignore[attr-defined]
    ranks = aiockpt.Ranks(rank, WORLD_SIZE, meeting)
    with aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=TINY, deadlines=deadlines), ranks=ranks) as ckpt:
        try:
            ckpt.save(step, state_of(rank, step)).result(DEADLINE_S)
        except aiockpt.CheckpointError:
            return GIVEN_UP
    return 0


def load(root: Path, world_size: int = WORLD_SIZE) -> int | None:
    """Load the newest step of all ranks on one, compare all of it, and return its value; None when there is none."""
    state = {key: value for rank in range(world_size) for key, value in state_of(rank, -1).items()}
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=TINY)) as ckpt:
        loaded = ckpt.load(state).result(DEADLINE_S)
    if loaded is None:
        return None
    value = int(state["value"])
    whole = {key: item for rank in range(world_size) for key, item in state_of(rank, value).items()}
    equal = all(torch.equal(state[key], item) for key, item in whole.items() if key != "value")
    return value if equal and loaded.step == value else NEVER_SAVED


def on_all_ranks(work: Callable[[int], int]) -> list[tuple[bool, int]]:
    """Fork all ranks at once; return of each whether it was killed, and what it returned."""
    return [end_of(pid) for pid in [fork(partial(work, rank)) for rank in range(WORLD_SIZE)]]


def save_with_ranks(root: Path, store: Path, step: int, victim: int, kill_at: int | None) -> list[tuple[bool, int]]:
    """Save a step on all ranks, one of which may die."""
    deadlines = PATIENT if kill_at is None else QUICK
    return on_all_ranks(lambda rank: save(root, store, rank, step, kill_at if rank == victim else None, deadlines))


def prepare() -> Case:
    """Save a first step on all ranks and see how many calls a rank makes: that is where the cases start from."""
    folder = tempfile.TemporaryDirectory(prefix="aiockpt-sigkill-ranks-")
    first = Path(folder.name)
    assert save_with_ranks(first / "base", first / "store", FIRST, 0, None) == [(False, 0)] * WORLD_SIZE

    def look(seed: int, place: Path) -> Outcomes:
        victim, kill_at = seed % WORLD_SIZE, 1 + seed // WORLD_SIZE * SPREAD % MOST_CALLS
        # The base is removed when nobody asks for its folder any more.
        shutil.copytree(Path(folder.name) / "base", place / "run")
        with noted(lambda: f"rank {victim} killed at call {kill_at}"):
            return Counter({kill_and_look(place / "run", place / "store", victim, kill_at): 1})

    return in_folders(look)


MOST_CALLS = 130
"""More than a rank makes; later ones are outlived."""


def kill_and_look(root: Path, store: Path, victim: int, kill_at: int) -> str:
    """Save with a killer, look, and save on; return what came of it."""
    ends = save_with_ranks(root, store, SECOND, victim, kill_at)
    killed = ends[victim][0]
    others = [status for rank, (_, status) in enumerate(ends) if rank != victim]
    assert all(status in (0, GIVEN_UP) for status in others), f"the others returned {others}"
    committed = (False, 0) in ends  # if nobody says so, nobody knows: even where none was killed, one may be late
    _, found = in_child(lambda: load(root) or 0)
    assert found in ((SECOND,) if committed else (FIRST, SECOND)), f"{ends}, then loaded {found}"
    again = save_with_ranks(root, store.with_suffix(".again"), LAST, 0, None)
    assert again == [(False, 0)] * WORLD_SIZE, f"saving on returned {again}"
    _, newest = in_child(lambda: load(root) or 0)
    assert newest == LAST, f"saved on, then loaded {newest}"
    if not killed:
        return "outlived"
    who = "rank 0" if victim == 0 else "another rank"
    return f"{who} killed, {'the others committed' if 0 in others else 'given up'}, {found} is there"


CAMPAIGN = Campaign(name="sigkill-ranks", counts="kills", prepare=prepare, smoke_count=4, apart=True)
