"""The job of a script's process under `aiockpt prove`: one JSON file, named by an environment variable.

Every process of one start reads the same file: the ranks of torchrun, and whatever they start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

VARIABLE = "AIOCKPT_PROVE"
KILLED = "killed"
"""The file in a run's folder that means: one process has killed itself, and all others are to be killed."""

How = Literal["straight", "killed", "resumed", "control"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """The place where a run kills itself, so that a finding can be replayed.

    Attributes:
        kind: ``"step"``: after the *count*-th optimizer step since *label*; ``"save"``: before storage call number *call*
            (from 0) that changes something in the folder of the step *label*; ``"call"``: when ``save()`` has returned.
        rank: which process does it; the others are killed with it.
    """

    kind: Literal["step", "save", "call"]
    label: int | None
    count: int = 0
    call: int = 0
    rank: int = 0

    def explain(self) -> str:
        """Return in words where that is."""
        on = f" (rank {self.rank})" if self.rank else ""
        if self.kind == "save":
            return f"in the save of step {self.label}, before its storage call {self.call + 1}{on}"
        if self.kind == "call":
            return f"when save({self.label}) had returned{on}"
        after = "the start" if self.label is None else f"step {self.label}"
        return f"{self.count} optimizer step{'' if self.count == 1 else 's'} after {after}{on}"


class ProofJob(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the script.

    Attributes:
        folder: where the records of this start go.
        place: where its checkpoints go, in place of those that the script names.
        withhold: a control: a load finds its step, and does not change the state.
        kill: where it ends by SIGKILL; None runs to its end.
        stop_after: it may end after so many optimizer steps since its load; None: at the end.
        spread: digest tensors in a way that another world size can compare.
        as_is: places that are not redirected, by what `aiockpt.prove.watched_calls.url_of` calls them.
        inline: the script is a function of the process that proves it; a kill is simulated.
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
    """Make the folder of *job*, write it down, and return the file."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    path = folder / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def read_job() -> ProofJob | None:
    """Return the job of this process; None outside of `aiockpt prove`."""
    path = os.environ.get(VARIABLE)
    return msgspec.json.decode(Path(path).read_bytes(), type=ProofJob) if path else None
