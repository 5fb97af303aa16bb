"""``aiockpt publish`` and ``aiockpt receive``."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import aiockpt
from aiockpt.errors import StorageError
from aiockpt.publish.published_place import PlaceNow, ReceiverNow
from aiockpt.publish.receiver_notes import LIVES_S, ReceiverNote
from aiockpt.tools.cli.commands import publishing
from aiockpt.tools.cli.main import app
from aiockpt.tools.cli.versions_view import view_place
from tests.publish.policy import are_of, in_folder, publish, received, saved, state_of
from tests.small_run import small_checkpointer
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


def test_a_command_that_fails_is_tried_again(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    command = f"echo $AIOCKPT_VERSION >> {tmp_path}/tried; test $(wc -l < {tmp_path}/tried) -eq 2"
    arguments = ["receive", str(tmp_path / "pub"), str(tmp_path / "got"), "--every", "0.1", "--exec", command]
    tried = tmp_path / "tried"
    with subprocess.Popen([*AIOCKPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            until(lambda: tried.exists() and tried.read_text() == "0\n0\n", "the second try")
        finally:
            child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=120)[0]
    assert said.count("version 0: the command ended with 1; it is tried again") == 1


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


def test_multiples_are_published_that_other_steps_have_followed(tmp_path: Path) -> None:
    saved(tmp_path / "run", 10, 11)
    command = [*AIOCKPT, "publish", str(tmp_path / "run"), str(tmp_path / "pub"), "--follow", "--every", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            until(lambda: (tmp_path / "pub" / "weight_v000000").exists(), "the first version")
            saved(tmp_path / "run", 12)
            saved(tmp_path / "run", 19, 20, 21)
            until(lambda: (tmp_path / "pub" / "weight_v000001").exists(), "the second version")
        finally:
            child.send_signal(signal.SIGTERM)
        child.communicate(timeout=120)
    assert received(tmp_path / "pub", tmp_path / "got") == [(1, 20)]


def test_an_outage_while_steps_are_listed_ends_no_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "run", 10)
    steps, calls = aiockpt.Checkpointer.steps, []

    def listed(ckpt: aiockpt.Checkpointer) -> Any:
        calls.append(ckpt)
        if len(calls) == 1:
            raise StorageError("the run's place is away")
        return steps(ckpt)

    def end() -> None:
        until(lambda: (tmp_path / "pub" / "weight_v000000").exists(), "the version")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(aiockpt.Checkpointer, "steps", listed)
    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(typer.Exit):
        publishing._follow(str(tmp_path / "run"), aiockpt.Publish(tmp_path / "pub", every=10), False)
    assert len(calls) > 1


def test_a_step_that_cannot_be_published_is_tried_again_without_a_newer_one(tmp_path: Path) -> None:
    saved(tmp_path / "run", 0)
    place, log = tmp_path / "pub", tmp_path / "log"
    place.write_text("no folder")
    command = [*AIOCKPT, "publish", str(tmp_path / "run"), str(place), "--follow"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as child:
        try:
            until(
                lambda: "step 0 is not published, and is tried again" in " ".join(log.read_text().split()), "it fails"
            )
            place.unlink()
            until(lambda: (place / "weight_v000000").exists(), "the version")
        finally:
            child.send_signal(signal.SIGTERM)


def test_follow_takes_no_step(tmp_path: Path) -> None:
    saved(tmp_path / "run", 0)
    done = CliRunner().invoke(app, ["publish", str(tmp_path / "run"), str(tmp_path / "pub"), "--follow", "--full"])
    assert done.exit_code != 0


def test_top_and_prune_show_which_receiver_is_where(tmp_path: Path) -> None:
    publish(tmp_path / "run", tmp_path / "pub", 0)
    versions = iter(aiockpt.receive(tmp_path / "pub", tmp_path / "got", name="rollout-1"))
    next(versions)
    publish(tmp_path / "run", tmp_path / "pub", 10, 20)
    dead = tmp_path / "pub" / "receivers" / "rollout-2.json"
    dead.write_bytes(msgspec.json.encode(ReceiverNote(name="rollout-2", version=1, step=10, needs=1, host="node-7")))
    long_ago = time.time() - LIVES_S - 60
    os.utime(dead, (long_ago, long_ago))
    (dead.with_name("nobody.json")).write_text("{}")
    for command in ("top", "prune"):
        said = run(command, tmp_path / "pub")
        assert "version 2, of step 20" in said
        assert "3 versions from 0 on\n2 receivers, 1 silent" in said
        first, second = (line.split() for line in said.splitlines()[4:])
        assert [first[0], *first[2:6]] == ["rollout-1", "0", "0", "2", "0"]
        assert second == ["rollout-2", "node-7", "1", "10", "1", "nothing", "11", "min", "ago"]
    (living, gone) = json.loads(run("top", tmp_path / "pub", "--json"))["receivers"]
    assert (living["behind"], living["keeps"], gone["behind"], gone["keeps"]) == (2, 0, 1, None)
    versions.close()
    done = CliRunner().invoke(app, ["prune", str(tmp_path / "pub"), "--last", "1"])
    assert done.exit_code != 0
    assert "Publish(keep=N)" in str(done.exception)


def test_the_receivers_that_do_not_fit_are_counted() -> None:
    one = ReceiverNow(name="r", host="h", version=1, step=1, behind=0, keeps=1, noted_s=1)
    place = PlaceNow(
        version=1, step=1, kind="full", bytes=1, weight_bytes=1, published_s=1, oldest=0, count=2, receivers=[one] * 9
    )
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(view_place("pub", place, 10, "storage is away"))
    console.print(view_place("pub", None, 10))
    lines = console.export_text().splitlines()
    assert lines[0] == "storage is away"
    assert lines[-2:] == ["5 receivers more, no further behind", "pub   no version is published yet"]


def test_at_a_narrow_terminal_each_receiver_has_one_line_with_whole_numbers() -> None:
    far = ReceiverNow(
        name="rollout-worker-0017.us-east-1", host="node-0123.cluster.example.com", version=1234567, step=7654321,
        behind=1357924, keeps=1234567, noted_s=5000,
    )  # fmt: skip
    new = ReceiverNow(name="new", host="h", version=-1, step=-1, behind=2592492, keeps=None, noted_s=1)
    place = PlaceNow(
        version=2592491, step=1, kind="full", bytes=1, weight_bytes=1, published_s=1, oldest=0, count=2,
        receivers=[new, far],
    )  # fmt: skip
    for width in (60, 80):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(view_place("pub", place, 24))
        first, second = (line.split() for line in console.export_text().splitlines()[4:])
        assert first == ["new", "h", "nothing", "1", "s", "ago"], "it is behind nothing before its first version"
        assert second[-7:] == ["1234567", "7654321", "1357924", "1234567", "83", "min", "ago"]


def test_prune_says_which_step_is_held_for_which_place(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path / "run") as ckpt:
        for step in range(3):
            ckpt.save(step, state_of(step)).result()
            if step == 0:
                ckpt.publish(step, tmp_path / "pub").result()
        said = run("prune", tmp_path / "run", "--last", "1")
    assert "it is held by the publisher to file://" in " ".join(said.split())
