"""The demo survives its own SIGKILL, from end to end, with real processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiockpt.tools.examples.child import Job
from aiockpt.tools.examples.demo import ELASTIC, EXACT, FAILED, ONE_PROCESS, DemoOptions, check_uncommitted, run_demo
from aiockpt.tools.examples.gpt import GPTSize
from aiockpt.tools.examples.phases import DemoError, run_job

TINY = GPTSize(layers=1, width=16, heads=2, context=8, batch=2)


@pytest.mark.parametrize(
    ("asynchronous", "every", "lazy"),
    [(False, 2, False), (True, 1, True)],
    ids=["sync", "each step, async"],
)
def test_a_run_killed_in_the_middle_of_a_save_goes_on_bit_by_bit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], asynchronous: bool, every: int, lazy: bool
) -> None:
    folder = tmp_path / "demo"
    options = DemoOptions(
        steps=10, every=every, lazy=lazy, keep=2, dir=folder, asynchronous=asynchronous, json=True, size=TINY
    )
    status = run_demo(options)
    out, progress = capfd.readouterr()
    assert status == EXACT, progress
    figures = json.loads(out)
    (killed, resumed), cost = figures["phases"], figures["cost"]
    assert figures["exact"] is True
    assert killed["differences"] == resumed["differences"] == []
    assert killed["resumed_from"] is None
    doomed = options.doomed_save(ONE_PROCESS[1])
    assert doomed is not None
    assert 0 <= resumed["newest_committed"] <= resumed["resumed_from"] < doomed
    assert cost["saves"] >= 4
    assert cost["steps"] >= 10
    assert 0 < cost["blocked_fraction"] < 1
    assert cost["pause_max_s"] >= cost["pause_median_s"] > 0
    assert "resumed: from step" in progress
    assert {path.name for path in folder.glob("*.log")} == {"reference.log", "killed.log", "resumed.log"}
    assert len(list((folder / "checkpoints").glob("step-*/MANIFEST-*.json"))) == options.keep


def test_a_process_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    job = Job(url="no-such-scheme://x", size=TINY, steps=1, every=None)
    with pytest.raises(DemoError, match="no-such-scheme") as caught:
        run_job(job, "broken", tmp_path, str)
    assert "ended with status 1 instead of 0" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "option"), [(signal.SIGINT, []), (signal.SIGTERM, ["--elastic"]), (signal.SIGHUP, [])]
)
def test_a_demo_that_is_told_to_end_leaves_no_folder_and_no_process(
    tmp_path: Path, number: signal.Signals, option: list[str]
) -> None:
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "demo", *option]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "A byte-level GPT" in process.stdout.readline()  # a process of its own is started next
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (started := children.read_text().split()):
            assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=250)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert not any(Path(f"/proc/{child}").exists() for child in started)


def test_a_demo_that_is_told_to_end_keeps_the_folder_that_was_named(tmp_path: Path) -> None:
    def told_to_end(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    folder = tmp_path / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aiockpt.tools.examples.demo.run_phases", told_to_end)
        assert run_demo(DemoOptions(dir=folder)) == 128 + signal.SIGTERM
    assert folder.is_dir()


def test_a_process_does_not_outlive_a_director_that_is_interrupted(tmp_path: Path) -> None:
    job = Job(url=str(tmp_path / "x"), size=TINY, steps=10**9, every=None)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # and returns, though the job would take for ever
        run_job(job, "endless", tmp_path, interrupt)


def test_a_process_that_tells_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.tools.examples.phases.SILENCE_S", 0)
    job = Job(url=str(tmp_path / "x"), size=TINY, steps=10**9, every=None)
    with pytest.raises(DemoError, match="no event for 0 s: the process was ended"):
        run_job(job, "silent", tmp_path, str)


def test_a_save_that_was_committed_before_the_kill_shows_nothing(tmp_path: Path) -> None:
    step = tmp_path / "step-00000004"
    (step / "a-3f9c21d07b44").mkdir(parents=True)
    check_uncommitted(tmp_path, 4)
    (step / "MANIFEST-1.json").touch()
    with pytest.raises(DemoError, match="step 4 was committed before the kill"):
        check_uncommitted(tmp_path, 4)


TOO_FEW = [
    DemoOptions(steps=15, every=5),
    DemoOptions(every=0),
    DemoOptions(keep=0),
    DemoOptions(elastic=True, steps=39, every=5),
]


@pytest.mark.parametrize("options", TOO_FEW)
def test_options_that_leave_nothing_to_show_are_refused_before_anything_is_made(
    options: DemoOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_demo(options) == FAILED
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert run_demo(DemoOptions(dir=tmp_path)) == FAILED
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("steps", [16, 17, 40, 120])
def test_the_save_that_dies_has_committed_ones_before_it_and_steps_after_it(steps: int) -> None:
    doomed = DemoOptions(steps=steps, every=5).doomed_save(ONE_PROCESS[1])
    assert doomed is not None
    assert doomed % 5 == 0
    assert 10 <= doomed < steps


@pytest.mark.parametrize(("steps", "every"), [(16, 2), (40, 5), (61, 5)])
def test_each_kill_of_the_elastic_demo_has_a_save_between_it_and_the_last(steps: int, every: int) -> None:
    options = DemoOptions(elastic=True, steps=steps, every=every)
    kills = [doomed for phase in ELASTIC if (doomed := options.doomed_save(phase)) is not None]
    assert all(later - earlier >= 2 * every for earlier, later in zip([0, *kills], [*kills, steps], strict=True))
