"""How long is the way of a tensor? The functions of aiockpt that one warm save and one warm load of a process pass.

``python tests/journey.py`` prints for each how many named functions in how many files run, on all threads (comprehensions
and lambdas are not counted), by folder, which modules of wings they are in, and how many calls of ours lie above
``pwrite``. It needs nothing but the public class: ``PYTHONPATH=OTHER_CHECKOUT python tests/journey.py`` gives the figures of
another commit. ``--functions`` lists all. These are symptoms, not a goal: a reader of the plain path should not meet what
the plain path does not need.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import aiockpt

PACKAGE = Path(aiockpt.__file__).parent
BACKENDS = (PACKAGE / "backends").resolve()
WINGS = ("ranks", "tiers", "lazy", "worker")
"""Folders of what a process that saves alone, into one place, does not need."""


class Passed:
    """What ran of the package while it was watched."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._pwrite_calls: list[int] = []
        self._counting = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and those that begin inside the block."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs during the block."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._counting:
            return
        if event == "call":
            self._codes.add(frame.f_code)
        elif event == "c_call" and getattr(argument, "__name__", "") in ("pwrite", "pwritev"):
            self._pwrite_calls.append(sum(file_of(above.f_code) is not None for above in _stack(frame)))

    @property
    def functions(self) -> dict[str, set[str]]:
        """The named functions, by the file that they are in."""
        found: dict[str, set[str]] = {}
        for code in self._codes:
            file = file_of(code)
            if file is not None and not code.co_name.startswith("<"):
                found.setdefault(file, set()).add(code.co_qualname)
        return found

    @property
    def wing_modules(self) -> list[str]:
        """The modules of wings that ran."""
        return sorted(file for file in self.functions if file.partition("/")[0] in WINGS)

    @property
    def calls_above_pwrite(self) -> int | None:
        """The calls of ours on the stack of the first write."""
        return min(self._pwrite_calls, default=None)


def file_of(code: CodeType) -> str | None:
    """Return the file of a function of the package, relative to it; None for any other."""
    path = Path(code.co_filename).resolve()
    if path.is_relative_to(BACKENDS):
        return f"backends/{path.relative_to(BACKENDS)}"
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def make_state() -> dict[str, Any]:
    """Return what a small training has, after a step."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 1}


ACTS: dict[str, Callable[[aiockpt.Checkpointer, dict[str, Any], int], object]] = {
    "save": lambda ckpt, state, step: ckpt.save(step, state).result(),
    "load": lambda ckpt, state, _: ckpt.load(state).result(),
}


def watch(folder: str, act: Callable[[aiockpt.Checkpointer, dict[str, Any], int], object]) -> Passed:
    """Return what *act* passes the third time, in a checkpointer whose threads are all watched from their start."""
    passed, state = Passed(), make_state()
    with passed.watching(), aiockpt.Checkpointer(folder) as ckpt:
        for step in (1, 3):
            ckpt.save(step, state).result()
            act(ckpt, state, step + 1)
        ckpt.wait()
        with passed.counting():
            act(ckpt, state, 5)
            ckpt.wait()
    return passed


def say(line: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="list every function")
    listed = parser.parse_args().functions
    for name, act in ACTS.items():
        with tempfile.TemporaryDirectory() as folder:
            passed = watch(folder, act)
        functions = passed.functions
        folders = Counter({file: len(names) for file, names in functions.items()})
        by_folder: Counter[str] = Counter()
        for file, count in folders.items():
            by_folder[file.partition("/")[0] if "/" in file else "(root)"] += count
        above = passed.calls_above_pwrite
        say(
            f"{name}: {sum(folders.values())} functions in {len(folders)} files"
            + (f", {above} calls above pwrite" if above is not None else "")
        )
        say("   " + ", ".join(f"{folder} {count}" for folder, count in by_folder.most_common()))
        say("   of wings: " + (", ".join(passed.wing_modules) or "none"))
        if listed:
            for file in sorted(functions):
                say(f"   {file}: {', '.join(sorted(functions[file]))}")


if __name__ == "__main__":
    main()
