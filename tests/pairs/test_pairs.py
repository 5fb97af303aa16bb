"""Every two choices of a checkpointer together: a save, one of the same step again, something bad, and a load that is right.

What cannot be combined is refused when the checkpointer is made, and the message says what to do.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import RankFailedError, StepExistsError, UsageError
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import walk
from tests.pairs.covering import Row, cover, pairs_of
from tests.ranks.crew import Crew
from tests.ranks.peer_crew import use
from tests.simulated.objects_client import ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedClock
from tests.simulated.twin_accelerator import TwinAccelerator

OPTIONS = {
    "worker": ("thread", "process"),
    "ranks": ("1", "2"),
    "tiers": ("one", "two", "memory first"),
    "snapshot": ("eager", "lazy", "device"),
    "load_group": ("none", "all"),
    "on_exists": ("new_generation", "skip", "raise"),
    "storage": ("local", "memory", "objects"),
    "trouble": ("damaged everywhere", "damaged in the nearest", "killed before the commit", "killed while writing"),
}
DEADLINE_S = 250
LIMIT = 1 << 24


def is_refused(row: Row) -> str | None:
    """Say with which words a combination is refused; None for one that is not."""
    if row["load_group"] == "all" and row["ranks"] == "1":
        return "init_process_group"
    if row["worker"] == "process":
        if row["tiers"] == "memory first" or row["storage"] == "memory":
            return "shm://|object of this process"
        if row["storage"] == "objects":
            return "give the URL or path"
    return None


PLAYED = cover(OPTIONS, lambda row: is_refused(row) is None)
REFUSED = cover(OPTIONS, lambda row: is_refused(row) is not None)[:12]
ROWS = [*PLAYED, *REFUSED]


class Places:
    """Where the steps of one row lie; each checkpointer and each look opens them anew."""

    def __init__(self, row: Row, folder: Path) -> None:
        self._row = row
        self._folder = folder
        self._name = uuid.uuid4().hex
        self._store = ObjectStore(SimulatedClock())

    def _far(self) -> Any:
        match self._row["storage"]:
            case "local":
                return str(self._folder / "far")
            case "memory":
                return f"memory://far-{self._name}"
            case _:
                return ObjectsBackend(self._store)

    def given(self) -> Any:
        """Return what a checkpointer is given."""
        match self._row["tiers"]:
            case "one":
                return self._far()
            case "two":
                return [aiockpt.Tier(str(self._folder / "near")), aiockpt.Tier(self._far(), bandwidth=None)]
            case _:
                return [aiockpt.Tier(f"memory://near-{self._name}", keep=3), aiockpt.Tier(self._far(), bandwidth=None)]

    def backends(self) -> list[Backend]:
        """Return them, the nearest first."""
        far = self._far()
        opened: Backend = far if isinstance(far, ObjectsBackend) else _opened(far)
        match self._row["tiers"]:
            case "one":
                return [opened]
            case "two":
                return [LocalBackend(str(self._folder / "near")), opened]
            case _:
                return [MemoryBackend(f"near-{self._name}"), opened]


def _opened(url: str) -> Backend:
    return MemoryBackend(url.removeprefix("memory://")) if url.startswith("memory://") else LocalBackend(url)


def state_of(rank: int, value: float, device: TwinAccelerator | None = None) -> dict[str, Any]:
    """Return what all ranks have alike, and something of a rank's own."""
    state: dict[str, Any] = {
        name: torch.nn.Parameter(torch.full((150, 33), value + n), requires_grad=False) for n, name in enumerate("abc")
    }
    state[f"own{rank}"] = torch.arange(700) + 1000 * int(value) + rank
    if device is not None:
        for tensor in state.values():
            device.place(tensor)
    return {**state, "value": value}


@contextmanager
def crew_of(row: Row, places: Places, device: TwinAccelerator | None = None) -> Iterator[Crew]:
    """Start the processes that a row describes."""
    options: dict[str, Any] = {name: row[name] for name in ("worker", "snapshot", "on_exists")}
    if device is not None:
        options["world"] = World(accelerator=device)
    if row["load_group"] == "all" and row["ranks"] == "1":
        options["load_group"] = torch.distributed.ProcessGroupGloo
    size = int(row["ranks"])
    with Crew(size, lambda _: places.given(), **options) as crew:
        if row["load_group"] == "all":
            for rank in range(size):
                use(crew, range(size), rank)
        yield crew


def save_all(row: Row, places: Places) -> float:
    """Save steps 1 and 2, and step 2 once more; return the value that it has then."""
    device = TwinAccelerator("early") if row["snapshot"] == "device" and row["worker"] == "thread" else None

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> bool:
        for step in (1, 2):
            ckpt.save(step, state_of(rank, step, device)).result(DEADLINE_S)
        again = ckpt.save(2, state_of(rank, 3, device))
        if row["on_exists"] == "raise":
            error = again.exception(DEADLINE_S)
            assert isinstance(error, StepExistsError if rank == 0 else RankFailedError | StepExistsError)
            assert "step 2 is committed already" in str(error)  # rank 0 has looked; the others hear of it
            return False
        return not again.result(DEADLINE_S).existed

    with crew_of(row, places, device) as crew:
        saved = crew.on_all(save)
    assert len(set(saved)) == 1
    assert saved[0] == (row["on_exists"] == "new_generation")
    return 3.0 if saved[0] else 2.0


async def make_trouble(row: Row, places: Places) -> bool:
    """Do what the row says to the newest step; return whether nothing whole is left of it."""
    backends = places.backends()
    touched = backends if row["trouble"] != "damaged in the nearest" else backends[:1]
    done = 0
    for backend in touched:
        for key in [stat.key async for stat in walk(backend, "step-00000002")]:
            done += await _harm(row["trouble"], backend, key)
    assert done, "nothing was harmed"
    for backend in backends:
        await backend.close()
    return row["trouble"] == "damaged everywhere" or (row["trouble"] == "damaged in the nearest" and len(backends) == 1)


async def _harm(trouble: str, backend: Backend, key: str) -> int:
    if trouble.startswith("damaged") and "/d/" in key:
        data = bytearray(await backend.get(key, LIMIT))
        data[-9] ^= 1
        await backend.put(key, bytes(data))
        return 1
    if trouble == "killed before the commit" and "/MANIFEST-" in key:
        await backend.delete([key])
        return 1
    if trouble == "killed while writing" and "/d/" in key:
        name = key.rpartition("/")[2]
        await backend.put(f"step-00000003/a-0123456789ab/d/{name}", await backend.get(key, LIMIT))
        return 1
    return 0


def load_all(row: Row, places: Places, expected: float) -> None:
    """Load on new processes, and compare every bit."""

    def load(rank: int, ckpt: aiockpt.Checkpointer) -> tuple[int, dict[str, Any]]:
        state = state_of(rank, 0)
        found = ckpt.load(state).result(DEADLINE_S)
        assert found is not None
        return found.step, state

    with crew_of(row, places) as crew:
        for rank, (step, state) in enumerate(crew.on_all(load)):
            assert step == min(int(expected), 2)
            assert state["value"] == expected
            for name, tensor in state_of(rank, expected).items():
                assert name == "value" or torch.equal(state[name], tensor), name


@pytest.mark.parametrize("row", ROWS, ids=["-".join(row.values()) for row in ROWS])
def test_what_was_saved_is_loaded_or_the_combination_is_refused(row: Row, tmp_path: Path) -> None:
    places = Places(row, tmp_path)
    refused = is_refused(row)
    if refused is not None:
        with pytest.raises(UsageError, match=refused), crew_of(row, places):
            pass
        return
    value = save_all(row, places)
    lost = anyio.run(make_trouble, row, places)
    load_all(row, places, 1.0 if lost else value)


def test_every_two_choices_that_can_be_combined_are_played_together() -> None:
    met = {pair for row in PLAYED for pair in pairs_of(row)}
    refused = {
        pair
        for one, other in combinations(OPTIONS, 2)
        for a, b in product(OPTIONS[one], OPTIONS[other])
        if (pair := frozenset(((one, a), (other, b)))) not in met
    }
    assert refused == {
        frozenset((("worker", "process"), ("storage", "memory"))),
        frozenset((("worker", "process"), ("storage", "objects"))),
        frozenset((("worker", "process"), ("tiers", "memory first"))),
        frozenset((("ranks", "1"), ("load_group", "all"))),
    }
