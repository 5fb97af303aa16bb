"""A disk without room, inodes or quota is emptied by retention, `delete`, ``prune`` and ``rm`` all the same."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.full_disk_child import NOBODY
from tests.run_python import run_python

MOUNTS = {
    "tmpfs, no room": ("tmpfs", ["size=4m"], 0),
    "tmpfs, no inodes": ("tmpfs", ["size=64m", "nr_inodes=200"], 0),
    "ext4, no room": ("ext4", [], 8),
    "ext4, no inodes": ("ext4", ["-N", "256"], 64),
    "ext4, over quota": ("ext4", ["-O", "quota", "-E", "quotatype=usrquota"], 64),
    "xfs, no room": ("xfs", [], 320),
    "btrfs, no room": ("btrfs", [], 256),
}
"""By name: kind, its options, and the MiB of the image that it lies in."""


def call(*command: object) -> None:
    """Run *command*, or skip the test: no root, no such file system, no such tool."""
    try:
        subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=250)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{command[0]} {command[1]} is not possible here: {error}")


@pytest.fixture(params=MOUNTS)
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Yield a folder on a small file system of its own, and what it is to be filled up with."""
    kind, options, image_mib = MOUNTS[request.param]
    folder, image = Path(tempfile.mkdtemp()), tmp_path / "image"  # which any user may enter, unlike pytest's
    if kind == "tmpfs":
        call("mount", "-t", "tmpfs", "-o", ",".join(options), "none", folder)
    else:
        with image.open("wb") as file:
            os.truncate(file.fileno(), image_mib << 20)
        call(f"mkfs.{kind}", "-q", *options, image)
        call("mount", "-o", "loop", image, folder)
    try:
        if "quota" in options:
            call("setquota", "-u", str(NOBODY), "4000", "4000", "0", "0", str(folder))
        yield folder, "inodes" if "inodes" in request.param else "bytes"
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def test_a_full_file_system_is_left_by_every_way_to_delete(full: tuple[Path, str]) -> None:
    done: dict[str, Any] = json.loads(run_python("-m", "tests.crash.full_disk_child", *full, timeout=300).stdout)
    assert done.pop("a save with retention") in ("saved", "StorageFullError, saved")
    assert done == {
        "is left": [[9, 8, 7, 6], False],
        "after delete": [9, 8, 6],
        "rm": [0, [9, 6]],
        "prune": [0, [9]],
        "rm of the run": [0, []],
        "loaded": 10.0,
    }
