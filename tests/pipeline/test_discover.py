"""A scan that remembers what it has read tells what a fresh one does, whatever happens to the steps in between."""

from typing import Literal

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.backends.memory import MemoryBackend
from aiockpt.format.manifest import Decision, Manifest, encode_manifest
from aiockpt.format.names import decision_key, manifest_key, step_id
from aiockpt.pipeline.discover import Heads, scan
from aiockpt.runtime.world import World
from aiockpt.storage.transfer import delete_below
from tests.paper import paper_manifest, paper_receipt
from tests.simulated.virtual_time import run_virtually

Change = tuple[Literal["save", "delete", "scan"], int]
CHANGES = st.tuples(st.sampled_from(["save", "delete", "scan"]), st.integers(0, 2))


class StoppedClock:
    """All that is written has one date, as in a store that dates to the second."""

    def monotonic_ns(self) -> int:
        return 0

    def time_ns(self) -> int:
        return 7


class Asked(MemoryBackend):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__(world=World(clock=StoppedClock()))
        self.reads = 0

    async def get(self, key: str, max_bytes: int) -> bytes:
        self.reads += 1
        return await super().get(key, max_bytes)


def manifest(step: int, generation: int, sequence: int) -> Manifest:
    """Return a manifest whose bytes are as many whatever *sequence* is."""
    changes = {"step": step, "id": step_id(step), "generation": generation, "attempt": f"{sequence:012x}"}
    return paper_manifest(paper_receipt(rank, sequence=100 + sequence, **changes) for rank in (0, 1))


async def save(backend: Asked, step: int, sequence: int) -> None:
    """Add a generation to *step*."""
    there = [entry for entry in await scan(backend) if entry.step == step]
    new = manifest(step, there[0].generations[0] + 1 if there else 1, sequence)
    decision = Decision(decision="commit", attempt=new.attempt, write_id="")
    await backend.put_new(decision_key(new.id, new.attempt), msgspec.json.encode(decision))
    await backend.put_new(manifest_key(new.id, new.generation), encode_manifest(new))


@given(st.lists(CHANGES, max_size=12))
def test_a_scan_that_remembers_tells_what_a_fresh_one_does(changes: list[Change]) -> None:
    async def main() -> None:
        backend, heads = Asked(), Heads()
        for sequence, (change, step) in enumerate(changes):
            if change == "save":
                await save(backend, step, sequence)
            elif change == "delete":
                await delete_below(backend, step_id(step))
            else:
                assert await scan(backend, heads) == await scan(backend)
        fresh = await scan(backend)
        assert await scan(backend, heads) == fresh
        backend.reads = 0
        assert await scan(backend, heads) == fresh
        assert backend.reads == 0

    run_virtually(main)
