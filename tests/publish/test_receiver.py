"""A folder that follows the versions: what is handed out, how it heals, and who may have it."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import save_file

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.convert.folder_layout import INDEX_NAME
from aiockpt.errors import CorruptionError
from aiockpt.publish import local_copy, reception
from aiockpt.publish.frames import FrameReader
from aiockpt.publish.local_copy import LocalCopy
from aiockpt.runtime.world import OsFiles
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.publish.policy import are_of, damage_all, in_folder, publish, received, state_of, weights_of
from tests.small_run import small_checkpointer
from tests.watch import Lines, until


def flip(folder: Path, at: int = -100) -> None:
    """Change a byte of the folder's weights, in place."""
    (path,) = folder.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        (was,) = file.read(1)
        file.seek(at, os.SEEK_END)
        file.write(bytes([was ^ 1]))


@pytest.mark.parametrize("where", ["folder", "memory"])
async def test_each_version_comes_whole_and_says_what_has_changed(tmp_path: Path, where: str) -> None:
    place = tmp_path / "pub" if where == "folder" else MemoryBackend("each")
    seen = []
    before = weights_of(0)
    async with small_checkpointer(tmp_path / "run", publish=aiockpt.Publish(place, full_every=3)) as ckpt:
        await ckpt.save(0, state_of(0))
        async for version in aiockpt.receive(place, tmp_path / "got", name="r", every_s=0.02):
            assert are_of(in_folder(version.folder), version.step)
            patches = {patch.name: patch for patch in version.patches()}
            assert list(patches) == version.changed()
            for name, patch in patches.items():
                if patch.positions is None:
                    before[name] = patch.values.view(before[name].shape)
                else:
                    assert 0 < len(patch.positions) < before[name].numel()
                    before[name].view(-1)[patch.positions] = patch.values
            assert are_of(before, version.step)
            seen.append((version.version, len(version.changed())))
            if version.step == 5:
                break
            await ckpt.save(version.step + 1, state_of(version.step + 1))
    assert seen == [(0, 6), *((number, 4) for number in range(1, 6))]


def test_only_the_newest_version_is_handed_out(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1, 2)
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02))
    assert next(versions).version == 2
    publish(tmp_path / "run", tmp_path / "pub", 3, 4, 5)
    version = next(versions)
    assert (version.version, version.step) == (5, 5)
    assert are_of(in_folder(version.folder), 5)
    total = {patch.name: patch for patch in version.patches()}
    changed = torch.nonzero((weights_of(5)["embed.weight"] != weights_of(2)["embed.weight"]).view(-1)).view(-1)
    positions = total["embed.weight"].positions
    assert positions is not None
    assert torch.equal(positions, changed)
    versions.close()


def test_patches_are_right_for_a_tensor_that_was_back_at_its_old_bytes_meanwhile(tmp_path: Path) -> None:
    small = [[1.0, 2.0], [5.0, 2.0], [1.0, 2.0], [5.0, 9.0]]
    options = aiockpt.Publish(tmp_path / "pub", prefix="model")
    engine: dict[str, torch.Tensor] = {}
    with small_checkpointer(tmp_path / "run") as ckpt:
        versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02))
        for step, values in enumerate(small):
            weights = {"small": torch.tensor(values), "other": torch.zeros(5000)}
            weights["other"][0] = min(step, 1)
            ckpt.save(step, {"model": weights}).result()
            ckpt.publish(step, options).result()
            if step in (0, 3):
                for patch in next(versions).patches():
                    engine.setdefault(patch.name, patch.values)[patch.positions] = patch.values
    versions.close()
    assert engine["small"].tolist() == small[-1]


def test_a_version_that_an_engine_did_not_take_comes_again_as_a_whole_or_the_newer_one(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02))
    for _ in range(3):
        version = next(versions)
        assert (version.version, len(version.changed())) == (1, 6)
        version.again()
    publish(tmp_path / "run", tmp_path / "pub", 2)
    version = next(versions)
    assert (version.version, len(version.changed())) == (2, 6)
    publish(tmp_path / "run", tmp_path / "pub", 3)
    version = next(versions)
    assert (version.version, len(version.changed())) == (3, 4)
    versions.close()


def test_the_folder_changes_only_when_the_loop_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "AHEAD_BYTES", 10_000)  # more than a delta, and less than the full version
    publish(tmp_path / "run", tmp_path / "pub", 0)
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02))
    next(versions)
    publish(tmp_path / "run", tmp_path / "pub", 1)
    ahead = tmp_path / "got" / ".aiockpt" / "weight_v000001"
    until(lambda: list(ahead.glob("*.safetensors")), "the next version is downloaded ahead")
    assert are_of(in_folder(tmp_path / "got"), 0)
    assert next(versions).version == 1
    versions.close()


def test_what_is_damaged_or_torn_is_found_and_made_anew(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]
    flip(tmp_path / "got")
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]
    flip(tmp_path / "got")
    publish(tmp_path / "run", tmp_path / "pub", 2, 3)
    assert received(tmp_path / "pub", tmp_path / "got") == [(3, 3)]
    (path,) = (tmp_path / "got").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    assert received(tmp_path / "pub", tmp_path / "got") == [(3, 3)]


def tear_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next update fail in the middle of a tensor, once."""
    read = FrameReader.read
    monkeypatch.setattr("aiockpt.publish.frames.RUN_BYTES", 1024)

    def fail_later(self: FrameReader, size: int) -> object:
        reads.append(size)
        if len(reads) == 7:
            raise CorruptionError("in the middle of a tensor")
        return read(self, size)

    reads: list[int] = []
    monkeypatch.setattr(FrameReader, "read", fail_later)


def test_a_receiver_that_goes_on_makes_anew_what_it_has_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    with aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02) as versions:
        following = iter(versions)
        assert next(following).version == 0
        tear_a_tensor(monkeypatch)
        publish(tmp_path / "run", tmp_path / "pub", 1)
        assert next(following).version == 1
        assert are_of(in_folder(tmp_path / "got"), 1)


def test_a_tensor_torn_in_mid_update_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]
    publish(tmp_path / "run", tmp_path / "pub", 1)
    tear_a_tensor(monkeypatch)
    with pytest.raises(CorruptionError, match="in the middle"):
        received(tmp_path / "pub", tmp_path / "got")
    assert not (tmp_path / "got" / "model.safetensors.index.json").exists()
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]


def test_a_receiver_that_died_while_it_made_the_files_makes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)

    def make_half(self: LocalCopy, name: str, header: bytes, size: int) -> None:
        (self.path / name).write_bytes(header[: size // 2])
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(LocalCopy, "_make_file", make_half)
        with pytest.raises(aiockpt.StorageError, match="killed here"):
            received(tmp_path / "pub", tmp_path / "got")
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]


def test_files_beside_the_weights_are_there_also_after_an_outage(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    save_file(weights_of(0), like / "model.safetensors")
    (like / "config.json").write_text("{}")
    publish(tmp_path / "run", tmp_path / "pub", 0, like=like)
    place = FaultyBackend(LocalBackend(tmp_path / "pub"), [Fault(do="fail", match="*config.json", times=None)])
    with pytest.raises(aiockpt.StorageError):
        received(place, tmp_path / "got")
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]
    assert (tmp_path / "got" / "config.json").read_text() == "{}"


def test_of_a_torn_tensor_no_other_one_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    publish(tmp_path / "run", tmp_path / "pub", 0)
    place = RecordingBackend(LocalBackend(tmp_path / "pub"))
    with aiockpt.receive(place, tmp_path / "got", every_s=0.02) as versions:
        following = iter(versions)
        assert next(following).version == 0
        place.operations.clear()
        (path,) = (tmp_path / "got").glob("*.safetensors")
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        with path.open("r+b") as file:
            file.seek(start + header["embed.weight"]["data_offsets"][0])  # the first that is updated
            file.write(b"torn")
        publish(tmp_path / "run", tmp_path / "pub", 1)
        assert next(following).version == 1
        assert are_of(in_folder(tmp_path / "got"), 1)
    full = [one for one in place.operations if one.verb == "reader.read" and "weight_v000000" in one.key]
    assert [one.size for one in full if one.offset >= start] == [64 * 96 * 2]


def test_a_damaged_delta_is_refused_before_the_folder_changes_and_a_full_version_goes_past_it(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]
    publish(tmp_path / "run", tmp_path / "pub", 1)
    flip(tmp_path / "pub" / "weight_v000001", -10)
    with pytest.raises(CorruptionError, match=r"weight_v000001/model.*publish a full version"):
        received(tmp_path / "pub", tmp_path / "got")
    assert are_of(in_folder(tmp_path / "got"), 0)
    publish(tmp_path / "run", tmp_path / "pub", 2, full=True)
    assert received(tmp_path / "pub", tmp_path / "got") == [(2, 2)]


def test_a_damaged_full_version_is_never_handed_out(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    flip(tmp_path / "pub" / "weight_v000000")
    with pytest.raises(CorruptionError, match=r"weight_v000000: .* has not the digest that was published"):
        received(tmp_path / "pub", tmp_path / "got")
    assert not (tmp_path / "got" / "model.safetensors.index.json").exists()


def test_a_receiver_that_follows_waits_out_a_damaged_version_and_an_outage(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    place = FaultyBackend(LocalBackend(tmp_path / "pub"), [Fault(do="fail", verb="list", at=3, times=2)])
    with Lines() as lines:
        versions = iter(aiockpt.receive(place, tmp_path / "got", every_s=0.02))
        assert next(versions).version == 0
        publish(tmp_path / "run", tmp_path / "pub", 1)
        flip(tmp_path / "pub" / "weight_v000001", -10)
        until(lambda: any("tried again" in line for line in lines.said), "it says so")
        publish(tmp_path / "run", tmp_path / "pub", 2, full=True)
        assert next(versions).version == 2
        versions.close()


def test_one_process_of_a_host_has_the_folder(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got"))
    next(versions)
    with pytest.raises(aiockpt.UsageError, match=f"process {os.getpid()}"):
        received(tmp_path / "pub", tmp_path / "got")
    versions.close()
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    (tmp_path / "got").mkdir()
    (tmp_path / "got" / "thesis.tex").write_text("mine")
    with pytest.raises(aiockpt.UsageError, match=r"thesis\.tex.*give an empty or a new folder$"):
        received(tmp_path / "pub", tmp_path / "got")
    assert os.listdir(tmp_path / "got") == ["thesis.tex"]
    with pytest.raises(aiockpt.UsageError, match="folder of this machine"):
        aiockpt.receive(tmp_path / "pub", "s3://bucket/got")
    with pytest.raises(aiockpt.UsageError, match="with base s3://bucket/model: name a folder of this machine"):
        aiockpt.receive(tmp_path / "pub", tmp_path / "new", base="s3://bucket/model")
    with pytest.raises(aiockpt.UsageError, match="as in rollout-3"):
        aiockpt.receive(tmp_path / "pub", tmp_path / "got", name="a/b")


def test_the_folder_of_the_versions_is_not_received_into(tmp_path: Path) -> None:
    (tmp_path / "pub").mkdir()
    for folder in (tmp_path, tmp_path / "pub"):
        with pytest.raises(aiockpt.UsageError, match="holds the versions themselves"):
            aiockpt.receive(tmp_path / "pub", folder)


def test_a_refused_folder_can_be_received_into_once_it_is_empty(tmp_path: Path) -> None:
    assert received(tmp_path / "pub", tmp_path / "got") == []
    (tmp_path / "got" / "notes.txt").touch()
    with pytest.raises(aiockpt.UsageError, match=r"holds notes\.txt"):
        received(tmp_path / "pub", tmp_path / "got")
    (tmp_path / "got" / "notes.txt").unlink()
    assert received(tmp_path / "pub", tmp_path / "got") == []


def test_receivers_of_two_folders_have_a_name_each(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    folders = [tmp_path / above / "policy" for above in ("a", "b", "a" * 99, "b" * 99)]
    receivers = [iter(aiockpt.receive(tmp_path / "pub", folder)) for folder in folders]
    for versions in receivers:
        next(versions)
    assert len(list((tmp_path / "pub" / "receivers").iterdir())) == 4
    for versions in receivers:
        versions.close()


def test_after_a_power_cut_the_index_is_there_only_beside_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]
    publish(tmp_path / "run", tmp_path / "pub", 1)
    flushed = []
    fsync = os.fsync

    def note(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_relative_to(tmp_path / "got"):
            has_index = (tmp_path / "got" / "model.safetensors.index.json").exists()
            flushed.append((str(path.relative_to(tmp_path / "got")), has_index))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(OsFiles, "fsync", staticmethod(note))
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]
    assert flushed == [
        (".", False),  # its name is gone before a tensor changes
        (".aiockpt/.copy.json.new", False),
        (".model.safetensors.index.json.new", False),
    ]


def test_a_receiver_that_died_while_it_made_other_files_leaves_no_index_of_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(3, 3)}).result()
        ckpt.publish(1, tmp_path / "pub").result()
    index = tmp_path / "got" / "model.safetensors.index.json"

    def die(path: Path) -> None:
        assert not index.exists()
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(local_copy, "_remove", die)
        with pytest.raises(aiockpt.StorageError, match="killed here"):
            list(aiockpt.receive(tmp_path / "pub", tmp_path / "got", follow=False))
    (version,) = aiockpt.receive(tmp_path / "pub", tmp_path / "got", follow=False)
    assert in_folder(version.folder).keys() == {"weight", "bias"}


def test_a_receiver_follows_a_place_that_is_begun_anew(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    with aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02) as versions:
        following = iter(versions)
        assert next(following).version == 0
        publish(tmp_path / "run", tmp_path / "pub", 1)
        assert next(following).version == 1
        publish(tmp_path / "other", tmp_path / "anew", 5, 6, 7)
        (tmp_path / "pub").rename(tmp_path / "old")
        (tmp_path / "anew").rename(tmp_path / "pub")
        version = next(following)
        assert (version.version, version.step) == (2, 7)
        assert are_of(in_folder(version.folder), 7)


def test_a_place_begun_anew_comes_to_a_number_that_was_there_before(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    with aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02) as versions, Lines() as lines:
        following = iter(versions)
        assert next(following).version == 1
        shutil.rmtree(tmp_path / "pub")
        for step in (5, 6):
            publish(tmp_path / "run", tmp_path / "pub", step)
            version = next(following)
            assert (version.version, version.step) == (step - 5, step)
            assert are_of(in_folder(version.folder), step)
    assert not [line for line in lines.said if "cannot be received" in line]


def test_another_model_gets_another_folder_layout(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    assert received(tmp_path / "pub", tmp_path / "got") == [(0, 0)]
    publish(tmp_path / "run", tmp_path / "pub", 1, dtype="float32")
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(2, {"model": torch.nn.Linear(3, 3)}).result()
        done = ckpt.publish(2, tmp_path / "pub").result()
    assert (done.version, done.kind) == (2, "full")
    (version,) = aiockpt.receive(tmp_path / "pub", tmp_path / "got", follow=False)
    assert in_folder(version.folder).keys() == {"weight", "bias"} == set(version.changed())


def test_a_fresh_receiver_begins_at_the_fold_and_one_that_is_near_takes_the_chain(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]
    publish(tmp_path / "run", tmp_path / "pub", *range(2, 6), full_every=4)
    for path in (tmp_path / "pub" / "weight_v000002").glob("*.safetensors"):
        path.unlink()
    assert received(tmp_path / "pub", tmp_path / "fresh") == [(5, 5)]
    (tmp_path / "pub" / "weight_v000002" / INDEX_NAME).write_text("{")
    assert received(tmp_path / "pub", tmp_path / "another") == [(5, 5)], "an index before the fold was read"
    for path in (tmp_path / "pub" / "full_v000004").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(aiockpt.CheckpointError):
        received(tmp_path / "pub", tmp_path / "got")


def test_what_a_base_has_is_not_downloaded_whatever_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    (tmp_path / "base").mkdir()
    weights = weights_of(0)
    save_file(
        {f"model.{name}": weights.pop(name) for name in ("embed.weight", "empty")}, tmp_path / "base/a.safetensors"
    )
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "base/b.safetensors")
    damage_all(tmp_path / "pub" / "weight_v000000")
    assert received(tmp_path / "pub", tmp_path / "got", base=tmp_path / "base") == [(1, 1)]
    assert "6 of 6 tensors are taken from the base" in caplog.text
    publish(tmp_path / "run", tmp_path / "pub", *range(2, 6), full_every=4)
    damage_all(tmp_path / "pub" / "full_v000004")
    assert received(tmp_path / "pub", tmp_path / "later", base=tmp_path / "base") == [(5, 5)], (
        "the deltas are fewer bytes"
    )


def test_a_receiver_that_is_started_again_with_its_base_goes_on_from_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    base, copy = tmp_path / "base", tmp_path / "got" / ".aiockpt" / "copy.json"
    shutil.copytree(tmp_path / "pub" / "weight_v000000", base)
    with pytest.raises(aiockpt.UsageError, match=r"name this folder as base= \(--base\)$"):
        received(tmp_path / "pub", base, base=base)
    damage_all(tmp_path / "pub" / "weight_v000000")
    assert received(tmp_path / "pub", tmp_path / "got", base=f"file://{base}") == [(1, 1)]
    copy.write_text(copy.read_text().replace('"version":1', '"version":-1'))  # killed before it was noted
    with Lines() as lines:
        assert received(tmp_path / "pub", tmp_path / "got", base=base) == [(1, 1)]
    assert not lines.said, "nothing is downloaded"
    shutil.rmtree(base)
    publish(tmp_path / "run", tmp_path / "pub", 2)
    caplog.set_level(logging.INFO, "aiockpt")
    caplog.clear()
    assert received(tmp_path / "pub", tmp_path / "got", base=base) == [(2, 2)]
    assert "base" not in caplog.text


def test_a_base_with_some_of_the_tensors_spares_these(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1, 2, full_every=2)
    (tmp_path / "base").mkdir()
    save_file({"frozen.weight": weights_of(0)["frozen.weight"]}, tmp_path / "base/a.safetensors")
    assert received(tmp_path / "pub", tmp_path / "got", base=tmp_path / "base") == [(2, 2)]


@pytest.mark.parametrize("what", ["of another model", "absent", "damaged"])
def test_a_base_that_is_of_no_use_is_told_once(tmp_path: Path, what: str) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    base = tmp_path / "base"
    if what != "absent":
        base.mkdir()
        save_file({"frozen.weight": torch.ones(33, 5)}, base / "model.safetensors")
    if what == "damaged":
        (base / "model.safetensors").write_bytes(b"no header")
    with Lines() as lines:
        assert received(tmp_path / "pub", tmp_path / "got", base=base) == [(0, 0)]
        publish(tmp_path / "run", tmp_path / "pub", 1)
        assert received(tmp_path / "pub", tmp_path / "got", base=base) == [(1, 1)]
    (said,) = [line for line in lines.said if "not loaded" not in line]
    assert ("has no tensor of a version" if what == "of another model" else f"base {base} is not used") in said


def test_a_base_that_changes_while_it_is_read_is_not_handed_out(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    shutil.copytree(tmp_path / "pub" / "weight_v000000", tmp_path / "base")
    flip(tmp_path / "pub" / "weight_v000001", -10)
    with Lines() as lines:
        versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02, base=tmp_path / "base"))
        seen: list[int] = []
        looking = threading.Thread(target=lambda: seen.append(next(versions).version))
        looking.start()
        until(lambda: any("another digest" in line for line in lines.said), "the base was read, and the delta not")
        flip(tmp_path / "base")
        flip(tmp_path / "pub" / "weight_v000001", -10)
        looking.join()
        versions.close()
    assert seen == [1]
    assert are_of(in_folder(tmp_path / "got"), 1)
    assert any("has not the digest" in line for line in lines.said)


def test_versions_of_others_are_refused_for_they_cannot_be_verified(tmp_path: Path) -> None:
    folder = tmp_path / "pub" / "weight_v000000"
    folder.mkdir(parents=True)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(CorruptionError, match="has no digests of aiockpt"):
        received(tmp_path / "pub", tmp_path / "got")


def test_a_place_that_can_only_be_read_is_received_from(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    place = FaultyBackend(LocalBackend(tmp_path / "pub"), [Fault(do="fail", verb="put*", times=None)])
    assert received(place, tmp_path / "got") == [(0, 0)]


def test_a_receiver_notes_where_it_is_until_it_ends(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 3)
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", name="rollout-1"))
    next(versions)
    note = tmp_path / "pub" / "receivers" / "rollout-1.json"
    assert json.loads(note.read_text())["step"] == 3
    versions.close()
    assert not note.exists()


@pytest.mark.parametrize("follow", [True, False])
async def test_the_note_is_renewed_during_a_long_download_and_keeps_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    monkeypatch.setattr(reception, "RENEW_S", 0.02)
    await anyio.to_thread.run_sync(publish, tmp_path / "run", tmp_path / "pub", 0, 1)
    place = FaultyBackend(LocalBackend(tmp_path / "pub"), [Fault(do="hang", verb="open", at=3)])
    receiver = aiockpt.receive(place, tmp_path / "got", name="r", every_s=0.02, follow=follow)
    note = tmp_path / "pub" / "receivers" / "r.json"

    def renewed() -> bool:
        return note.exists() and json.loads(note.read_text())["needs"] == 0

    async with receiver, anyio.create_task_group() as tasks:
        tasks.start_soon(anext, aiter(receiver))
        for _ in range(3):
            await anyio.to_thread.run_sync(until, renewed, "the note, which says that version 0 is read")
            note.unlink()
        tasks.cancel_scope.cancel()


async def test_it_is_iterated_once_and_ends_in_an_event_loop(tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(publish, tmp_path / "run", tmp_path / "pub", 0)
    receiver = aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.02)
    with pytest.raises(aiockpt.BlockingCallError, match="async for"):
        next(iter(receiver))
    versions = aiter(receiver)
    assert (await anext(versions)).version == 0
    with anyio.move_on_after(0.1) as scope:
        await anext(versions)
    assert scope.cancelled_caught
    async with receiver:
        pass
    with pytest.raises(aiockpt.UsageError, match="used already"):
        await anext(aiter(receiver))


CHILD = """
import sys, aiockpt
for version in aiockpt.receive(sys.argv[1], sys.argv[2], every_s=0.01):
    print(version.version, flush=True)
"""


def test_a_receiver_that_is_killed_goes_on(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    for step in range(1, 4):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "pub"), str(tmp_path / "got")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            publish(tmp_path / "run", tmp_path / "pub", step)
            time.sleep(0.01 * step)
            child.send_signal(signal.SIGKILL)
        assert received(tmp_path / "pub", tmp_path / "got") == [(step, step)]


def test_the_run_itself_is_never_read_by_a_receiver(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0, 1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]
