"""Does the plain writer write, say how, and leave nothing behind?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiockpt.examples.disk import BLOCK_BYTES, measure_disk


def test_it_gives_one_speed_a_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path, size_bytes=BLOCK_BYTES + 1, repeats=2)
    assert len(speed.bytes_per_s) == 2
    assert min(speed.bytes_per_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_writes_through_the_page_cache_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def open_without_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return plain_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_without_direct)
    speed = measure_disk(tmp_path, size_bytes=1, repeats=1)
    assert not speed.direct
    assert speed.bytes_per_s[0] > 0
