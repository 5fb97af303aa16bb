"""A job that is killed in each of its saves leaves one dead save in the place, and not one for each kill."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.runtime import processes
from aiockpt.runtime.processes import ProcessNames
from tests.crash.test_full_disk import call
from tests.run_python import run_python

KILLED = """
import os, signal, sys, torch, aiockpt
from aiockpt.backends.local import LocalUpload
place, step = sys.argv[1], int(sys.argv[2])
def killed(self):
    os.kill(os.getpid(), signal.SIGKILL)
if len(sys.argv) > 3:
    LocalUpload._flush_and_close = killed  # all is written, nothing is voted for
with aiockpt.Checkpointer(place, retention=aiockpt.Retention(last=2)) as ckpt:
    state = {"x": torch.full((5 << 19,), float(step))}
    ckpt.resume(state)
    ckpt.save(step, state).result()
"""
STEP_BYTES = 10 << 20
AIOCKPT = str(Path(sys.executable).with_name("aiockpt"))


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of 69 MiB."""
    folder = Path(tempfile.mkdtemp())
    call("mount", "-t", "tmpfs", "-o", "size=69m", "none", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def train(place: Path, step: int, *, killed: bool) -> None:
    end, status = (["killed"], -signal.SIGKILL) if killed else ([], 0)
    run_python("-c", KILLED, place, step, *end, status=status)


def test_a_crash_loop_leaves_room_for_a_save(disk: Path) -> None:
    run = disk / "run"
    for step in (1, 2, 3):
        train(run, step, killed=False)
    for kill in range(7):
        train(run, 4 + kill % 2, killed=True)
    train(run, 6, killed=False)
    attempts = [path.parent.name for path in run.glob("*/a-*")]
    assert sorted(attempts) == ["step-00000003", "step-00000006"]
    train(run, 7, killed=True)
    train(run, 8, killed=False)
    assert sorted(path.parent.name for path in run.glob("*/a-*")) == ["step-00000006", "step-00000008"]


def test_a_full_disk_names_what_dead_saves_hold(disk: Path) -> None:
    run = disk / "run"
    with aiockpt.Checkpointer(run) as ckpt:
        ckpt.save(1, {"x": torch.zeros(5 << 19)}).result()
    for number in range(5):  # of another host: whether they are dead is not known
        folder = run / f"step-0000000{number + 2}" / f"a-{number:012x}" / "d"
        folder.mkdir(parents=True)
        (folder / "r00000-0000.safetensors").write_bytes(bytes(STEP_BYTES))
    with aiockpt.Checkpointer(run, on_error="warn") as ckpt:
        with pytest.raises(aiockpt.StorageFullError) as caught:
            ckpt.save(9, {"x": torch.zeros(5 << 19)}).result()
        (line,) = [part for part in str(caught.value).split(": ") if part.startswith("aiockpt prune")]
        assert f"hold {5 * STEP_BYTES:,} bytes" in str(caught.value)
        asked = subprocess.run([AIOCKPT, "prune", run], capture_output=True, text=True, timeout=120, check=True)
        assert line.replace(f"file://{run}", str(run)) in " ".join(asked.stdout.split())
        subprocess.run([AIOCKPT, *line.split()[1:]], timeout=120, check=True)
        ckpt.save(9, {"x": torch.zeros(5 << 19)}).result()


def test_a_name_tells_whether_its_process_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ProcessNames()
    own = [names.make() for _ in range(256)]
    assert len(set(own)) == 256
    assert ProcessNames().make({name for name in own if name}) is None
    assert ProcessNames().make({name for name in own[1:] if name}) == own[0]
    code = "from aiockpt.runtime.processes import ProcessNames; print(ProcessNames().make(), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert not any(map(names.find_dead(), [own[0] or "", name, "0123456789ab"]))
    child.communicate("\n")
    assert list(map(names.find_dead(), [own[0] or "", name, "0123456789ab"])) == [False, True, False]
    other = names.make() or ""
    assert not names.find_dead()(f"{(int(other[:6], 16) + 1) % (1 << 24):06x}{name[6:]}")  # of another host
    hidden = tmp_path / "proc"
    hidden.mkdir()
    (hidden / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    monkeypatch.setattr(processes, "_PROC", hidden)  # a table that shows the processes of this user alone
    assert not names.find_dead()(name)
