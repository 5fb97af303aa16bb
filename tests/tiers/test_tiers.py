"""Several places for one run: memory first, committed on the first durable one, the others in the background."""

import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.engine import maintenance
from aiockpt.events import Promoted, PromotionFailed
from aiockpt.pipeline import copy, lineage
from aiockpt.places.tiers import promotion
from aiockpt.places.tiers import tiers as listing
from aiockpt.storage.backend import Space
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Gate
from tests.small_run import small_checkpointer
from tests.watch import Watch


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((5000,), value), "y": torch.arange(7) + int(value), "value": value}


def steps(place: Any) -> list[int]:
    with small_checkpointer(place) as ckpt:
        return sorted(info.step for info in ckpt.steps().result())


def loaded(place: Any, step: int | None = None) -> float:
    like = state(-1)
    with small_checkpointer(place) as ckpt:
        assert ckpt.load(like, step).result() is not None
    assert torch.equal(like["x"], state(like["value"])["x"])
    assert torch.equal(like["y"], state(like["value"])["y"])
    return float(like["value"])


def faulty(root: Path, do: Any, verb: Any = "create", times: int | None = None) -> FaultyBackend:
    return FaultyBackend(LocalBackend(str(root)), [Fault(do=do, verb=verb, match="*", times=times)])


def save(tiers: Any, *numbers: int, **options: Any) -> None:
    """Save the state of each of these steps, and wait for what follows."""
    with small_checkpointer(tiers, **options) as ckpt:
        for step in numbers:
            ckpt.save(step, state(step)).result()


def test_a_step_passes_memory_disk_and_the_rest(tmp_path: Path) -> None:
    memory, disk = MemoryBackend(), Gate(LocalBackend(str(tmp_path / "disk")))
    watch = Watch()
    tiers = [aiockpt.Tier(memory), aiockpt.Tier(disk), aiockpt.Tier(tmp_path / "far")]
    with small_checkpointer(tiers, observers=[watch]) as ckpt:
        save = ckpt.save(1, state(1))
        save.in_memory().result()
        assert not save.done()
        assert loaded(memory) == 1
        disk.open_up()
        result = save.result()
        assert (result.url, result.durable) == (disk.url, True)
        far = save.committed(tmp_path / "far").result()
        assert far.url == f"file://{tmp_path}/far"
    assert [loaded(place) for place in (memory, tmp_path / "disk", tmp_path / "far")] == [1, 1, 1]
    assert [event.url for event in watch.of(Promoted)] == [disk.url, f"file://{tmp_path}/far"]


def test_each_tier_takes_and_keeps_what_it_is_told(tmp_path: Path) -> None:
    memory = MemoryBackend()
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [
        aiockpt.Tier(memory, keep=1),
        aiockpt.Tier(near, every=2, keep=2),
        aiockpt.Tier(far, every=4, keep=aiockpt.Retention(last=1, every=8)),
    ]
    with small_checkpointer(tiers) as ckpt:
        for step in range(1, 14):
            save = ckpt.save(step, state(step))
            assert save.result().durable is (step % 2 == 0)
            if step % 4:
                assert isinstance(save.committed(far).exception(), aiockpt.SaveSkippedError)
            else:
                save.committed(far).result()
    assert steps(memory) == [13]
    assert steps(near) == [10, 12]
    assert steps(far) == [8, 12]


def test_a_far_tier_that_is_away_delays_nothing_and_catches_up(tmp_path: Path) -> None:
    far = Gate(faulty(tmp_path / "far", "fail", times=3))
    watch = Watch()
    with small_checkpointer([tmp_path / "near", aiockpt.Tier(far)], observers=[watch]) as ckpt:
        save = ckpt.save(1, state(1))
        save.result()
        assert not save.committed(far).done()
        far.open_up()
        save.committed(far).result()
    assert loaded(tmp_path / "far") == 1
    assert [event.final for event in watch.of(PromotionFailed)] == [False] * 3


def test_a_slow_tier_gets_the_newest_steps(tmp_path: Path) -> None:
    far = Gate(LocalBackend(str(tmp_path / "far")))
    with small_checkpointer([tmp_path / "near", far]) as ckpt:
        saves = [ckpt.save(step, state(step)) for step in range(1, 7)]
        for save in saves:
            save.result()
        far.open_up()
        outcomes = [save.committed(far).exception() for save in saves]
    assert sum(isinstance(outcome, aiockpt.SaveSkippedError) for outcome in outcomes) == 3
    assert steps(tmp_path / "near") == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "far")[1:] == [5, 6]


def test_what_waits_for_a_far_tier_is_kept(tmp_path: Path) -> None:
    far = Gate(LocalBackend(str(tmp_path / "far")))
    near = aiockpt.Tier(tmp_path / "near", keep=1)
    with small_checkpointer([near, far]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).result()
        assert steps(tmp_path / "near") == [1, 2, 3]
        far.open_up()
    assert steps(tmp_path / "far") == [1, 2, 3]


def test_memory_holds_what_it_keeps_and_what_is_being_copied(tmp_path: Path) -> None:
    memory, far = MemoryBackend(), Gate(LocalBackend(str(tmp_path / "far")))
    tiers: list[Any] = [aiockpt.Tier(memory, keep=1), tmp_path / "near", far]
    with small_checkpointer(tiers) as ckpt:
        ckpt.save(1, state(1)).result()
        assert far.reached.wait(250)
        for step in (2, 3, 4):
            ckpt.save(step, state(step)).result()
        ckpt.wait()
        assert steps(memory) == [1, 4]
        far.open_up()
    assert steps(tmp_path / "far") == [1, 3, 4]
    assert steps(memory) == [4]


def test_memory_keeps_an_overtaken_step_until_it_is_committed(tmp_path: Path) -> None:
    memory = MemoryBackend()
    disk = Gate(LocalBackend(str(tmp_path / "disk")), match="step-00000001*")
    with small_checkpointer([aiockpt.Tier(memory, keep=1), disk]) as ckpt:
        overtaken = ckpt.save(1, state(1))
        assert disk.reached.wait(250)
        for step in (2, 3):
            ckpt.save(step, state(step)).result()
        try:
            assert steps(memory) == [1, 3]
        finally:
            disk.open_up()
        assert overtaken.result().url == disk.url
        ckpt.wait()
    assert steps(memory) == [3]
    assert steps(disk) == [1, 2, 3]


def test_memory_holds_no_more_while_every_save_to_the_disk_fails(tmp_path: Path) -> None:
    memory = MemoryBackend()
    with small_checkpointer([memory, faulty(tmp_path, "fail")], on_error="warn") as ckpt:
        for step in range(1, 9):
            assert isinstance(ckpt.save(step, state(step)).exception(), aiockpt.StorageError)
            assert len(steps(memory)) <= 2  # the newest, and one that is tried again
            assert step in steps(memory)


def test_memory_is_thinned_although_the_far_tier_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "STALLED_S", 0.3)
    memory = MemoryBackend()
    save([aiockpt.Tier(memory, keep=1), tmp_path / "near", faulty(tmp_path / "far", "hang")], 1, 2, 3)
    assert steps(memory) == [3]


def test_what_memory_gave_up_is_given_up_behind_it(tmp_path: Path) -> None:
    memory, far = MemoryBackend(), Gate(LocalBackend(str(tmp_path / "far")), match="step-00000000*")
    told: list[BaseException] = []
    tiers = [
        aiockpt.Tier(memory, keep=1),
        aiockpt.Tier(tmp_path / "near", every=4),
        aiockpt.Tier(far, on_error=told.append, content="weights"),
    ]
    model = torch.nn.Linear(3, 3)
    with small_checkpointer(tiers) as ckpt:
        for step in (0, 1, 2):
            ckpt.save(step, {"model": model}).result()
            assert far.reached.wait(250)
        ckpt.wait()
        far.open_up()
    assert len(told) == 1
    assert str(told[0]).startswith("step 1 was in memory://")
    assert steps(far) == [0, 2]


def test_a_failing_tier_is_reported_as_asked(tmp_path: Path) -> None:
    broken = faulty(tmp_path / "far", "fail")
    told: list[BaseException] = []
    save([tmp_path / "near", aiockpt.Tier(broken, on_error=told.append)], 1)
    assert [type(error) for error in told] == [aiockpt.StorageError]
    with pytest.raises(aiockpt.BackgroundSaveError, match="step 2"):
        save([tmp_path / "near", aiockpt.Tier(broken, on_error="raise")], 2)
    assert steps(tmp_path / "near") == [1, 2]


def test_a_tier_that_hangs_holds_no_memory_that_others_copy_through(tmp_path: Path) -> None:
    far = faulty(tmp_path / "far", "hang", "upload.write")
    large = {"x": torch.arange(60_000)}  # 30 windows
    with small_checkpointer([MemoryBackend(), tmp_path / "disk", aiockpt.Tier(far, deadline=1)]) as ckpt:
        ckpt.save(1, large).result()
        assert ckpt.save(2, large).result().durable
    assert steps(tmp_path / "disk") == [1, 2]


def test_a_slow_tier_gets_its_last_step_while_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "STALLED_S", 1.5)
    slow = aiockpt.Tier(tmp_path / "far", bandwidth=200e3)  # 2.4 s, each window of 4 KiB 20 ms
    with small_checkpointer([tmp_path / "near", slow]) as ckpt:
        ckpt.save(1, {"x": torch.arange(60_000)}).result()
    assert steps(tmp_path / "far") == [1]


def test_a_tier_whose_flush_takes_long_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flushing(LocalBackend):
        async def create(self, key: str, size: int) -> Any:
            upload = await super().create(key, size)
            finish = upload.finish

            async def slowly() -> None:
                await anyio.sleep(2.5)
                await finish()

            upload.finish = slowly  # type: ignore[method-assign]
            return upload

    monkeypatch.setattr(promotion, "STALLED_S", 1.5)
    monkeypatch.setattr(copy, "FLUSHED_BYTES_PER_S", 1e3)
    save([tmp_path / "near", Flushing(str(tmp_path / "far"))], 1)
    assert steps(tmp_path / "far") == [1]


def test_whatever_goes_wrong_with_one_step_the_tier_takes_the_next(tmp_path: Path) -> None:
    class Buggy(LocalBackend):
        async def create(self, key: str, size: int) -> Any:
            if "step-00000001" in key:
                raise ZeroDivisionError("a bug")
            return await super().create(key, size)

    def complain(error: BaseException) -> None:
        raise RuntimeError("of the callback")

    far = aiockpt.Tier(Buggy(str(tmp_path / "far")), on_error=complain)
    with small_checkpointer([tmp_path / "near", far]) as ckpt:
        first, second = (ckpt.save(step, state(step)) for step in (1, 2))
        assert isinstance(first.committed(far.url).exception(), ZeroDivisionError)
        second.committed(far.url).result()
    assert steps(tmp_path / "far") == [2]


def test_memory_before_a_disk_holds_the_newest_step_unless_told_otherwise(tmp_path: Path) -> None:
    several, newest, alone = MemoryBackend(), MemoryBackend(), MemoryBackend()
    places: list[list[Any]] = [[aiockpt.Tier(several, keep=2), tmp_path / "a"], [newest, tmp_path / "b"], [alone]]
    for tiers in places:
        save(tiers, 1, 2, 3)
    assert [steps(place) for place in (several, newest, alone)] == [[2, 3], [3], [1, 2, 3]]
    assert steps(tmp_path / "b") == [1, 2, 3]


class Full(MemoryBackend):
    async def space(self) -> Space:
        return Space(1000, 1000)


def test_a_full_memory_tier_is_passed_over(tmp_path: Path) -> None:
    memory = Full()
    with small_checkpointer([memory, tmp_path / "disk"]) as ckpt:
        save = ckpt.save(1, state(1))
        assert save.result().durable
        assert isinstance(save.committed(memory).exception(), aiockpt.SaveSkippedError)
    assert loaded(tmp_path / "disk") == 1


def test_a_failing_durable_tier_is_followed_by_the_next(tmp_path: Path) -> None:
    with small_checkpointer([MemoryBackend(), faulty(tmp_path / "a", "fail"), tmp_path / "b"]) as ckpt:
        assert ckpt.save(1, state(1)).result().url == f"file://{tmp_path}/b"
    assert loaded(tmp_path / "b") == 1


def test_a_tier_nobody_has_is_named(tmp_path: Path) -> None:
    with small_checkpointer([tmp_path / "a", tmp_path / "b"]) as ckpt:
        save = ckpt.save(1, state(1))
        with pytest.raises(aiockpt.UsageError, match="is not a tier"):
            save.committed("s3://elsewhere")
        save.result()


def test_a_step_that_no_tier_takes_is_skipped_and_says_so(tmp_path: Path) -> None:
    with small_checkpointer([aiockpt.Tier(tmp_path / "a", every=2)]) as ckpt:
        assert isinstance(ckpt.save(1, state(1)).exception(), aiockpt.SaveSkippedError)
        ckpt.save(2, state(2)).result()
    assert steps(tmp_path / "a") == [2]


def flip(root: Path, step: int, offset: int) -> None:
    data = next((root / f"step-{step:08d}").glob("a-*/d/*.safetensors"))
    content = bytearray(data.read_bytes())
    content[offset] ^= 1
    data.write_bytes(content)


@pytest.fixture
def far(near: Path, tmp_path: Path) -> Path:
    """A place with the steps 1 and 2, and a nearer one with the same."""
    save([aiockpt.Tier(near, keep=2), tmp_path / "far"], 1, 2)
    return tmp_path / "far"


def test_the_newest_step_is_loaded_from_the_nearest_tier(near: Path, far: Path) -> None:
    assert loaded([near, faulty(far, "fail", "open")]) == 2
    with small_checkpointer(far) as ckpt:
        assert ckpt.load(state(-1)).result() is not None
        ckpt.save(3, state(3)).result()
    assert loaded([near, far]) == 3
    assert loaded([near, far], step=1) == 1
    with small_checkpointer([near, far]) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [3, 2, 1]
        assert ckpt.latest().result() == 3
        assert torch.equal(ckpt.read(3, "y").result(), torch.arange(7) + 3)


def test_an_empty_near_tier_loads_from_the_far_one(far: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    with small_checkpointer([fresh, far]) as ckpt:
        like = state(-1)
        assert ckpt.load(like).result() is not None
        assert like["value"] == 2
        ckpt.save(1, state(10)).result()  # went back: an older number, and a newer save
    assert loaded([fresh, far]) == 10
    assert loaded(far) == 10


@pytest.mark.parametrize(("offset", "newest"), [(20000, 2), (5000, 1)], ids=["elsewhere", "everywhere"])
def test_bad_blocks_are_read_from_another_tier(near: Path, far: Path, offset: int, newest: int) -> None:
    flip(near, 2, 5000)
    flip(far, 2, offset)
    assert loaded([near, far]) == newest
    assert loaded(near) == 1


def test_a_missing_file_is_read_from_another_tier(near: Path, far: Path) -> None:
    next((near / "step-00000002").glob("a-*/d/*.safetensors")).unlink()
    assert loaded([near, far]) == 2


def test_nothing_is_started_from_scratch_while_a_tier_cannot_be_listed(near: Path, far: Path, tmp_path: Path) -> None:
    away = faulty(far, "fail", "list")
    with pytest.raises(aiockpt.StorageError):
        loaded([tmp_path / "fresh", away])
    assert loaded([near, away]) == 2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((listing, "LIST_PATIENCE_S"), (listing, "COPY_PATIENCE_S"), (lineage, "PATIENCE_S")):
        monkeypatch.setattr(module, name, 0.1)


@pytest.mark.usefixtures("impatient")
def test_neither_load_nor_save_waits_for_a_hanging_tier(near: Path, far: Path) -> None:
    stuck = aiockpt.Tier(faulty(far, "hang", "list"), deadline=0.1)
    with small_checkpointer([near, stuck]) as ckpt:
        like = state(-1)
        assert ckpt.load(like).result() is not None
        assert like["value"] == 2
        assert ckpt.save(3, state(3)).result().durable
        assert isinstance(ckpt.save(4, state(4)).committed(stuck.url).exception(), aiockpt.StorageTimeoutError)
    assert loaded(near) == 4


@pytest.mark.usefixtures("impatient")
def test_a_bad_block_is_read_from_a_tier_that_answers(near: Path, far: Path, tmp_path: Path) -> None:
    flip(near, 2, 5000)
    assert loaded([near, faulty(tmp_path / "stuck", "hang", "list"), far]) == 2


def test_a_hanging_tier_that_alone_has_steps_is_awaited(far: Path, tmp_path: Path) -> None:
    away = Gate(LocalBackend(str(far)), verb="list")
    with small_checkpointer([tmp_path / "fresh", away]) as ckpt:
        like = state(-1)
        loading = ckpt.load(like)
        with pytest.raises(TimeoutError):
            loading.result(0.5)
        away.open_up()
        assert loading.result() is not None
    assert like["value"] == 2


def test_a_deleted_step_does_not_come_back_from_another_tier(near: Path, far: Path) -> None:
    with small_checkpointer([near, far]) as ckpt:
        ckpt.delete(2).result()
        assert ckpt.latest().result() == 1
    assert steps(far) == [1]


def test_copies_of_a_dead_process_are_made_up_for(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, 2, 4, 5)
    with small_checkpointer([near, aiockpt.Tier(far, every=2)]) as ckpt:
        assert ckpt.load(state(-1)).result() is not None
        assert not far.exists()
        ckpt.save(6, state(6)).result()
    assert steps(far) == [4, 6]
    assert loaded(far, step=4) == 4


def test_copies_are_made_though_no_next_is_taken(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, 10)
    with small_checkpointer([near, aiockpt.Tier(far, every=10)]) as ckpt:
        ckpt.load(state(-1)).result()
        ckpt.save(11, state(11)).result()
    assert steps(far) == [10]


def test_what_this_process_has_just_committed_is_copied_once(tmp_path: Path) -> None:
    near = Gate(LocalBackend(str(tmp_path / "near")), "get", "step-00000000/MANIFEST*", times=1)
    far = LocalBackend(str(tmp_path / "far"))
    watch = Watch()
    with small_checkpointer([near, aiockpt.Tier(far, every=2)], observers=[watch]) as ckpt:
        first = ckpt.save(0, state(0))
        assert near.reached.wait(250)  # it is committed, and its save does not know yet
        ckpt.save(1, state(1)).result()  # which has the far tier look for what an earlier process left
        time.sleep(0.3)
        near.open_up()
        first.committed(far.url).result()
    assert [event.step for event in watch.of(Promoted)] == [0]


def test_a_save_is_newer_than_what_comes_back_later(near: Path, far: Path, tmp_path: Path) -> None:
    """The far tier has newer saves than the near one, of another node, and is away for the first save here."""
    with small_checkpointer([tmp_path / "elsewhere", far]) as ckpt:
        ckpt.load(state(-1)).result()
        for step in range(3, 9):
            ckpt.save(step, state(step)).result()
    away = faulty(far, "fail", "list", times=1)
    with small_checkpointer([near, away]) as ckpt:
        ckpt.save(3, state(30)).result()
        assert ckpt.latest().result() == 8
        ckpt.save(4, state(40)).result()
    assert loaded([near, far]) == 40


@pytest.mark.parametrize("wrong", ["ignore", None, 3])
def test_what_cannot_be_done_about_an_error_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"on_error=.*give 'warn', 'raise' or a callable"):
        aiockpt.Tier(tmp_path, on_error=wrong)


def test_the_end_waits_for_the_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def prune(place: Any, *options: Any, **more: Any) -> Any:
        for _ in range(5000):
            await anyio.lowlevel.checkpoint()
        pruned = await really(place, *options, **more)
        ended.append(place.backend.url)
        return pruned

    really = maintenance.prune
    monkeypatch.setattr(maintenance, "prune", prune)
    memory, disk = MemoryBackend(), LocalBackend(str(tmp_path))
    tiers = [aiockpt.Tier(memory, keep=1), aiockpt.Tier(disk, keep=1)]
    with small_checkpointer(tiers) as ckpt:
        ckpt.save(1, state(1)).result()
        ckpt.wait()
        assert disk.url in ended


def test_a_committed_step_is_saved_though_never_read_back(tmp_path: Path) -> None:
    faults = [Fault(do="fail", verb="get", match="*/MANIFEST-1.json", times=2)]  # a read error is tried once more
    near = FaultyBackend(LocalBackend(str(tmp_path / "near")), faults)
    tiers = [aiockpt.Tier(near), aiockpt.Tier(tmp_path / "far")]
    with small_checkpointer(tiers) as ckpt:
        save = ckpt.save(1, state(1))
        assert save.result().url == near.url
        with pytest.raises(aiockpt.SaveSkippedError, match="step 1 cannot be read back"):
            save.committed(tmp_path / "far").result()
        ckpt.save(2, state(2)).result()
    assert near.schedule.fired
    assert steps(tmp_path / "near") == [1, 2]
    assert loaded(tmp_path / "far") == 2
