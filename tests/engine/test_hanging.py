"""A file system that stops answering ends no wait by itself: each ends by its deadline, and the process ends."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from tests.run_python import run_python
from tests.servers.fuse import mount
from tests.small_run import SMALL

DEADLINES = aiockpt.Deadlines(slab_s=60, commit_s=1, ranks_s=60, takeover_s=60, close_s=2)
LIMITS = aiockpt.Limits(io=SMALL, deadlines=DEADLINES)


class Hanging(ForwardingFiles):
    """Files whose calls of *verb* do not return while *answers* is not set."""

    def __init__(self) -> None:
        super().__init__(OsFiles())
        self.verb = ""
        self.answers = threading.Event()

    def forward(self, call: FilesCall) -> Any:
        if call.verb == self.verb:
            self.answers.wait()
        return call()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    files = Hanging()
    yield files
    files.answers.set()


def open_run(place: Path, files: Hanging) -> aiockpt.Checkpointer:
    return aiockpt.Checkpointer(place, world=World(files=files), limits=LIMITS, on_error="warn")


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((30_000,), value)}


@pytest.mark.parametrize("verb", ["pwrite", "fdatasync", "lstat", "link", "fsync"])
def test_a_save_into_a_mount_that_hangs_fails_by_name(tmp_path: Path, hanging: Hanging, verb: str) -> None:
    ckpt = open_run(tmp_path, hanging)
    ckpt.save(1, state(1)).result()
    ckpt.wait()
    hanging.verb = verb
    for _ in range(2):
        with pytest.raises(aiockpt.StorageTimeoutError, match=f"^{tmp_path}: .*(has not returned|still hangs)"):
            ckpt.save(2, state(2)).result(60)
    hanging.answers.set()  # it was its server that was away: what hung ends, and all goes on
    ckpt.wait()
    while ckpt._engine.calls.late(0):
        threading.Event().wait(0.01)
    ckpt.save(3, state(3)).result(60)
    ckpt.close()
    with open_run(tmp_path, hanging) as again:
        assert again.latest().result() == 3


@pytest.mark.parametrize("verb", ["preadv", "lstat", "listdir"])
def test_a_load_from_a_mount_that_hangs_fails_by_name(tmp_path: Path, hanging: Hanging, verb: str) -> None:
    ckpt = open_run(tmp_path, hanging)
    ckpt.save(1, state(1)).result()
    ckpt.wait()
    hanging.verb = verb
    with pytest.raises(aiockpt.StorageTimeoutError, match=f"^{tmp_path}: .*has not returned.*do not use a state"):
        ckpt.load(state(0)).result(60)
    with pytest.raises(aiockpt.StorageTimeoutError, match="has not returned"):
        ckpt.steps().result(60)
    ckpt.close()


def test_closing_over_a_hanging_call_names_it(
    tmp_path: Path, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = open_run(tmp_path, hanging)
    hanging.verb = "rename"  # of LATEST, after the commit
    ckpt.save(1, state(1)).result()
    with pytest.raises(TimeoutError, match=r"clean-ups, and these calls have not returned: .*LATEST"):
        ckpt.close()
    assert any("are abandoned: aiockpt-loop" in record.getMessage() for record in caplog.records)
    assert not ckpt._loop.usable


@pytest.mark.timeout(60)
def test_a_call_past_its_own_deadline_hangs_however_short_that_is(tmp_path: Path, hanging: Hanging) -> None:
    deadlines = aiockpt.Deadlines(slab_s=60, commit_s=3, ranks_s=60, takeover_s=60, close_s=1)
    limits = aiockpt.Limits(io=SMALL, deadlines=deadlines)
    ckpt = aiockpt.Checkpointer(tmp_path, world=World(files=hanging), limits=limits, on_error="warn")
    hanging.verb = "pwrite"
    ckpt.save(1, state(1))
    with pytest.raises(TimeoutError, match="after 1 s these saves still run"):
        ckpt.close()
    assert not ckpt._loop.usable


CHILD = """
import os, signal, sys, torch, aiockpt
from pathlib import Path
place, way = sys.argv[1:]
deadlines = aiockpt.Deadlines(commit_s=1, close_s=2)
ckpt = aiockpt.Checkpointer(place, limits=aiockpt.Limits(deadlines=deadlines), on_error="warn")
state = {"x": torch.zeros(30_000)}
ckpt.save(1, state).result()
ckpt.wait()
os.kill(int((Path(place).parents[1] / "pid").read_text()), signal.SIGSTOP)
save = ckpt.save(2, state)
if way == "close":
    try:
        save.result()
    except TimeoutError as error:
        print("failed", error)
    ckpt.close()
if way == "drop":
    del ckpt, save
print("ended")
"""


@pytest.mark.parametrize("way", ["close", "exit", "drop"])
def test_a_process_ends_although_its_mount_hangs(tmp_path: Path, way: str) -> None:
    with mount(tmp_path) as (mounted, _):
        ran = run_python("-c", CHILD, mounted / "run", way, status=None)
    assert "ended" in ran.stdout, ran.stderr
    assert (way != "close") or ("failed" in ran.stdout and f"{mounted}/run: " in ran.stdout), ran.stdout
    assert "has not returned" in ran.stdout + ran.stderr
