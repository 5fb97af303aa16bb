"""The mount that holds a path, and buckets that are mounted as folders, which cannot store checkpoints.

Such a mount has no exclusive creation across hosts, no hard links, and no flush that guarantees storage. (A FUSE file
system with all three, such as JuiceFS or SSHFS, is treated as any other file system.)
"""

from __future__ import annotations

import os
import re

import msgspec

_BUCKETS = ("rclone", "s3fs", "goofys", "geesefs", "mountpoint-s3")
# The kernel writes a blank, a tab or a backslash in a name as a backslash and its octal number.
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    """A line of the kernel's table of mounts.

    Attributes:
        source: a device, or a name that the mounting program chose.
        at: the folder.
        kind: of the file system.
    """

    source: str
    at: str
    kind: str


def find_mount(path: str) -> Mount | None:
    """Return the mount that holds *path*, as the kernel reports it; None where it reports nothing."""
    path = os.path.realpath(path)
    best: Mount | None = None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
            lines = table.read().splitlines()
    except OSError:
        return None
    for line in lines:
        source, at, kind, *_ = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), part) for part in line.split(" "))
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        # Not ">": of two mounts at one folder the later one hides the earlier.
        if inside and (best is None or len(at) >= len(best.at)):
            best = Mount(source, at, kind)
    return best


def is_in_user_space(path: str) -> bool:
    """Return whether *path* is on a file system that a program serves (FUSE); its figures may be wrong."""
    mount = find_mount(path)
    return mount is not None and mount.kind.startswith("fuse")


def explain_bucket(path: str) -> str | None:
    """Return why *path* cannot store checkpoints, where it is in a bucket that is mounted as a folder; else None."""
    mount = find_mount(path)
    if mount is None or not mount.kind.startswith("fuse"):
        return None
    program = next((name for name in _BUCKETS if name in (mount.kind.removeprefix("fuse."), mount.source)), None)
    if program is None:
        return None
    below = os.path.relpath(os.path.realpath(path), mount.at).removeprefix(".")
    bucket = mount.source.partition(":")[2].strip("/") if program == "rclone" else ""
    address = "/".join(part for part in ("s3:/", bucket or "BUCKET", below) if part)
    return (
        f"{path} is in a bucket that {program} has mounted at {mount.at}: it has no exclusive creation and no links,"
        f" and a flush does not reach the store. Use the store's own address: {address} (or gs://…, az://…)"
    )
