"""``aiockpt gc``: of dead runs below a folder the newest step stays, and of runs that may live everything does."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.small_checkpoints import Command, data_file, make_older, save, save_aged, snapshot_of
from tests.small_run import small_checkpointer


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with two dead runs and a young one, at several depths, and other things."""
    folder = tmp_path / "runs"
    for name, days in (("a", 40), ("team/b c/d", 90), ("young", 2)):
        save(folder / name, [1, 2, 3])
        make_older(folder / name, days)
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "deep" / "notes.txt").write_text("mine")
    (folder / "data" / "step-5").mkdir()
    (folder / "data" / "step-5" / "mine.bin").write_bytes(b"mine")
    return folder


def by_name(folder: Path, told: Any) -> dict[str, Any]:
    return {str(Path(run["run"]).relative_to(folder)): run for run in told["runs"]}


def test_dry_by_default_it_tells_what_each_run_holds_and_would_free(aiockpt_command: Command, runs: Path) -> None:
    before = snapshot_of(runs)
    told = aiockpt_command("gc", runs, "--json")
    assert told.status == 0
    found = by_name(runs, told.json())
    assert found.keys() == {"a", "team/b c/d", "young"}
    size = sum(path.stat().st_size for path in (runs / "a").glob("step-*/**/*") if path.is_file())
    assert (found["a"]["steps"], found["a"]["bytes"], found["a"]["kept"]) == (3, size, [3])
    assert 0.6 * size < found["a"]["freed_bytes"] < 0.7 * size
    assert found["young"]["stays"].startswith("written within")
    assert found["young"]["freed_bytes"] == 0
    shown = aiockpt_command("gc", runs)
    assert shown.status == 0
    for text in ("team/b c/d", "40 days ago", "keeps 1 step", "written within 720 h", "add --yes to free"):
        assert text in shown.out
    assert snapshot_of(runs) == before


def test_yes_leaves_the_newest_step_of_dead_runs_and_what_is_not_theirs(aiockpt_command: Command, runs: Path) -> None:
    found = by_name(runs, aiockpt_command("gc", runs, "--json").json())
    done = aiockpt_command("gc", runs, "--yes", "--json")
    assert done.status == 0
    assert by_name(runs, done.json()) == found
    assert [steps(runs / name) for name in ("a", "team/b c/d", "young")] == [[3], [3], [1, 2, 3]]
    assert (runs / "data" / "step-5" / "mine.bin").exists()
    with small_checkpointer(runs / "a") as ckpt:
        assert ckpt.verify().result().step == 3
    again = aiockpt_command("gc", runs, "--yes")
    assert (again.status, "nothing to delete of 3 runs" in again.out) == (0, True)


def test_a_torn_newest_step_does_not_stay_in_place_of_a_whole_one(aiockpt_command: Command, runs: Path) -> None:
    data_file(runs / "a", 3).write_bytes(b"torn")
    make_older(runs / "a", 40)
    assert aiockpt_command("gc", runs, "--yes").status == 0
    assert steps(runs / "a") == [2, 3]


def test_what_unfinished_saves_left_is_counted_and_goes(aiockpt_command: Command, runs: Path) -> None:
    begun = runs / "a" / "step-00000004" / "a-00112233aabb" / "d"
    begun.mkdir(parents=True)
    (begun / "r00000-0000.safetensors").write_bytes(bytes(5000))
    make_older(runs / "a", 40)
    for arguments in ((), ("--yes",)):
        (run,) = aiockpt_command("gc", runs / "a", "--keep", 3, *arguments, "--json").json()["runs"]
        assert (run["steps"], run["kept"], run["freed_bytes"]) == (4, [3, 2, 1], 5000)
    assert steps(runs / "a") == [1, 2, 3]


def beat(root: Path, *, ended: bool, silent_s: float = 0.0, every_s: float = 5.0) -> None:
    """Leave the heartbeat of a run, old by its date and new by its words."""
    said = {
        "number": 7, "time_s": time.time() - silent_s, "every_s": every_s, "host": "h", "pid": 1, "rank": 0,
        "world_size": 1, "pending": [], "durable_step": 3, "durable_s": 1.0, "places": {}, "bytes_per_s": 0.0,
        "failed": 0, "retried": 0, "ended": ended,
    }  # fmt: skip
    (root / "monitor").mkdir()
    (root / "monitor" / "beat-00000.json").write_bytes(msgspec.json.encode(said))
    make_older(root, 40)


@pytest.mark.parametrize(("says", "stays"), [({"ended": False}, True), ({"ended": True}, False)])
def test_a_run_whose_heart_beats_is_left_alone(
    aiockpt_command: Command, runs: Path, says: dict[str, Any], stays: bool
) -> None:
    beat(runs / "a", **says)
    assert aiockpt_command("gc", runs, "--yes").status == 0
    assert steps(runs / "a") == ([1, 2, 3] if stays else [3])


def test_a_run_that_fell_silent_long_ago_is_dead(aiockpt_command: Command, runs: Path) -> None:
    beat(runs / "a", ended=False, silent_s=40 * 86400.0)
    assert aiockpt_command("gc", runs, "--yes").status == 0
    assert steps(runs / "a") == [3]


@pytest.mark.parametrize("keep", [("--keep", 1), ("--keep", 0, "--all")])
def test_a_run_with_a_held_step_is_left_alone(aiockpt_command: Command, runs: Path, keep: tuple[object, ...]) -> None:
    with small_checkpointer(runs / "a") as ckpt, ckpt.hold(1):
        time.sleep(1.1)  # by the storage's clock: so the lease is older than what counts as dead
        (run,) = aiockpt_command("gc", runs / "a", "--older-than", "1s", *keep, "--yes", "--json").json()["runs"]
    assert "step 1: it is held by process" in run["stays"]
    assert steps(runs / "a") == [1, 2, 3]


def test_a_run_with_an_object_without_a_date_is_left_alone(aiockpt_command: Command, runs: Path) -> None:
    os.utime(data_file(runs / "a", 2), (0, 0))
    (run,) = aiockpt_command("gc", runs / "a", "--yes", "--json").json()["runs"]
    assert (run["stays"], steps(runs / "a")) == ("when it was last written is not known", [1, 2, 3])


def test_a_folder_that_is_a_run_and_has_others_in_it_is_as_young_as_these(aiockpt_command: Command, runs: Path) -> None:
    save_aged(runs / "a" / "eval", {1: 2.0, 2: 1.0})
    told = by_name(runs, aiockpt_command("gc", runs, "--yes", "--json").json())
    assert told["a"]["stays"]
    assert told["a/eval"]["stays"]
    assert steps(runs / "a") == [1, 2, 3]


@pytest.mark.skipif(not os.geteuid() and shutil.which("setpriv") is None, reason="root may write anywhere")
def test_a_user_without_rights_is_told_and_the_other_runs_are_cleaned(tmp_path: Path) -> None:
    for name in ("mine", "read only", "closed"):
        save(tmp_path / name, [1, 2])
        make_older(tmp_path / name, 40)
    locked = [tmp_path / "read only", *(tmp_path / "read only").rglob("*")]
    for path in locked:
        path.chmod(0o555 if path.is_dir() else 0o444)
    save(tmp_path / "partly", [1, 2])
    (tmp_path / "partly" / "logs").mkdir()
    make_older(tmp_path / "partly", 40)
    closed = [tmp_path / "closed", tmp_path / "partly" / "logs"]
    for path in closed:
        path.chmod(0o000)
    bare = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]  # root without its powers
    command = [*bare, sys.executable, "-m", "aiockpt.tools.cli.main", "gc", str(tmp_path), "--yes", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    finally:
        for path in (*closed, *locked):
            path.chmod(0o755)
    told = msgspec.json.decode(done.stdout)
    found = by_name(tmp_path, told)
    assert done.returncode == 3, done.stderr
    assert sorted(map(Path, told["unread"])) == closed
    assert found["read only"]["problem"]
    assert "logs" in found["partly"]["problem"]
    assert [steps(tmp_path / name) for name in ("mine", "read only", "partly")] == [[2], [1, 2], [1, 2]]


def test_runs_in_a_bucket_are_found_below_a_prefix(
    aiockpt_command: Command, aws_environment: pytest.MonkeyPatch, moto: str, s3_url: str
) -> None:
    aws_environment.setenv("AWS_ENDPOINT_URL", moto)
    for name in ("a", "team/b"):
        with small_checkpointer(f"{s3_url}/{name}") as ckpt:
            for step in (1, 2):
                ckpt.save(step, {"x": step}).result()
    young = aiockpt_command("gc", s3_url, "--yes", "--json").json()["runs"]
    assert [(run["run"], run["stays"]) for run in young] == [
        (f"{s3_url}/{name}", "written within 720 h") for name in ("a", "team/b")
    ]
    time.sleep(2.1)  # S3 dates by the second
    done = aiockpt_command("gc", f"{s3_url}/team", "--older-than", "1s", "--yes", "--json")
    assert (done.status, [run["kept"] for run in done.json()["runs"]]) == (0, [[2]])
    for name, left in (("a", [2, 1]), ("team/b", [2])):
        with small_checkpointer(f"{s3_url}/{name}") as ckpt:
            assert [info.step for info in ckpt.steps().result()] == left
