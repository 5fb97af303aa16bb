"""The disk probe writes and reads, says how, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

import pytest

from aiockpt.testing.disk import BLOCK_BYTES, measure_disk


@pytest.mark.parametrize("kind", ["write", "read"])
def test_it_gives_one_speed_a_file_tells_every_block_and_leaves_nothing_behind(
    tmp_path: Path, kind: Literal["write", "read"]
) -> None:
    moved: list[int] = []
    speed = measure_disk(tmp_path, size_bytes=BLOCK_BYTES + 1, repeats=2, kind=kind, on_moved=moved.append)
    assert len(speed.bytes_per_s) == 2
    assert min(speed.bytes_per_s) > 0
    assert moved == [BLOCK_BYTES] * 4
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_goes_through_the_page_cache_says_so_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def open_without_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(plain_open(path, flags & ~os.O_DIRECT, mode))  # as tmpfs did: made, then refused
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_without_direct)
    speed = measure_disk(tmp_path, size_bytes=1, repeats=1)
    assert not speed.direct
    assert speed.bytes_per_s[0] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_is_measured_has_no_name(tmp_path: Path) -> None:
    seen: list[list[Path]] = []
    measure_disk(tmp_path, size_bytes=1, repeats=1, on_moved=lambda _: seen.append(list(tmp_path.iterdir())))
    assert seen == [[]]


def test_a_full_disk_is_not_taken_for_one_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        measure_disk(tmp_path, size_bytes=1, repeats=1)
