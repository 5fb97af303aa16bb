"""Data files by kind, and `Retention(optimizer=…)`: older steps keep their weights, whatever happens on the way."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import Event, GarbageDeleted, StepDeleted
from aiockpt.format.manifest import Manifest, decode_manifest
from aiockpt.options import Worker
from aiockpt.pipeline.collect import delete_step
from aiockpt.pipeline.discover import list_step
from aiockpt.storage.backend import Listing
from aiockpt.testing.recording import Call, RecordingFiles
from tests.file_surgery import fingerprint, paths
from tests.gates import Around
from tests.inline_process import Process, local
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import power_cuts, run_inline, snapshot
from tests.small_run import small_checkpointer

KEEP_ONE = aiockpt.Retention(last=3, optimizer=1)


def state(value: float) -> dict[str, Any]:
    """A model whose weight is also an EMA's, tied, with an optimizer that has stepped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 40)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(value)
    return {
        "aaa": model[0].weight,
        "model": model,
        "optimizer": optimizer,
        "ema": torch.full((50,), value),
        "step": int(value),
    }


def manifests(root: Path, step: int) -> list[Manifest]:
    found = sorted((root / f"step-{step:08d}").glob("MANIFEST-*.json"))
    return [decode_manifest(path.read_bytes(), path.name) for path in found]


def files(root: Path, step: int) -> list[str]:
    return sorted(path.name for path in (root / f"step-{step:08d}").glob("a-*/d/*"))


def weights_are(where: Any, step: int, value: float) -> bool:
    bare = state(-1)["model"]
    with small_checkpointer(where) as ckpt:
        assert ckpt.load({"model": bare}, step).result() is not None
    return all(bool((tensor == value).all()) for tensor in bare.parameters())


def test_what_modules_hold_lies_in_files_of_its_own(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1)).result()
    (manifest,) = manifests(tmp_path, 1)
    # What the state has beside the module, too, bears that name, and so it lies in no file of the module's.
    assert [file.kind for file in manifest.files] == ["weights", "weights", "rest"]
    for name, entry in manifest.tensors.items():
        kinds = {manifest.files[piece.file].kind for piece in entry.pieces}
        belongs = name.startswith("model.") or name == "aaa"
        assert kinds == ({"weights"} if belongs else {"rest"}), name


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_older_steps_keep_their_weights_and_the_newest_all(tmp_path: Path, worker: Worker) -> None:
    rules = aiockpt.Retention(last=4, optimizer=2)
    with small_checkpointer(tmp_path, retention=rules, worker=worker) as ckpt:
        for step in range(1, 7):
            ckpt.save(step, state(step)).result()
    assert {step: len(files(tmp_path, step)) for step in (3, 4, 5, 6)} == {3: 2, 4: 2, 5: 3, 6: 3}
    assert [manifest.generation for manifest in manifests(tmp_path, 4)] == [2]
    for step in (3, 4, 5, 6):
        assert weights_are(tmp_path, step, step)
    with small_checkpointer(tmp_path) as ckpt:
        assert [info.problem for info in ckpt.steps().result()] == [None] * 4
        for step in (3, 6):
            ckpt.verify(step).result()
        fresh = state(-1)
        loaded = ckpt.load(fresh).result()
        assert loaded is not None
        assert (loaded.step, fresh["step"]) == (6, 6)
        with pytest.raises(aiockpt.CheckpointError, match="weights only"):
            ckpt.load(state(-1), 4).result()


class Deletions:
    """Keeps the events of what was deleted."""

    def __init__(self) -> None:
        self.told: list[Event] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepDeleted | GarbageDeleted):
            self.told.append(event)


def test_a_dry_run_tells_what_would_be_thinned(tmp_path: Path) -> None:
    seen = Deletions()
    with small_checkpointer(tmp_path, observers=[seen]) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state(step)).result()
        ckpt.verify(2).result()
        told = ckpt.prune(KEEP_ONE, dry_run=True).result()
        assert not seen.told
        assert [(thin.step, thin.bytes > 0) for thin in told.thinned] == [(3, True)]
        assert [doomed.step for doomed in told.steps] == [1]
        assert [thin.step for thin in ckpt.prune(aiockpt.Retention(optimizer=1)).result().thinned] == [3, 1]
        assert ckpt.prune(aiockpt.Retention(optimizer=1)).result().thinned == ()
        assert seen.told
    assert {step: len(files(tmp_path, step)) for step in (1, 2, 3, 4)} == {1: 2, 2: 3, 3: 2, 4: 3}


def test_steps_that_cannot_be_thinned_are_told(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.ones(5)}).result()
        pruned = ckpt.prune(KEEP_ONE).result()
        assert pruned.thinned == ()
        assert [step_id for step_id, _ in pruned.left] == ["step-00000001"]
        assert ckpt.load({"x": torch.zeros(5)}, 1).result() is not None


def test_weights_count_for_the_rules(tmp_path: Path) -> None:
    """A resume that finds nothing whole has looked at every thinned step, and damaged none of them."""
    with small_checkpointer(tmp_path, retention=KEEP_ONE) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).result()
    (tmp_path / "step-00000003" / "MANIFEST-1.json").write_bytes(b"")
    with small_checkpointer(tmp_path) as ckpt:
        with pytest.raises(aiockpt.CheckpointError):
            ckpt.load(state(0)).result()
        pruned = ckpt.prune(aiockpt.Retention(last=1), dry_run=True).result()
    assert [step.step for step in pruned.steps] == [1]
    assert {step.step: step.reason for step in pruned.kept}[2] == "the newest"


def test_a_thinned_copy_is_no_source_for_another(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [aiockpt.Tier(near), aiockpt.Tier(far, keep=KEEP_ONE)]
    with small_checkpointer(tiers) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).committed(str(far)).result()
    assert len(files(far, 1)) == 2
    damaged = (
        near
        / "step-00000001"
        / next((near / "step-00000001").glob("a-*/d/*-0001*")).relative_to(near / "step-00000001")
    )
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with small_checkpointer([near, far]) as ckpt, pytest.raises(aiockpt.CheckpointError):
        ckpt.load(state(-1), 1).result()


# Power cuts

STATES = {value: state(value) for value in (1, 2, 3)}


def saved(steps: int) -> SimulatedFiles:
    disk = SimulatedFiles()
    backend, world = local(disk, 0)

    async def main() -> None:
        job = Process(backend, world)
        for step in range(1, steps + 1):
            (await job.save(step, STATES[step])).result()
        await backend.close()

    run_inline(main)
    return disk


def loads(disk: SimulatedFiles, step: int | None, only_weights: bool) -> float:
    whole = state(-1)
    wanted = {"model": whole["model"]} if only_weights else whole
    backend, world = local(disk, 99)

    async def main() -> None:
        try:
            assert await Process(backend, world).load(wanted, step) is not None
        finally:
            await backend.close()

    run_inline(main)
    values = {float(tensor.detach().mean()) for tensor in whole["model"].parameters()}
    assert len(values) == 1
    return values.pop()


def prune(disk: Any) -> None:
    backend, world = local(disk, 3)

    async def main() -> None:
        job: Process = Process(backend, world)
        await job.ckpt.prune(KEEP_ONE)
        await backend.close()

    run_inline(main)


def recorded(start: SimulatedFiles) -> list[Call]:
    recording = RecordingFiles(snapshot(start))
    prune(recording)
    return recording.calls


def paths_of(disk: SimulatedFiles, step: int) -> list[str]:
    return sorted(path for path in paths(disk) if f"/step-{step:08d}/" in path)


def different(cuts: Iterable[tuple[int, SimulatedFiles]]) -> Iterator[tuple[int, SimulatedFiles]]:
    """Leave out disks that are equal to an earlier one in all names and bytes."""
    seen = set()
    for done, after in cuts:
        if (key := fingerprint(after)) not in seen:
            seen.add(key)
            yield done, after


def test_a_power_cut_leaves_steps_whole_or_thin() -> None:
    start = saved(2)
    outcomes: set[float | None] = set()
    for done, after in different(power_cuts(recorded(start), start=start, limit=24)):
        assert loads(after, None, only_weights=False) == 2.0, f"after call {done}"
        assert loads(after, 1, only_weights=True) == 1.0, f"after call {done}"
        try:
            outcomes.add(loads(after, 1, only_weights=False))
        except aiockpt.CheckpointError:
            outcomes.add(None)
    assert outcomes == {1.0, None}


def test_the_next_clean_up_finishes_what_was_cut() -> None:
    start = saved(2)
    calls = recorded(start)
    finished = snapshot(start)
    prune(finished)
    wanted = [path for path in paths_of(finished, 1) if "MANIFEST" in path or path.endswith(".safetensors")]
    for done, after in different(power_cuts(calls, start=start, limit=6)):
        prune(after)
        left = [path for path in paths_of(after, 1) if "MANIFEST" in path or path.endswith(".safetensors")]
        assert left == wanted, f"after call {done}"
        assert loads(after, 1, only_weights=True) == 1.0


async def test_a_step_that_is_deleted_while_it_is_thinned_is_gone() -> None:
    place = MemoryBackend()

    async def delete(verb: str, key: str) -> None:
        if verb == "put_new" and key.endswith("-00000001/MANIFEST-2.json"):
            await delete_step(place, await list_step(place, "step-00000001"))

    async with small_checkpointer(Around(place, before=delete)) as ckpt:
        for step in (1, 2):
            await ckpt.save(step, state(step))
        pruned = await ckpt.prune(aiockpt.Retention(last=2, optimizer=1))
        assert (pruned.thinned, pruned.failed) == ((), ("step-00000001",))
    assert (await place.list("step-00000001")) == Listing((), ())
