"""The time that the call of a lazy save holds training, by the number of tensors; and the cost of detecting changes.

A state of many small tensors (parameters, both Adam moments and step counts), saved lazily again and again; three optimizer
steps between two saves leave the caches as training leaves them. The next save is called when the last one is durable, so
no work waits for other work, and only Python and memory are timed. The last save is loaded and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aiockpt
from aiockpt.lazy.mutability import SplitState
from aiockpt.lazy.version_check import VersionCheck
from benchmarks.report import Samples
from benchmarks.steps import seconds
from benchmarks.visit import Outcome, Turn

ELEMENTS = 1024
"""Elements of a parameter: enough for an ordinary tensor, too few for its copy to matter."""
TENSORS_OF_A_PARAMETER = 4
MOST_REMADE = 3
"""Saves, at most, whose times are left out because what is known of the state was made anew in them."""


class Training:
    """A model whose state, with its optimizer's, has *tensors* small tensors."""

    def __init__(self, tensors: int) -> None:
        count = max(1, tensors // TENSORS_OF_A_PARAMETER)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(ELEMENTS)) for _ in range(count))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self) -> None:
        """Bring the caches into the state after training."""
        for _ in range(3):
            self.optimizer.step()


@contextmanager
def _saving(work: Path) -> Iterator[tuple[aiockpt.Checkpointer, Callable[[int, Training], float]]]:
    """Yield a checkpointer, and a function that trains, saves, waits, and returns the seconds of the call."""
    with aiockpt.Checkpointer(work, retention=aiockpt.Retention(last=1), snapshot="lazy") as ckpt:

        def save(step: int, training: Training) -> float:
            training.train()
            begun_s = time.perf_counter()
            saving = ckpt.save(step, training.state)
            call_s = time.perf_counter() - begun_s
            saving.result(60)
            ckpt.wait()
            return call_s

        yield ckpt, save


def _check(ckpt: aiockpt.Checkpointer, training: Training) -> None:
    expected = [parameter.detach().clone() for parameter in training.model]
    training.train()
    ckpt.load(training.state).result(60)
    if not all(map(torch.equal, training.model, expected)):
        raise RuntimeError("what was loaded is not what was saved")


def calls(turn: Turn, outcome: Outcome) -> None:
    """Time the call: of a new structure, then of a known one; the check for moved tensors; the loop thread."""
    for tensors in turn.settings["tensors"]:
        training = Training(tensors)
        samples: Samples = {"first_call_s": [], "call_s": [], "walk_s": [], "loop_s": []}
        with _saving(Path(turn.folder) / str(tensors)) as (ckpt, save):
            walk, loop = ckpt._submitter.walk, ckpt._engine.loop
            samples["first_call_s"].append(save(0, training))
            save(1, training)
            for step in range(turn.repetitions):
                busy_s = loop.cpu_s()
                samples["call_s"].append(save(2 + step, training))
                samples["loop_s"].append(loop.cpu_s() - busy_s)
                training.train()
                samples["walk_s"].append(seconds(lambda: walk(training.state)))  # noqa: B023  called at once
            save(2 + turn.repetitions, training)
            _check(ckpt, training)
        outcome.add(turn, f"{tensors:,} tensors", samples)


class _TimedNotes:
    """Timed notes of version counters; disabled where *on* is False."""

    def __init__(self, note: Callable[[], VersionCheck | None]) -> None:
        self.on = True
        self.took_s = 0.0
        self._note = note

    def __call__(self) -> VersionCheck | None:
        begun_s = time.perf_counter()
        noted = self._note() if self.on else None
        self.took_s = time.perf_counter() - begun_s
        return noted


def watching(turn: Turn, outcome: Outcome) -> None:
    """Time the call, watched and not, in turn; the note alone; the second comparison, from memory and from the caches."""
    for tensors in turn.settings["tensors"]:
        training = Training(tensors)
        samples: Samples = {"call_watched_s": [], "call_s": [], "note_s": [], "hook_s": [], "hook_again_s": []}
        with _saving(Path(turn.folder) / str(tensors)) as (ckpt, save):
            save(0, training)
            save(1, training)
            split, remade = _split_of(ckpt), 0
            notes = split.note_versions = _TimedNotes(split.note_versions)
            for step in range(2, 2 * turn.repetitions + 4):
                notes.on = step % 2 == 1
                call_s = save(step, training)
                if _split_of(ckpt) is not split:  # an optimizer elsewhere in the process was made, or collected
                    remade += 1
                    if remade > MOST_REMADE:
                        raise RuntimeError(f"save {step} made what is known of the state anew, as {MOST_REMADE} before")
                    split = _split_of(ckpt)
                    notes = split.note_versions = _TimedNotes(split.note_versions)
                    continue
                if step < 4:
                    continue
                samples["call_watched_s" if notes.on else "call_s"].append(call_s)
                if notes.on:
                    samples["note_s"].append(notes.took_s)
                    for name, value in zip(("hook_s", "hook_again_s"), _time_hooks(ckpt, training), strict=True):
                        samples[name].append(value)
            _check(ckpt, training)
        outcome.add(turn, f"{tensors:,} tensors", samples)


def _split_of(ckpt: aiockpt.Checkpointer) -> Any:
    """Return the last lazy save's description of its state; it is the same object while the structure is unchanged."""
    beside: Any = ckpt._submitter._snapshotter
    return beside._mutability._known.find(SplitState, (False, frozenset()))


def _time_hooks(ckpt: aiockpt.Checkpointer, training: Training) -> list[float]:
    """Return the seconds of the second comparison after a pass over all parameters, and again with warm caches."""
    check = _split_of(ckpt).note_versions()
    assert check is not None
    torch.autograd.backward([parameter.square().sum() for parameter in training.model])
    return [seconds(check.recheck) for _ in range(2)]
