"""Many ranks and several tiers: every rank copies its own files, rank 0 those that others leave, and all hear of it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.shm import ShmBackend
from aiockpt.events import PromotionFailed
from aiockpt.format.names import parse_attempt
from aiockpt.places.tiers.promotion import MOST_WAITING
from aiockpt.places.tiers.tiers import Tiers
from aiockpt.ranks import storage_fallback
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.gates import Around, Gate
from tests.ranks.crew import Crew, coordinator_of
from tests.ranks.test_save import equal, loaded, replicated
from tests.watch import Watch


def test_all_ranks_hear_when_a_step_is_in_each_tier(tmp_path: Path) -> None:
    def tiers(rank: int) -> list[Any]:
        return [aiockpt.Tier(f"memory://{tmp_path.name}"), tmp_path / "disk", tmp_path / "far"]

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> list[str]:
        urls = []
        for step in (1, 2):
            future = ckpt.save(step, replicated(step))
            future.in_memory().result()
            urls += [future.result().url, future.committed(tmp_path / "far").result().url]
        return urls

    with Crew(3, tiers) as crew:
        expected = [f"file://{tmp_path}/disk", f"file://{tmp_path}/far"] * 2
        assert crew.on_all(save) == [expected] * 3
    for place in (f"memory://{tmp_path.name}", tmp_path / "disk", tmp_path / "far"):
        assert equal(loaded(place, replicated(2)), replicated(2))


def test_every_rank_copies_its_own_files(tmp_path: Path) -> None:
    far = [RecordingBackend(LocalBackend(str(tmp_path / "far"))) for _ in range(3)]
    with Crew(3, lambda rank: [tmp_path / "near", far[rank]]) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).committed(f"file://{tmp_path}/far").result())
    for rank, backend in enumerate(far):
        created = [done.key.rpartition("/")[2] for done in backend.operations if done.verb == "create"]
        assert created == [f"r{rank:05d}-0000.safetensors"]


def test_rank_0_waits_for_a_rank_that_copies_later(tmp_path: Path) -> None:
    later = Gate(LocalBackend(str(tmp_path / "far")), "create")
    created: list[str] = []
    looks: list[str] = []

    async def watch(verb: str, key: str) -> None:
        if verb == "create":
            created.append(key.rpartition("/")[2])
        elif created and verb in {"list", "stat"}:
            looks.append(key)
        if len(created) > 1 or len(looks) > 5:
            later.open_up()

    first = Around(LocalBackend(str(tmp_path / "far")), before=watch)
    with Crew(2, lambda rank: [tmp_path / "near", later if rank else first]) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).committed(f"file://{tmp_path}/far").result())
    assert created == ["r00000-0000.safetensors"]


def test_rank_0_copies_what_another_rank_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.places.tiers.joint_copy.PATIENCE_S", 0.5)

    def tiers(rank: int) -> list[Any]:
        broken = [Fault(do="fail", verb="create", match="*", times=None)] if rank == 1 else []
        return [tmp_path / "near", FaultyBackend(LocalBackend(str(tmp_path / "far")), broken)]

    with Crew(2, tiers) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
    assert equal(loaded(tmp_path / "far", replicated(1)), replicated(1))


def test_all_hear_of_a_copy_that_was_not_committed(tmp_path: Path) -> None:
    """They try again with it, where they would have waited for the deadline of the tier."""
    watch = Watch()

    def tiers(rank: int) -> list[Any]:
        once = [] if rank else [Fault(do="fail", verb="put_new", match="*MANIFEST*")]
        return [tmp_path / "near", FaultyBackend(LocalBackend(str(tmp_path / "far")), once)]

    with Crew(2, tiers, observers=[watch]) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).committed(f"file://{tmp_path}/far").result())
    assert any("rank 0 could not commit step 1" in event.error for event in watch.of(PromotionFailed))


def test_a_copy_of_a_dead_writer_is_not_lost(tmp_path: Path) -> None:
    """The note of rank 0 is swallowed; then it buries its writer as `aiockpt.worker.client` does."""
    far = tmp_path / "far"

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> str:
        return ckpt.save(1, replicated(1)).committed(far).result().url

    with Crew(3, lambda rank: [tmp_path / "near", far]) as crew:
        board = coordinator_of(crew.checkpointers[0]).board
        post, swallowed = board.post, []

        async def die_instead(key: str, note: Any) -> None:
            if key.startswith("tier/"):
                swallowed.append(key)
            else:
                await post(key, note)

        def bury(rank: int, ckpt: aiockpt.Checkpointer) -> str:
            url = save(rank, ckpt)
            if rank == 0:
                (folder,) = far.glob("step-*/a-*")
                attempt, tiers = parse_attempt(folder.name), ckpt._submitter._destination
                assert attempt is not None
                assert isinstance(tiers, Tiers)
                board.post = post  # type: ignore[method-assign]
                ckpt._loop.submit(tiers.notify_lost, 1, attempt, [1], aiockpt.WriterLostError("killed")).result()
            return url

        board.post = die_instead  # type: ignore[method-assign]
        assert crew.on_all(bury) == [f"file://{far}"] * 3
        assert len(swallowed) == 1


def test_notes_of_lost_copies_are_removed_when_newer_ones_come(tmp_path: Path) -> None:
    with Crew(2, lambda rank: [tmp_path / "near", tmp_path / "far"]) as crew:
        ckpt = crew.checkpointers[0]
        crew.on_all(lambda rank, ckpt: ckpt.save(0, replicated(0)).committed(tmp_path / "far").result())
        board: Any = coordinator_of(ckpt).board
        forget, forgotten = board.delete, list[str]()

        async def noted(keys: Sequence[str]) -> None:
            forgotten.extend(keys)
            await forget(keys)

        board.delete = noted
        attempts = [f"{number:012x}" for number in range(8)]
        for attempt in attempts:
            ckpt._loop.submit(
                ckpt._submitter._destination.notify_lost, 1, attempt, [1], aiockpt.WriterLostError("killed")
            ).result()
        first, *others = forgotten
        assert first.startswith("tier/1/step-00000000/")
        assert others == [f"tier/1/step-00000001/{attempt}" for attempt in attempts[: -(2 * MOST_WAITING + 1) - 1]]


def test_ranks_load_together_from_the_nearest_tier(tmp_path: Path) -> None:
    tiers = [tmp_path / "near", tmp_path / "far"]
    with Crew(2, lambda rank: tiers) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)).committed(tmp_path / "far").result())
    fresh = [tmp_path / "fresh", tmp_path / "far"]
    with Crew(3, lambda rank: fresh) as crew:

        def load(rank: int, ckpt: aiockpt.Checkpointer) -> bool:
            state = replicated(9)
            assert ckpt.load(state).result() is not None
            return equal(state, replicated(1))

        assert crew.on_all(load) == [True] * 3


def save_on_all(crew: Crew, step: int, state: dict[str, Any]) -> None:
    crew.on_all(lambda rank, ckpt: ckpt.save(step, state).result())


def test_every_rank_makes_the_weights_of_what_it_wrote(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 50) for _ in range(6)))
    state = {"model": model, "moments": torch.zeros(10), "step": 3}
    weights = aiockpt.Tier(tmp_path / "weights", content="weights")
    with Crew(3, lambda rank: [tmp_path / "near", weights]) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, state).committed(tmp_path / "weights").result())
    made = {path.name for path in tmp_path.glob("weights/step-*/a-*/d/*")}
    assert made == {f"r{rank:05d}-0000.safetensors" for rank in range(3)}
    bare = torch.nn.Sequential(*(torch.nn.Linear(30, 50) for _ in range(6)))
    with aiockpt.Checkpointer(tmp_path / "weights") as ckpt:
        assert ckpt.load({"model": bare}).result() is not None
    assert all(torch.equal(mine, other) for mine, other in zip(bare.parameters(), model.parameters(), strict=True))


def test_all_ranks_pass_newer_weights_over_or_all_say_what_lacks(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        model = torch.nn.Linear(30, 50)
        torch.nn.init.constant_(model.weight, value)
        return {"model": model, "moments": torch.full((5000,), value)}

    near, far = tmp_path / "near", tmp_path / "far"
    with Crew(2, lambda rank: [near, aiockpt.Tier(far, content="weights")]) as crew:
        for step in (1, 2):
            save_on_all(crew, step, state(step))
    shutil.rmtree(near / "step-00000002")
    with Crew(2, lambda rank: [near, far]) as crew:

        def load(rank: int, ckpt: aiockpt.Checkpointer) -> tuple[int, str, float]:
            into = state(0)
            loaded = ckpt.load(into).result()
            assert loaded is not None
            assert "weights only" in loaded.skipped[0][1]
            return loaded.step, loaded.url, float(into["moments"][0])

        assert crew.on_all(load) == [(1, f"file://{near}", 1.0)] * 2
    with Crew(2, far) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(state(0)).result())
        assert [type(error) for error in errors] == [aiockpt.StateMismatchError] * 2
        assert all("moments" in str(error) for error in errors)


class Disk(FaultyBackend):
    """The disk of one host, which has the same name on each."""

    @property
    def url(self) -> str:
        return "file:///local"


def own_disk(root: Path) -> Any:
    return Disk(LocalBackend(str(root)), [])


def own_memory(root: Path) -> Any:
    root.mkdir(exist_ok=True)
    return ShmBackend("run", mount=str(root))


@pytest.mark.parametrize("open_own", [own_disk, own_memory])
@pytest.mark.parametrize("tiers", [1, 2])
def test_a_place_not_seen_by_all_is_refused(tmp_path: Path, tiers: int, open_own: Any) -> None:
    """Four ranks on two hosts."""

    def places(rank: int) -> list[Any]:
        return [open_own(tmp_path / f"host-{rank // 2}"), tmp_path / "shared"][:tiers]

    with mock.patch.object(storage_fallback, "PROBE_S", 0.3), Crew(4, places, on_error=lambda future: None) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
    refused = [error for error in errors if isinstance(error, aiockpt.UsageError)]
    assert refused
    assert all(isinstance(error, aiockpt.UsageError | aiockpt.RankFailedError) for error in errors)
    assert all("is not one place for all ranks" in str(error) for error in errors)
    assert "give a place that all of them share" in str(refused[0])
    assert not list(tmp_path.glob("**/MANIFEST*"))


def test_whether_all_see_a_place_is_asked_once(tmp_path: Path) -> None:
    places = [RecordingBackend(LocalBackend(str(tmp_path / "run"))) for _ in range(3)]
    with Crew(3, places.__getitem__) as crew:
        for step in (1, 2, 3):
            save_on_all(crew, step, replicated(step))
    done = [one for place in places for one in place.operations]
    assert len([one for one in done if one.verb == "put" and one.key.startswith(".seen-")]) == 1
    assert not list(tmp_path.glob("run/.seen-*"))
