"""The way of a tensor: the functions of aiockpt that one warm save and one warm load of a process pass.

``python tests/journey.py`` prints for each how many named functions in how many files run, on all threads (comprehensions
and lambdas are not counted), the lines of their bodies, by folder, which modules of wings they are in, and the chain of our
calls from ``save`` to the first ``pwrite``, over all threads. It needs nothing but the public class:
``PYTHONPATH=OTHER_CHECKOUT python tests/journey.py`` gives the figures of another commit. ``--functions`` lists all. These
are symptoms, not a goal: a reader of the plain path should not meet what the plain path does not need.
"""

import argparse
import ast
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
WINGS = ("ranks", "places", "lazy", "worker")
"""Folders of what a process that saves alone, into one place, does not need."""
Chain = list[CodeType]
"""Functions of ours, each called by the next; where work changed threads or became a task, by what started it."""


class Passed:
    """What ran of the package while it was watched."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._often: set[CodeType] | None = None
        self._started: dict[int, tuple[object, Chain]] = {}
        self._chains: list[Chain] = []
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
        """Count what runs during the block; of several such blocks what runs in each: a race won or lost does not count."""
        self._codes = set()
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
            self._often = self._codes if self._often is None else self._often & self._codes

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._counting:
            return
        if event == "call":
            self._codes.add(frame.f_code)
            self._note_start(frame)
        elif event == "c_call" and getattr(argument, "__name__", "") in ("pwrite", "pwritev"):
            self._chains.append(self._chain(frame))

    def _note_start(self, frame: FrameType) -> None:
        """Remember the chain of what is handed to a thread, to a loop, or becomes a task."""
        code = frame.f_code
        started: object
        if code.co_name == "submit" and code.co_filename.endswith("concurrent/futures/thread.py"):
            started = frame.f_locals["fn"]
        elif code.co_name in ("call_soon", "call_soon_threadsafe") and code.co_filename.endswith(
            "asyncio/base_events.py"
        ):
            started = frame.f_locals["callback"]
        elif code.co_name == "create_task" and code.co_filename.endswith("asyncio/base_events.py"):
            started = getattr(frame.f_locals["coro"], "cr_frame", None)
        else:
            return
        self._started[id(started)] = started, self._chain(frame)  # the object is kept, so that its id is no other's

    def _chain(self, frame: FrameType | None) -> Chain:
        chain: Chain = []
        inner: FrameType | None = None
        while frame is not None:
            code, path = frame.f_code, frame.f_code.co_filename
            if file_of(code) is not None:
                chain.append(code)
            begun: list[object] = []
            if code.co_name == "_run" and path.endswith("asyncio/events.py"):
                begun = [inner, frame.f_locals["self"]._callback]
            elif code.co_name == "run" and path.endswith("concurrent/futures/thread.py"):
                begun = [frame.f_locals["self"].fn]
            for one in begun:
                if id(one) in self._started:
                    return chain + self._started[id(one)][1]
            inner, frame = frame, frame.f_back
        return chain

    @property
    def functions(self) -> dict[str, set[str]]:
        """The named functions, by the file that they are in."""
        found: dict[str, set[str]] = {}
        for code in self._often or ():
            file = file_of(code)
            if file is not None and not code.co_name.startswith("<"):
                found.setdefault(file, set()).add(code.co_qualname)
        return found

    @property
    def body_lines(self) -> int:
        """The lines of all functions that ran, without signatures, docstrings, comments and blank lines."""
        return sum(_body_lines(file, names) for file, names in self.functions.items())

    @property
    def wing_modules(self) -> list[str]:
        """The modules of wings that ran."""
        return sorted(file for file in self.functions if file.partition("/")[0] in WINGS)

    @property
    def way_to_pwrite(self) -> list[str]:
        """The calls of ours above the first write, over all threads, the outermost first; empty where nothing is written."""
        first = self._chains[0] if self._chains else []
        return [f"{file_of(code)}: {code.co_qualname}" for code in reversed(first)]


def file_of(code: CodeType) -> str | None:
    """Return the file of a function of the package, relative to it; None for any other."""
    path = Path(code.co_filename).resolve()
    if path.is_relative_to(BACKENDS):
        return f"backends/{path.relative_to(BACKENDS)}"
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _body_lines(file: str, names: set[str]) -> int:
    text = (PACKAGE / file).read_text()
    lines, total = text.splitlines(), 0
    for name, node in _functions(ast.parse(text), ""):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if name in names and body:
            inside = map(str.strip, lines[body[0].lineno - 1 : body[-1].end_lineno])
            total += sum(bool(line) and not line.startswith("#") for line in inside)
    return total


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions below *node* by their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


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
    """Return what a warm *act* passes each time, in a checkpointer whose threads are all watched from their start."""
    passed, state = Passed(), make_state()
    with passed.watching(), aiockpt.Checkpointer(folder) as ckpt:
        for step in (1, 3):
            ckpt.save(step, state).result()
            act(ckpt, state, step + 1)
        ckpt.wait()
        for step in (5, 6, 7):
            with passed.counting():
                act(ckpt, state, step)
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
        say(
            f"{name}: {sum(folders.values())} functions in {len(folders)} files, {passed.body_lines:,} lines in their bodies"
        )
        say("   " + ", ".join(f"{folder} {count}" for folder, count in by_folder.most_common()))
        say("   of wings: " + (", ".join(passed.wing_modules) or "none"))
        if way := passed.way_to_pwrite:
            say(f"   {len(way)} calls from save to pwrite:")
            for call in way:
                say(f"      {call}")
        if listed:
            for file in sorted(functions):
                say(f"   {file}: {', '.join(sorted(functions[file]))}")


if __name__ == "__main__":
    main()
