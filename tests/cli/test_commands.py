"""Commands where their output alone does not tell: what they leave alone, options, errors, pipes. (See `transcripts`.)"""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from rich.progress import Progress

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.pipeline.discover import StepEntry
from aiockpt.runtime.promise import Promise
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import finish, hold_steps
from aiockpt.tools.cli.main import main
from aiockpt.tools.cli.show import SpeedColumn
from aiockpt.tools.cli.survey import find_unfinished
from tests.cli.small_checkpoints import Command, begin_attempt, snapshot_of, uncommit
from tests.run_python import run_python


def raising(error: BaseException) -> Callable[..., None]:
    """Return a function that takes anything and raises *error*."""

    def refuse(*_: object) -> None:
        raise error

    return refuse


def test_a_manifest_that_is_deleted_while_it_is_looked_at_names_no_attempt(root: Path) -> None:
    entry = StepEntry("step-00000300", 300, (2,), frozenset(), ("00112233aabb",))
    (found,) = anyio.run(find_unfinished, LocalBackend(root), entry)
    assert found.missing_ranks is None


@pytest.mark.parametrize("command", ["ls", "inspect", "diff"])
def test_looking_changes_nothing_and_finishes_nobodys_commit(
    aiockpt_command: Command, root: Path, command: str
) -> None:
    uncommit(root, 300)
    begin_attempt(root, 400)
    before = snapshot_of(root)
    aiockpt_command(command, root, *([100, 200] if command == "diff" else []))
    assert snapshot_of(root) == before


def test_a_metric_with_brackets_in_its_name_has_a_column_of_that_name(aiockpt_command: Command, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": torch.ones(1)}, metrics={"accuracy[top5]": 0.5}).result()
    assert "accuracy[top5]" in aiockpt_command("ls", tmp_path).out


@pytest.mark.parametrize("step", ["newest", "2.5", "step-200"])
def test_what_is_no_step_is_refused_with_what_would_be_one(aiockpt_command: Command, made: Path, step: str) -> None:
    outcome = aiockpt_command("verify", made, step)
    assert outcome.status == 2
    assert "is no step" in outcome.err
    assert "step-00001000" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prune", "x", "--dryrun"), "(Possible options: --dry-run)"),
        (("prune", "x", "--dry_run"), "(Possible options: --dry-run)"),
        (("ls", "x", "--jsn"), "(Possible options: --json)"),
        (("--versoin",), "(Possible options: --version)"),
        (("verify", "x", "--step", "3"), "No such option: --step"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_the_one_that_was_meant(
    aiockpt_command: Command, arguments: tuple[str, ...], says: str
) -> None:
    outcome = aiockpt_command(*arguments)
    assert outcome.status == 2
    assert says in " ".join(outcome.err.replace("│", " ").split())


def test_an_option_like_no_other_is_answered_with_none(aiockpt_command: Command) -> None:
    assert "Possible" not in aiockpt_command("ls", "x", "--zzz").err


@pytest.mark.parametrize(
    "command", ["ls", "inspect", "verify", "diff", "cp", "convert", "prune", "gc", "rm", "commit", "bench"]
)
def test_help_writes_flags_and_arguments_as_people_know_them(aiockpt_command: Command, command: str) -> None:
    shown = aiockpt_command(command, "--help").out
    assert "bool" not in shown
    usage = next(line for line in shown.splitlines() if "Usage:" in line)
    assert not {"{", "}"} & set(usage)
    arguments = usage.partition("[OPTIONS]")[2].split()
    assert arguments
    assert arguments == [name.upper() for name in arguments]


def test_help_of_diff_says_in_which_forms_a_step_is_given(aiockpt_command: Command) -> None:
    assert "step-00001000" in aiockpt_command("diff", "-h").out


def test_a_file_url_means_its_folder(aiockpt_command: Command, root: Path) -> None:
    spaced = root.rename(root.with_name("a run"))
    assert aiockpt_command("ls", f"file://{str(spaced).replace(' ', '%20')}").status == 0


def test_inspect_folds_by_itself_what_would_fill_many_screens(aiockpt_command: Command, tmp_path: Path) -> None:
    layers = {str(i): {str(j): torch.ones(1) for j in range(10)} for i in range(30)}
    state = {"layers": layers, "many": {str(i): i for i in range(200)}}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
    folded = aiockpt_command("inspect", tmp_path)
    assert len(folded.out.splitlines()) < 110
    assert "--all shows everything" in folded.out
    assert len(aiockpt_command("inspect", tmp_path, "--all").out.splitlines()) > 530


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--parameters", "7B", "--bandwidth", "9" * 400],
        ["prove", "--resume-with", "'", "--", "true"],
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(aiockpt_command: Command, words: list[str]) -> None:
    refused = aiockpt_command(*words)
    assert refused.status == 2
    assert refused.err.startswith("error: ")


def test_inspect_shows_values_under_keys_of_every_kind(aiockpt_command: Command, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(0, {"x": {True: "a", 2**70: "b", 1.5: "c", "1.5": "d", 7: "e"}}).result()
    shown = aiockpt_command("inspect", str(tmp_path / "run"))
    assert shown.status == 0
    assert all(repr(value) in shown.out for value in "abcde")
    assert r"x.True" in shown.out


def test_prune_cuts_a_long_list_of_what_stays(
    aiockpt_command: Command, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.tools.cli.results.KEPT_SHOWN", 2)
    shown = aiockpt_command("prune", made).out
    assert "step 100" not in shown
    assert "kept: 3 steps (300, 200, 100) · 1 of them not shown above" in shown


@pytest.mark.parametrize("arguments", [("--last", 0), ("--mode", "middle")])
def test_prune_refuses_rules_that_make_no_sense(
    aiockpt_command: Command, made: Path, arguments: tuple[object, ...]
) -> None:
    assert aiockpt_command("prune", made, *arguments).status == 2


def test_doctor_tells_what_the_place_can_do_and_leaves_nothing_behind(aiockpt_command: Command, tmp_path: Path) -> None:
    found = aiockpt_command("doctor", tmp_path, "--json").json()
    assert found["link"]
    assert found["exclusive_create"]
    assert min(found["write_bytes_per_s"], found["read_bytes_per_s"], found["file_flush_ms"]) > 0
    assert list(tmp_path.iterdir()) == []
    last = aiockpt_command("doctor", tmp_path).out.splitlines()[-1]
    assert last.startswith("✓ safe for checkpoints")
    assert "of concurrent commits exactly one succeeds" in last


def test_doctor_does_not_call_memory_safe_without_a_condition(aiockpt_command: Command) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("this machine has no /dev/shm")
    assert "✓ safe for checkpoints while the machine is up:" in aiockpt_command("doctor", folder).out


def test_doctor_says_how_to_make_the_folder_that_a_run_would_make_by_itself(
    aiockpt_command: Command, tmp_path: Path
) -> None:
    assert f"make it (mkdir -p '{tmp_path}/a run'), or" in aiockpt_command("doctor", tmp_path / "a run").err
    assert "mkdir" not in aiockpt_command("ls", tmp_path / "a run").err
    (tmp_path / "file").touch()
    outcome = aiockpt_command("doctor", tmp_path / "file")
    assert "a file; give a folder" in outcome.err


def test_doctor_leaves_nothing_behind_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    monkeypatch.setattr(LocalBackend, "open", raising(KeyboardInterrupt()))
    assert aiockpt_command("doctor", tmp_path).status == 130
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_out_what_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    monkeypatch.setattr(os, "link", raising(PermissionError()))
    outcome = aiockpt_command("doctor", tmp_path)
    assert outcome.status == 0
    assert "no hard links" in outcome.out
    monkeypatch.setattr(os, "O_EXCL", 0)
    outcome = aiockpt_command("doctor", tmp_path)
    assert outcome.status == 3
    assert "two writers could both commit here" in outcome.out


def test_doctor_says_what_it_may_not_do(
    aiockpt_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", raising(PermissionError(13, "Permission denied")))
    outcome = aiockpt_command("doctor", tmp_path)
    assert outcome.status == 3
    assert f"{tmp_path}: cannot be written to (Permission denied)" in outcome.err


@pytest.mark.parametrize(("free_bytes", "says"), [(0, "no size"), (9 << 20, "9 MiB free: too few for a test")])
def test_doctor_refuses_what_has_no_room(
    aiockpt_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, says: str
) -> None:
    space = shutil.disk_usage(tmp_path)._replace(total=free_bytes, free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: space)
    outcome = aiockpt_command("doctor", tmp_path)
    assert (outcome.status, says in outcome.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_fails_has_a_status_of_its_own(
    aiockpt_command: Command, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = staticmethod(raising(PermissionError(13, "Permission denied")))
    monkeypatch.setattr("aiockpt.runtime.world.OsFiles.listdir", refusing)
    outcome = aiockpt_command("ls", made)
    assert outcome.status == 3
    assert outcome.err.startswith("error: ")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    monkeypatch.setattr("aiockpt.tools.cli.survey.open_backend", raising(ZeroDivisionError()))
    monkeypatch.setattr("sys.argv", ["aiockpt", "ls", str(made)])
    with pytest.raises(ZeroDivisionError):
        main()


def test_an_interrupted_wait_cancels_the_work() -> None:
    class Interrupted(aiockpt.Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    cancelled: list[bool] = []
    promise: Promise[None] = Promise("verify")
    promise.cancel_work = lambda: cancelled.append(True)
    future = Interrupted(promise)
    with pytest.raises(KeyboardInterrupt):
        finish(future)
    assert cancelled == [True]


def test_a_reader_that_has_seen_enough_is_not_told_of_damage(made: Path) -> None:
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "ls", str(made)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.wait(250) == 141


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), (None, 200), ("0", 200)])
def test_a_pipe_is_as_wide_as_columns_says(root: Path, columns: str | None, widest: int) -> None:
    begin_attempt(root, 400)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"COLUMNS": columns} if columns else {}
    done = run_python("-m", "aiockpt.tools.cli.main", "ls", root, env=environment)
    longest = max(len(line) for line in done.stdout.splitlines() if str(root) not in line)
    assert widest / 2 < longest <= widest


def test_one_unit_is_used_for_every_speed(aiockpt_command: Command, root: Path, tmp_path: Path) -> None:
    printed = (
        aiockpt_command("verify", root).out,
        aiockpt_command("cp", root, tmp_path / "copy").out,
        aiockpt_command("doctor", tmp_path).out,
    )
    for out in printed:
        assert "iB/s" in out
        assert "MB/s" not in out
    bar = Progress()
    bar.add_task("", total=10)
    (task,) = bar.tasks
    task.finished_speed = 3 << 20
    assert str(SpeedColumn().render(task)) == "3.0 MiB/s"


def test_help_does_not_import_torch() -> None:
    package = str(Path(aiockpt.__file__).parent)
    program = (
        "import sys, types\n"
        "package = types.ModuleType('aiockpt'); package.__path__ = [sys.argv.pop(1)]\n"
        "sys.modules['aiockpt'] = package\n"  # what aiockpt/__init__.py imports is not this command's to decide
        "from aiockpt.tools.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)\n"
    )
    for arguments in (["--help"], ["ls", package]):
        assert run_python("-c", program, package, *arguments).stderr == "False\n"


def test_the_version_is_told(aiockpt_command: Command) -> None:
    assert aiockpt_command("--version").out.startswith("aiockpt 0.")


def test_every_command_refuses_a_place_that_is_a_slip(
    aiockpt_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [
        [name]
        for name in ("ls", "inspect", "verify", "diff", "doctor", "bench", "report", "prune", "gc", "commit", "top")
    ]
    calls = [[*call, "s3:b/run"] + (["1", "2"] if call == ["diff"] else []) for call in calls]
    calls += [["rm", "s3:b/run", "1"], ["cp", "s3:b/run", "there"], ["convert", "s3:b/run", "there"]]
    calls += [["watch", "s3:b/run", "--exec", "true"], ["plan", "s3:b/run"]]
    for call in calls:
        refused = aiockpt_command(*call)
        assert (refused.status, "write s3://b/run" in refused.err.replace("\n", " ")) == (2, True), (call, refused)
    assert list(tmp_path.iterdir()) == []


def test_steps_that_a_command_reads_are_held_by_it(root: Path) -> None:
    with aiockpt.Checkpointer(root) as reading, aiockpt.Checkpointer(root) as training:
        holds = hold_steps(reading, [100, 300, 999])
        assert [step.step for step in training.prune(aiockpt.Retention(last=1)).result().steps] == []
        holds[100].release()
        assert [step.step for step in training.prune(aiockpt.Retention(last=1)).result().steps] == [100]


def test_all_steps_of_a_running_job_are_copied_or_named(aiockpt_command: Command, tmp_path: Path) -> None:
    ended = threading.Event()

    def train() -> None:
        with aiockpt.Checkpointer(tmp_path / "run", retention=aiockpt.Retention(last=3)) as ckpt:
            step = 0
            while not ended.is_set():
                ckpt.save(step := step + 1, {"x": torch.arange(9)}).result()
                saved.set()

    saved = threading.Event()
    training = threading.Thread(target=train)
    training.start()
    try:
        assert saved.wait(250)
        copied = aiockpt_command("cp", tmp_path / "run", tmp_path / "copy", "--all")
        verified = aiockpt_command("verify", tmp_path / "run", "--all")
    finally:
        ended.set()
        training.join()
    for done in (copied, verified):
        assert done.status == 0 or "deleted meanwhile; run the command again" in " ".join(done.err.split()), done.err
    assert "copied to" in copied.out or copied.status == 2


def test_a_step_copied_by_hand_is_named_by_its_folder(aiockpt_command: Command, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "step-00000100", root / "step-00000100.bak")
    done = aiockpt_command("verify", root, "--all")
    assert (done.status, done.out.count("intact")) == (1, 3), done.err
    for command in ("verify", "ls", "prune"):
        out = aiockpt_command(command, root, *["--all"][: command == "verify"]).out
        assert "step-00000100.bak" in out
        assert "step -1" not in out
        assert "removes" not in out  # what no command removes
    assert aiockpt_command("cp", root, tmp_path / "copy", "--all").out.count("copied to") == 3


@pytest.mark.parametrize("command", [("ls",), ("inspect",), ("prune", "--last", 1), ("diff", 100, 300)])
def test_no_number_loses_its_unit_on_a_narrow_terminal(
    aiockpt_command: Command, root: Path, command: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []
    for width in (40, 200):
        monkeypatch.setattr(show.out, "width", width)
        printed.append(aiockpt_command(command[0], root, *command[1:]).out)
    amounts = [re.findall(r"[\d.]+ (?:[KM]i)?B\b|\d{4}-\d\d-\d\d|[\d.]+%", out) for out in printed]
    assert len(amounts[0]) == len(amounts[1]) > 0
    assert sorted(amounts[0]) == sorted(amounts[1])
