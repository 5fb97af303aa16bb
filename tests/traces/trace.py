"""What was asked of the storage, in an order that means something: what is free to change its order is sorted.

A trace is a list of lines: calls of the backend contract, below them what a file system is asked for beside reads and writes
(flushes, links, removals, folders), and marks of the scenario ("committed 1", what a load returned). Names that are drawn
(attempts, leases, temporary files) are numbered in the order in which they come.

Guarantees:

- Between two *borders* lines are sorted, so that tasks that run side by side may go in any order. A border is what makes
  something visible or takes it away (put, put_new, link, rename, unlink, delete), and every mark. So a flush, a write, or a
  check that moves to the other side of a commit or of an acknowledgement is a difference.
- A trace of threads (`changes_of`) has no borders, no reads and no looks: they poll. It holds each change once.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from aiockpt.runtime.world import Files
from aiockpt.storage.backend import Backend
from aiockpt.testing.recording import Call, Operation, RecordingBackend, RecordingFiles

DRAWN = re.compile(r"(?<![0-9a-f])[0-9a-f]{12,32}(?![0-9a-f])")
BORDERS = ("put ", "put_new ", "delete ", "link ", "rename ", "unlink ", "== ")
BELOW = frozenset({"fsync", "fdatasync", "link", "rename", "unlink", "mkdir", "rmdir"})
SIZED = frozenset({"put", "put_new", "create", "reader.read", "upload.write"})
LOOKS = ("get ", "stat ", "list ", "space", "open ", "reader.", "close", "mkdir ")


class _Shared(list[Any]):
    """The list that backends and file systems of one scenario write to."""

    def __init__(self, take: Callable[[Any], object]) -> None:
        super().__init__()
        self._take = take

    def append(self, one: Any) -> None:
        self._take(one)


class Trace:
    """The lines of one scenario, as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def mark(self, text: str) -> None:
        """Note that the program was told, or has done, something."""
        self.lines.append(f"== {text}")

    def files(self, inner: Files, name: str = "") -> RecordingFiles:
        """Return *inner*, with what is asked of it below the contract in this trace."""
        recording = RecordingFiles(inner)
        recording.calls = _Shared(lambda call: self._note_call(name, call))
        return recording

    def backend(self, inner: Backend, name: str = "") -> RecordingBackend:
        """Return *inner*, with what is asked of it in this trace."""
        recording = RecordingBackend(inner)
        recording.operations = _Shared(lambda operation: self._note_operation(name, operation))
        return recording

    def _note_call(self, name: str, call: Call) -> None:
        if call.verb in BELOW:
            told = f"{call.path} > {call.target}" if call.target else call.path
            self.lines.append(_line(call.verb, name, told, f"errno {call.error}" if call.error else ""))

    def _note_operation(self, name: str, operation: Operation) -> None:
        told = operation.key
        if operation.verb in SIZED:
            told += f" @{operation.offset}" if operation.verb in ("reader.read", "upload.write") else ""
            told += f" {operation.size}"
        self.lines.append(_line(operation.verb, name, told, operation.error))

    def in_order(self) -> list[str]:
        """Return the lines, with what is between two borders sorted, and drawn names numbered."""
        told: list[str] = []
        numbers: dict[str, str] = {}
        phase: list[str] = []
        for line in [*self.lines, "== end"]:
            if not line.startswith(BORDERS):
                phase.append(line)
                continue
            told += _numbered(phase, numbers)
            told += _numbered([line], numbers)
            phase = []
        return told

    def changes(self) -> list[str]:
        """Return the marks in their order, and then all changes, each once, with nothing to tell their order or writer."""
        marks = [DRAWN.sub("#", line) for line in self.lines if line.startswith("== ")]
        lines = {DRAWN.sub("#", _without_size(line)) for line in self.lines if not line.startswith(("== ", *LOOKS))}
        return [*marks, *sorted(lines)]


def _line(verb: str, name: str, told: str, error: str) -> str:
    return " ".join(filter(None, (verb, name, told, f"! {error}" if error else "")))


def _without_size(line: str) -> str:
    """Leave out how long a record is, and in how many pieces a file was written: both depend on who was quicker."""
    return re.sub(r"^(put|put_new|upload\.write) (.*?)(?: @\d+)? \d+", r"\1 \2", line)


def _numbered(lines: Sequence[str], numbers: dict[str, str]) -> list[str]:
    """Return *lines* sorted, with a number for each drawn name that is the same wherever it comes again."""

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found[0], f"#{len(numbers) + 1}")

    known = [DRAWN.sub(lambda found: numbers.get(found[0], "#"), line) for line in lines]
    for _, line in sorted(zip(known, lines, strict=True), key=lambda pair: pair[0]):
        DRAWN.sub(number, line)
    return sorted(DRAWN.sub(number, line) for line in lines)
