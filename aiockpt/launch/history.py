"""The history of one launch, on one node: its attempts, what each lost, the stalls, and the effective time (ETTR).

It is written as JSON at each event, whole, under a name of this launcher; ``aiockpt report`` and ``aiockpt top`` read it.
Times of people are seconds since 1970; durations are of the monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from aiockpt.format.document import described
from aiockpt.launch.restart_policy import TrainerFailure
from aiockpt.runtime.progress import ProgressRecord, RestartFigures, write_whole

MONITOR = "monitor"
_BEGINS = "launch-"
_MOST_POINTS = 4096


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A stall that was noticed: at *at_s*, *quiet_s* after the last progress of its ranks, in the median step *median_s*.

    Attributes:
        behind: ranks that the others wait for, as far as steps and stacks show.
        places: rank → its innermost frames.
        folder: of the stacks.
    """

    at_s: float
    attempt: int
    quiet_s: float
    median_s: float
    ranks: tuple[int, ...]
    step: int
    behind: tuple[int, ...] = ()
    places: dict[str, str] = {}
    folder: str = ""
    ended: str = ""


class NodeAttempt(msgspec.Struct, kw_only=True):
    """One start of the trainers.

    Attributes:
        began_s: seconds since 1970; *lasted_s* since then, to its failure or its end.
        world_size: of this start.
        first_step, last_step: -1 before the first.
        notice_s: from the last progress to the notice of what ended it.
        decide_s: from the last progress to its end: for a hang later than the notice.
        restart_s: from its end to the start of the next trainers.
        first_step_s: from the start of these trainers to the end of their first step.
        counted_s: of training whose steps were not lost.
        lost_steps, lost_s: what the next attempt repeats.
        commits: of saves, on the rank with the most.
    """

    number: int
    began_s: float
    world_size: int
    lasted_s: float = 0.0
    first_step: int = -1
    last_step: int = -1
    first_step_s: float = 0.0
    notice_s: float = 0.0
    decide_s: float = 0.0
    restart_s: float = 0.0
    counted_s: float = 0.0
    lost_steps: int = 0
    lost_s: float = 0.0
    commits: int = 0
    failure: TrainerFailure | None = None


class NodeRun(msgspec.Struct, kw_only=True):
    """One launcher: of the ranks of one node.

    Attributes:
        outcome: ``running``, ``ended``, ``failed``, or ``stopped: why``.
        ettr: the time of steps that count ÷ all time; 0 where the trainers tell no progress.
        urls: where the trainers save.
    """

    run_id: str
    host: str
    pid: int
    began_s: float
    ranks: tuple[int, ...] = ()
    outcome: str = "running"
    lasted_s: float = 0.0
    ettr: float = 0.0
    urls: tuple[str, ...] = ()
    attempts: list[NodeAttempt] = []
    stalls: list[Stall] = []


class Timeline:
    """When which step came, in one attempt: at most some thousand points, so that a month costs no more than an hour.

    Its clock stands while steps are trained that a rewind takes back.
    """

    def __init__(self) -> None:
        self.ready_s, self.first_step = 0.0, -1
        self.points: list[tuple[int, float]] = []
        self._every, self._skipped = 1, 0
        self._last: tuple[int, float] | None = None

    def add(self, records: Iterable[ProgressRecord]) -> bool:
        """Take the records of this moment in; return whether it is the first step."""
        rows = list(records)
        if not self.ready_s and not self.points:
            # What has loaded, and begins to train.
            self.ready_s = min((row.mark_s for row in rows if row.stage == "train" and not row.steps), default=0.0)
        # A step is done when the last rank has done it.
        slowest = min(rows, key=lambda row: (row.steps, -row.step_s), default=None)
        if slowest is None or not slowest.steps or (self._last is not None and self._last[0] == slowest.step):
            return False
        first, self._last = self._last is None, (slowest.step, slowest.step_s - slowest.thrown_s)
        while self.points and self.points[-1][0] >= slowest.step:
            self.points.pop()
        if first:  # short steps: some were done between two looks
            self.first_step = max(slowest.step - slowest.steps + 1, 0)
        self._skipped += 1
        if self._skipped >= self._every or first:
            self._skipped = 0
            self.points.append(self._last)
        if len(self.points) > _MOST_POINTS:
            self.points, self._every = self.points[::2], 2 * self._every
        return first

    @property
    def last(self) -> tuple[int, float]:
        """The last step, and when it came."""
        return self._last or (-1, 0.0)

    def counted(self, before: int | None = None) -> tuple[float, float]:
        """Return the seconds of training whose steps count, those below *before* (None: all), and of those that do not."""
        if self._last is None:
            return 0.0, 0.0
        begun_s = self.ready_s or self.points[0][1]
        reached = [at_s for step, at_s in (*self.points, self._last) if before is None or step < before]
        kept_s = max(reached, default=begun_s)
        return max(kept_s - begun_s, 0.0), max(self._last[1] - max(kept_s, begun_s), 0.0)


def close_attempt(attempt: NodeAttempt, timeline: Timeline, next_step: int | None = None) -> None:
    """Note what an attempt was worth, when *next_step* is the first that the next one trains; None: it has not begun."""
    attempt.counted_s, attempt.lost_s = timeline.counted(next_step)
    attempt.lost_steps = 0 if next_step is None else max(timeline.last[0] - next_step + 1, 0)


def effective(attempts: Sequence[NodeAttempt], lasted_s: float) -> float:
    """Return the time of steps that count ÷ all time."""
    return min(sum(attempt.counted_s for attempt in attempts) / lasted_s, 1.0) if lasted_s > 0 else 0.0


def figures_of(launch: NodeRun) -> RestartFigures:
    """Return what a launch tells its trainers."""
    *ended, now = launch.attempts
    last = ended[-1] if ended else now
    return RestartFigures(
        restarts=Counter("another node" if each.failure is None else each.failure.kind for each in ended),
        notice_s=last.notice_s,
        decide_s=last.decide_s,
        restart_s=last.restart_s,
        first_step_s=now.first_step_s,
        lost_steps=sum(each.lost_steps for each in ended),
        lost_s=sum(each.lost_s for each in ended),
        ettr=launch.ettr,
    )


# ------------------------------------------------------------------ files


def write_launch(folder: Path, launch: NodeRun) -> None:
    """Write it whole or not at all, under a name of its own: a launcher that is started again may have the same pid.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_BEGINS}{launch.host}-{launch.began_s:.0f}-{launch.pid}.json"
    write_whole(path, msgspec.json.format(msgspec.json.encode(launch)))


def read_launches(folder: Path) -> list[NodeRun]:
    """Return the launches noted in *folder*, or beside the traces of a run there, the oldest first, without damaged ones."""
    found = []
    for path in sorted([*folder.glob(f"{_BEGINS}*.json"), *(folder / MONITOR).glob(f"{_BEGINS}*.json")]):
        try:
            found.append(_decoder.decode(path.read_bytes()))
        except (OSError, msgspec.DecodeError):
            continue
    return sorted(found, key=lambda launch: launch.began_s)


_decoder = msgspec.json.Decoder(described(NodeRun))
