"""Versions whose files several ranks write: what they are, and what becomes of a rank that cannot, or dies, or is late.

Ranks are threads here, each with a checkpointer of its own; who is killed is a process (test_killed_share.py).
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import StorageError
from aiockpt.events import PublicationFailed
from aiockpt.publish import shares, step_weights, version_files
from aiockpt.publish.shares import deal_files, spread_ranks
from aiockpt.publish.versions import Versions
from aiockpt.runtime.notes import StoreLostError
from aiockpt.runtime.world import World
from aiockpt.storage.forwarding import BackendCall, Forwarding
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.gates import Around, Gate
from tests.publish.other_reader import OtherReader
from tests.publish.policy import received, state_of, weights_of
from tests.ranks.crew import coordinator_of
from tests.small_run import small_checkpointer
from tests.watch import Lines, Watch, until

RANKS = 3


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_weights, "SHARE_BYTES", 4096)
    monkeypatch.setattr(version_files, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(shares, "WATCH_S", 0.05)


class Job:
    """Ranks that save to one place and publish to the backends in *dests*, one for each rank."""

    def __init__(self, root: Any, dests: list[Any], options: Mapping[str, Any] | None = None, **others: Any) -> None:
        store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        options = dict(options or {})
        self.wants = [
            aiockpt.Publish(dest, **{"every": 1000, **options} | others.pop(f"of_{rank}", {}))
            for rank, dest in enumerate(dests)
        ]
        self.ranks = [
            small_checkpointer(root, ranks=aiockpt.Ranks(rank, len(dests), store), publish=wants, **others)
            for rank, wants in enumerate(self.wants)
        ]

    def on_all(self, work: Callable[[int, aiockpt.Checkpointer], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return [one.result() for one in [threads.submit(work, *each) for each in enumerate(self.ranks)]]

    def save(self, step: int, state: Any = None) -> None:
        self.on_all(lambda rank, ckpt: ckpt.save(step, state_of(step) if state is None else state).result())

    def publish(self, *steps: int, **how: Any) -> list[aiockpt.Published]:
        """Save steps on all ranks, and publish each from rank 0."""
        done = []
        for step in steps:
            self.save(step)
            done.append(self.ranks[0].publish(step, self.wants[0], **how).result(250))
        return done


@contextmanager
def job(root: Any, dests: list[Any], options: Mapping[str, Any] | None = None, **others: Any) -> Iterator[Job]:
    made = Job(root, dests, options, **others)
    try:
        yield made
    finally:
        made.on_all(lambda rank, ckpt: ckpt.close())


def recorded(make: Callable[[], Any], count: int = RANKS) -> list[RecordingBackend]:
    return [RecordingBackend(make()) for _ in range(count)]


def created(backend: RecordingBackend) -> dict[str, list[str]]:
    """Return folder → the files that were written there through a backend; without the token of a store."""
    found: dict[str, list[str]] = {}
    for done in backend.operations:
        if done.verb == "create":
            folder, _, name = done.key.rpartition("/")
            found.setdefault(folder, []).append(name.partition(".")[0])
    return found


def are_shared_out(dests: Sequence[RecordingBackend], drafts: int) -> bool:
    """Return whether all ranks have written files of as many drafts, no two of them the same one."""
    found = [created(one) for one in dests]
    apart = all(
        len({name for one in found for name in one[folder]}) == sum(len(one[folder]) for one in found)
        for folder in found[0]
    )
    return apart and len(found[0]) == drafts and all(one.keys() == found[0].keys() for one in found)


def is_step(reader: OtherReader, step: int) -> bool:
    wanted = {name: bytes(one.view(-1).view(torch.uint8).numpy().tobytes()) for name, one in weights_of(step).items()}
    return {name: data for name, (_, _, data) in reader.tensors.items()} == wanted


def folders(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name != "receivers")


def test_another_reader_follows_a_chain_that_three_ranks_have_written(tmp_path: Path) -> None:
    pub = tmp_path / "pub"
    dests = recorded(lambda: LocalBackend(str(pub)))
    with job(tmp_path / "run", dests, {"full_every": 3}) as ranks:
        done = ranks.publish(*range(5))
    assert [(one.version, one.kind) for one in done] == [(0, "full"), *[(number, "delta") for number in range(1, 5)]]
    assert are_shared_out(dests, 6)  # five versions and a fold
    reader = OtherReader(pub)
    assert is_step(reader, 0)
    for step in range(1, 5):
        reader.pull(step)
        assert is_step(reader, step)
    assert received(pub, tmp_path / "got") == [(4, 4)]
    assert folders(pub) == ["full_v000003", *(f"weight_v{number:06d}" for number in range(5))]
    assert not list(pub.rglob("open.*"))


def test_in_a_store_each_rank_has_names_of_its_own(tmp_path: Path) -> None:
    store = MemoryBackend("shared-out")
    dests = recorded(lambda: store)
    with job(tmp_path / "run", dests, {"full_every": 2, "keep": 0}) as ranks:
        done = ranks.publish(*range(4))
    assert [one.kind for one in done] == ["full", "delta", "delta", "delta"]
    assert are_shared_out(dests, 5)
    assert received(store, tmp_path / "got") == [(3, 3)]
    assert not [key for key in store._objects if "/open." in key]
    tokens = [{done.key.split(".")[1] for done in one.operations if done.verb == "create"} for one in dests]
    assert not (tokens[0] & tokens[1]) | (tokens[1] & tokens[2])


def test_a_job_of_other_size_goes_on_with_deltas(tmp_path: Path) -> None:
    pub = tmp_path / "pub"
    for count, steps in ((3, (0, 1)), (2, (2, 3)), (1, (4,)), (3, (5,))):
        dests = recorded(lambda: LocalBackend(str(pub)), count)
        with job(tmp_path / "run", dests) as ranks:
            done = ranks.publish(*steps)
        assert [one.kind for one in done if one.version] == ["delta"] * len([step for step in steps if step])
        assert are_shared_out(dests, len(steps))
    reader = OtherReader(pub)
    reader.pull(5)
    assert is_step(reader, 5)


def test_committed_steps_are_shared_out_up_to_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "GOODBYE_S", 10_000)  # the ranks end when rank 0 says so
    dests = recorded(lambda: LocalBackend(str(tmp_path / "pub")))
    with job(tmp_path / "run", dests, {"every": 1}) as ranks:
        ranks.save(0)
        until(lambda: (tmp_path / "pub/weight_v000000").exists(), "version 0")
        ranks.save(1)
    assert are_shared_out(dests, 2)
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]


def test_if_more_than_half_has_changed_on_all_ranks_together_the_version_is_full(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    dests = recorded(lambda: LocalBackend(str(tmp_path / "pub")))
    with job(tmp_path / "run", dests, {"prefix": "model"}) as ranks:
        for step in range(2):
            ranks.save(step, {"model": {f"w{n}": torch.randn(40, 40, generator=generator) for n in range(3)}})
            assert ranks.ranks[0].publish(step, ranks.wants[0]).result(250).kind == "full"
    assert are_shared_out(dests, 3)  # the second one as a delta, too


# ---------------------------------------------------------------------- a rank that cannot


def test_a_rank_that_does_not_see_the_place_writes_nothing_and_is_left_out_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "LEFT_OUT", 2)
    dests = recorded(lambda: LocalBackend(str(tmp_path / "pub")))
    dests[1] = RecordingBackend(LocalBackend(str(tmp_path / "elsewhere")))
    with Lines(logging.WARNING) as lines, job(tmp_path / "run", dests) as ranks:
        assert [one.kind for one in ranks.publish(0, 1, 2, 3)] == ["full", "delta", "delta", "delta"]
    assert not (tmp_path / "elsewhere").exists()
    # Asked for the first version and, two drafts later, for the last one.
    assert len([line for line in lines.said if "rank 0 writes all files of" in line]) == 2
    assert "rank 1 has written no files: ObjectNotFoundError" in lines.said[0]
    drafts = [created(one).keys() for one in dests]
    assert len(drafts[0] & drafts[2]) >= 2, "who can was left out, too"
    assert received(tmp_path / "pub", tmp_path / "got") == [(3, 3)]
    assert folders(tmp_path / "pub") == [f"weight_v{number:06d}" for number in range(4)]


@pytest.mark.parametrize(("shows", "why"), [(None, "is not seen here"), (b"part", "has 4 bytes here, not")])
def test_files_that_rank_0_does_not_see_whole_are_in_no_version(shows: bytes | None, why: str, tmp_path: Path) -> None:
    pub = LocalBackend(str(tmp_path / "pub"))

    class Late(Forwarding):
        """Shows at once what others write, and others not all of what it writes."""

        async def forward(self, call: BackendCall) -> Any:
            if call.verb != "create":
                return await call()
            if shows is not None:
                await pub.put(call.key, shows)
            return await LocalBackend(str(tmp_path / "cache")).create(*call.arguments)

    with Lines(logging.WARNING) as lines, job(tmp_path / "run", [pub, Late(pub), pub]) as ranks:
        ranks.publish(0)
    assert why in lines.said[0]
    assert received(pub, tmp_path / "got") == [(0, 0)]


@pytest.mark.parametrize("delta", [False, True])
def test_a_rank_with_other_weights_writes_nothing(delta: bool, tmp_path: Path) -> None:
    dests = recorded(lambda: LocalBackend(str(tmp_path / "pub")))
    with job(tmp_path / "run", [LocalBackend(str(tmp_path / "pub"))] * RANKS) as ranks:
        ranks.publish(*range(int(delta)))
    with Lines(logging.WARNING) as lines, job(tmp_path / "run", dests, of_1={"dtype": "float16"}) as ranks:
        (done,) = ranks.publish(1)
    assert done.kind == ("delta" if delta else "full")
    assert any(
        "rank 1 has written no files: UsageError: the weights of step 1 have other names" in line for line in lines.said
    )
    assert not created(dests[1])
    assert received(tmp_path / "pub", tmp_path / "got") == [(int(delta), 1)]


@pytest.mark.parametrize("place", ["folder", "store"])
def test_what_a_rank_cannot_write_rank_0_writes_with_all_else(place: str, tmp_path: Path) -> None:
    inner: Any = LocalBackend(str(tmp_path / "pub")) if place == "folder" else MemoryBackend("refusing")
    refusing = FaultyBackend(inner, [Fault(do="fail", verb="create", times=None)])
    watch = Watch()
    with Lines(logging.WARNING) as lines, job(tmp_path / "run", [inner, inner, refusing], observers=[watch]) as ranks:
        assert [one.kind for one in ranks.publish(0, 1)] == ["full", "delta"]
    assert "rank 2 has written no files" in lines.said[0]
    assert not watch.of(PublicationFailed)
    assert received(inner, tmp_path / "got") == [(1, 1)]
    if place == "folder":
        assert folders(tmp_path / "pub") == ["weight_v000000", "weight_v000001"]


@pytest.mark.parametrize("place", ["folder", "store"])
def test_a_silent_rank_is_waited_for_a_while_and_adds_nothing_when_it_wakes(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "PATIENCE_S", 0.5)
    monkeypatch.setattr(shares, "WATCH_S", 1000.0)  # it does not look while it writes
    inner: Any = LocalBackend(str(tmp_path / "pub")) if place == "folder" else MemoryBackend("silent")
    asleep = Gate(inner, "create")
    backend = RecordingBackend(asleep)
    with Lines(logging.WARNING) as lines, job(tmp_path / "run", [inner, backend, inner]) as ranks:
        ranks.publish(0)
        assert "no files of rank 1, after" in lines.said[0]
        before = files_of(inner, tmp_path / "pub")
        asleep.open_up()
        until(lambda: created(backend), "the late file")
        until(lambda: any(done.verb == "delete" for done in backend.operations), "its removal")
        until(lambda: files_of(inner, tmp_path / "pub") == before, "nothing is left")
    assert received(inner, tmp_path / "got") == [(0, 0)]


def files_of(inner: Any, pub: Path) -> list[str]:
    if isinstance(inner, MemoryBackend):
        return sorted(inner._objects)
    walked = os.walk(pub)  # which minds no file that is removed meanwhile
    return sorted(os.path.join(folder, name) for folder, folders, files in walked for name in folders + files)


def test_a_rank_stops_when_rank_0_gives_up_the_draft(tmp_path: Path) -> None:
    pub = LocalBackend(str(tmp_path / "pub"))
    stopped = []

    async def wait(verb: str, key: str) -> None:
        if verb == "upload.write":
            try:
                await anyio.sleep(250)
            finally:
                stopped.append(key)

    refusing = FaultyBackend(pub, [Fault(do="fail", verb="create", times=None)])
    with job(tmp_path / "run", [pub, Around(pub, before=wait), refusing]) as ranks:
        ranks.publish(0)
        until(lambda: stopped, "the end of what is not wanted")
    assert folders(tmp_path / "pub") == ["weight_v000000"]


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    pub = LocalBackend(str(tmp_path / "pub"))
    with Lines(logging.WARNING) as lines, job(tmp_path / "run", [pub] * RANKS) as ranks:
        ranks.save(1)
        ranks.ranks[2].close()
        ranks.ranks[0].publish(1, ranks.wants[0]).result(250)
    assert "rank 2 has left" in lines.said[0]
    assert received(pub, tmp_path / "got") == [(0, 1)]


def test_without_the_store_of_the_ranks_rank_0_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pub = LocalBackend(str(tmp_path / "pub"))
    with Lines(logging.WARNING) as lines, job(tmp_path / "run", [pub] * RANKS) as ranks:
        ranks.save(1)
        ranks.save(2)

        async def lost(*_: object) -> None:
            raise StoreLostError("connection reset by peer", [0])

        with monkeypatch.context() as broken:
            broken.setattr(coordinator_of(ranks.ranks[0]).board, "post", lost)
            for step in (1, 2):
                ranks.ranks[0].publish(step, ranks.wants[0]).result(250)
    (line,) = lines.said  # for the next versions no other rank is asked
    assert "connection reset by peer" in line
    assert received(pub, tmp_path / "got") == [(1, 2)]


@pytest.mark.parametrize("place", ["folder", "store"])
def test_nothing_is_left_of_a_draft_that_rank_0_cannot_finish(place: str, tmp_path: Path) -> None:
    inner: Any = LocalBackend(str(tmp_path / "pub")) if place == "folder" else MemoryBackend("unfinished")
    others = recorded(lambda: inner, 2)

    def has_finished(one: RecordingBackend) -> bool:
        return any(done.verb == "upload.finish" for done in one.operations)

    async def refuse(verb: str, key: str) -> None:
        if verb == "create":
            await anyio.to_thread.run_sync(until, lambda: all(map(has_finished, others)), "the other ranks' files")
            raise StorageError("no")

    with job(tmp_path / "run", [Around(inner, before=refuse), *others], observers=[watch := Watch()]) as ranks:
        ranks.save(1)
        with pytest.raises(StorageError):
            ranks.ranks[0].publish(1, ranks.wants[0]).result(250)
        until(lambda: not any(path.is_file() for path in tmp_path.glob("pub/**/*")), "an empty folder")
        assert place == "folder" or not inner._objects
    assert watch.of(PublicationFailed)


async def test_the_mark_of_a_draft_is_removed_before_its_files_are_listed() -> None:
    """Who finds the mark when its file is written has written it before that listing."""
    store = RecordingBackend(MemoryBackend("marked"))
    await Versions(store, World()).abandon(draft := Versions(store, World()).draft("weight_v000000"))
    assert next((done.verb, done.key) for done in store.operations) == ("delete", draft.mark)


def test_no_two_drafts_of_a_process_have_one_name(tmp_path: Path) -> None:
    versions = Versions(LocalBackend(str(tmp_path)), World())
    assert len({versions.draft("weight_v000000").hidden for _ in range(600)}) == 600


def test_ranks_that_never_met_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "GOODBYE_S", 0.3)
    with job(tmp_path / "run", [LocalBackend(str(tmp_path / "pub"))] * RANKS):
        pass


# ---------------------------------------------------------------------- what is dealt


def test_files_are_dealt_by_their_bytes() -> None:
    assert deal_files([5, 9, 1, 4, 4], [0, 3, 8]) == {0: [1], 3: [0, 2], 8: [3, 4]}
    assert deal_files([7], [0, 1]) == {0: [0]}


def test_ranks_that_write_are_spread_over_the_hosts() -> None:
    assert spread_ranks(3) == [0, 1, 2]
    assert spread_ranks(1024) == list(range(0, 1024, 16))


def test_few_bytes_are_not_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_weights, "SHARE_BYTES", 1 << 28)
    dests = recorded(lambda: LocalBackend(str(tmp_path / "pub")))
    with job(tmp_path / "run", dests) as ranks:
        (done,) = ranks.publish(0)
    assert [len(created(one)) for one in dests] == [1, 0, 0]  # of one file
    assert done.files == ("model-00001-of-00001.safetensors",)
