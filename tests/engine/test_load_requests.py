"""The requests of a load of a place with 10,000 steps: no more than when they were first counted, and half when warm."""

from collections import Counter
from collections.abc import Sequence

import torch

from aiockpt.backends.memory import MemoryBackend
from aiockpt.backends.ranges import RangeReader
from aiockpt.format.manifest import encode_manifest
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import attempt_folder, manifest_key, step_id
from aiockpt.storage.backend import Listing, Stat
from tests.paper import paper_receipt
from tests.small_run import small_checkpointer

STEPS = 10_000
NEWEST = STEPS - 1
BEFORE = Counter({"list": STEPS + 1, "get": STEPS + 2, "open": 1, "put": 1, "delete": 1})
"""Of a load of the newest step, counted before heads had a digest: a listing and a look at each step, and of the newest
its manifest, its one data file, and the lease; and ``LATEST``, beside the listing."""

WARM = Counter({"list": STEPS + 1, "get": 2, "open": 1, "put": 1, "delete": 1})
"""Of a load in a process that has read the heads before: of those N steps it asks N + 3 times before it opens a file."""


class Wide(MemoryBackend):
    """A place with many steps, most of which have a manifest and no data. Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self._paper: dict[str, tuple[str, bytes]] = {}
        for step in range(NEWEST):
            changes = {"step": step, "id": step_id(step), "attempt": f"{step:012x}", "sequence": step + 1}
            votes = [paper_receipt(rank, **changes) for rank in (0, 1)]
            manifest = merge_receipts(votes, writer="w", write_id="0" * 32, created_ns=5)
            self._paper[manifest.id] = (manifest.attempt, encode_manifest(manifest))

    async def list(self, prefix: str) -> Listing:
        self.asked["list"] += 1
        if prefix in self._paper:
            attempt, data = self._paper[prefix]
            found = Stat(manifest_key(prefix, 1), len(data), 7)
            return Listing((found,), (attempt_folder(prefix, attempt),))
        listing = await super().list(prefix)
        if not prefix:
            return Listing(listing.objects, tuple(sorted({*listing.folders, *self._paper})))
        return listing

    async def get(self, key: str, max_bytes: int) -> bytes:
        self.asked["get"] += 1
        folder = key.partition("/")[0]
        if folder in self._paper:
            return self._paper[folder][1][:max_bytes]
        return await super().get(key, max_bytes)

    async def open(self, key: str) -> RangeReader:
        self.asked["open"] += 1
        return await super().open(key)

    async def stat(self, key: str) -> Stat:
        self.asked["stat"] += 1
        return await super().stat(key)

    async def put(self, key: str, data: bytes) -> None:
        self.asked["put"] += 1
        await super().put(key, data)

    async def delete(self, keys: Sequence[str]) -> None:
        self.asked["delete"] += 1
        await super().delete(keys)


def test_a_load_makes_no_more_requests_than_it_did_before() -> None:
    place, state = Wide(), {"x": torch.arange(100)}
    with small_checkpointer(place) as ckpt:
        ckpt.save(NEWEST, state).result()
    with small_checkpointer(place) as ckpt:
        place.asked.clear()
        loaded = ckpt.load({"x": torch.zeros(100, dtype=torch.int64)}).result()
        assert loaded is not None
        assert (loaded.step, loaded.skipped) == (NEWEST, ())
        assert place.asked <= BEFORE, place.asked
        place.asked.clear()
        assert ckpt.load({"x": torch.zeros(100, dtype=torch.int64)}).result() is not None
        assert place.asked <= WARM, place.asked
