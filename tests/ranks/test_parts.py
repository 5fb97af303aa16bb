"""A world whose pieces are too many for JSON: saved in columns, committed twice, damaged, loaded by any other world."""

from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import ManifestError, NoValidCheckpointError
from aiockpt.format import merge
from aiockpt.format.manifest import decode_manifest
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.ranks.crew import Crew
from tests.ranks.test_save import equal, failing_on, loaded, replicated
from tests.small_run import steps


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_PIECES", 3)


def save(root: Any, step: int = 1, ranks: int = 3) -> None:
    with Crew(ranks, root) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(step, replicated(step)).result())


def test_columns_are_loaded_by_one_and_by_many(tmp_path: Path) -> None:
    save(tmp_path)
    manifest = decode_manifest(next(tmp_path.glob("step-*/MANIFEST-1.json")).read_bytes())
    assert manifest.requires == ("parts",)
    assert len(list(tmp_path.glob("step-*/a-*/p/*.bin"))) == 6
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))
    targets = [replicated(9) for _ in range(2)]
    with Crew(2, tmp_path) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(targets[rank]).result())
    assert all(equal(target, replicated(1)) for target in targets)


def test_a_checkpoint_in_columns_is_described_verified_and_read_in_part(tmp_path: Path) -> None:
    save(tmp_path)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        held = {one.name: one for one in ckpt.describe(1).result().tensors}
        assert held["w0"].bytes == 700 * 33 * 4
        assert ckpt.verify(1).result().step == 1
        assert torch.equal(ckpt.read(1, "w2", rows=slice(3, 5)).result(), replicated(1)["w2"][3:5])


@pytest.mark.parametrize("damage", ["missing", "flipped", "torn"])
def test_a_step_with_a_bad_part_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    blob = next(tmp_path.glob("step-00000002/a-*/p/offsets-0000.bin"))
    data = blob.read_bytes()
    blob.unlink()
    if damage != "missing":
        blob.write_bytes(data[:-4] if damage == "torn" else bytes([data[0] ^ 1]) + data[1:])
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(ManifestError, match="part"):
        ckpt.load(replicated(0), 2).result()


def test_another_rank_commits_the_same_columns_in_place_of_rank_0(tmp_path: Path) -> None:
    hang = Fault(do="hang", verb="put_new", match="*MANIFEST*", times=None)
    quick = aiockpt.Deadlines(ranks_s=20, commit_s=3, takeover_s=0.3, close_s=60)
    with Crew(3, failing_on(0, tmp_path, hang), deadlines=quick, on_error=lambda future: None) as crew:
        outcomes = crew.start(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        assert [outcome.result().generation for outcome in outcomes[1:]] == [1, 1]
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_without_its_parts_there_is_no_commit(tmp_path: Path) -> None:
    full = Fault(do="fail", verb="put_new", match="*/p/sizes*", times=None)
    quick = aiockpt.Deadlines(ranks_s=20, commit_s=20, takeover_s=0.3, close_s=60)
    backends = [FaultyBackend(LocalBackend(str(tmp_path)), [full]) for _ in range(2)]
    with Crew(2, backends.__getitem__, deadlines=quick, on_error=lambda future: None) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
    assert all(isinstance(error, aiockpt.CheckpointError) for error in errors)
    assert not list(tmp_path.glob("step-*/MANIFEST*"))


def test_a_deleted_step_leaves_no_part(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.delete(1).result()
    assert not list(tmp_path.glob("step-00000001/**/*.bin"))
    assert steps(tmp_path) == [3, 2]


def test_with_all_parts_gone_nothing_is_loaded_silently(tmp_path: Path) -> None:
    save(tmp_path)
    for blob in tmp_path.glob("step-*/a-*/p/*.bin"):
        blob.unlink()
    with aiockpt.Checkpointer(tmp_path) as ckpt, pytest.raises(NoValidCheckpointError):
        ckpt.load(replicated(0)).result()
