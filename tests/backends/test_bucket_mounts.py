"""Buckets that are mounted as folders: refused at the first write, with the address that works; doctor says it, too."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends import local_mounts
from aiockpt.backends.local_mounts import Mount, explain_bucket, find_mount
from aiockpt.tools.cli.doctor import examine
from tests.servers.seaweed import BUCKET, CREDENTIALS, Seaweed

MOUNTED_S = 20.0


def rclone(endpoint: str, folder: Path, cache: str) -> tuple[list[str], dict[str, str]]:
    keys = {
        "ACCESS_KEY_ID": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "SECRET_ACCESS_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    remote = {"TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": endpoint, **keys}
    env = {f"RCLONE_CONFIG_STORE_{name}": value for name, value in remote.items()}
    return ["rclone", "mount", f"store:{BUCKET}", str(folder), "--vfs-cache-mode", cache, "--config", ""], env


def s3fs(endpoint: str, folder: Path, _: str) -> tuple[list[str], dict[str, str]]:
    env = {
        "AWSACCESSKEYID": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "AWSSECRETACCESSKEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    return ["s3fs", BUCKET, str(folder), "-f", "-o", f"url={endpoint},use_path_request_style"], env


@pytest.fixture
def mount(seaweed: Seaweed, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def mount(make: Callable[..., tuple[list[str], dict[str, str]]], cache: str) -> Path:
        folder = tmp_path / "mounted"
        folder.mkdir()
        command, env = make(seaweed.endpoint_url, folder, cache)
        if shutil.which(command[0]) is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            pytest.skip(f"{command[0]} and /dev/fuse are needed: apt-get install {command[0]}")
        around = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        process = subprocess.Popen(command, env={**around, **env}, stderr=subprocess.DEVNULL)
        running.append((process, folder))
        end = time.monotonic() + MOUNTED_S
        while not os.path.ismount(folder):
            if process.poll() is not None or time.monotonic() > end:
                pytest.skip(f"{command[0]} cannot mount here")
            time.sleep(0.05)  # for another program, which tells nobody that it is ready
        return folder

    yield mount
    for process, folder in running:
        subprocess.run(["fusermount3" if shutil.which("fusermount3") else "umount", "-uz", str(folder)], check=False)
        process.terminate()
        process.wait(250)


@pytest.mark.parametrize(
    ("make", "cache", "address"),
    [(rclone, "off", f"s3://{BUCKET}/run"), (rclone, "full", f"s3://{BUCKET}/run"), (s3fs, "", "s3://BUCKET/run")],
)
def test_a_bucket_that_is_mounted_is_refused_with_its_address(
    mount: Callable[..., Path], make: Callable[..., object], cache: str, address: str
) -> None:
    folder = mount(make, cache)
    with aiockpt.Checkpointer(folder / "run") as ckpt:
        assert ckpt.load({"x": 1}).result() is None
        save = ckpt.save(1, {"x": 1})
        with pytest.raises(aiockpt.UsageError, match=f"the store's own address: {address} "):
            save.result()
    assert not (folder / "run").exists()
    found = examine(folder)
    assert found.problems
    assert make.__name__ in found.problems[0]


@pytest.mark.parametrize(
    ("mounted", "says"),
    [
        (Mount("store:b/runs", "/", "fuse.rclone"), "s3://b/runs/data/run "),
        (Mount("s3fs", "/", "fuse.s3fs"), "s3://BUCKET/data/run "),
        (Mount("mountpoint-s3", "/", "fuse"), "s3://BUCKET/data/run "),
        (Mount("JuiceFS:vol", "/", "fuse.juicefs"), None),
        (Mount("me@host:", "/", "fuse.sshfs"), None),
        (Mount("rclone", "/", "ext4"), None),
        (None, None),
    ],
)
def test_a_bucket_is_told_from_other_file_systems(
    mounted: Mount | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_mounts, "find_mount", lambda path: mounted)
    found = explain_bucket("/data/run")
    assert (says in found) if says is not None and found is not None else found is says


def test_a_write_to_such_a_mount_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_mounts, "find_mount", lambda path: Mount("store:b", str(tmp_path), "fuse.rclone"))
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(aiockpt.UsageError, match="s3://b/run "):
        ckpt.save(1, {"x": 1}).result()
    assert list(tmp_path.iterdir()) == []


def test_the_mount_of_a_path_is_the_innermost(tmp_path: Path) -> None:
    proc = find_mount("/proc/self")
    assert proc is not None
    assert (proc.at, proc.kind) == ("/proc", "proc")
    here = find_mount(str(tmp_path / "not there"))
    assert here is not None
    assert str(tmp_path).startswith(here.at)
