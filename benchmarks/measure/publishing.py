"""Publication of what changed in a step, and its application on another host, beside the same work by hand.

A step's weights are bfloat16, and 0.8 % of them differ from the step before (a learning rate of 3e-6). *By hand* means: read
both steps' files, XOR, zstd of level 1, write and flush, on as many threads as there are processors; and on the other side
read, decompress, XOR into a file that is mapped from memory. *With sums* adds what the form asks for: two XXH3-128 and an
Adler-32 while publishing, one XXH3-128 while applying. *From disk* is the same with the files out of the page cache: a step
was written past it, too. aiockpt verifies every block that it reads besides. Each side is a process of its own that holds no
model; its peak is the largest anonymous memory beyond that before the first call.

*publishing_peaks* measures that memory alone, of both sides, for a full version and for a delta, each in a process of its
own: of weights that are saved as they are published, and of float32 that becomes bfloat16. Sizes are of the version.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn

import aiockpt
from aiockpt.publish.frames import load_zstd
from benchmarks.measure.processes import measure_in_processes
from benchmarks.visit import Outcome, Turn

MEMORY = Path("/dev/shm")
TENSORS = 16
CHANGED_FRACTION = 0.008
THREADS = os.cpu_count() or 1
RUN_BYTES = 1 << 20
WAIT_S = 1800.0
Samples = dict[str, list[float]]


class Side(msgspec.Struct, frozen=True):
    """The task of one process."""

    kind: str
    folder: str
    target: str
    steps: int


def publishing(turn: Turn, outcome: Outcome) -> None:
    """Measure all contenders on the same steps."""
    folder, target = Path(turn.folder), MEMORY / f"aiockpt-bench-{os.getpid()}"
    target.mkdir(mode=0o700)
    steps = turn.repetitions + 2
    try:
        _save(folder, turn.size_bytes, steps)
        for kind in turn.contenders:
            samples: Samples = {}
            for side in ("publish", "apply"):
                samples |= _run(Side(f"{kind}: {side}", str(folder), str(target), steps))
            outcome.add(turn, kind, samples)
            shutil.rmtree(folder / "pub", ignore_errors=True)
    finally:
        shutil.rmtree(target)


def _run(side: Side) -> Samples:
    """Do the work of one side in a process of its own."""
    (samples,) = measure_in_processes("publishing", [side], WAIT_S)
    return cast("Samples", samples)


def publishing_peaks(turn: Turn, outcome: Outcome) -> None:
    """Measure the memory of each side."""
    for name in turn.contenders:
        folder = Path(turn.folder) / name
        _save(folder, turn.size_bytes, 2, getattr(torch, name))
        samples: Samples = {}
        for step, kind in enumerate(("full", "delta")):
            for side in ("publish", "apply"):
                (peak_bytes,) = _run(Side(f"peak: {side}", str(folder), str(folder / "got"), step)).values()
                samples[f"{side}_{kind}_bytes"] = peak_bytes
        outcome.add(turn, name, samples)
        shutil.rmtree(folder)


def _save(folder: Path, size: int, steps: int, dtype: torch.dtype | None = None) -> None:
    """Save steps, with the same weights as plain files for what is done by hand, or as *dtype* without these."""
    generator = torch.Generator().manual_seed(1)
    model = make_model(size, TENSORS, generator, dtype or torch.bfloat16)
    with aiockpt.Checkpointer(folder / "run") as ckpt:
        for step in range(steps):
            ckpt.save(step, {"model": model}).result()
            for name, tensor in model.named_parameters():
                if dtype is None:
                    elements_of(tensor).tofile(folder / f"{name}-{step}.raw")
                change(tensor, generator)


def make_model(size: int, tensors: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return weights that take *size* bytes as bfloat16."""
    model = nn.Module()
    for number in range(tensors):
        values = torch.randn(size // 2 // tensors, generator=generator).to(dtype)
        model.register_parameter(f"t{number}", nn.Parameter(values, requires_grad=False))
    return model


def elements_of(tensor: torch.Tensor) -> Any:
    """Return the elements as integers, in the tensor's memory."""
    return tensor.data.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def change(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Change `CHANGED_FRACTION` of the elements by the last bit of a bfloat16."""
    count, raw = tensor.numel(), elements_of(tensor)
    at = torch.randint(0, count, (int(count * CHANGED_FRACTION),), generator=generator).numpy()
    raw[at] ^= 1 << 8 * (raw.itemsize - 2)


# ---------------------------------------------------------------------- one side


@contextmanager
def _peak(samples: Samples, name: str) -> Iterator[None]:
    """Add the largest anonymous memory in the block, beyond that at its beginning."""
    before, most, over = _anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, _anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    samples[name] = [float(max(0, most - before))]


def _anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def be_side(side: Side) -> Samples:
    """Do the work of one side once for each step; the first two steps are not counted."""
    folder, target = Path(side.folder), Path(side.target)
    samples: Samples = {}
    work: dict[str, Callable[[Path, Path, int, Samples], None]] = {
        "aiockpt: publish": _publish,
        "aiockpt: apply": _apply,
        "peak: publish": _publish_one,
        "peak: apply": _apply_one,
        "floor: by hand: publish": lambda *what: _publish_by_hand(*what, sums=False),
        "floor: by hand: apply": lambda *what: _apply_by_hand(*what, sums=False),
        "floor: with sums: publish": lambda *what: _publish_by_hand(*what, sums=True),
        "floor: with sums: apply": lambda *what: _apply_by_hand(*what, sums=True),
        "floor: from disk: publish": lambda *what: _publish_by_hand(*what, sums=True, cold=True),
        "floor: from disk: apply": lambda *what: _apply_by_hand(*what, sums=True),
    }
    work[side.kind](folder, target, side.steps, samples)
    return {name: values[2:] if name.endswith("_s") else values for name, values in samples.items()}


def _publish(folder: Path, target: Path, steps: int, samples: Samples) -> None:
    with aiockpt.Checkpointer(folder / "run") as ckpt, _peak(samples, "publish_peak_bytes"):
        done = [ckpt.publish(step, folder / "pub").result() for step in range(steps)]
    samples["publish_s"] = [one.seconds for one in done]
    samples["delta_fraction"] = [one.file_bytes / one.weight_bytes for one in done if one.kind == "delta"]


def _publish_one(folder: Path, target: Path, step: int, samples: Samples) -> None:
    with aiockpt.Checkpointer(folder / "run") as ckpt, _peak(samples, "peak_bytes"):
        done = ckpt.publish(step, aiockpt.Publish(folder / "pub", dtype="bfloat16")).result()
    assert done.kind == ("delta" if step else "full")


def _apply_one(folder: Path, target: Path, step: int, samples: Samples) -> None:
    with _peak(samples, "peak_bytes"):
        (version,) = aiockpt.receive(folder / "pub", target, follow=False)
    assert version.step == step


def _apply(folder: Path, target: Path, steps: int, samples: Samples) -> None:
    """Receive version after version: each becomes visible when the one before it was received."""
    hidden = [(folder / "pub" / f"weight_v{step:06d}", folder / "pub" / f"hidden-{step}") for step in range(1, steps)]
    for path, beside in hidden:
        path.rename(beside)
    seconds = [0.0]
    with _peak(samples, "apply_peak_bytes"):
        versions = iter(aiockpt.receive(folder / "pub", target / "got", every_s=0.01))
        next(versions)
        for number, (path, beside) in enumerate(hidden, 1):
            beside.rename(path)
            ahead = target / "got" / ".aiockpt" / path.name
            while not ahead.exists():
                time.sleep(0.001)
            time.sleep(0.05)  # the download, which is small
            begun_s = time.perf_counter()
            assert next(versions).version == number
            seconds.append(time.perf_counter() - begun_s)
        versions.close()
    samples["apply_s"] = seconds


# ---------------------------------------------------------------------- by hand


def _publish_by_hand(
    folder: Path, target: Path, steps: int, samples: Samples, *, sums: bool, cold: bool = False
) -> None:
    zstd = load_zstd()
    samples["publish_s"] = [0.0]
    (folder / "pub").mkdir()
    for step in range(1, steps):

        def work(number: int, step: int = step) -> None:
            hashers: Any = xxhash.xxh3_128(), xxhash.xxh3_128()
            check = 1
            compressor = zstd.ZstdCompressor(level=1)
            old_path, new_path = (folder / f"t{number}-{which}.raw" for which in (step - 1, step))
            with old_path.open("rb") as old, new_path.open("rb") as new, _out(folder, number, step).open("wb") as out:
                while run := new.read(RUN_BYTES):
                    before = old.read(RUN_BYTES)
                    if sums:
                        hashers[0].update(before)
                        hashers[1].update(run)
                        check = zlib.adler32(run, check)
                    xor = np.bitwise_xor(np.frombuffer(run, np.uint8), np.frombuffer(before, np.uint8))
                    out.write(compressor.compress(xor))
                out.write(compressor.flush())
                out.flush()
                os.fsync(out.fileno())

        if cold:
            for path in (folder / f"t{number}-{which}.raw" for number in range(TENSORS) for which in (step - 1, step)):
                _evict(path)
        begun_s = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(TENSORS)))
        samples["publish_s"].append(time.perf_counter() - begun_s)


def _evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is dirty stays
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _out(folder: Path, number: int, step: int) -> Path:
    return folder / "pub" / f"t{number}-{step}.zst"


def _apply_by_hand(folder: Path, target: Path, steps: int, samples: Samples, *, sums: bool) -> None:
    zstd = load_zstd()
    maps = []
    for number in range(TENSORS):
        shutil.copyfile(folder / f"t{number}-0.raw", target / f"t{number}")
        with (target / f"t{number}").open("r+b") as file:
            maps.append(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))
    samples["apply_s"] = [0.0]
    for step in range(1, steps):

        def work(number: int, step: int = step) -> None:
            decompressor, data = zstd.ZstdDecompressor(), _out(folder, number, step).read_bytes()
            hasher, at = xxhash.xxh3_128(), 0
            while at < len(maps[number]):
                xor = np.frombuffer(decompressor.decompress(data, RUN_BYTES), np.uint8)
                data = b""
                run = maps[number][at : at + len(xor)]
                np.bitwise_xor(run, xor, out=run)
                if sums:
                    hasher.update(run.data)
                at += len(xor)

        begun_s = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(TENSORS)))
        samples["apply_s"].append(time.perf_counter() - begun_s)


if __name__ == "__main__":
    print(msgspec.json.encode(be_side(msgspec.json.decode(sys.argv[1], type=Side))).decode())
