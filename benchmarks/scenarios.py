"""What is done and timed? One function for each question, run in a contender's own process.

Guarantees:

- What was saved is loaded again and compared by digest, outside the clock; a difference fails the visit.
- A load is "cold" or "warm" only when the page cache was probed and says so.
- Durations start right before the call and end when the checkpoint is durable, or the tensors are filled.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine, pages, training
from benchmarks import state as states
from benchmarks.contenders import Contender
from benchmarks.report import Samples
from benchmarks.state import State


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that *work* takes, with the collector's debts paid and nothing left to write beforehand."""
    gc.collect()
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _save_once(contender: Contender, step: int, state: State) -> tuple[float, float]:
    """Save and return the seconds until the state may change, and until the checkpoint is durable."""
    states.stamp(state, step)
    paused_s = 0.0

    def save() -> None:
        nonlocal paused_s
        start = time.perf_counter()
        pending = contender.save(step, state)
        paused_s = time.perf_counter() - start
        pending.wait()

    durable_s = timed(save)
    return paused_s, durable_s


def _check(contender: Contender, step: int, state: State) -> None:
    """Fail unless *step* loads as what *state* is now."""
    expected = states.digests(state)
    states.clear(state)
    contender.load(step, state)
    _compare(state, expected)


def _compare(state: State, expected: dict[str, str]) -> None:
    loaded = states.digests(state)
    wrong = [name for name in expected if loaded[name] != expected[name]]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(expected)} tensors differ from what was saved, {wrong[0]!r} first")


def save(contender: Contender, state: State, folder: Path, repetitions: int) -> Samples:
    """Pause and time to durable: of the first save of a process, and of those after it."""
    contender.open(folder, state)
    first = _save_once(contender, 1, state)
    later = [_save_once(contender, 2 + index, state) for index in range(repetitions)]
    _check(contender, 1 + repetitions, state)
    contender.close()
    return {
        "pause_first_s": [first[0]],
        "durable_first_s": [first[1]],
        "pause_s": [paused_s for paused_s, _ in later],
        "durable_s": [durable_s for _, durable_s in later],
    }


def warmed(contender: Contender, state: State, folder: Path, repetitions: int) -> Samples:
    """Pause and time to durable of the first save after ``warm_up``."""
    contender.open(folder, state)
    warm_up_s = timed(lambda: contender.warm_up(state))
    paused_s, durable_s = _save_once(contender, 1, state)
    _check(contender, 1, state)
    contender.close()
    return {"warm_up_s": [warm_up_s], "pause_warmed_s": [paused_s], "durable_warmed_s": [durable_s]}


def load(contender: Contender, state: State, folder: Path, repetitions: int) -> Samples:
    """Seconds to fill the job's tensors, from the disk and from the page cache."""
    contender.open(folder, state)
    _save_once(contender, 1, state)
    expected = states.digests(state)

    def load_once(prepare: Callable[[Path], float]) -> float:
        states.clear(state)
        prepare(contender.location(1))
        seconds = timed(lambda: contender.load(1, state))
        _compare(state, expected)
        return seconds

    cold = [load_once(pages.drop) for _ in range(repetitions)]
    warm = [load_once(pages.warm) for _ in range(repetitions)]
    contender.close()
    return {"cold_s": cold, "warm_s": warm}


def train(contender: Contender, state: State, folder: Path, repetitions: int) -> Samples:
    """What saves take from a training loop; the first save, which warms the contender up, is not counted."""
    step = training.small_step()
    contender.open(folder, state)
    _save_once(contender, 1, state)
    seen = [
        training.measure_save(step, lambda index=index: contender.save(2 + index, state))  # type: ignore[misc]
        for index in range(repetitions)
    ]
    contender.close()
    return {name: [getattr(one, name) for one in seen] for name in training.Slowdown.__struct_fields__}


def memory(contender: Contender, state: State, folder: Path, repetitions: int) -> Samples:
    """What this process takes before its first save; the parent watches the peak from outside (`benchmarks.run`)."""
    gc.collect()
    before_bytes = machine.memory_bytes(os.getpid())
    contender.open(folder, state)
    for index in range(1 + repetitions):
        _save_once(contender, 1 + index, state)
    budget_bytes = contender.budget_bytes()
    contender.close()
    return {"before_bytes": [before_bytes], **({} if budget_bytes is None else {"budget_bytes": [budget_bytes]})}


SCENARIOS: dict[str, Callable[[Contender, State, Path, int], Samples]] = {
    "memory": memory,
    "save": save,
    "warmed": warmed,
    "load": load,
    "train": train,
}
