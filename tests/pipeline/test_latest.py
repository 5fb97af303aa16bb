"""A listing that is older, shorter or broken beside ``LATEST`` gives the newest save, or an error."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.pipeline import discover
from aiockpt.storage.backend import Backend, Listing
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.small_run import small_checkpointer


class LateListings(Forwarding):
    """*inner*, whose listings may be those of an earlier moment, and lack names.

    Attributes:
        seen: the listings of each moment, by prefix; `note` adds a moment.
        ages: how many moments the listing of a prefix is old; *lacks*: the places of the names that it leaves out.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.seen: list[dict[str, Listing]] = []
        self.ages: dict[str, int] = {}
        self.lacks: dict[str, frozenset[int]] = {}

    async def note(self) -> None:
        root = await self.inner.list("")
        self.seen.append({"": root} | {folder: await self.inner.list(folder) for folder in root.folders})

    async def forward(self, call: BackendCall) -> Any:
        if call.verb != "list" or not self.ages.keys() | self.lacks.keys():
            return await call()
        age, lacks = self.ages.get(call.key, 0), self.lacks.get(call.key, frozenset())
        if not age and not lacks:
            return await call()
        listing = self.seen[max(0, len(self.seen) - 1 - age)].get(call.key, Listing((), ()))
        objects = tuple(one for at, one in enumerate(listing.objects) if at not in lacks)
        return Listing(objects, tuple(one for at, one in enumerate(listing.folders) if at not in lacks))


def open_run(place: Backend, **options: Any) -> aiockpt.Checkpointer:
    return small_checkpointer(place, **options)


async def save(place: LateListings, steps: Sequence[int]) -> None:
    """Save *steps*, each with its place in the list as the value; a step lower than the last is a rewind."""
    await place.note()
    async with open_run(place, retention=aiockpt.Retention(last=3)) as ckpt:
        for value, step in enumerate(steps):
            await ckpt.save(step, {"value": value})
            await ckpt.prune()
            await place.note()


STEPS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
AGES = st.dictionaries(st.sampled_from(["", *(f"step-{step:08d}" for step in range(6))]), st.integers(0, 7))
LACKS = st.dictionaries(
    st.sampled_from(["", *(f"step-{step:08d}" for step in range(6))]), st.frozensets(st.integers(0, 4))
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(steps=STEPS, ages=AGES, lacks=LACKS, warm=st.booleans())
@pytest.mark.anyio
async def test_no_older_listing_gives_an_older_step(
    steps: list[int], ages: dict[str, int], lacks: dict[str, frozenset[int]], warm: bool
) -> None:
    place = LateListings(MemoryBackend())
    await save(place, steps)
    state = {"value": -1}
    failed = False
    try:
        async with open_run(place) as ckpt:
            if warm:  # it then remembers the heads of what was listed
                await ckpt.load({"value": -1})
            place.ages, place.lacks = ages, lacks
            assert await ckpt.load(state) is not None
            await ckpt.save(6, {"value": 6})  # is newer than all, whatever was listed
    except aiockpt.StorageError:
        failed = True
    assert state["value"] == len(steps) - 1 or (failed and state["value"] == -1)
    place.ages, place.lacks = {}, {}
    async with open_run(place) as ckpt:
        assert failed or await ckpt.latest() == 6


@pytest.mark.parametrize(
    "hint", [b"step-00000009\n", b"step-00000002\n3\n", b"", b"\xff", b"../x", b"step-00000002\nx\n"]
)
def test_a_hint_that_lies_costs_a_line_at_most(hint: bytes, caplog: pytest.LogCaptureFixture) -> None:
    place = MemoryBackend()
    with open_run(place) as ckpt:
        ckpt.save(2, {"value": 2}).result()
        ckpt.save(1, {"value": 1}).result()
    discover.logged.clear()
    with open_run(FaultyBackend(place)) as ckpt:
        ckpt.run_on_destination("hint", lambda destination: place.put("LATEST", hint)).result()
        state = {"value": -1}
        for _ in range(2):
            ckpt.load(state).result()
    assert state["value"] == 1
    lines = [record for record in caplog.records if "which is not there" in record.getMessage()]
    assert len(lines) == (hint[:1] == b"s" and b"x" not in hint)
    assert all(record.levelno == logging.WARNING for record in lines)


@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_hint_that_never_answers_stops_nothing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.pipeline.latest.HINT_S", 0.05)
    hanging = FaultyBackend(MemoryBackend(), [Fault(do="hang", verb=verb, match="LATEST", times=None)])
    with open_run(hanging, retention=aiockpt.Retention(last=1)) as ckpt:
        for step in range(5):
            ckpt.save(step, {"value": step})
        ckpt.wait()
        assert [info.step for info in ckpt.steps().result()] == [4]
