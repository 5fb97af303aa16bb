"""The job of a script's process under `aiockpt prove`: one JSON file, named by an environment variable.

Every process of one start reads the same file: the ranks of torchrun, and their child processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from aiockpt.format.document import described
from aiockpt.units import count

VARIABLE = "AIOCKPT_PROVE"
KILLED = "killed"
"""A file of this name in a run's folder: one process has killed itself, and the others are to be killed."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """The place where a run kills itself, so that a finding can be replayed.

    Attributes:
        kind: ``"step"``: after the *count*-th optimizer step since *label*; ``"save"``: before storage call number *call*
            (from 0) that changes something in the folder of the step *label*; ``"call"``: when ``save()`` has returned.
        rank: the process that kills itself; the others are killed with it.
    """

    kind: Literal["step", "save", "call"]
    label: int | None
    count: int = 0
    call: int = 0
    rank: int = 0

    def explain(self) -> str:
        """Return the place in words."""
        on = f" (rank {self.rank})" if self.rank else ""
        if self.kind == "save":
            return f"in the save of step {self.label}, before its storage call {self.call + 1}{on}"
        if self.kind == "call":
            return f"when save({self.label}) had returned{on}"
        after = "the start" if self.label is None else f"step {self.label}"
        return f"{count(self.count, 'optimizer step')} after {after}{on}"


class ProofJob(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the script.

    Attributes:
        folder: for the records of this start.
        place: for its checkpoints; replaces the places that the script names.
        withhold: this start is a control: a load finds its step and leaves the state unchanged.
        kill: where the start ends by SIGKILL; None: it runs to its end.
        stop_after: optimizer steps since its load after which it may end; None: at the end.
        spread: digest tensors so that starts of other world sizes can be compared.
        as_is: places that are not redirected, by their names from `aiockpt.prove.watched_calls.url_of`.
        inline: the script is a function of the proving process; a kill is simulated.
    """

    folder: str
    place: str
    withhold: bool = False
    kill: Kill | None = None
    stop_after: int | None = None
    spread: bool = False
    as_is: tuple[str, ...] = ()
    inline: bool = False


def write_job(job: ProofJob) -> Path:
    """Make the folder of *job*, write *job* to a file in it, and return the file."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    path = folder / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def read_job() -> ProofJob | None:
    """Return the job of this process; None outside of `aiockpt prove`."""
    path = os.environ.get(VARIABLE)
    return msgspec.json.decode(Path(path).read_bytes(), type=described(ProofJob)) if path else None
