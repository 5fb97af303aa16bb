"""Who is measured? One small class for each way to save and load, all behind one contract.

Guarantees:

- Everybody gets the same state, saves it to files that survive a power cut when ``Pending.wait`` returns (what a
  library does not flush itself, its class here flushes, on the clock), and loads it into the job's own tensors.
- Defaults are the library's own; a contender with other settings says so in its name.
- A library is imported only in the process that measures it.

``torch_checkpointing``, ``torchsnapshot`` and the others of the field are not here: they need another torch, or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # which imports torch: half the time of a visit to a storage client
    from benchmarks.state import State

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Pending:
    """A save that has returned to the caller.

    Attributes:
        done: whether ``wait`` would return at once, or has work left for the calling thread only.
        wait: returns when the checkpoint is durable; raises when the save failed.
    """

    done: Callable[[], bool]
    wait: Callable[[], object]


class Contender(Protocol):
    """One way to checkpoint. Used by one thread, in a process of its own: open, saves and loads, close."""

    def open(self, folder: Path, state: State) -> None:
        """Get ready to save *state* below *folder*, an empty folder."""

    def warm_up(self, state: State) -> None:
        """Allocate ahead what the first save needs, where the library knows how to."""

    def save(self, step: int, state: State) -> Pending:
        """Save; return when *state* may change again."""
        ...

    def load(self, step: int, state: State) -> None:
        """Fill the tensors of *state* with those of *step*."""

    def location(self, step: int) -> Path:
        """Return the file or folder that holds *step*, for the page cache's sake."""
        ...

    def budget_bytes(self) -> int | None:
        """Return the memory beyond the state that the library says it takes; None when it says nothing."""

    def close(self) -> None:
        """Release everything."""


class Base:
    """A folder, and the answers of a library that has nothing to say."""

    folder: Path

    def open(self, folder: Path, state: State) -> None:
        """Remember *folder*."""
        self.folder = folder

    def warm_up(self, state: State) -> None:
        """Refuse: only aiockpt has a warm-up."""
        raise NotImplementedError("only aiockpt has a warm-up")

    def budget_bytes(self) -> int | None:
        """Say nothing."""
        return None

    def close(self) -> None:
        """Have nothing to release."""


CONTENDERS = {
    "aiockpt": ("ours", "Aiockpt"),
    "dcp-save": ("dcp", "Save"),
    "dcp-save-4-threads": ("dcp", "SaveWithThreads"),
    "dcp-async-thread": ("dcp", "AsyncThread"),
    "dcp-async-thread-kept-stager": ("dcp", "AsyncThreadKeptStager"),
    "dcp-async-process": ("dcp", "AsyncProcess"),
    "dcp-async-process-kept-stager": ("dcp", "AsyncProcessKeptStager"),
    "torch-save": ("torch_save", "TorchSave"),
    "safetensors": ("safetensors_file", "Safetensors"),
}
"""Name → module below `benchmarks.contenders` and class in it."""


ONLY = {"warmed": ("aiockpt",)}
"""Who alone takes part in a scenario."""


def taking_part(scenario: str) -> tuple[str, ...]:
    """Return the contenders of *scenario*."""
    return ONLY.get(scenario) or tuple(CONTENDERS)


def make(name: str) -> Contender:
    """Import what contender *name* needs and return a new one.

    Raises:
        ImportError: its library is not installed.
    """
    module, kind = CONTENDERS[name]
    made: Contender = getattr(import_module(f"{__name__}.{module}"), kind)()
    return made
