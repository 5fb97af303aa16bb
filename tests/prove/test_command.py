"""`aiockpt prove` with real processes and a real SIGKILL, leaving nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aiockpt.prove.assignment import VARIABLE
from tests.run_python import run_python
from tests.watch import until

SCRIPT = [sys.executable, "-m", "tests.prove.scripts"]


def prove(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in *folder*, as a user would."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100",
        "TMPDIR": scratch(folder),
    }  # fmt: skip
    command = "-m", "aiockpt.tools.cli.main", "prove", *arguments
    return run_python(*command, status=None, cwd=folder, env=environment, timeout=300)


def scratch(folder: Path) -> str:
    """Return where a proof that is run in *folder* has its temporary files: others may be proving beside it."""
    beside = folder.with_name(f"{folder.name}-scratch")
    beside.mkdir(exist_ok=True)
    return str(beside)


def left_behind(folder: Path) -> list[str]:
    """Return the processes of a proof in *folder* that are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{VARIABLE}={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_script_is_killed_for_real_and_certified(tmp_path: Path) -> None:
    mine = tmp_path / "run" / "step-00000099" / "MANIFEST-1.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("of a run that is not to be read")
    done = prove(tmp_path, "--json", "c.json", "--dir", "work", "--", *SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "certified: killed twice and resumed, the run is, bit by bit, the run that was never stopped" in done.stdout
    found: dict[str, Any] = json.loads((tmp_path / "c.json").read_text())
    assert found["verdict"] == "certified"
    assert found["method"] == "processes, killed by SIGKILL"
    starts = found["starts"]
    assert [start["name"] for start in starts] == ["straight", "killed", "resumed 1", "resumed 2", "control"]
    assert starts[1]["killed"].startswith("in the save of step ")
    assert 0 <= starts[2]["resumed_from"] < starts[3]["resumed_from"]
    assert starts[3]["killed"] is None
    assert starts[4]["resumed_from"] == starts[2]["resumed_from"], "the control starts from the same files"
    outcomes = {row["row"]: row["outcome"] for row in found["rows"]}
    assert outcomes["optimizer exp_avg"] == outcomes["training: data"] == outcomes["rng torch"] == "equal"
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["step-00000099", "MANIFEST-1.json"]
    assert mine.read_text() == "of a run that is not to be read"
    assert not left_behind(tmp_path)


def test_a_bug_is_found_with_real_processes_and_told_in_a_narrow_terminal(tmp_path: Path) -> None:
    done = prove(tmp_path, "--kills", "1", "--seed", "4", "--", *SCRIPT, "data one ahead")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs: the resumed run is another run: data differs first, at step " in done.stdout
    assert "the straight run was given that at step " in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    assert not list(tmp_path.iterdir()), "nothing is left in the user's folder"
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_proof_that_is_ended_by_a_signal_takes_all_that_it_started_along(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = "import os, time; open('began', 'w').close(); time.sleep(90)"
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "prove", "--", sys.executable, "-c", script]
    environment = {**os.environ, "TMPDIR": scratch(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as running:
        while not (tmp_path / "began").exists():
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(250) == 128 + number
    until(lambda: not left_behind(tmp_path), "the end of what was killed")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-command"], "no-such-command cannot be started"),
        ([sys.executable, "-c", "print('hello')"], "without making an aiockpt.Checkpointer"),
        ([sys.executable, "-c", "raise SystemExit('out of luck')"], "out of luck"),
        ([sys.executable, "-c", "import time; print('zzz', flush=True); time.sleep(60)"], "did not end within 1 s"),
    ],
)
def test_what_cannot_be_proved_ends_with_status_2_and_says_why(
    tmp_path: Path, command: list[str], message: str
) -> None:
    done = prove(tmp_path, "--timeout", "1" if "zzz" in command[-1] else "100", "--", *command)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not left_behind(tmp_path)
