"""The contenders: one small class for each way to save and load, all behind one contract.

Guarantees:

- All contenders get the same state, save it to files that survive a power cut when ``Pending.wait`` returns (files that a
  library does not flush are flushed by its class here, on the clock), and load it into the job's own tensors.
- Defaults are the library's own; the name of a contender states any deviation.
- A library is imported only in the process that measures it.

`benchmarks.scenarios` has, as data, the scenarios and options of each. ``torch_checkpointing``,
``torchsnapshot`` and the others of the field are not here: they need another torch, or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which imports torch: half the time of a visit to a storage client
    from benchmarks.state import State
    from benchmarks.visit import Outcome, Turn

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


class Contender:
    """One way to checkpoint. Used by one thread, in a process of its own: open, saves and loads, close.

    This class has the defaults for what a library does not support.
    """

    checks = True
    """Whether it can load what it saved; a floor cannot."""
    folder: Path
    read_bytes = 0
    """Bytes read by the last load, as the library reports them."""

    def open(self, folder: Path, state: State) -> None:
        """Prepare to save *state* below *folder*, an empty folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def warm_up(self, state: State) -> None:
        """Allocate the memory of the first save in advance, where the library supports it."""
        raise NotImplementedError("only aiockpt has a warm-up")

    def save(self, step: int, state: State) -> Pending:
        """Save; return when *state* may change again."""
        raise NotImplementedError

    def load(self, step: int, state: State) -> None:
        """Fill the tensors of *state* with those of *step*."""
        raise NotImplementedError("a floor is no checkpoint")

    def location(self, step: int) -> Path:
        """Return the file or folder that holds *step*, for control of the page cache."""
        return self.folder / f"step-{step}"

    def budget_bytes(self) -> int | None:
        """Return the memory beyond the state that the library states; None when it states none."""
        return None

    def loop_cpu_s(self) -> float | None:
        """Return the processor seconds so far of a thread that needs the interpreter's lock; None without one."""
        return None

    def take_waits(self) -> list[float]:
        """Return the seconds that optimizers were held since the last call."""
        return []

    def settle(self) -> None:
        """Wait until earlier saves have ended, including their deletions."""

    def close(self) -> None:
        """Release everything."""


def make(spec: tuple[str, dict[str, Any]]) -> Any:
    """Import the library of a contender, and return a new one.

    Args:
        spec: ``module:class`` below `benchmarks`, and the arguments.

    Raises:
        ImportError: its library is not installed.
    """
    from benchmarks.visit import resolve

    place, options = spec
    return resolve(place)(**options)


def try_make(turn: Turn, name: str, outcome: Outcome) -> Any:
    """Return contender *name* of *turn*'s scenario; where its library is missing, None, with the reason in *outcome*."""
    from benchmarks.scenarios import SCENARIOS

    try:
        return make(SCENARIOS[turn.scenario].contenders[name])
    except ImportError as error:
        if (error.name or "").startswith(("benchmarks", "aiockpt")):
            raise
        outcome.unavailable[name] = str(error)
        return None
