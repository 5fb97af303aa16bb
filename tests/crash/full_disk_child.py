"""A run on a file system that is filled again and again: ``python -m tests.crash.full_disk_child FOLDER bytes|inodes``.

It begins as any user and goes on as one without rights, for whom no block is kept in reserve. It prints what came of each
act, as JSON.
"""

import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.tools.cli.main import main as command_line
from tests.small_run import small_checkpointer

NOBODY = 65534
DAYS_AGO = 1e9


def state(value: float) -> dict[str, Any]:
    """Return 200 KB."""
    return {"x": torch.full((50_000,), value)}


def fill_bytes(folder: Path) -> None:
    """Take every byte that is left."""
    with (folder / "filler").open("ab", buffering=0) as filler:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while filler.write(b"\1" * size):
                    pass


def fill_inodes(folder: Path) -> None:
    """Take every inode that is left."""
    with suppress(OSError):
        for number in itertools.count(len(list(folder.glob("empty-*")))):
            (folder / f"empty-{number}").touch()


def command(*arguments: object) -> int:
    """Run ``aiockpt`` here, silently; return its status."""
    sys.argv = ["aiockpt", *map(str, arguments)]
    try:
        command_line()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def steps(root: Path) -> list[int]:
    """Return the committed steps, the newest first."""
    return sorted((int(path.parent.name[5:]) for path in root.glob("step-*/MANIFEST-*.json")), reverse=True)


def save(ckpt: aiockpt.Checkpointer, step: int) -> str:
    """Save *step*, twice if the first time finds no room; return what became of it."""
    told = []
    for _ in range(2):
        try:
            ckpt.save(step, state(step)).result()
        except aiockpt.StorageError as error:
            told.append(type(error).__name__)
        else:
            told.append("saved")
            break
    ckpt.wait()
    return ", ".join(told)


def dead_save(root: Path, step: int) -> Path:
    """Leave what a job leaves that was killed before its vote, days ago."""
    attempt = next((root / f"step-{step:08d}").glob("a-*"))
    next((root / f"step-{step:08d}").glob("MANIFEST*")).unlink()
    (attempt / "DECISION.json").unlink()
    shutil.rmtree(attempt / "r")
    for path in attempt.rglob("*"):
        os.utime(path, (DAYS_AGO, DAYS_AGO))
    return attempt


def run(folder: Path, fill: Callable[[Path], object]) -> dict[str, Any]:
    """*fill* what *folder* lies on, and delete from it by every way there is; return what came of each."""
    root = folder / "run"
    done: dict[str, Any] = {}
    with small_checkpointer(root, on_error="warn") as ckpt:
        for step in range(1, 9):
            ckpt.save(step, state(step)).result()
    dead = dead_save(root, 1)
    fill(folder)
    with small_checkpointer(root, on_error="warn", retention=aiockpt.Retention(last=4)) as ckpt:
        ckpt.load(state(0)).result()
        done["a save with retention"] = save(ckpt, 9)
        done["is left"] = [steps(root), dead.exists()]
        fill(folder)
        ckpt.delete(7).result()
    done["after delete"] = steps(root)
    fill(folder)
    done["rm"] = [command("rm", root, 8, "--yes"), steps(root)]
    fill(folder)
    done["prune"] = [command("prune", root, "--last", 1, "--yes"), steps(root)]
    fill(folder)
    done["rm of the run"] = [command("rm", root, "--all", "--yes"), steps(root)]
    for other in folder.glob("empty-*"):
        other.unlink()
    (folder / "filler").unlink(missing_ok=True)
    with small_checkpointer(root, on_error="warn") as ckpt:
        ckpt.save(10, state(10)).result()
    target = state(0)
    with small_checkpointer(root) as ckpt:
        ckpt.load(target).result()
    done["loaded"] = target["x"][0].item()
    return done


if __name__ == "__main__":
    place, fill = Path(sys.argv[1]), {"bytes": fill_bytes, "inodes": fill_inodes}[sys.argv[2]]
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory() as warm:  # what is imported on the way may lie where only this user may read
        run(Path(warm, "roomy"), lambda _: None)
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.write(out, json.dumps(run(place, fill)).encode())
