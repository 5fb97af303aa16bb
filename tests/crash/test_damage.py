"""Whatever is changed in a checkpoint's files is noticed: one bit, a length, a swapped or stale file."""

import random
from pathlib import Path

import pytest

import aiockpt
from tests.file_surgery import ROOT, content, paths, replaced
from tests.inline_process import TINY, load_value, saved_files, tiny_state
from tests.simulated.simulated_files import SimulatedFiles

DATA = "/d/r00000-0000.safetensors"
BLOCK_BYTES = 4096
"""Of `TINY`."""


def the_file(files: SimulatedFiles, step: int, ending: str) -> str:
    found = [path for path in paths(files) if f"/step-{step:08d}/" in path and path.endswith(ending)]
    assert len(found) == 1
    return found[0]


def assert_detected(files: SimulatedFiles, what: str) -> None:
    value: object = "nothing"
    try:
        value = load_value(files, step=1)
    except aiockpt.CorruptionError:
        return
    pytest.fail(f"{what}: loaded {value}")


@pytest.mark.parametrize("ending", [DATA, "/MANIFEST-1.json"], ids=["data", "manifest"])
def test_one_flipped_bit_anywhere_is_detected(ending: str) -> None:
    files = saved_files(1)
    path = the_file(files, 1, ending)
    good = content(files, path)
    dice = random.Random(1)
    for position in _positions(bytes(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << dice.randrange(8)
        assert_detected(replaced(files, path, bad), f"bit in byte {position} of {path}")


def _positions(good: bytes) -> list[int]:
    """Every byte of a data file's header, of both ends and beside the blocks' borders, and every 41st between.

    That no bit of a manifest can flip unseen, tests/format/test_document.py shows without a load for each.
    """
    size = len(good)
    header = good[8 : 8 + int.from_bytes(good[:8], "little")].rstrip(b" ") if good[8:9] == b"{" else b""
    borders = range(BLOCK_BYTES, size, BLOCK_BYTES)
    beside = (byte for border in borders for byte in range(border - 2, min(border + 2, size)))
    first = range(min(size, max(64, 8 + len(header) + 2)))
    return sorted({*first, *range(0, size, 41), *beside, *range(max(0, size - 64), size)})


@pytest.mark.parametrize("ending", [DATA, "/MANIFEST-1.json"], ids=["data", "manifest"])
def test_a_file_that_is_cut_or_grown_is_detected(ending: str) -> None:
    files = saved_files(1)
    path = the_file(files, 1, ending)
    good = bytes(content(files, path))
    for bad in (b"", good[:1], good[:100], good[:-1], good[: len(good) // 2], good + b"\0", good + good):
        assert_detected(replaced(files, path, bad), f"{len(bad)} of {len(good)} bytes")


def test_a_missing_data_file_is_detected() -> None:
    files = saved_files(1)
    files.unlink(the_file(files, 1, DATA))
    assert_detected(files, "missing")


def test_a_swapped_or_duplicated_block_is_detected() -> None:
    files = saved_files(1)
    path = the_file(files, 1, DATA)
    good = content(files, path)
    first, second = good[:BLOCK_BYTES], good[BLOCK_BYTES : 2 * BLOCK_BYTES]
    for blocks in ((second, first), (first, first), (second, second)):
        bad = b"".join(map(bytes, blocks)) + bytes(good[2 * BLOCK_BYTES :])
        assert len(bad) == len(good)
        assert_detected(replaced(files, path, bad), "blocks")


def test_a_file_of_another_step_is_detected() -> None:
    files = saved_files(2)
    stale = content(files, the_file(files, 2, DATA))
    assert len(stale) == len(content(files, the_file(files, 1, DATA)))
    assert_detected(replaced(files, the_file(files, 1, DATA), stale), "stale data")
    other = content(files, the_file(files, 2, "/MANIFEST-1.json"))
    assert_detected(replaced(files, the_file(files, 1, "/MANIFEST-1.json"), other), "stale manifest")


@pytest.mark.parametrize("ending", [DATA, "/MANIFEST-1.json"], ids=["data", "manifest"])
def test_a_damaged_newest_step_is_skipped_for_the_one_before(ending: str) -> None:
    files = saved_files(3)
    path = the_file(files, 3, ending)
    bad = content(files, path)
    bad[-20] ^= 1
    assert load_value(replaced(files, path, bad)) == 2.0


def test_when_no_step_is_valid_nothing_is_started_from_scratch_by_mistake() -> None:
    files = saved_files(2)
    for step in (1, 2):
        path = the_file(files, step, "/MANIFEST-1.json")
        files = replaced(files, path, b"torn")
    with pytest.raises(aiockpt.NoValidCheckpointError, match="step-00000001"):
        load_value(files)


def test_a_hint_that_lies_is_not_believed() -> None:
    files = saved_files(2)
    for lie in (b"", b"step-00000001\n", b"../../etc\n", b"\xff" * 100):
        assert load_value(replaced(files, f"{ROOT}/LATEST", lie)) == 2.0


def test_a_symbolic_link_in_place_of_data_is_not_followed(tmp_path: Path) -> None:
    """On a real file system: the data file is moved away and linked to."""

    root = tmp_path / "run"
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=TINY)) as ckpt:
        ckpt.save(1, tiny_state(1)).result()
        data = next(root.glob("step-*/a-*/d/*.safetensors"))
        moved = data.rename(tmp_path / "elsewhere")
        data.symlink_to(moved)
        with pytest.raises(aiockpt.CheckpointError):
            ckpt.load(tiny_state(0), 1).result()
