"""Memory that bytes wait in: on pages, there already, with or without a kernel that knows how."""

import ctypes
import gc
import mmap
import os
import platform
import re
import resource
from pathlib import Path

import pytest

from aiockpt.errors import ClosedError
from aiockpt.runtime import host_memory, shared_memory

SIZE_BYTES = 3 * mmap.PAGESIZE + 5


def faults_of_touching(pages: host_memory.Pages) -> int:
    mine = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # threads of earlier tests may touch theirs
    before = resource.getrusage(mine).ru_minflt
    ctypes.memset(host_memory.address_of(pages), 1, len(pages))
    return resource.getrusage(mine).ru_minflt - before


@pytest.mark.parametrize("kernel_knows", [True, False])
def test_the_memory_is_zero_starts_on_a_page_and_is_there_already(
    monkeypatch: pytest.MonkeyPatch, kernel_knows: bool
) -> None:
    if not kernel_knows:
        monkeypatch.setattr(host_memory, "advise", lambda *_: -1)
    pages = host_memory.map_pages(64 << 20)
    assert pages[:SIZE_BYTES] == bytes(SIZE_BYTES)
    assert host_memory.address_of(pages) % mmap.PAGESIZE == 0
    assert faults_of_touching(pages) < 100  # of 16,384 pages; the interpreter may touch some of its own


def test_memory_that_is_not_there_would_be_noticed() -> None:
    assert faults_of_touching(mmap.mmap(-1, 64 << 20)) > 1000


def test_shared_memory_is_there_already_and_another_map_of_it_sees_the_same() -> None:
    shared = shared_memory.SharedMemory()
    pages = [shared.map(number, 1 << 20) for number in (1, 0, 2)]
    assert faults_of_touching(pages[2]) < 20
    for number, piece in zip((1, 0, 2), pages, strict=True):
        piece[:5] = b"piece"
        piece[5] = number
    seen = [shared_memory.map_shared(shared.fd, number, 1 << 20) for number in range(3)]
    assert [bytes(piece[:6]) for piece in seen] == [b"piece\x00", b"piece\x01", b"piece\x02"]
    seen[1][:5] = b"other"
    assert bytes(pages[0][:5]) == b"other"
    shared.close()
    shared.close()
    with pytest.raises(ClosedError):
        shared.map(3, 1 << 20)
    assert bytes(pages[2][:5]) == b"piece"


def test_growing_in_any_order_never_cuts_off_what_is_mapped() -> None:
    shared = shared_memory.SharedMemory()
    last = shared.map(9, mmap.PAGESIZE)
    first = shared.map(0, mmap.PAGESIZE)
    last[0], first[0] = 1, 2
    assert (last[0], first[0]) == (1, 2)
    assert os.fstat(shared.fd).st_size == 10 * mmap.PAGESIZE
    shared.close()


def mapped_kib(pages: host_memory.Pages, fact: str) -> int | None:
    """Return *fact* of the mapping that *pages* are; None when there is none."""
    begins = f"{host_memory.address_of(pages):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    if not any(line.startswith(begins) for line in lines):
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith(fact))


def has_huge_shared_memory() -> bool:
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    allowed = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return version >= (6, 1) and allowed.exists() and "[deny]" not in allowed.read_text()


@pytest.mark.skipif(not has_huge_shared_memory(), reason="needs Linux 6.1 with transparent huge pages")
def test_shared_memory_lies_in_huge_pages_for_all_who_map_it() -> None:
    shared = shared_memory.SharedMemory()
    size = 2 * shared_memory.HUGE_BYTES
    pages = shared.map(1, size)
    pages[:3] = b"abc"
    shared.make_huge(host_memory.address_of(pages), size)
    seen = shared_memory.map_shared(shared.fd, 1, size)
    assert bytes(seen[:3]) == b"abc"
    assert faults_of_touching(seen) < 20
    assert mapped_kib(pages, "ShmemPmdMapped:") == mapped_kib(seen, "ShmemPmdMapped:") == size >> 10
    shared.close()


def test_a_piece_is_unmapped_when_nobody_looks_at_it_any_more() -> None:
    shared = shared_memory.SharedMemory()
    pages = shared.map(0, shared_memory.HUGE_BYTES)
    view = memoryview(pages)[5:]
    address = f"{host_memory.address_of(pages):x}-"
    del pages
    assert address in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert address not in Path("/proc/self/maps").read_text()
    shared.close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_a_disk_takes_shared_memory_directly(tmp_path: Path) -> None:
    shared = shared_memory.SharedMemory()
    pages = shared.map(1, 1 << 20)
    pages[:] = bytes(range(256)) * 4096
    try:
        fd = os.open(tmp_path / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    try:
        assert os.pwrite(fd, memoryview(pages), 0) == 1 << 20
    finally:
        os.close(fd)
        shared.close()
    assert (tmp_path / "direct").read_bytes() == bytes(range(256)) * 4096


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroup", "groups", "expected"),
    [
        ("0::/job", {"job": ("max", GIB, 0)}, 8 * GIB),
        ("0::/job", {"job": (3 * GIB, 2 * GIB, 0)}, GIB),
        ("0::/job", {"job": (3 * GIB, 2 * GIB, GIB // 2)}, 3 * GIB // 2),  # of its use, that much is cache
        ("0::/outer/job", {"outer/job": ("max", 0, 0), "outer": (2 * GIB, GIB, 0)}, GIB),
        ("0::/../of/the/host", {"": (3 * GIB, GIB, 0)}, 2 * GIB),
        ("0::/of/the/host", {"": (3 * GIB, GIB, 0)}, 2 * GIB),
        ("0::/job", {"job": (GIB, 2 * GIB, 0)}, 0),
        ("0::/job", {"job": (64 * GIB, GIB, 0)}, 8 * GIB),
        ("5:cpu:/job\n4:memory:/job", {"memory/job": (3 * GIB, 2 * GIB, GIB)}, 2 * GIB),
        ("4:memory:/of/the/host\n0::/", {"memory": (3 * GIB, 2 * GIB, 0)}, GIB),
        ("4:memory:/", {"memory": (2**63 - 4096, GIB, 0)}, 8 * GIB),
        (None, {}, 8 * GIB),
    ],
)
def test_the_limit_of_a_container_bounds_what_is_available(
    tmp_path: Path, cgroup: str | None, groups: dict[str, tuple[int | str, int, int]], expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    if cgroup is not None:
        (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    for name, (limit, use, cache) in groups.items():
        (folder := tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True, exist_ok=True)
        first = name.startswith("memory")
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (folder / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{use}\n")
        (folder / "memory.stat").write_text(f"{'total_' if first else ''}inactive_file {cache}\n")
    assert host_memory.available_bytes(tmp_path) == expected
