"""A folder of weights is whole or not there, whatever is there before and whatever happens meanwhile."""

import asyncio
import errno
import itertools
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.adapters.rename import Rules
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.convert import Converted, to_hugging_face
from aiockpt.convert.folder_layout import INDEX_NAME, SINGLE_NAME, decode_index
from aiockpt.convert.outbound import ExportRequest, convert_step
from aiockpt.engine.alone import OnePlace
from aiockpt.engine.context import Engine, Place
from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectExistsError,
    StepExistsError,
    StorageError,
    StorageFullError,
    UsageError,
)
from aiockpt.options import Options, Tier
from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Space
from aiockpt.testing.faults import Fault, FaultyBackend, FaultyFiles
from aiockpt.testing.recording import Call, RecordingFiles
from tests.convert.small_models import DEADLINE_S, all_same, export, load_folder, save_model, take_in
from tests.inline_process import TINY, Process, local
from tests.simulated.inline_loop import InlineLoop
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import power_cuts, run_inline, snapshot
from tests.small_run import small_checkpointer

OUT = "/out"
Content = dict[str, bytes]


def test_weights_that_are_there_are_refused_and_stay(tmp_path: Path, root: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    export(root, tmp_path / "out", max_shard_bytes=10_000)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for dry_run in (True, False):
        with pytest.raises(ObjectExistsError, match=r"holds model-00001.*already.*--force"):
            export(root, tmp_path / "out", dry_run=dry_run)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(("first", "second"), [(10**9, 10_000), (10_000, 10**9), (10_000, 20_000), (10**9, 10**9)])
def test_replaced_weights_leave_no_file_of_the_old_ones(tmp_path: Path, root: Path, first: int, second: int) -> None:
    save_model(root, 8, seed=5)
    export(root, tmp_path / "out", step=7, max_shard_bytes=first)
    export(root, tmp_path / "out", step=8, max_shard_bytes=second, replace=True)
    export(root, tmp_path / "fresh", step=8, max_shard_bytes=second)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "fresh").iterdir())
    assert all_same(load_folder(tmp_path / "out"), load_folder(tmp_path / "fresh"))


def test_what_a_killed_conversion_left_is_spoken_of_and_goes_with_force(tmp_path: Path, root: Path) -> None:
    (tmp_path / "out").mkdir()
    (left := tmp_path / "out" / ".aiockpt-0123456789ab-model.safetensors.part").write_bytes(b"half")
    with pytest.raises(ObjectExistsError, match="runs or was killed"):
        export(root, tmp_path / "out")
    export(root, tmp_path / "out", replace=True)
    assert not left.exists()


def test_a_dry_run_writes_nothing(tmp_path: Path, root: Path) -> None:
    planned = export(root, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    done = export(root, tmp_path / "out")
    assert (planned.files, planned.bytes, planned.ties) == (done.files, done.bytes, done.ties)
    planned = take_in(tmp_path / "back", tmp_path / "out", dry_run=True)
    assert not (tmp_path / "back").exists()
    assert take_in(tmp_path / "back", tmp_path / "out").bytes == planned.bytes


def test_of_two_conversions_to_one_folder_the_second_is_told(tmp_path: Path, root: Path) -> None:
    def on_written(_: int) -> None:
        if not (tmp_path / "out" / SINGLE_NAME).exists():
            (tmp_path / "out" / SINGLE_NAME).write_bytes(b"theirs")

    with pytest.raises(ObjectExistsError, match=r"another conversion has written model\.safetensors"):
        export(root, tmp_path / "out", on_written=on_written)
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"theirs"]


def test_a_link_that_a_reader_would_take_for_the_weights_is_refused_or_replaced(tmp_path: Path, root: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "out" / SINGLE_NAME).symlink_to(tmp_path / "theirs")
    with pytest.raises(ObjectExistsError, match=r"holds model\.safetensors already"):
        export(root, tmp_path / "out", max_shard_bytes=10_000)
    export(root, tmp_path / "out", max_shard_bytes=10_000, replace=True)
    assert not (tmp_path / "out" / SINGLE_NAME).is_symlink()
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_file_is_no_folder(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="name a folder"):
        export(root, tmp_path / "model.safetensors")


def test_a_place_of_checkpoints_is_no_folder_for_weights(root: Path) -> None:
    with pytest.raises(UsageError, match="holds checkpoints"):
        export(root, root, replace=True)


def test_a_step_that_is_there_is_refused_or_gets_a_new_generation(tmp_path: Path, root: Path) -> None:
    export(root, tmp_path / "out")
    with pytest.raises(StepExistsError, match="has step 7 already"):
        take_in(root, tmp_path / "out", step=7)
    take_in(root, tmp_path / "out", step=7, replace=True)
    with aiockpt.Checkpointer(root) as ckpt:
        assert ckpt.describe(7).result(DEADLINE_S).info.generation == 2


def test_progress_adds_up_to_the_bytes(tmp_path: Path, root: Path) -> None:
    seen: list[int] = []
    done = export(root, tmp_path / "out", max_shard_bytes=10_000, on_written=seen.append)
    assert sum(seen) == done.bytes
    seen.clear()
    done = take_in(tmp_path / "back", tmp_path / "out", on_written=seen.append)
    assert sum(seen) == done.bytes


class Nearly(MemoryBackend):
    """A place with hardly any room."""

    async def space(self) -> Space:
        return Space(1000, 10_000)


def test_a_place_that_is_too_small_is_refused_before_a_byte_is_written(root: Path, tmp_path: Path) -> None:
    place = Nearly(f"nearly-{tmp_path}")
    with pytest.raises(StorageFullError, match=r"needs .* bytes"):
        export(root, place)
    assert not asyncio.run(place.list("")).objects


@pytest.mark.parametrize("verb", ["create", "upload.write", "upload.finish", "put_new"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_store_that_fails_keeps_nothing_of_the_conversion(root: Path, tmp_path: Path, verb: str, at: int) -> None:
    inner = MemoryBackend(f"failing-{tmp_path}")
    asyncio.run(inner.put("config.json", b"{}"))
    place = FaultyBackend(inner, [Fault(do="fail", verb=verb, at=at, error=errno.ENOSPC)])
    if verb == "put_new" and at > 1:
        pytest.skip("the index is one object")
    with pytest.raises(StorageFullError):
        export(root, place, max_shard_bytes=10_000)
    assert [stat.key for stat in asyncio.run(inner.list("")).objects] == ["config.json"]


def test_an_index_whose_answer_was_lost_does_not_outlive_its_files(root: Path, tmp_path: Path) -> None:
    inner = MemoryBackend(f"lost-{tmp_path}")
    place = FaultyBackend(inner, [Fault(do="lose_answer", verb="put_new", error=errno.ETIMEDOUT)])
    with pytest.raises(StorageError):
        export(root, place, max_shard_bytes=10_000)
    assert not asyncio.run(inner.list("")).objects


def test_the_index_of_a_store_is_created_last(root: Path, tmp_path: Path) -> None:
    place = MemoryBackend(f"order-{tmp_path}")
    created: list[str] = []
    create, put_new = place.create, place.put_new

    async def noted_create(key: str, size: int) -> object:
        created.append(key)
        return await create(key, size)

    async def noted_put(key: str, data: bytes) -> None:
        created.append(key)
        await put_new(key, data)

    place.create, place.put_new = noted_create, noted_put  # type: ignore[method-assign, assignment]
    done = export(root, place, max_shard_bytes=10_000)
    assert created == [*done.files, INDEX_NAME]


# ---------------------------------------------------------------- a simulated disk


def weights_state(value: float) -> dict[str, object]:
    model = torch.nn.Linear(40, 30)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, value)
    return {"model": model}


def request(step: int, max_shard_bytes: int) -> ExportRequest:
    return ExportRequest(step, None, None, max_shard_bytes, replace=True, dry_run=False, rename=Rules(()))


def convert_on(files: Files, step: int, max_shard_bytes: int) -> None:
    """Convert a step of /run to the folder /out."""
    backend, world = local(files, seed=step)

    async def main() -> None:
        loop = InlineLoop("convert", lambda: None)
        place = Place(Engine(loop, Options(io=TINY), (), world), backend)
        out = LocalBackend(OUT, world=world)
        await convert_step(OnePlace(place, Tier(backend)), out, request(step, max_shard_bytes), lambda _: None)
        await backend.close()

    run_inline(main)


@cache
def disk_with_two_steps() -> SimulatedFiles:
    files = SimulatedFiles()
    backend, world = local(files)

    async def main() -> None:
        job = Process(backend, world)
        for step in (1, 2):
            (await job.save(step, weights_state(step))).result()
        await backend.close()

    run_inline(main)
    return files


def content(files: Files) -> Content:
    """Return the files of /out that have names of weights."""
    backend = local(files)[1]
    place = LocalBackend(OUT, world=backend)

    async def main() -> Content:
        return {stat.key: await place.get(stat.key, 1 << 20) for stat in (await place.list("")).objects}

    return run_inline(main)


def whole(files: Files) -> Content | None:
    """Return what a reader takes for the weights of the folder: one file, else what the index names; None for nothing."""
    found = content(files)
    if SINGLE_NAME in found:
        return {SINGLE_NAME: found[SINGLE_NAME]}
    if INDEX_NAME not in found:
        return None
    names = set(decode_index(found[INDEX_NAME], "index").values())
    assert names <= found.keys(), f"the index names {names}, there is {found.keys()}"
    return {name: found[name] for name in [*names, INDEX_NAME]}


KINDS = {"one to one": (10**6, 10**6), "one to many": (10**6, 100), "many to one": (100, 10**6), "many": (100, 100)}


class Conversion:
    """Step 2 converted over the weights of step 1: what is there before and after, and the calls between."""

    def __init__(self, kind: str) -> None:
        first, second = KINDS[kind]
        self.start = snapshot(disk_with_two_steps())
        convert_on(self.start, 1, first)
        self.old = whole(self.start)
        recording = RecordingFiles(snapshot(self.start))
        convert_on(recording, 2, second)
        self.calls: list[Call] = recording.calls
        after = snapshot(self.start)
        convert_on(after, 2, second)
        self.new = whole(after)

    def violation(self, skip: frozenset[int] = frozenset(), limit: int = 24) -> str | None:
        """Return the first broken promise of any power cut, or None."""
        cuts = power_cuts(self.calls, start=self.start, skip=skip, limit=limit)
        for done, after in cuts:
            call = self.calls[done - 1]
            try:
                found = whole(after)
            except (AssertionError, CorruptionError) as error:
                return f"after call {done} ({call}): {error}"
            if found is not None and found not in (self.old, self.new):
                return f"after call {done} ({call}): the weights are neither the old nor the new ones"
            if done == len(self.calls) and found != self.new:
                return f"after the last call ({call}): the new weights are not there"
        return None


@cache
def conversion(kind: str) -> Conversion:
    return Conversion(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_leaves_the_old_weights_the_new_ones_or_none(kind: str) -> None:
    found = conversion(kind)
    assert found.old is not None
    assert found.new is not None
    assert found.old != found.new
    assert found.violation() is None


def test_one_file_is_replaced_without_a_moment_without_either() -> None:
    found = conversion("one to one")
    for done, after in power_cuts(found.calls, start=found.start, limit=24):
        assert whole(after) is not None, f"after call {done}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_flush_of_the_folder_that_is_removed_is_missed(kind: str) -> None:
    found = conversion(kind)
    published = next(
        index for index, call in enumerate(found.calls) if call.verb in ("rename", "unlink") and OUT in call.path
    )
    flushes = [i for i, call in enumerate(found.calls) if call.is_flush and call.path.startswith(OUT)]
    data = [i for i in flushes if i < published and call_is_of_file(found.calls[i])]
    names = [i for i in flushes if i > published]
    assert data
    assert names
    assert found.violation(frozenset(data), limit=64) is not None
    assert found.violation(frozenset(names), limit=64) is not None


def call_is_of_file(call: Call) -> bool:
    return call.path != OUT


def failing_everywhere(
    error: int, start: SimulatedFiles, max_shard_bytes: int
) -> Iterator[tuple[int, SimulatedFiles, BaseException | None]]:
    """Yield (call, disk, outcome) of a conversion whose every call fails once."""
    at = 0
    while True:
        at += 1
        files = snapshot(start)
        faulty = FaultyFiles(files, [Fault(do="fail", at=at, error=error)])
        outcome: BaseException | None = None
        try:
            convert_on(faulty, 2, max_shard_bytes)
        except CheckpointError as failed:
            outcome = failed
        if not faulty.schedule.fired:
            return
        yield at, files, outcome


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_call_leaves_whole_weights_or_none_and_no_rubbish(error: int) -> None:
    expected = conversion("many").new
    failed = 0
    for at, files, outcome in failing_everywhere(error, disk_with_two_steps(), 100):
        assert files.open_count == 0
        found = whole(files)
        if outcome is None:
            assert found == expected, f"at call {at}"
            continue
        failed += 1
        assert found in (None, expected), f"at call {at}: {outcome!r}"
        assert content(files) in ({}, expected), f"at call {at}: {outcome!r}"
    assert failed > 10


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_any_call_of_a_replacement_leaves_the_old_weights_or_the_new_ones(kind: str) -> None:
    found = conversion(kind)
    assert found.old is not None
    assert found.new is not None
    for at, files, outcome in failing_everywhere(errno.EIO, found.start, KINDS[kind][1]):
        assert whole(files) in ((found.new,) if outcome is None else (found.old, found.new)), (
            f"at call {at}: {outcome!r}"
        )


def test_old_weights_that_a_failure_put_back_survive_a_power_cut() -> None:
    found = conversion("many")
    for at in itertools.count(1):
        faulty = FaultyFiles(snapshot(found.start), [Fault(do="fail", verb="rename", at=at, error=errno.EIO)])
        recording = RecordingFiles(faulty)
        with suppress(CheckpointError):
            convert_on(recording, 2, KINDS["many"][1])
        if not faulty.schedule.fired:
            assert at > 4
            return
        for done, after in power_cuts(recording.calls, start=found.start, limit=24):
            expected = (found.old, found.new) if done == len(recording.calls) else (None, found.old, found.new)
            assert whole(after) in expected, f"rename {at} failed; after call {done} ({recording.calls[done - 1]})"


@pytest.mark.parametrize("kind", KINDS)
def test_a_flush_of_the_folder_that_fails_is_an_error(kind: str) -> None:
    for at in itertools.count(1):
        files = FaultyFiles(snapshot(conversion(kind).start), [Fault(do="fail", verb="fsync", match=OUT, at=at)])
        try:
            convert_on(files, 2, KINDS[kind][1])
        except StorageError:
            continue
        assert not files.schedule.fired, f"flush {at}"
        assert at > 1
        break


def test_what_another_conversion_has_created_in_a_store_stays(root: Path, tmp_path: Path) -> None:
    place = MemoryBackend(f"raced-{tmp_path}")
    create = place.create

    async def after_another(key: str, size: int) -> object:
        await place.put(key, b"theirs")
        return await create(key, size)

    place.create = after_another  # type: ignore[method-assign, assignment]
    with pytest.raises(ObjectExistsError):
        export(root, place)
    assert asyncio.run(place.get(SINGLE_NAME, 100)) == b"theirs"


def test_a_cancelled_conversion_leaves_nothing(tmp_path: Path) -> None:
    futures: list[aiockpt.Future[Converted]] = []
    written: list[int] = []

    def on_written(size: int) -> None:
        written.append(size)
        futures[0].cancel()

    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": {"x": torch.randn(300_000)}}).result(DEADLINE_S)
        futures.append(to_hugging_face(ckpt, tmp_path / "out", prefix="w", on_written=on_written))
        assert futures[0].exception(DEADLINE_S) is not None
        assert futures[0].cancelled()
    assert written
    assert not (tmp_path / "out").exists()
