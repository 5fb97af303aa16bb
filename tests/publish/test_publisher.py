"""Versions of a run's steps: what other readers take, what a delta is against, what is cleaned up."""

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.convert import outbound, to_hugging_face
from aiockpt.convert.casting import Cast, cast_all
from aiockpt.engine.alone import Destination
from aiockpt.engine.find import find_manifest
from aiockpt.errors import CorruptionError, StorageError
from aiockpt.events import PublicationFailed, VersionPublished
from aiockpt.publish import publications, step_weights, version_files
from aiockpt.publish.form import DECISION
from aiockpt.publish.step_weights import open_weights_of
from aiockpt.publish.versions import Versions
from aiockpt.runtime.world import OsFiles, World
from aiockpt.storage.backend import Listing
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.publish.other_reader import OtherReader
from tests.publish.policy import Policy, are_of, in_folder, publish, received, saved, state_of, weights_of
from tests.run_python import run_python
from tests.small_run import small_checkpointer
from tests.watch import Lines, Watch, until


def dead_name() -> str:
    """Return the name that a process of this host, which has ended, gave its folder."""
    return run_python(
        "-c", "from aiockpt.runtime.processes import ProcessNames; print(ProcessNames().make())"
    ).stdout.strip()


def numbers(dest: Path) -> list[str]:
    return sorted(path.name for path in dest.iterdir() if path.name != "receivers")


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def has_weights_of(reader: OtherReader, step: int) -> bool:
    return {name: data for name, (_, _, data) in reader.tensors.items()} == {
        name: raw(tensor) for name, tensor in weights_of(step).items()
    }


def test_another_reader_follows_the_chain_step_by_step(tmp_path: Path) -> None:
    done = publish(tmp_path / "run", tmp_path / "pub", *range(6), full_every=3)
    assert [(one.version, one.kind, one.base, one.changed) for one in done[:2]] == [
        (0, "full", None, 6),
        (1, "delta", 0, 4),
    ]
    reader = OtherReader(tmp_path / "pub")
    for step in range(6):
        reader.pull(step)
        assert has_weights_of(reader, step)
    assert numbers(tmp_path / "pub") == ["full_v000003", *(f"weight_v00000{number}" for number in range(6))]
    assert are_of(in_folder(tmp_path / "pub" / "full_v000003"), 3)


@pytest.mark.slow
def test_two_hundred_versions_with_folds_are_followed_by_another_reader_and_by_ours(tmp_path: Path) -> None:
    pub = tmp_path / "pub"
    reader: OtherReader | None = None
    with small_checkpointer(tmp_path / "run", retention=aiockpt.Retention(last=2)) as ckpt:
        for step in range(200):
            ckpt.save(step, state_of(step)).result()
            assert ckpt.publish(step, pub).result().version == step
            reader = reader or OtherReader(pub)
            if step % 9 == 0:
                assert received(pub, tmp_path / "got") == [(step, step)]
    assert reader is not None
    reader.pull(199)
    assert has_weights_of(reader, 199)
    assert received(pub, tmp_path / "fresh") == [(199, 199)]


def test_folds_in_the_chain_are_versions_that_begin_it_anew(tmp_path: Path) -> None:
    done = publish(tmp_path / "run", tmp_path / "pub", *range(5), full_every=2, fold="chain")
    assert [one.kind for one in done] == ["full", "delta", "full", "delta", "full"]
    reader = OtherReader(tmp_path / "pub", 2)
    reader.pull(4)
    assert has_weights_of(reader, 4)


def test_a_tensor_of_many_windows_and_files_comes_out_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_files, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(step_weights, "FILE_BYTES", 13_000)
    done = publish(tmp_path / "run", tmp_path / "pub", 0, 1, 2)
    assert [len(one.files) for one in done] == [3, 3, 3]
    reader = OtherReader(tmp_path / "pub")
    reader.pull(2)
    assert has_weights_of(reader, 2)
    assert received(tmp_path / "pub", tmp_path / "got") == [(2, 2)]


@pytest.mark.parametrize(("dtype", "part"), [(None, 1), ("float32", 1), ("bfloat16", 4), ("float64", 2)])
def test_windows_leave_room_for_what_is_cast_in_them(tmp_path: Path, dtype: str | None, part: int) -> None:
    async def window_bytes(destination: Destination) -> int:
        found = await find_manifest(destination, 0)
        async with open_weights_of(found, aiockpt.Publish(tmp_path / "pub", dtype=dtype), None) as weights:
            return weights.window_bytes(1 << 20)

    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, {"model": torch.nn.Linear(3, 3)}).result()
        assert ckpt.run_on_destination("look", window_bytes).result() == (1 << 20) // part


def test_a_tensor_that_was_saved_in_columns_is_published_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_files, "WINDOW_BYTES", 4096)
    whole = torch.arange(6000.0).view(100, 60)
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step in range(2):
            columns = aiockpt.Shards((100, 60), {(0, at): whole[:, at : at + 30].contiguous() for at in (0, 30)})
            ckpt.save(step, {"model": {"w": columns}}).result()
            ckpt.publish(step, aiockpt.Publish(tmp_path / "pub", prefix="model")).result()
            reader = OtherReader(tmp_path / "pub")
            reader.pull(step)
            assert reader.tensors["w"][2] == raw(whole)
            whole[step::7] += 1


def test_what_is_cast_in_many_windows_is_what_a_conversion_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_files, "WINDOW_BYTES", 4096)
    model = torch.nn.Linear(90, 70)
    kinds = []
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step in range(2):
            ckpt.save(step, {"model": model}).result()
            kinds.append(ckpt.publish(step, aiockpt.Publish(tmp_path / "pub", dtype="bfloat16")).result().kind)
            with torch.no_grad():
                model.weight[step::7] += 1
        to_hugging_face(ckpt, tmp_path / "hf", step=1, dtype="bfloat16").result()
    assert kinds == ["full", "delta"]
    reader = OtherReader(tmp_path / "pub")
    reader.pull(1)
    wanted = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: data for name, (_, _, data) in reader.tensors.items()} == {
        name: raw(tensor) for name, tensor in wanted.items()
    }


def test_what_is_cast_is_read_into_memory_that_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_files, "WINDOW_BYTES", 4096)
    seen: list[torch.Tensor] = []

    def note(casts: Sequence[Cast]) -> None:
        seen.extend(cast.stored for cast in casts)  # kept, so that no allocator gives the same memory again
        cast_all(casts)

    monkeypatch.setattr(outbound, "cast_all", note)
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, {"model": torch.nn.Linear(900, 70)}).result()
        ckpt.publish(0, aiockpt.Publish(tmp_path / "pub", dtype="bfloat16")).result()
    assert len(seen) > 120
    assert len({stored.untyped_storage().data_ptr() for stored in seen}) < 20


def test_a_full_version_is_what_a_conversion_writes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": model}).result()
        to_hugging_face(ckpt, tmp_path / "hf", dtype="bfloat16").result()
        ckpt.publish(1, aiockpt.Publish(tmp_path / "pub", dtype="bfloat16")).result()
    wanted = load_file(tmp_path / "hf" / "model.safetensors")
    found = in_folder(tmp_path / "pub" / "weight_v000000")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {found["0.weight"].dtype, found["1.num_batches_tracked"].dtype} == {torch.bfloat16, torch.int64}


def test_a_step_that_is_gone_is_no_base(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.delete(1).result()
    (done,) = publish(tmp_path / "run", tmp_path / "pub", 2)
    assert (done.version, done.kind) == (2, "full")


def test_a_step_that_was_saved_anew_is_no_base(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    saved(tmp_path / "run", 1)
    (done,) = publish(tmp_path / "run", tmp_path / "pub", 2)
    assert done.kind == "full"


def test_the_base_is_held_until_the_next_version(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run", retention=aiockpt.Retention(last=1)) as ckpt:
        kinds = []
        for step in range(3):
            ckpt.save(step, state_of(step)).result()
            ckpt.wait()
            if step != 1:
                kinds.append(ckpt.publish(step, tmp_path / "pub").result().kind)
        assert kinds == ["full", "delta"]
    assert not list((tmp_path / "run").glob("step-*/lease-*"))


def test_a_delta_whose_base_has_other_digests_is_never_published(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    index = tmp_path / "pub" / "weight_v000001" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    sums = document["metadata"]["aiockpt"]["tensors"]["embed.weight"]
    sums[1] = sums[1][::-1]
    index.write_text(json.dumps(document))
    (done,) = publish(tmp_path / "run", tmp_path / "pub", 2)
    assert (done.version, done.kind) == (2, "full")
    assert numbers(tmp_path / "pub") == [f"weight_v00000{number}" for number in range(3)]


def test_if_more_than_half_has_changed_the_version_is_a_full_one(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step in range(2):
            ckpt.save(step, {"model": {"weight": torch.randn(100, 100)}}).result()
            assert ckpt.publish(step, aiockpt.Publish(tmp_path / "pub", prefix="model")).result().kind == "full"


def test_a_step_that_is_the_newest_version_is_not_published_again(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(3, state_of(3)).result()
        first = ckpt.publish(3, tmp_path / "pub").result()
        again = ckpt.publish(3, tmp_path / "pub").result()
        assert (first.version, again.version, again.url) == (0, 0, first.url)
        assert ckpt.publish(3, tmp_path / "pub", full=True).result().version == 1


def test_a_chain_that_is_broken_is_mended_by_a_full_version_of_its_last_step(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step in range(3):
            ckpt.save(step, state_of(step)).result()
            ckpt.publish(step, tmp_path / "pub").result()
        shutil.rmtree(tmp_path / "pub" / "weight_v000001")
        with pytest.raises(CorruptionError, match="publish a full one"):
            received(tmp_path / "pub", tmp_path / "got")
        ckpt.publish(2, tmp_path / "pub", full=True).result()
    assert received(tmp_path / "pub", tmp_path / "got") == [(3, 2)]


def test_without_a_folder_for_temporary_files_it_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publications, "FIRST_PAUSE_S", 0.01)
    watch = Watch()
    with small_checkpointer(tmp_path / "run", publish=tmp_path / "pub", observers=[watch]) as ckpt:
        ckpt.save(0, state_of(0)).result()
        watch.wait_for(VersionPublished)
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
            ckpt.save(1, state_of(1)).result()
            watch.wait_for(PublicationFailed)
        assert "name another folder as TMPDIR" in watch.of(PublicationFailed)[0].error
        until(lambda: len(watch.of(VersionPublished)) == 2, "the second version")
    assert watch.of(VersionPublished)[1].kind == "delta"


def test_a_place_that_lists_its_newest_version_late_gets_each_number_once(tmp_path: Path) -> None:
    class Late(RecordingBackend):
        async def list(self, prefix: str) -> Listing:
            found = await super().list(prefix)
            return found if prefix else msgspec.structs.replace(found, folders=found.folders[:-1])

    place = Late(MemoryBackend())
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step in range(3):
            ckpt.save(step, state_of(step)).result()
            assert ckpt.publish(step, place).result().version == step
    assert len([one for one in place.operations if one.verb == "create"]) == 3


def test_two_places_of_one_name_have_a_publisher_each(tmp_path: Path) -> None:
    class Nameless(FaultyBackend):
        def __repr__(self) -> str:
            return "<a place>"

    places = Nameless(MemoryBackend(), []), Nameless(MemoryBackend(), [])
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step, place in enumerate([*places, places[0]]):
            ckpt.save(step, state_of(step)).result()
            assert ckpt.publish(step, place).result().version == step // 2
    assert [received(place, tmp_path / f"got-{number}") for number, place in enumerate(places)] == [[(1, 2)], [(0, 1)]]


def test_a_run_that_went_back_publishes_the_next_number_and_says_so(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 4, 5)
    with Lines() as lines:
        (done,) = publish(tmp_path / "run", tmp_path / "pub", 2)
    assert (done.version, done.step, done.kind) == (2, 2, "delta")
    assert any("step 2 is published as version 2, after step 5 as version 1" in line for line in lines.said)
    assert received(tmp_path / "pub", tmp_path / "got") == [(2, 2)]


def test_versions_are_like_a_folder_or_nothing_is_written(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    save_file(weights_of(0), like / "model.safetensors")
    (like / "config.json").write_text('{"model_type": "toy"}')
    (like / "tokenizer.json").write_text("{}")
    publish(tmp_path / "run", tmp_path / "pub", 0, 1, like=like)
    assert (tmp_path / "pub/weight_v000000/config.json").read_text() == '{"model_type": "toy"}'
    assert (tmp_path / "pub/weight_v000000/tokenizer.json").exists()
    assert not (tmp_path / "pub/weight_v000001/config.json").exists()
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]
    assert (tmp_path / "got/config.json").exists()
    others = {
        "is not among the weights": weights_of(0) | {"more": torch.zeros(2)},
        "is not in the folder": {name: one for name, one in weights_of(0).items() if name != "head.weight"},
        "give dtype=": {name: one.float() for name, one in weights_of(0).items()},
        "\\[10, 96\\], and BF16 \\[96, 10\\]": weights_of(0)
        | {"head.weight": weights_of(0)["head.weight"].T.contiguous()},
    }
    for message, weights in others.items():
        save_file(weights, like / "model.safetensors")
        with pytest.raises(aiockpt.UsageError, match=message):
            publish(tmp_path / "run", tmp_path / "other", 2, like=like)
    assert not (tmp_path / "other").exists()


def test_of_names_that_share_memory_the_version_has_that_of_the_folder(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.embed, model.head = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    model.head.weight = model.embed.weight
    like = tmp_path / "like"
    like.mkdir()
    save_file({"head.weight": torch.zeros(8, 8)}, like / "model.safetensors")
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, {"model": model}).result()
        ckpt.publish(0, aiockpt.Publish(tmp_path / "pub", like=like)).result()
    assert in_folder(tmp_path / "pub/weight_v000000").keys() == {"head.weight"}


def test_old_versions_go_but_for_those_that_a_receiver_is_at(tmp_path: Path) -> None:
    pub = tmp_path / "pub"
    publish(tmp_path / "run", pub, *range(6), full_every=2, keep=1)
    assert numbers(pub) == ["full_v000004", "weight_v000003", "weight_v000004", "weight_v000005"]
    assert received(pub, tmp_path / "got") == [(5, 5)]
    (pub / "receivers").mkdir(exist_ok=True)
    note = {"name": "slow", "version": 5, "step": 5, "needs": 5}
    (pub / "receivers" / "slow.json").write_text(json.dumps(note))
    watch = Watch()
    with small_checkpointer(tmp_path / "run", observers=[watch]) as ckpt:
        for step in range(6, 11):
            ckpt.save(step, state_of(step)).result()
            ckpt.publish(step, aiockpt.Publish(pub, full_every=2, keep=0)).result()
    assert numbers(pub) == ["full_v000006", "full_v000008", "full_v000010", *(f"weight_v{n:06d}" for n in range(5, 11))]
    assert watch.of(VersionPublished)[-1].receivers == {"slow": 5}
    assert received(pub, tmp_path / "got") == [(10, 10)]


def test_the_note_of_a_receiver_that_is_silent_for_a_day_is_removed(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    notes = tmp_path / "pub" / "receivers"
    notes.mkdir()
    for name, hours in {"living": 0, "silent": 23, "gone": 25}.items():
        note = notes / f"{name}.json"
        note.write_text(json.dumps({"name": name, "version": 0, "step": 0, "needs": 0}))
        os.utime(note, (then_s := time.time() - 3600 * hours, then_s))
    publish(tmp_path / "run", tmp_path / "pub", 1)
    assert sorted(path.name for path in notes.iterdir()) == ["living.json", "silent.json"]
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", name="gone"))
    next(versions)
    assert (notes / "gone.json").exists()
    versions.close()


def test_each_number_has_one_winner_of_many_publishers(tmp_path: Path) -> None:
    for place in (tmp_path / "pub", MemoryBackend("race")):
        roots = [tmp_path / f"run-{number}" for number in range(3)]
        done: list[aiockpt.Published] = []

        def work(root: Path, first: int, dest: Any, done: list[aiockpt.Published] = done) -> None:
            done.extend(publish(root, dest, *range(first, first + 4)))

        threads = [threading.Thread(target=work, args=(root, 10 * number, place)) for number, root in enumerate(roots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(one.version for one in done) == list(range(12))
        newest = max(done, key=lambda one: one.version)
        got = tmp_path / f"got-{type(place).__name__}"
        assert received(place, got) == [(newest.version, newest.step)]
        for root in roots:
            for path in root.iterdir():
                assert path.name != "pub"


# ---------------------------------------------------------------------- stores


def test_a_winner_that_died_before_its_index_is_finished_by_the_next_one(tmp_path: Path) -> None:
    store = MemoryBackend("decided")
    publish(tmp_path / "run", store, 0)
    dying = FaultyBackend(store, [Fault(do="fail", verb="put_new", match="*index.json", times=None)])
    with pytest.raises(StorageError):
        publish(tmp_path / "run", dying, 1)
    objects = store._objects
    assert f"weight_v000001/{DECISION}" in objects
    assert "weight_v000001/model.safetensors.index.json" not in objects
    (done,) = publish(tmp_path / "run", store, 2)
    assert (done.version, done.step) == (2, 2)
    assert received(store, tmp_path / "got") == [(2, 2)]


def test_files_of_a_dead_publisher_are_gone_before_the_index_comes(tmp_path: Path) -> None:
    store = MemoryBackend("leftovers")
    publish(tmp_path / "run", store, 0)
    store._objects["weight_v000001/model-00001-of-00001.dead.safetensors"] = store._object(b"dead")
    publish(tmp_path / "run", store, 1)
    files = [key for key in store._objects if key.startswith("weight_v000001/") and key.endswith(".safetensors")]
    assert len(files) == 1
    assert "dead" not in files[0]


def test_a_late_file_of_a_dead_rank_is_gone_with_the_next_version(tmp_path: Path) -> None:
    store = MemoryBackend("late")
    publish(tmp_path / "run", store, 0)
    before = set(store._objects)
    store._objects["weight_v000000/model-00002-of-00002.dead.safetensors"] = store._object(b"dead")
    publish(tmp_path / "run", store, 1)
    assert {key for key in store._objects if key.startswith("weight_v000000/")} == {
        key for key in before if key.startswith("weight_v000000/")
    }


def test_hidden_folders_of_dead_publishers_are_removed(tmp_path: Path) -> None:
    hidden = tmp_path / "pub" / ".aiockpt-deadbeef0000"
    publish(tmp_path / "run", tmp_path / "pub", 0)
    hidden.mkdir()
    (hidden / "model-00001-of-00001.safetensors").write_bytes(b"x")
    publish(tmp_path / "run", tmp_path / "pub", 1)
    assert hidden.exists()  # of another host, it may live
    empty = tmp_path / "pub" / f".aiockpt-{dead_name()}"
    empty.mkdir()
    os.utime(hidden / "model-00001-of-00001.safetensors", (1, 1))
    publish(tmp_path / "run", tmp_path / "pub", 2)
    assert not hidden.exists()
    assert not empty.exists()


# ---------------------------------------------------------------------- beside a run


def test_the_name_of_a_version_is_flushed_before_it_counts_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "run", 0)
    flushed: list[tuple[str, bool]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        folder = tmp_path / "pub"
        if Path(f"/proc/self/fd/{fd}").readlink() == folder:
            flushed.append(("pub", (folder / "weight_v000000").exists()))
        fsync(fd)

    monkeypatch.setattr(OsFiles, "fsync", staticmethod(note))
    publish(tmp_path / "run", tmp_path / "pub", 0)
    assert ("pub", True) in flushed


async def test_a_version_in_a_store_is_removed_index_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a removal that was killed leaves is no version."""
    place = MemoryBackend("removed")
    async with small_checkpointer(tmp_path / "run") as ckpt:
        await ckpt.save(0, state_of(0))
        await ckpt.publish(0, place)
    deleted: list[list[str]] = []
    delete = place.delete

    async def note(keys: Sequence[str]) -> None:
        deleted.append(list(keys))
        await delete(keys)

    monkeypatch.setattr(place, "delete", note)
    await Versions(place, World()).remove(["weight_v000000"])
    assert deleted[0] == ["weight_v000000/model.safetensors.index.json"]
    assert not (await place.list("weight_v000000")).objects


def test_each_committed_step_is_published_and_the_last_one_before_the_end(tmp_path: Path) -> None:
    watch = Watch()
    options = aiockpt.Publish(tmp_path / "pub", every=2)
    with small_checkpointer(tmp_path / "run", publish=options, observers=[watch]) as ckpt:
        for step in range(5):
            ckpt.save(step, state_of(step))
    assert received(tmp_path / "pub", tmp_path / "got")[-1][1] == 4
    published = watch.of(VersionPublished)
    assert {event.step for event in published} <= {0, 2, 4}
    assert published[-1].step == 4
    assert not list((tmp_path / "run").glob("step-*/lease-*"))


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_whose_publisher_was_killed_is_published_by_the_resume(tmp_path: Path, every: int) -> None:
    saved(tmp_path / "run", 3, 4, 5)  # and the process ended before it was published
    publish = aiockpt.Publish(tmp_path / "pub", every=every)
    state = state_of(0)
    for _ in range(2):  # the second time it is there
        with small_checkpointer(tmp_path / "run", publish=publish) as ckpt:
            assert ckpt.resume(state) == 6
    assert numbers(tmp_path / "pub") == ["weight_v000000"]
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 6 - every)]


def test_a_publication_that_fails_harms_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    dest = FaultyBackend(MemoryBackend(), [Fault(do="fail", verb="create", times=None)])
    with caplog.at_level(logging.ERROR), small_checkpointer(tmp_path, publish=dest, observers=[watch]) as ckpt:
        ckpt.save(0, state_of(0)).result()
    assert "step 0 is not published" in caplog.text
    assert watch.of(PublicationFailed)[0].step == 0


@pytest.mark.parametrize("outage", [1, 2])
def test_a_step_that_storage_refused_is_published_without_a_newer_one(
    outage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who rolls out for a trainer may wait for its version, and the trainer for them: no newer step comes."""
    monkeypatch.setattr(publications, "FIRST_PAUSE_S", 0.1)
    watch = Watch()
    dest = FaultyBackend(MemoryBackend(), [Fault(do="fail", verb="create", times=outage)])
    with small_checkpointer(tmp_path, publish=dest, observers=[watch]) as ckpt:
        ckpt.save(0, state_of(0)).result()
        give_up_s = time.monotonic() + 100
        while not watch.of(VersionPublished) and time.monotonic() < give_up_s:
            time.sleep(0.02)
        assert [event.step for event in watch.of(VersionPublished)] == [0]
    assert {event.step for event in watch.of(PublicationFailed)} == {0}


def test_a_writer_process_commits_and_the_trainer_publishes(tmp_path: Path) -> None:
    with small_checkpointer(str(tmp_path / "run"), worker="process", publish=tmp_path / "pub") as ckpt:
        ckpt.save(0, state_of(0)).result()
        ckpt.save(1, state_of(1)).result()
    assert received(tmp_path / "pub", tmp_path / "got")[-1][1] == 1


def test_what_cannot_be_published_is_refused(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, {"model": Policy(0)}, exclude="model.head.**").result()
        with pytest.raises(aiockpt.UsageError, match=r"saved without head\.weight"):
            ckpt.publish(0, tmp_path / "pub").result()
        with pytest.raises(aiockpt.StepNotFoundError):
            ckpt.publish(9, tmp_path / "pub").result()
        wrong: list[dict[str, Any]] = [{"fold": "no"}, {"keep": -1}, {"full_every": 0}, {"evry": 1}]
        for options in wrong:
            with pytest.raises(aiockpt.UsageError):
                aiockpt.Publish(tmp_path / "pub", **options)
    assert not (tmp_path / "pub").exists()
