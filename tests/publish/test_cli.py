"""``aiockpt publish`` and ``aiockpt receive``."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from aiockpt.tools.cli.main import app
from tests.publish.policy import are_of, in_folder, publish, received, saved
from tests.watch import until

AIOCKPT = [sys.executable, "-m", "aiockpt.tools.cli.main"]


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_step_is_published_and_received(tmp_path: Path) -> None:
    saved(tmp_path / "run", 0, 1)
    said = run("publish", tmp_path / "run", tmp_path / "pub", "--step", 0)
    assert "version 0, of step 0: in full" in said
    done = json.loads(run("publish", tmp_path / "run", tmp_path / "pub", "--json"))
    assert (done["version"], done["base"], done["changed"]) == (1, 0, 4)
    command = f"echo $AIOCKPT_VERSION $AIOCKPT_STEP > $AIOCKPT_FOLDER/../seen; ls $AIOCKPT_FOLDER >> {tmp_path}/seen"
    assert "version 1, of step 1" in run("receive", tmp_path / "pub", tmp_path / "got", "--exec", command, "--once")
    assert (tmp_path / "seen").read_text().startswith("1 1\nmodel-00001-of-00001.safetensors\n")
    assert are_of(in_folder(tmp_path / "got"), 1)


def test_a_command_that_fails_is_told_in_the_status(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    arguments = ["receive", str(tmp_path / "pub"), str(tmp_path / "got"), "--exec", "exit 3", "--once"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "version 0: the command ended with 3" in done.output


def test_a_run_is_followed_from_another_process_until_a_signal(tmp_path: Path) -> None:
    saved(tmp_path / "run", 0)
    command = [*AIOCKPT, "publish", str(tmp_path / "run"), str(tmp_path / "pub"), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            until(lambda: (tmp_path / "pub" / "weight_v000000").exists(), "the first version")
            saved(tmp_path / "run", 1)
            until(lambda: (tmp_path / "pub" / "weight_v000001").exists(), "the second version")
        finally:
            child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=120)[0]
    assert child.returncode == 128 + signal.SIGTERM, said
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 1)]


def test_follow_takes_no_step(tmp_path: Path) -> None:
    saved(tmp_path / "run", 0)
    done = CliRunner().invoke(app, ["publish", str(tmp_path / "run"), str(tmp_path / "pub"), "--follow", "--full"])
    assert done.exit_code != 0
