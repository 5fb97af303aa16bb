"""A file system in user space that passes all on to a folder, but for its habits: what other file systems refuse.

Run it as a program with the folder, the mount point, a file for the counts of its requests, and habits: ``CALL=ERRNO``
refuses a call always, ``CALL=ERRNO*N`` the first N times, ``late=N`` does not see the folder ``run`` the first N times that
it is asked for it. CALL is a name of `Habits`; "open_direct" and "write_direct" are those past the page cache. Its process
id is in the file ``pid`` beside the mount point: while it is stopped, no call returns.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SERVED_S = 20.0


@contextmanager
def mount(folder: Path, *habits: str) -> Iterator[tuple[Path, Counter[str]]]:
    """Mount a file system with *habits* on ``folder/mount``, over ``folder/source``; its counts are there afterwards."""
    unmount = shutil.which("fusermount3") or shutil.which("fusermount")
    if unmount is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse, and Debian's fuse3")
    source, mounted, counts = folder / "source", folder / "mount", folder / "counts.json"
    source.mkdir(exist_ok=True)
    mounted.mkdir()
    counted: Counter[str] = Counter()
    server = subprocess.Popen(
        [sys.executable, __file__, *map(os.fspath, (source, mounted, counts)), *habits],
        stderr=subprocess.PIPE,
        text=True,
    )
    (folder / "pid").write_text(str(server.pid))
    try:
        _wait_for(server, mounted)
        yield mounted, counted
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run([unmount, "-u", "-z", mounted], check=False, capture_output=True)
        try:
            server.wait(SERVED_S)
        finally:
            server.kill()
            server.communicate()
    counted.update(json.loads(counts.read_text()))


def _wait_for(server: subprocess.Popen[str], mounted: Path) -> None:
    until_s = time.monotonic() + SERVED_S
    while not os.path.ismount(mounted):
        if server.poll() is not None or time.monotonic() > until_s:
            assert server.stderr is not None
            pytest.skip(
                f"no file system in user space here: {server.stderr.read()[-300:] if server.poll() else 'no mount'}"
            )
        time.sleep(0.01)


if __name__ == "__main__":
    import mfusepy  # type: ignore[import-untyped, import-not-found, unused-ignore]

    SOURCE, MOUNTED, COUNTS, *GIVEN = sys.argv[1:]
    ASKED: Counter[str] = Counter()
    REFUSED: dict[str, list[int]] = {}
    for given in GIVEN:
        call, _, what = given.partition("=")
        name, _, times = what.partition("*")
        REFUSED[call] = [errno.ENOENT, int(name)] if call == "late" else [getattr(errno, name), int(times or -1)]

    def meet(call: str) -> None:
        """Count a request, and refuse it where that is a habit."""
        ASKED[call] += 1
        error, left = REFUSED.get(call, (0, 0))
        if left:
            REFUSED[call][1] -= 1
            raise OSError(error, "a habit")

    class Habits(mfusepy.Operations):  # type: ignore[misc, unused-ignore]
        """Passes all on to the folder, but for what `meet` refuses."""

        use_ns = True

        def __init__(self) -> None:
            self.direct: set[int] = set()

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            meet("getattr")
            if path == "/run":
                meet("late")
            found = os.lstat(SOURCE + path)
            times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}
            return {name: getattr(found, name) for name in dir(found) if name.startswith("st_")} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            meet("readdir")
            return [".", "..", *os.listdir(SOURCE + path)]

        def open(self, path: str, flags: int) -> int:
            direct = flags & os.O_DIRECT
            meet("open_direct" if direct else "open")
            fd = os.open(SOURCE + path, flags & ~os.O_DIRECT)
            if direct:
                self.direct.add(fd)
            return fd

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            meet("create")
            return os.open(SOURCE + path, fi | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            meet("read_direct" if fh in self.direct else "read")
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            meet("write_direct" if fh in self.direct else "write")
            return os.pwrite(fh, data, offset)

        def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
            meet("fallocate")
            os.posix_fallocate(fh, offset, size)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            meet("fsync")
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            meet("fsyncdir")
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            meet("statfs")
            found = os.statvfs(SOURCE)
            return {name: getattr(found, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")}

        def release(self, path: str, fh: int) -> int:
            self.direct.discard(fh)
            os.close(fh)
            return 0

        def link(self, target: str, source: str) -> int:
            meet("link")
            os.link(SOURCE + source, SOURCE + target)
            return 0

        def rename(self, old: str, new: str) -> int:
            meet("rename")
            os.rename(SOURCE + old, SOURCE + new)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            meet("mkdir")
            os.mkdir(SOURCE + path, mode)
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(SOURCE + path)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(SOURCE + path)
            return 0

    options = {"entry_timeout": 0, "attr_timeout": 0, "negative_timeout": 0, "hard_remove": True, "big_writes": True}
    mfusepy.FUSE(Habits(), MOUNTED, foreground=True, nothreads=True, **options)
    Path(COUNTS).write_text(json.dumps(ASKED))
