"""What is the floor of each question? The same bytes, moved by `benchmarks.floors`, timed as a contender is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import floors, pages
from benchmarks import state as states
from benchmarks.contenders import Base, Pending
from benchmarks.report import Samples
from benchmarks.scenarios import timed, train
from benchmarks.state import State


def _memcpy(state: State, folder: Path, repetitions: int) -> Samples:
    target = floors.aligned_buffer(states.size_bytes(state))
    copies = {"memmove_s": floors.copy_by_memmove, "torch_copy_s": floors.copy_by_torch}
    samples: Samples = {name: [] for name in copies}
    for copy in copies.values():
        copy(state, target)  # starts torch's threads
    for _ in range(repetitions):
        for name, copy in copies.items():
            samples[name].append(timed(lambda copy=copy: copy(state, target)))  # type: ignore[misc]
    return samples


def _direct_write(state: State, folder: Path, repetitions: int) -> Samples:
    source = floors.aligned_buffer(states.size_bytes(state))
    with ThreadPoolExecutor(floors.DIRECT_THREADS) as pool:
        list(pool.map(abs, range(floors.DIRECT_THREADS)))
        return {
            "direct_write_s": [
                timed(lambda index=index: floors.write_direct(pool, folder / f"raw-{index}", source))  # type: ignore[misc]
                for index in range(repetitions)
            ]
        }


def _direct_read(state: State, folder: Path, repetitions: int) -> Samples:
    target, file = floors.aligned_buffer(states.size_bytes(state)), folder / "raw"
    with ThreadPoolExecutor(floors.DIRECT_THREADS) as pool:
        floors.write_direct(pool, file, target)
        seconds = []
        for _ in range(repetitions):
            pages.drop(file)
            seconds.append(timed(lambda: floors.read_direct(pool, file, target)))
    return {"direct_read_s": seconds}


def _warm_read(state: State, folder: Path, repetitions: int) -> Samples:
    target, file = floors.aligned_buffer(states.size_bytes(state)), folder / "raw"
    samples: Samples = {}
    with ThreadPoolExecutor(floors.WARM_READ_THREADS) as pool:
        floors.write_direct(pool, file, target)
        for _ in range(repetitions):
            for chunk_bytes in floors.WARM_READ_CHUNKS_BYTES:
                pages.warm(file)
                seconds = timed(lambda chunk=chunk_bytes: floors.read_warm(pool, file, target, chunk))  # type: ignore[misc]
                samples.setdefault(f"preadv_{chunk_bytes // pages.MIB}_mib_s", []).append(seconds)
    return samples


def _raw_training(state: State, folder: Path, repetitions: int) -> Samples:
    return train(_RawFloor(), state, folder, repetitions)


class _RawFloor(Base):
    """The floor of training slowed: a warm copy and a thread that writes past the page cache. It cannot load."""

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._saver = floors.RawSaver(folder, state)

    def save(self, step: int, state: State) -> Pending:
        writing = self._saver.save(step, state)
        return Pending(writing.done, writing.result)

    def load(self, step: int, state: State) -> None:
        raise NotImplementedError("the raw floor is no checkpoint")

    def location(self, step: int) -> Path:
        return self.folder / f"raw-{step}"


FLOORS: dict[str, Callable[[State, Path, int], Samples]] = {
    "floor: memcpy": _memcpy,
    "floor: O_DIRECT write": _direct_write,
    "floor: O_DIRECT read": _direct_read,
    "floor: warm preadv": _warm_read,
    "floor: memcpy + raw writer": _raw_training,
}

FLOORS_OF = {
    "save": ("floor: memcpy", "floor: O_DIRECT write"),
    "warmed": (),
    "load": ("floor: O_DIRECT read", "floor: warm preadv"),
    "train": ("floor: memcpy + raw writer",),
    "memory": (),
}
