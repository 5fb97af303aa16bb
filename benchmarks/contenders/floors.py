"""The floor of each question about a save or a load: the same bytes, moved by `benchmarks.floors`, timed alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks import floors, pages
from benchmarks import state as states
from benchmarks.report import Samples
from benchmarks.state import State
from benchmarks.steps import timed

HASHED_RUN_BYTES = 4 * pages.MIB


def memcpy(state: State, folder: Path, repetitions: int) -> Samples:
    """Copy all tensors into warm memory."""
    target = floors.aligned_buffer(states.size_bytes(state))
    copies = {"memmove_s": floors.copy_by_memmove, "torch_copy_s": floors.copy_by_torch}
    samples: Samples = {name: [] for name in copies}
    for copy in copies.values():
        copy(state, target)  # starts torch's threads
    for _ in range(repetitions):
        for name, copy in copies.items():
            samples[name].append(timed(partial(copy, state, target)))
    return samples


def direct_write(state: State, folder: Path, repetitions: int) -> Samples:
    """Write the same number of bytes past the page cache."""
    source = floors.aligned_buffer(states.size_bytes(state))
    with ThreadPoolExecutor(floors.DIRECT_THREADS) as pool:
        list(pool.map(abs, range(floors.DIRECT_THREADS)))
        files = [folder / f"raw-{index}" for index in range(repetitions)]
        return {"direct_write_s": [timed(partial(floors.write_direct, pool, file, source)) for file in files]}


def direct_read(state: State, folder: Path, repetitions: int) -> Samples:
    """Read the same number of bytes past the page cache."""
    target, file = floors.aligned_buffer(states.size_bytes(state)), folder / "raw"
    with ThreadPoolExecutor(floors.DIRECT_THREADS) as pool:
        floors.write_direct(pool, file, target)
        seconds = []
        for _ in range(repetitions):
            pages.drop(file)
            seconds.append(timed(partial(floors.read_direct, pool, file, target)))
    return {"direct_read_s": seconds}


def warm_read(state: State, folder: Path, repetitions: int) -> Samples:
    """Read the same number of bytes from the page cache, in chunks of several sizes; and into the tensors, hashed."""
    target, file = floors.aligned_buffer(states.size_bytes(state)), folder / "raw"
    runs = floors.cut_runs(state, HASHED_RUN_BYTES)
    samples: Samples = {}
    with ThreadPoolExecutor(floors.WARM_READ_THREADS) as pool:
        floors.write_direct(pool, file, target)
        for _ in range(repetitions):
            for chunk_bytes in floors.WARM_READ_CHUNKS_BYTES:
                pages.warm(file)
                seconds = timed(partial(floors.read_warm, pool, file, target, chunk_bytes))
                samples.setdefault(f"preadv_{chunk_bytes // pages.MIB}_mib_s", []).append(seconds)
            pages.warm(file)
            seconds = timed(partial(floors.read_hashed, pool, file, runs, HASHED_RUN_BYTES))
            samples.setdefault("preadv_and_hash_s", []).append(seconds)
    return samples
