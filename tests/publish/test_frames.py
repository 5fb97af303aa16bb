"""Frames: every decompressor takes them, and a damaged one is refused."""

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash

from aiockpt.errors import CorruptionError, UsageError
from aiockpt.publish import frames
from aiockpt.publish.frames import FrameReader, TensorSums, apply_frames, load_zstd

ZSTD = load_zstd()


def random_bytes(size: int, seed: int) -> frames.Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def make_frame(new: frames.Bytes, old: frames.Bytes, window: int) -> tuple[bytes, TensorSums]:
    sums = TensorSums(len(new), ZSTD)
    parts = []
    for at in range(0, len(new), window):
        parts += sums.add(new[at : at + window], old[at : at + window].copy())
    return b"".join([*parts, sums.end()]), sums


@pytest.mark.parametrize("size", [1, 1000, frames.RUN_BYTES, 3 * frames.RUN_BYTES + 17])
@pytest.mark.parametrize("window", [777, frames.RUN_BYTES, 1 << 30])
def test_a_frame_is_the_difference_of_a_whole_tensor(size: int, window: int) -> None:
    old, new = random_bytes(size, 1), random_bytes(size, 1)
    new[:: max(1, size // 7)] ^= 5
    if window == 777 and size > 1000:
        window = 77_777
    frame, sums = make_frame(new, old, window)
    assert ZSTD.get_frame_info(frame).decompressed_size == size
    assert np.array_equal(np.frombuffer(ZSTD.decompress(frame), np.uint8), new ^ old)
    assert sums.digests == (xxhash.xxh3_128_hexdigest(old.data), xxhash.xxh3_128_hexdigest(new.data))
    assert sums.checksum == f"{zlib.adler32(new.data):08x}"
    tensor = old.copy()
    assert apply_frames(tensor, [FrameReader(ZSTD, memoryview(frame), "w")]) == sums.digests[1]
    assert np.array_equal(tensor, new)


def test_frames_of_several_versions_are_applied_together() -> None:
    versions = [random_bytes(2 * frames.RUN_BYTES, seed) for seed in range(4)]
    pairs = list(pairwise(versions))
    readers = [FrameReader(ZSTD, memoryview(make_frame(new, old, 1 << 30)[0]), "w") for old, new in pairs]
    tensor = versions[0].copy()
    assert apply_frames(tensor, readers) == xxhash.xxh3_128_hexdigest(versions[-1].data)


@pytest.mark.parametrize("harm", [lambda data: data[:-9], lambda data: data[:40], lambda data: b"x" * 50])
def test_a_damaged_frame_names_what_it_is_of(harm: Callable[[bytes], bytes]) -> None:
    frame, _ = make_frame(random_bytes(10_000, 1), random_bytes(10_000, 2), 1 << 30)
    with pytest.raises(CorruptionError, match=r"weight_v000007: w: the frame is"):
        FrameReader(ZSTD, memoryview(harm(frame)), "weight_v000007: w").read(10_000)


def test_without_zstd_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(frames, "import_module", fail)
    with pytest.raises(UsageError, match=r"pip install 'aiockpt\[publish\]'"):
        load_zstd()
