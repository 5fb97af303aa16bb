"""The step that is found when something is bad: the newest whole one; what was passed over is reported, and only that."""

import errno
import itertools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import NewerFormatError, archived
from aiockpt.events import StepSkipped
from aiockpt.format.document import digest128, seal, unseal
from aiockpt.format.manifest import Manifest, decode_manifest, encode_manifest
from aiockpt.options import Worker
from aiockpt.pipeline import discover
from aiockpt.pipeline.discover import StepEntry, dated_ns
from aiockpt.pipeline.lineage import Lineage
from aiockpt.runtime.world import OsClock, World
from aiockpt.storage.backend import Backend, Listing
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Around
from tests.small_run import small_checkpointer
from tests.watch import Lines, Watch

NEWEST = 5


def state(step: float) -> dict[str, Any]:
    return {"x": torch.full((3000,), float(step)), "step": step}


def save(place: Path | Backend, *steps: int, value: float | None = None, **options: Any) -> None:
    with small_checkpointer(place, **options) as ckpt:
        ckpt.load(state(-1)).result()
        for step in steps:
            ckpt.save(step, state(step if value is None else value)).result()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A place with the steps 1 to 5."""
    root = tmp_path / "run"
    save(root, *range(1, NEWEST + 1))
    return root


def load(place: Path | Backend, step: int | None = None) -> tuple[float | None, dict[str, str]]:
    """Return the value that is loaded, and what was skipped; the event and the log of a new process must say the same."""
    discover.logged.clear()
    loaded, watch = state(-1), Watch()
    with Lines() as lines, small_checkpointer(place, observers=[watch]) as ckpt:
        result = ckpt.load(loaded, step).result()
    if result is None:
        return None, {}
    assert torch.equal(loaded["x"], state(loaded["step"])["x"])
    assert len(watch.of(StepSkipped)) == len(result.skipped)
    assert sum("is skipped" in line for line in lines.said) == len(result.skipped)
    return loaded["step"], dict(result.skipped)


def passed_over(place: Path | Backend) -> tuple[float | None, list[str]]:
    """Return the value that is loaded, and the steps that were skipped."""
    value, skipped = load(place)
    return value, list(skipped)


def latest(place: Path | Backend) -> int | None:
    with small_checkpointer(place) as ckpt:
        return ckpt.latest().result()


def folder(step: int) -> str:
    return f"step-{step:08d}"


def manifest(root: Path, step: int, generation: int = 1) -> Path:
    return root / folder(step) / f"MANIFEST-{generation}.json"


def data_file(root: Path, step: int) -> Path:
    (path,) = (root / folder(step)).glob("a-*/d/*")
    return path


def failing_at(root: Path, match: str, error: int = errno.EIO, verb: str = "*") -> FaultyBackend:
    """Return the place, in which no call of *verb* works for what *match* fits."""
    return FaultyBackend(LocalBackend(str(root)), [Fault(do="fail", verb=verb, match=match, times=None, error=error)])


# What is in the way of a file or folder

Way = Callable[[Path], object]


def _clear(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def link(path: Path) -> None:
    moved = path.rename(path.parent.parent / f"moved-{path.name}")
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    _clear(path)
    os.mkfifo(path)


def directory(path: Path) -> None:
    _clear(path)
    (path / "inside").mkdir(parents=True)


def plain_file(path: Path) -> None:
    _clear(path)
    path.write_text("a file")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def too_long(path: Path) -> None:
    os.truncate(path, 10 << 30)


WAYS: list[Way] = [link, pipe, directory, emptied, truncated, flipped, too_long]


def test_where_nothing_is_damaged_nothing_is_told(run: Path) -> None:
    assert load(run) == (NEWEST, {})
    save(run, 5, 5, value=7.0)
    with small_checkpointer(run) as ckpt:  # a branch: sound steps of another one are nobody's business
        ckpt.load(state(-1), 2).result()
        ckpt.save(3, state(33.0)).result()
    assert load(run) == (33.0, {})


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_generation_makes_no_step_the_newest(run: Path, way: Way) -> None:
    """A crash can leave an empty one where there are no hard links."""
    bad = manifest(run, 2, 2)
    shutil.copy(manifest(run, 2), bad)
    way(bad)
    value, skipped = load(run)
    assert (value, list(skipped)) == (NEWEST, [folder(2)])
    assert "MANIFEST-2.json" in skipped[folder(2)]
    assert latest(run) == NEWEST
    assert load(run, 2) == (2, skipped)
    save(run, 6)
    assert load(run)[0] == 6
    save(run, 2, value=22.0)  # its name is taken: the next number is
    assert manifest(run, 2, 3).exists()
    assert load(run) == (22.0, {})


def test_a_bad_generation_falls_back_in_its_place(run: Path) -> None:
    save(run, 3, value=33.0)
    shutil.copy(manifest(run, 3, 2), run.parent / "kept")
    emptied(manifest(run, 3, 2))
    assert passed_over(run) == (NEWEST, [folder(3)])  # its first generation was collected


def test_both_generations_of_the_newest_step_are_tried(run: Path) -> None:
    keeping = failing_at(run, "*/MANIFEST-1*", verb="delete")
    save(keeping, 5, value=55.0)
    assert load(run) == (55.0, {})
    (path,) = _data_of(run, 5, 2)
    flipped(path)
    assert passed_over(run) == (
        5.0,
        [folder(5)],
    )  # the data of the second one are bad, the first is older and whole


def _data_of(root: Path, step: int, generation: int) -> tuple[Path, ...]:
    found = decode_manifest(manifest(root, step, generation).read_bytes())
    return tuple(root / folder(step) / file.p for file in found.files)


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_manifest_of_the_newest_step_is_told(run: Path, way: Way) -> None:
    way(manifest(run, NEWEST))
    assert passed_over(run) == (NEWEST - 1, [folder(NEWEST)])
    assert latest(run) == NEWEST - 1


@pytest.mark.parametrize("way", [link, pipe, plain_file])
def test_a_bad_folder_of_the_newest_step_is_told(run: Path, way: Way) -> None:
    way(run / folder(NEWEST))
    assert passed_over(run) == (NEWEST - 1, [folder(NEWEST)])
    save(run, 6)
    assert load(run)[0] == 6


@pytest.mark.parametrize("way", [*WAYS, lambda path: path.unlink()])
def test_bad_data_of_the_newest_step_are_told(run: Path, way: Way) -> None:
    way(data_file(run, NEWEST))
    assert passed_over(run) == (NEWEST - 1, [folder(NEWEST)])


@pytest.mark.parametrize("way", [link, pipe, directory, _clear])
def test_an_attempt_that_is_not_there_any_more_is_told(run: Path, way: Way) -> None:
    (attempt,) = (run / folder(NEWEST)).glob("a-*")
    way(attempt)
    assert passed_over(run) == (NEWEST - 1, [folder(NEWEST)])


def test_a_link_that_is_called_otherwise_is_nobodys_business(run: Path) -> None:
    (run / "latest").symlink_to(run / folder(5))
    os.mkfifo(run / "pipe")
    (run / "step-notes").write_text("")
    assert load(run) == (NEWEST, {})


def test_the_manifest_of_another_step_and_one_from_before_are_told(run: Path) -> None:
    before = manifest(run, NEWEST).read_bytes()
    shutil.copy(manifest(run, 4), manifest(run, NEWEST))
    value, skipped = load(run)
    assert value == 4
    assert "was it copied here" in skipped[folder(NEWEST)]
    with small_checkpointer(run) as ckpt:
        ckpt.delete(NEWEST).result()
    save(run, NEWEST, value=50.0)
    manifest(run, NEWEST).write_bytes(before)  # of the save that was deleted
    value, skipped = load(run)
    assert value == 4
    assert "names the attempt" in skipped[folder(NEWEST)]


def test_a_flipped_bit_in_a_head_is_told(run: Path) -> None:
    path = manifest(run, NEWEST)
    data = path.read_bytes()
    assert b'"sequence":5' in data
    path.write_bytes(data.replace(b'"sequence":5', b'"sequence":0'))
    assert passed_over(run) == (4, [folder(NEWEST)])


@pytest.mark.parametrize("sealed", [False, True])
def test_no_claim_of_an_old_step_makes_a_save_fail(run: Path, sealed: bool) -> None:
    path = manifest(run, 2)
    last = msgspec.structs.replace(decode_manifest(path.read_bytes()), sequence=2**63 - 1)
    data = encode_manifest(last)
    path.write_bytes(data if sealed else data.replace(b'"user":', b'"uzer":'))
    save(run, 6, 7)
    assert load(run)[0] == 7


def unsealed_head(path: Path) -> None:
    """Make it a manifest as it was written before its head had a digest."""
    head, _, rest = unseal(path.read_bytes(), "it").partition(b',"head":"')
    path.write_bytes(seal(head + rest[rest.index(b'"') + 1 :]))


def test_manifests_from_before_their_heads_had_a_digest_are_read(run: Path) -> None:
    for step in range(1, NEWEST + 1):
        unsealed_head(manifest(run, step))
    assert load(run) == (NEWEST, {})
    flipped(manifest(run, 2))
    assert passed_over(run) == (NEWEST, [folder(2)])  # it cannot be told whether that was the newest


# What cannot be read


@pytest.mark.parametrize("error", [errno.EIO, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA])
@pytest.mark.parametrize("match", ["step-00000002/MANIFEST-1.json", "step-00000002*"])
def test_a_bad_sector_in_an_old_step_stops_nothing(run: Path, match: str, error: int) -> None:
    place = failing_at(run, match, error)
    assert passed_over(place) == (NEWEST, [folder(2)])
    assert latest(place) == NEWEST
    with small_checkpointer(place, retention=aiockpt.Retention(last=2)) as ckpt:
        assert {info.step: info.problem is None for info in ckpt.steps().result()} == {
            5: True, 4: True, 3: True, 2: False, 1: True,
        }  # fmt: skip
        ckpt.load(state(-1)).result()
        ckpt.save(6, state(6)).result()
        pruned = ckpt.prune().result()
    assert (run / folder(2)).exists()
    assert any(kept.step == 2 and "cannot be read" in kept.reason for kept in pruned.kept)
    assert sorted(int(path.name[5:]) for path in run.glob("step-*")) == [2, 5, 6]
    assert load(place)[0] == 6


@pytest.mark.parametrize("verb", ["get", "open", "reader.read"])
def test_a_bad_sector_in_the_newest_step_is_told(run: Path, verb: str) -> None:
    assert passed_over(failing_at(run, "step-00000005*", verb=verb)) == (NEWEST - 1, [folder(NEWEST)])


OUTAGES = [errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ETIMEDOUT, errno.ECONNRESET]


@pytest.mark.parametrize("error", OUTAGES)
@pytest.mark.parametrize(
    "match", ["step-00000005/MANIFEST-1.json", "step-00000005", "step-00000005/a-*", "step-00000002*"]
)
def test_an_outage_is_no_damage(run: Path, match: str, error: int) -> None:
    """What does not say how new it is may be the newest; a step whose data alone are away is, if it is."""
    place = failing_at(run, match, error)
    with pytest.raises(aiockpt.StorageError, match=match.partition("/")[0].rstrip("*")):
        load(place)
    assert load(run) == (NEWEST, {})


@pytest.mark.parametrize("error", OUTAGES)
def test_an_outage_of_a_step_stops_no_save(run: Path, error: int) -> None:
    place = failing_at(run, "step-00000005*", error)
    with small_checkpointer(place, retention=aiockpt.Retention(last=2)) as ckpt:
        assert any(info.step == 5 and info.problem for info in ckpt.steps().result())
        ckpt.save(3, state(33.0)).result()  # of a lower number than the one that is away
        pruned = ckpt.prune().result()
    assert any(kept.step == 5 and "cannot be read" in kept.reason for kept in pruned.kept)
    assert load(run) == (33.0, {})


@pytest.mark.parametrize("match", ["step-00000005", "step-00000005/*"])
def test_a_step_that_reads_again_later_is_older(run: Path, match: str) -> None:
    place = FaultyBackend(
        LocalBackend(str(run)),
        [Fault(do="fail", verb=verb, match=match, error=errno.EIO, times=None) for verb in ("get", "list")],
    )
    save_without_loading(place, 3, 33.0)
    assert load(run) == (33.0, {})


def test_a_step_whose_inode_reads_later_is_older(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(str(run))
    honest = backend.list

    async def list_without_inode(prefix: str) -> Listing:
        listing = await honest(prefix)
        if prefix:
            return listing
        folders = tuple(folder for folder in listing.folders if folder != "step-00000005")
        return Listing(listing.objects, folders, (*listing.others, "step-00000005"))

    monkeypatch.setattr(backend, "list", list_without_inode)
    save_without_loading(backend, 3, 33.0)
    assert load(run) == (33.0, {})


def test_an_older_step_that_is_away_is_not_asked_for(run: Path) -> None:
    assert load(failing_at(run, "step-00000002/a-*", errno.EACCES)) == (NEWEST, {})


# What may not be read, and is older


def archive(root: Path, step: int) -> Around:
    """Return the place, in which the manifest of *step* can be listed, and is archived."""
    key = f"{folder(step)}/MANIFEST-1.json"

    async def before(verb: str, called: str) -> None:
        if verb in ("get", "open") and called == key:
            raise archived(f"reading {key!r}", key)

    return Around(LocalBackend(str(root)), before=before)


def days_back(path: Path, days: float) -> None:
    at_ns = path.stat().st_mtime_ns - int(days * 86_400e9)
    os.utime(path, ns=(at_ns, at_ns))


def test_a_refused_step_that_a_newer_one_names_is_passed_over(run: Path) -> None:
    days_back(manifest(run, 2), 0.5)
    save(run, 6, 7)
    place = failing_at(run, "step-00000002/MANIFEST-1.json", errno.EACCES, verb="get")
    value, skipped = load(place)
    assert (value, list(skipped)) == (7, [folder(2)])
    assert "Permission denied" in skipped[folder(2)]
    assert latest(place) == 7
    with small_checkpointer(place, retention=aiockpt.Retention(last=2)) as ckpt:
        loaded = state(-1)
        assert (ckpt.resume(loaded), loaded["step"]) == (8, 7)
        assert {info.step for info in ckpt.steps().result() if info.problem} == {2}
        assert any(kept.step == 2 and "cannot be read" in kept.reason for kept in ckpt.prune().result().kept)
    assert load(place)[0] == 7


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_refused_step_of_this_process_is_passed_over(tmp_path: Path, worker: Worker) -> None:
    root = tmp_path / "run"
    with small_checkpointer(root, worker=worker) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).result()
        ckpt.save(2, state(22)).result()
        ckpt.save(4, state(4)).result()
    assert decode_manifest(manifest(root, 4).read_bytes()).older == ((folder(2), 2), (folder(3), 1), (folder(1), 1))
    assert decode_manifest(manifest(root, 1).read_bytes()).older is msgspec.UNSET
    days_back(manifest(root, 2, 2), 0.01)
    assert passed_over(failing_at(root, "step-00000002/MANIFEST-*.json", errno.EACCES, verb="get")) == (4, [folder(2)])
    with pytest.raises(aiockpt.StorageError, match=folder(4)):
        load(failing_at(root, "step-00000004/MANIFEST-1.json", errno.EACCES, verb="get"))


async def test_a_save_names_nothing_that_was_called_after_it() -> None:
    lineage = Lineage(0, 1, lambda: "run")
    lineage.places.append(MemoryBackend("overtaking"))
    for many, number, named in ((5, 3, (2, 1)), (5, 9, (5, 4, 3, 2, 1)), (69, 70, range(69, 5, -1))):
        for committed in range(1, many + 1):
            lineage.note_committed(folder(committed), 1, committed)
        attempt = await lineage.begin_attempt(StepEntry(folder(99), 99, ()), "0123456789ab", number)
        assert attempt.older == tuple((folder(step), 1) for step in named)


def test_a_save_names_a_refused_step(run: Path) -> None:
    days_back(manifest(run, 2), 0.5)
    place = archive(run, 2)
    save_without_loading(place, 6)
    assert passed_over(place) == (6, [folder(2)])
    (run / folder(2) / "MANIFEST-2.json").write_bytes(b"")  # a bad one that is dated now
    with pytest.raises(aiockpt.StorageError, match="restore it first"):
        load(place)


def unlistable(root: Path, step: int) -> FaultyBackend:
    """Return the place, in which the folder of *step* is another user's."""
    return failing_at(root, folder(step), errno.EACCES, verb="list")


@pytest.mark.parametrize(("days", "named"), [(0.5, True), (0.5, False), (1.1, False)])
def test_an_unlistable_step_is_as_old_as_its_folder(run: Path, days: float, named: bool) -> None:
    """Any name in it may be that of its newest manifest: the last of them must be older than all of the newer step."""
    days_back(run / folder(2), days)
    save(run, 6)
    if not named:
        changed(run, 6, older=((folder(1), 1),))
    if named or days > 1:
        assert passed_over(unlistable(run, 2)) == (6, [folder(2)])
    else:
        with pytest.raises(aiockpt.StorageError, match=folder(2)):
            load(unlistable(run, 2))
    days_back(manifest(run, 2), 9)
    days_back(run / folder(2), -days - 0.1)  # it was saved again, or deleted and saved anew: what is in it is not known
    with pytest.raises(aiockpt.StorageError, match=folder(2)):
        load(unlistable(run, 2))


def test_a_save_names_an_unlistable_step(run: Path) -> None:
    days_back(run / folder(NEWEST), 0.5)
    place = unlistable(run, NEWEST)
    with pytest.raises(aiockpt.StorageError, match=folder(NEWEST)):
        load(place)
    save_without_loading(place, 6)
    assert load(place)[0] == 6
    named = decode_manifest(manifest(run, 6).read_bytes()).older
    assert named
    assert (folder(NEWEST), 1) in named


def test_an_unlistable_step_without_a_date_is_raised() -> None:
    for place in (MemoryBackend("undated"), LocalBackend("/nowhere")):
        with pytest.raises(aiockpt.StorageError):
            anyio.run(dated_ns, place, folder(2), 0)


def test_an_undated_manifest_proves_nothing(run: Path) -> None:
    os.utime(manifest(run, 2), ns=(0, 0))
    save(run, 6)
    with pytest.raises(aiockpt.StorageError, match="restore it first"):
        load(archive(run, 2))


USE = """
import sys, torch, aiockpt
with aiockpt.Checkpointer(sys.argv[1], retention=aiockpt.Retention(last=2)) as ckpt:
    state = {"x": torch.zeros(3000), "step": -1.0}
    assert (ckpt.resume(state), state["step"]) == (7, 6.0), state["step"]
    assert (ckpt.resume(state), ckpt.latest().result()) == (7, 6)
    assert {info.step for info in ckpt.steps().result() if info.problem} == {2}
    ckpt.copy(None, sys.argv[2]).result()
    ckpt.save(7, {**state, "step": 7.0}).result()
    kept = ckpt.prune(aiockpt.Retention(last=2, optimizer=1)).result().kept
    assert any(one.step == 2 and "cannot be read" in one.reason for one in kept), kept
    assert ckpt.resume(state) == 8
"""


@pytest.mark.skipif(not os.geteuid() and shutil.which("setpriv") is None, reason="root may read anything")
def test_a_folder_of_another_user_is_passed_over(run: Path, tmp_path: Path) -> None:
    save(run, 6)
    bare = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]  # root without its powers
    listed = [*bare, sys.executable, "-m", "aiockpt.tools.cli.main", "ls", str(run)]
    (run / folder(2)).chmod(0o000)
    try:
        used = [*bare, sys.executable, "-c", USE, str(run), str(tmp_path / "copy")]
        done = subprocess.run(used, capture_output=True, text=True, check=False)
        shown = subprocess.run(listed, capture_output=True, text=True, check=False)
    finally:
        (run / folder(2)).chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step-00000002 is skipped") == 1, "once for a process"
    assert "Permission denied" in done.stderr
    assert "Permission denied" in shown.stdout
    assert sorted(int(path.name[5:]) for path in run.glob("step-*")) == [2, 6, 7]
    assert load(tmp_path / "copy")[0] == 6


def test_a_refused_step_is_told_once_beside_damaged_ones(run: Path) -> None:
    days_back(manifest(run, 2), 0.5)
    save(run, 6, 7)
    flipped(data_file(run, 7))
    value, skipped = load(archive(run, 2))
    assert (value, sorted(skipped)) == (6, [folder(2), folder(7)])


def test_a_refused_step_is_told_once_for_a_process(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    days_back(manifest(run, 2), 0.5)
    caplog.set_level(logging.INFO, "aiockpt")
    discover.logged.clear()
    for _ in range(2):
        with small_checkpointer(archive(run, 2)) as ckpt:
            ckpt.load(state(-1)).result()
    assert caplog.text.count("step-00000002 is skipped") == 1
    assert caplog.text.count(", passed over: step-00000002\n") == 2


def test_a_manifest_names_older_steps_the_newest_first(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, *range(66))
    with small_checkpointer(near) as ckpt:
        ckpt.copy(65, far).result()
    save(near, 65, value=1.0)
    save_without_loading([near, far], 66)
    older = decode_manifest(manifest(near, 66).read_bytes()).older
    assert older == tuple((folder(step), 1) for step in range(65, 1, -1))


def test_a_copy_of_the_weights_alone_names_what_is_older_too(run: Path, tmp_path: Path) -> None:
    with small_checkpointer([run, aiockpt.Tier(tmp_path / "weights", content="weights")]) as ckpt:
        model = torch.nn.Linear(2, 2)
        ckpt.save(6, {"model": model, "step": 6}).result()
    copied = decode_manifest(manifest(tmp_path / "weights", 6).read_bytes())
    assert copied.older == tuple((folder(step), 1) for step in range(NEWEST, 0, -1))


@pytest.mark.parametrize(("days", "found"), [(2, True), (0.9, False)])
def test_a_refused_step_of_yesterday_is_passed_over(run: Path, days: float, found: bool) -> None:
    for step in range(1, NEWEST + 1):
        changed(run, step, older=msgspec.UNSET)
    days_back(manifest(run, 2), days)
    if found:
        value, skipped = load(archive(run, 2))
        assert (value, list(skipped)) == (NEWEST, [folder(2)])
        assert "restore it first" in skipped[folder(2)]
    else:
        with pytest.raises(aiockpt.StorageError, match="restore it first"):
            load(archive(run, 2))


def test_the_date_of_a_late_copy_proves_nothing(run: Path) -> None:
    for path in run.rglob("*"):  # the newest was copied here first
        if folder(NEWEST) in str(path):
            days_back(path, -3)
        elif path.is_file():
            days_back(path, -9)
    with pytest.raises(aiockpt.StorageError, match="restore it first"):
        load(archive(run, NEWEST))


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET])
def test_what_may_pass_is_waited_for(run: Path, error: int) -> None:
    days_back(manifest(run, 2), 9)
    save(run, 6)
    with pytest.raises(aiockpt.StorageError, match=folder(2)):
        load(failing_at(run, "step-00000002/MANIFEST-1.json", error, verb="get"))


def test_a_refused_step_that_older_ones_name_is_raised(run: Path) -> None:
    days_back(manifest(run, NEWEST), 0.5)
    changed(run, 1, older=((folder(NEWEST), 9),))
    changed(run, 4, older=((folder(NEWEST), 0), (folder(3), 1)))
    with pytest.raises(aiockpt.StorageError, match="restore it first"):
        load(archive(run, NEWEST))
    changed(run, 4, older=((folder(NEWEST), 1),))
    assert load(archive(run, NEWEST))[0] == 4


def test_a_refused_step_that_was_saved_anew_is_raised(run: Path) -> None:
    save(run, 6)
    with small_checkpointer(run) as ckpt:
        ckpt.delete(2).result()
    save(run, 2, value=22.0)
    days_back(manifest(run, 2), -0.01)
    for path in (run / folder(6)).glob("*.*"):  # marks that came later, too
        days_back(path, -0.02)
    with pytest.raises(aiockpt.StorageError, match="restore it first"):
        load(archive(run, 2))


def test_a_refused_step_behind_a_damaged_one_is_raised(run: Path) -> None:
    days_back(manifest(run, NEWEST), 0.5)
    save(run, 6)
    assert load(archive(run, NEWEST))[0] == 6
    flipped(data_file(run, 6))
    with pytest.raises(aiockpt.StorageError, match="restore it first"):
        load(archive(run, NEWEST))


def changed(root: Path, step: int, **changes: Any) -> None:
    path = manifest(root, step)
    data = msgspec.json.encode(msgspec.structs.replace(decode_manifest(path.read_bytes()), **changes))
    path.write_bytes(seal(data))


@pytest.mark.parametrize("changes", [{"version": 2}, {"min_reader": 9}, {"requires": ("telepathy",)}])
def test_a_newer_format_is_no_damage(run: Path, changes: dict[str, Any]) -> None:
    changed(run, NEWEST, **changes)
    with pytest.raises(NewerFormatError, match=r"install"):
        load(run)
    with pytest.raises(NewerFormatError):
        latest(run)
    with pytest.raises(NewerFormatError):
        load(run, NEWEST)
    assert load(run, 4) == (4, {})
    save_without_loading(run, 6)
    with small_checkpointer(run) as ckpt:
        ckpt.prune(aiockpt.Retention(last=1)).result()
        assert any(info.step == NEWEST and info.problem for info in ckpt.steps().result())
    assert manifest(run, NEWEST).exists()


def save_without_loading(place: Any, step: int, value: float | None = None) -> None:
    with small_checkpointer(place) as ckpt:
        ckpt.save(step, state(step if value is None else value)).result()


def test_an_old_step_of_a_newer_format_stops_nothing(run: Path) -> None:
    path = manifest(run, 2)
    newer = encode_manifest(decode_manifest(path.read_bytes())).replace(b'"version":1', b'"version":2')
    path.write_bytes(_resealed(newer))
    assert load(run) == (NEWEST, {})


def _resealed(data: bytes) -> bytes:
    """Return a manifest that was changed, with right digests."""
    head, mark, rest = (data[: data.rindex(b',"digest":"')] + b"}").partition(b',"head":"')
    return seal(head + mark + digest128(head).encode() + rest[rest.index(b'"') :])


# What is damaged on its way


def test_a_manifest_that_comes_damaged_is_read_again(run: Path) -> None:
    wire = [Fault(do="flip", verb="get", match="*5/MANIFEST-1.json", at=at, times=1, bit=97 * at) for at in range(1, 8)]
    assert load(FaultyBackend(LocalBackend(str(run)), wire)) == (NEWEST, {})


def test_a_manifest_that_always_comes_damaged_is_told(run: Path) -> None:
    wire = [
        Fault(do="flip", verb="get", match="*5/MANIFEST-1.json", at=at, times=1, bit=97 * at) for at in range(1, 99)
    ]
    assert passed_over(FaultyBackend(LocalBackend(str(run)), wire)) == (NEWEST - 1, [folder(NEWEST)])


# Garbage


def dead_save(root: Path, step: int) -> Path:
    """Leave the attempt of a save that died before its vote; return its folder."""
    shutil.copytree(root / folder(1), root / folder(step))
    manifest(root, step).unlink()
    (attempt,) = (root / folder(step)).glob("a-*")
    (attempt / "DECISION.json").unlink()
    for path in [*attempt.rglob("*"), attempt]:
        os.utime(path, (1e9, 1e9))
    return attempt


def test_a_receipt_that_is_too_long_is_garbage(run: Path) -> None:
    receipt = dead_save(run, 9) / "r" / "r00000.json"
    os.truncate(receipt, 10 << 30)
    os.utime(receipt, (1e9, 1e9))
    place = FaultyBackend(LocalBackend(str(run)), [Fault(do="hang", verb="get", match="*/r00000.json", times=None)])
    assert load(place) == (NEWEST, {})
    with small_checkpointer(place) as ckpt:
        pruned = ckpt.prune().result()
    assert [garbage.step_id for garbage in pruned.garbage] == [folder(9)]
    assert not (run / folder(9)).exists()


@pytest.mark.parametrize("way", [directory, pipe, emptied, too_long])
def test_a_bad_decision_record_holds_up_no_prune(run: Path, way: Way) -> None:
    record = dead_save(run, 9) / "DECISION.json"
    record.write_text("{}")
    way(record)
    for path in record.parent.rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    (record.parent / "r" / "r00000.json").write_text("torn")
    os.utime(record.parent / "r" / "r00000.json", (1e9, 1e9))
    other = dead_save(run, 8)
    (other / "r" / "r00000.json").unlink()
    with small_checkpointer(run) as ckpt:
        pruned = ckpt.prune().result()
    assert [garbage.step_id for garbage in pruned.garbage] == [folder(8)]
    ((step_id, reason),) = pruned.left
    assert step_id == folder(9)
    assert "DECISION.json" in reason
    assert load(run) == (NEWEST, {})
    save_without_loading(run, 9)
    assert load(run) == (9, {})


@pytest.mark.parametrize("way", [directory, pipe, link, emptied])
def test_a_committed_step_with_anything_in_it_can_be_deleted(run: Path, way: Way) -> None:
    (record,) = (run / folder(2)).glob("a-*/DECISION.json")
    way(record)
    (run / folder(2) / "dangling").symlink_to("nowhere")
    with small_checkpointer(run) as ckpt:
        ckpt.delete(2).result()
    assert not (run / folder(2)).exists()
    assert load(run) == (NEWEST, {})


def test_generations_decide_whether_there_is_something_to_finish(run: Path) -> None:
    """An attempt that was overtaken is garbage; one whose number is the next is a commit to be finished."""
    keeping = failing_at(run, "*", verb="delete")
    save(keeping, 5, value=52.0)
    save(keeping, 5, value=53.0)
    assert [manifest(run, 5, number).exists() for number in (1, 2, 3)] == [True] * 3
    third = manifest(run, 5, 3).read_bytes()
    manifest(run, 5, 2).unlink()
    assert load(run) == (53.0, {})
    assert not manifest(run, 5, 2).exists()  # the second one was overtaken by the third
    manifest(run, 5, 3).unlink()
    assert load(run)[0] in (52.0, 53.0)  # both have all their votes, and no generation above them
    assert decode_manifest(third).generation == 3


def test_a_manifest_that_is_too_long_is_not_read(run: Path) -> None:
    too_long(manifest(run, NEWEST))
    place = FaultyBackend(
        LocalBackend(str(run)), [Fault(do="hang", verb="get", match="*5/MANIFEST-1.json", times=None)]
    )
    value, skipped = load(place)
    assert value == NEWEST - 1
    assert "too many for a document of aiockpt" in skipped[folder(NEWEST)]


class Deleting(LocalBackend):
    """A place where another process deletes a step between the listing of it and the look at its manifest."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root_path = root

    async def list(self, prefix: str) -> Listing:
        listing = await super().list(prefix)
        if prefix == folder(2) and manifest(self._root_path, 2).exists():
            for attempt in (self._root_path / prefix).glob("a-*"):
                shutil.rmtree(attempt)
            listing = await super().list(prefix)
            shutil.rmtree(self._root_path / prefix)
        return listing


def test_a_step_that_is_being_deleted_is_not_damaged(run: Path) -> None:
    assert load(Deleting(run)) == (NEWEST, {})


# What is deleted


def test_pruning_keeps_what_can_be_loaded(run: Path) -> None:
    way_of = {5: truncated, 4: flipped}
    for step, way in way_of.items():
        way(manifest(run, step))
    _clear(data_file(run, 3))
    with small_checkpointer(run) as ckpt:
        pruned = ckpt.prune(aiockpt.Retention(last=1)).result()
    assert [step.step for step in pruned.steps] == [1]
    assert load(run)[0] == 2


def test_a_damaged_step_is_not_kept_for_another(run: Path) -> None:
    flipped(data_file(run, NEWEST))
    with small_checkpointer(run) as ckpt:
        loaded = ckpt.load(state(-1)).result()
        assert loaded is not None
        pruned = ckpt.prune(aiockpt.Retention(last=1)).result()
    assert [step.step for step in pruned.steps] == [1, 2, 3]
    assert load(run)[0] == NEWEST - 1


@pytest.mark.parametrize("bad", ["manifest", "data", "attempt", "data that a load has read"])
def test_an_older_generation_behind_a_bad_one_stays(run: Path, bad: str) -> None:
    keeping = failing_at(run, "*/MANIFEST-1*", verb="delete")
    save(keeping, 5, value=55.0)
    (data,) = _data_of(run, 5, 2)
    if bad == "manifest":
        flipped(manifest(run, 5, 2))
    elif bad == "data that a load has read":
        flipped(data)
    else:
        _clear(data if bad == "data" else data.parent.parent)
    with small_checkpointer(run) as ckpt:
        ckpt.load(state(-1)).result()
        ckpt.prune(aiockpt.Retention(last=5, grace_s=0)).result()
    assert passed_over(run) == (5.0, [folder(5)])


def test_votes_are_older_than_a_later_save(run: Path) -> None:
    """A job died between its votes and its manifest. The next one does not load, and saves a step of a lower number."""
    manifest(run, NEWEST).unlink()
    save_without_loading(run, 3)
    assert load(run) == (3, {})
    assert manifest(run, NEWEST).exists()  # it was finished all the same


# Beginning from nothing


def resume(place: Path | Backend) -> int:
    with small_checkpointer(place) as ckpt:
        return ckpt.resume(state(-1))


def test_a_run_begins_only_where_nothing_of_ours_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("")
    assert resume(tmp_path) == 0
    assert not caplog.records
    save_without_loading(tmp_path, 1)
    emptied(manifest(tmp_path, 1))
    with pytest.raises(aiockpt.NoValidCheckpointError, match=r"MANIFEST-1\.json"):
        resume(tmp_path)
    shutil.rmtree(tmp_path / folder(1))
    (tmp_path / folder(1)).symlink_to("nowhere")
    with pytest.raises(aiockpt.NoValidCheckpointError, match="symbolic link"):
        resume(tmp_path)


def test_an_attempt_alone_is_told_however_old(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (dead_save(run, 9) / "r" / "r00000.json").unlink()
    for step in range(1, NEWEST + 1):
        shutil.rmtree(run / folder(step))
    (run / "LATEST").unlink()
    assert resume(run) == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step-00000009" in line
    assert "was begun and is not committed" in line


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_an_attempt_without_a_readable_record_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    left = tmp_path / folder(9) / "a-0123456789ab" / "DECISION.json"
    left.parent.mkdir(parents=True)
    if what == "folder":
        left.mkdir()
    else:
        os.mkfifo(left)
    assert resume(tmp_path) == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step-00000009" in line
    assert "DECISION.json" in line


def test_an_attempt_that_has_only_begun_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / folder(9) / "a-0123456789ab" / "d").mkdir(parents=True)
    assert resume(tmp_path) == 0
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_place_whose_steps_are_all_gone_says_so(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, NEWEST + 1):
        shutil.rmtree(run / folder(step))
    assert resume(run) == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step-00000005" in line


# A folder that is used again


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "of another run" in record.getMessage()]


def test_the_first_save_over_steps_of_another_run_says_so(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_checkpointer(run, retention=aiockpt.Retention(last=2)) as ckpt:
        ckpt.save(1, state(10.0)).result()
        ckpt.save(2, state(20.0)).result()
        ckpt.save(3, state(30.0)).result()
    (line,) = warnings(caplog)
    assert "holds 5 step(s) of another run that were not loaded, the newest of them 5" in line
    assert load(run) == (30.0, {})
    assert [load(run, step)[0] for step in (4, 5)] == [4, 5]  # nothing of the higher ones is lost


def test_who_has_loaded_is_not_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(run, 6)
    with small_checkpointer(run) as ckpt:  # going back is deliberate
        ckpt.load(state(-1), 2).result()
        ckpt.save(3, state(33.0)).result()
    assert warnings(caplog) == []


class Skipping(OsClock):
    """A clock on which a minute passes with each look."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def monotonic_ns(self) -> int:
        return OsClock.monotonic_ns() + next(self._looks) * 60 * 10**9


@pytest.mark.parametrize("apart", [0, 1], ids=["the same numbers", "other numbers"])
def test_two_jobs_in_one_folder_are_both_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, apart: int) -> None:
    def told() -> list[str]:
        words = ("of another run", "another job saves to", "saves of two jobs")
        found = [record.getMessage() for record in caplog.records if any(word in record.getMessage() for word in words)]
        caplog.clear()
        return found

    worlds = [World(clock=Skipping()) for _ in range(2)]
    one, other = (small_checkpointer(tmp_path, world=world) for world in worlds)
    with one, other:
        one.load(state(-1)).result()
        other.load(state(-1)).result()
        one.save(10, state(1)).result()
        other.save(10 + apart, state(2)).result()
        other.wait()
        (line,) = told()
        assert "of another run that were not loaded" in line
        for step in (20, 30, 40):  # they take turns
            other.save(step + apart, state(3)).result()
            other.wait()
            one.save(step, state(4)).result()
            one.wait()
        (line,) = told()
        assert "another job saves to" in line
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.load(state(-1)).result()
        if apart:
            (line,) = told()
            assert "step 41 is the newest" in line
            assert "load(state, 40)" in line
        ckpt.save(50, state(5)).result()
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.load(state(-1)).result()  # one line goes on, and is the newest
        assert told() == []


def test_a_manifest_can_be_changed_by_these_tests(run: Path) -> None:
    assert isinstance(decode_manifest(manifest(run, 1).read_bytes()), Manifest)


def test_bytes_of_a_damaged_step_are_not_left(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": torch.ones(3000)}).result()
        ckpt.save(2, {"x": torch.zeros(3000), "y": torch.full((3000,), 2.0)}).result()
        (data,) = tmp_path.glob("step-00000002/a-*/d/*")
        data.write_bytes(data.read_bytes()[:-1] + b"\xff")
        found = {"x": torch.full((3000,), 5.0), "y": torch.full((3000,), 5.0)}
        with pytest.raises(aiockpt.StateMismatchError, match=r"y: overwritten from step-00000002 and not stored here"):
            ckpt.load(found, strict=False).result()
