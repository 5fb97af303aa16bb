"""The simulated file system is a faithful twin of the real one, power cuts aside."""

import errno
import mmap
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from aiockpt.runtime.world import Files, OsFiles
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import SimulatedClock

NAMES = ["a", "b", "c"]
CREATE = os.O_RDWR | os.O_CREAT


class Monkey:
    """Does random things to a file system below *root* and writes down what came of each."""

    def __init__(self, files: Files, root: str, seed: int) -> None:
        self.files = files
        self.root = root
        self.dice = random.Random(seed)
        self.fds: list[int] = []

    def path(self) -> str:
        folder = self.dice.choice(["", "", "/a", "/b"])
        return f"{self.root}{folder}/{self.dice.choice(NAMES)}"

    def fd(self) -> int:
        return self.dice.choice(self.fds) if self.fds else 10**6

    def open(self) -> str:
        flags = self.dice.choice([os.O_RDONLY, CREATE, CREATE | os.O_EXCL, os.O_RDONLY | os.O_DIRECTORY, os.O_WRONLY])
        fd = self.files.open(self.path(), flags)
        self.fds.append(fd)
        return "opened"

    def close(self) -> str:
        fd = self.fd()
        if fd in self.fds:
            self.fds.remove(fd)
        self.files.close(fd)
        return "closed"

    def pwrite(self) -> int:
        data = self.dice.randbytes(self.dice.randrange(2000))
        return self.files.pwrite(self.fd(), memoryview(data), self.dice.randrange(5000))

    def preadv(self) -> tuple[int, bytes]:
        buffers = [memoryview(bytearray(self.dice.randrange(1500))) for _ in range(3)]
        count = self.files.preadv(self.fd(), buffers, self.dice.randrange(6000))
        return count, b"".join(buffers)

    def fallocate(self) -> str:
        self.files.fallocate(self.fd(), 0, self.dice.randrange(1, 9000))
        return "allocated"

    def flush(self) -> str:
        self.dice.choice([self.files.fsync, self.files.fdatasync])(self.fd())
        return "flushed"

    def fstat(self) -> object:
        return self.facts(self.files.fstat(self.fd()))

    def lstat(self) -> object:
        return self.facts(self.files.lstat(self.path()))

    def name(self) -> str:
        verb = self.dice.choice([self.files.mkdir, self.files.rmdir, self.files.unlink])
        verb(self.path())
        return "done"

    def link(self) -> str:
        self.files.link(self.path(), self.path())
        return "linked"

    def rename(self) -> str:
        folder = self.dice.choice([self.root, f"{self.root}/a"])
        source, target = (f"{folder}/{self.dice.choice(NAMES)}" for _ in range(2))
        if stat.S_ISDIR(self.files.lstat(source).st_mode):
            return "only files are renamed"
        self.files.rename(source, target)
        return "renamed"

    def listdir(self) -> list[str]:
        return sorted(self.files.listdir(self.dice.choice([self.root, f"{self.root}/a", self.path()])))

    @staticmethod
    def facts(found: os.stat_result) -> tuple[int, int, int]:
        if stat.S_ISDIR(found.st_mode):
            return stat.S_IFMT(found.st_mode), 0, 0  # sizes and links of directories differ between file systems
        return stat.S_IFMT(found.st_mode), found.st_size, found.st_nlink

    def act(self) -> object:
        verbs: list[Callable[[], object]] = [
            *[self.open] * 3,
            *[self.pwrite] * 2,
            *[self.name] * 3,
            self.close,
            self.preadv,
            self.fallocate,
            self.flush,
            self.fstat,
            self.lstat,
            self.link,
            self.rename,
            self.listdir,
        ]
        try:
            return self.dice.choice(verbs)()
        except OSError as error:
            return errno.errorcode[error.errno or 0]


@pytest.mark.parametrize("seed", range(40))
def test_it_behaves_as_the_operating_system_does(tmp_path: Path, seed: int) -> None:
    simulated = SimulatedFiles()
    simulated.mkdir("/r")
    ours, real = Monkey(simulated, "/r", seed), Monkey(OsFiles(), str(tmp_path), seed)
    for turn in range(150):
        assert (turn, ours.act()) == (turn, real.act())
        assert len(ours.fds) == len(real.fds)
    for fd in real.fds:
        os.close(fd)


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


def aligned(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes))


@pytest.mark.parametrize(("offset", "start", "size"), [(1, 0, 4096), (0, 1, 4096), (0, 0, 4095), (512, 0, 4096)])
def test_o_direct_wants_everything_aligned(files: SimulatedFiles, offset: int, start: int, size: int) -> None:
    fd = files.open("/f", CREATE | os.O_DIRECT)
    memory = aligned(3 * 4096)
    assert files.pwrite(fd, memory[4096:], 0) == 8192
    with pytest.raises(OSError, match="Invalid argument"):
        files.pwrite(fd, memory[start : start + size], offset)
    with pytest.raises(OSError, match="Invalid argument"):
        files.preadv(fd, [memory[start : start + size]], offset)
    assert files.preadv(fd, [memory], 0) == 8192


def test_without_o_direct_opening_fails_after_the_file_was_made() -> None:
    files = SimulatedFiles(direct_alignment=None)
    with pytest.raises(OSError) as caught:
        files.open("/f", CREATE | os.O_DIRECT)
    assert caught.value.errno == errno.EINVAL
    assert files.listdir("/") == ["f"]


@pytest.mark.parametrize(("page_cache", "number"), [("cold", errno.EAGAIN), ("unsupported", errno.EOPNOTSUPP)])
def test_the_page_cache_answers_as_it_was_told(page_cache: str, number: int) -> None:
    files = SimulatedFiles(page_cache=page_cache)  # type: ignore[arg-type]
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"data"), 0)
    with pytest.raises(OSError) as caught:
        files.preadv(fd, [memoryview(bytearray(4))], 0, os.RWF_NOWAIT)
    assert caught.value.errno == number
    assert files.preadv(fd, [memoryview(bytearray(4))], 0) == 4


def test_a_full_disk_takes_no_more() -> None:
    files = SimulatedFiles(capacity_bytes=10)
    fd = files.open("/f", CREATE)
    files.pwrite(fd, memoryview(b"12345678"), 0)
    for grow in (lambda: files.pwrite(fd, memoryview(b"123"), 8), lambda: files.fallocate(fd, 0, 11)):
        with pytest.raises(OSError) as caught:
            grow()
        assert caught.value.errno == errno.ENOSPC
    assert files.statvfs("/").f_bavail == 2
    files.pwrite(fd, memoryview(b"87654321"), 0)
    files.unlink("/f")
    assert files.statvfs("/").f_bavail == 10


def test_without_hard_links_link_is_not_permitted() -> None:
    files = SimulatedFiles(hard_links=False)
    files.close(files.open("/f", CREATE))
    with pytest.raises(PermissionError):
        files.link("/f", "/g")


def test_what_is_not_modelled_is_refused(files: SimulatedFiles) -> None:
    files.close(files.open("/f", CREATE))
    with pytest.raises(OSError):
        files.open("/f", os.O_WRONLY | os.O_TRUNC)


def test_files_are_dated_by_the_clock() -> None:
    clock = SimulatedClock(now_ns=7)
    files = SimulatedFiles(clock=clock)
    fd = files.open("/f", CREATE)
    assert files.fstat(fd).st_mtime_ns == 7
    clock.advance(1)
    files.pwrite(fd, memoryview(b"x"), 0)
    assert files.lstat("/f").st_mtime_ns == 1_000_000_007


def test_open_descriptors_are_counted(files: SimulatedFiles) -> None:
    fds = [files.open("/f", CREATE), files.open("/", os.O_RDONLY | os.O_DIRECTORY)]
    assert files.open_count == 2
    for fd in fds:
        files.close(fd)
    assert files.open_count == 0


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returns, or the name of its error."""
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def special_things(files: Files, root: str) -> list[object]:
    """Look at a link that leads nowhere and at a pipe in every way that a reader might; return what came of it."""
    came: list[object] = []
    for name in ("link", "fifo"):
        path = f"{root}/{name}"
        came.append(stat.S_IFMT(files.lstat(path).st_mode))
        for flags in (os.O_RDONLY | os.O_NOFOLLOW, os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            fd = outcome(lambda path=path, flags=flags: files.open(path, flags | os.O_NONBLOCK))  # type: ignore[misc]
            if isinstance(fd, int):
                came.append(stat.S_IFMT(files.fstat(fd).st_mode))
                came.append(outcome(lambda fd=fd: files.preadv(fd, [memoryview(bytearray(9))], 0)))  # type: ignore[misc]
                files.close(fd)
            else:
                came.append(fd)
        came.append(outcome(lambda path=path: files.listdir(path)))  # type: ignore[misc]
        came.append(outcome(lambda path=path: files.lstat(f"{path}/below")))  # type: ignore[misc]
        came.append(outcome(lambda path=path: files.mkdir(path)))  # type: ignore[misc]
        files.unlink(path)
    return [*came, files.listdir(root)]


def test_links_and_pipes_are_looked_at_as_on_the_operating_system(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    simulated = SimulatedFiles()
    simulated.mkdir("/r")
    simulated.put_special("link", "/r/link")
    simulated.put_special("fifo", "/r/fifo")
    assert special_things(simulated, "/r") == special_things(OsFiles(), str(tmp_path))
