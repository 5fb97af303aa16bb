"""The sequence of a proof: run a script straight, kill it and resume it, run a control, compare, and report the result.

1. *straight*: an uninterrupted run; the others are compared with it.
2. *killed*, *resumed*, …: one line of starts in one place; each but the last ends by a kill that a seed draws.
3. *control*: like the first resumed start, from the same files, but its load leaves the state unchanged. A row that does not
   differ there cannot reveal a missing load, and does not count as shown.
4. *again*: a second straight run, only where something differs. Differences between the two straight runs are not caused by
   the resume.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from aiockpt.errors import UsageError
from aiockpt.prove.assignment import Kill, ProofJob
from aiockpt.prove.certificate import Certificate, Evidence, judge
from aiockpt.prove.compare import (
    RESUME,
    Comparison,
    Findings,
    Reference,
    compare_reshaped,
    saved_views,
)
from aiockpt.prove.inline import InlineRunner, ProcessRunner, Tick
from aiockpt.prove.records import Begun, Ended, Labelled, LoadDone, SaveDone, Stepped
from aiockpt.prove.starts import Proof, Runner, Start
from aiockpt.prove.watched_calls import url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Places of the kills: drawn from the records of the straight run, by a seed, so that they can be repeated.


def draw_kills(straight: Start, count: int, seed: int) -> list[Kill]:
    """Return up to *count* kills, in the order of the training: in turn inside a save and between two steps.

    Each comes after the first save, so that a resume has a step to load. An empty list: the run is too short.
    """
    dice = random.Random(seed)
    places = _places(straight, dice)
    kills: list[Kill] = []
    for number in range(count):
        window = places[len(places) * number // count : len(places) * (number + 1) // count]
        wanted = [kill for kill in window if (kill.kind == "step") == bool(number % 2)] or window
        if wanted:
            kills.append(dice.choice(wanted))
    return kills


def _places(straight: Start, dice: random.Random) -> list[Kill]:
    """Return every place after the first save: each later save, and each optimizer step."""
    calls = {rank: {done.step: done.calls for done in straight.of(SaveDone, rank)} for rank in straight.ranks}
    ranks: Sequence[int] = sorted(straight.ranks)
    places: list[Kill] = []
    first: int | None = None
    for record in straight.ranks[0]:
        if isinstance(record, Labelled) and record.saved:
            if first is not None and record.step != first:
                places.append(_in_save(record.step, calls, dice.choice(ranks), dice))
            first = record.step if first is None else first
        elif isinstance(record, Stepped) and first is not None:
            rank = dice.choice(ranks)
            places.append(Kill(kind="step", label=record.label, count=record.count, rank=rank))
    return places


def _in_save(step: int, calls: dict[int, dict[int, int]], rank: int, dice: random.Random) -> Kill:
    number = calls[rank].get(step, 0)
    if not number:  # another process writes, or it was not committed: the kill comes while it is under way
        return Kill(kind="call", label=step, rank=rank)
    return Kill(kind="save", label=step, call=dice.randrange(number), rank=rank)


PRINTED = "printed loss"
CONTROL_STEPS = 8
"""Optimizer steps after which a control may end."""
SHORT = (
    "the run is too short to be killed and resumed: it needs a save, and then at least one optimizer step or another save; "
    "train longer, or save more often"
)


def certify(
    script: Callable[[], object] | Sequence[str],
    how: Proof = Proof(),  # noqa: B008  frozen
    *,
    folder: Path | None = None,
    tick: Tick | None = None,
    on_start: Callable[[Start], object] = lambda start: None,
) -> Certificate:
    """Prove that a resume of *script* is the same run, or find the first difference.

    Args:
        script: a command, started as processes and killed by SIGKILL; or a function without arguments, which makes its own
            ``Checkpointer`` and is called anew for each start (a kill is simulated then: see `aiockpt.prove.inline`).
        folder: for records, logs and scratch checkpoints; None: a temporary one, removed at the end.
        tick: called with the progress.
        on_start: called with each start when it is over.

    Raises:
        UsageError: the script cannot be proved: it fails, saves nothing, is too short, does not end in time.
    """
    runner: Runner = (
        InlineRunner(script) if callable(script) else ProcessRunner(script, how.timeout_s, _compile(how.loss), tick)
    )
    with _work_folder(folder, fast=callable(script)) as work:
        return _Proof(runner, how, work, on_start).run()


class _Proof:
    """One proof under way."""

    def __init__(self, runner: Runner, how: Proof, folder: Path, on_start: Callable[[Start], object]) -> None:
        self._runner, self._how, self._folder, self._on_start = runner, how, folder, on_start
        self._starts: list[Start] = []
        self._early = folder / "place-of-the-control"

    def run(self) -> Certificate:
        """Run everything and return the certificate."""
        straight = self._run("straight", self._folder / "place-straight")
        _check_straight(straight)
        if self._how.loss is not None and not straight.printed:
            raise UsageError(f"--loss {self._how.loss!r} matches nothing that the script prints:\n{straight.tail}")
        kills = draw_kills(straight, self._how.kills, self._how.seed)
        if not kills:
            raise UsageError(SHORT)
        line = self._run_line(kills)
        findings = self._compare(straight, line)
        control = Findings()
        if self._early.exists():
            how = self._how.resume_with
            started = self._run("control", self._early, how, withhold=True, stop_after=CONTROL_STEPS)
            self._compare_one(straight, started, line[:1], control, to_the_end=False)
        again = None
        idle, ignored = self._idle(straight, findings), self._ignored(findings)
        if findings.differing() - idle - ignored:
            again = Findings()
            twice = self._run("again", self._folder / "place-again")
            self._compare_one(straight, twice, [], again, to_the_end=True)
        return judge(self._runner, self._how, self._starts, Evidence(findings, control, again, idle, ignored))

    # ------------------------------------------------------------------ runs

    def _run(
        self,
        name: str,
        place: Path,
        command: Sequence[str] | None = None,
        *,
        kill: Kill | None = None,
        withhold: bool = False,
        stop_after: int | None = None,
    ) -> Start:
        job = ProofJob(
            folder=str((self._folder / name.replace(" ", "-")).resolve()),
            place=str(place.resolve()),
            kill=kill,
            withhold=withhold,
            stop_after=stop_after,
            spread=self._how.resume_with is not None,
            as_is=tuple(map(url_of, self._how.as_is)),
            inline=isinstance(self._runner, InlineRunner),
        )
        start = self._runner.run(name, job, command)
        self._starts.append(start)
        self._on_start(start)
        return start

    def _run_line(self, kills: Sequence[Kill]) -> list[Start]:
        """Return the killed and resumed starts, up to the first that ran to its end."""
        place = self._folder / "place"
        line: list[Start] = []
        for kill in [*kills, None]:
            name = "killed" if not line else f"resumed {len(line)}" if len(kills) > 1 else "resumed"
            command = self._how.resume_with if line else None
            line.append(self._run(name, place, command, kill=kill))
            if len(line) == 1:
                _check_killed(line[0])
                # Before the next start, which saves and deletes here: the control must begin from the same files.
                shutil.copytree(place, self._early)
            if line[-1].died is None:
                break
        return line

    # ------------------------------------------------------------------ comparisons

    def _compare(self, straight: Start, line: Sequence[Start]) -> Findings:
        findings = Findings()
        for number, start in enumerate(line):
            self._compare_one(straight, start, line[:number], findings, to_the_end=start.died is None)
        return findings

    def _compare_one(
        self, straight: Start, start: Start, before: Sequence[Start], findings: Findings, *, to_the_end: bool
    ) -> None:
        if before and not start.ranks:
            _judge_resume(start, findings, "an aiockpt.Checkpointer", "none was made", start.tail)
            return
        if self._how.resume_with is not None and before:
            compare_reshaped(straight, start, before, findings, self._how.close, to_the_end=to_the_end)
        else:
            for rank in straight.ranks:
                saved = saved_views([earlier.ranks.get(rank, ()) for earlier in before])
                comparison = Comparison(Reference(straight.ranks[rank]), findings, start.name, rank, self._how.close)
                seen = start.ranks.get(rank, ())
                if start.died is not None:  # ranks ended by the death of another one closed in the middle
                    seen = [record for record in seen if not isinstance(record, Ended)]
                comparison.run(seen, saved, to_the_end=to_the_end)
        if start.died is None and start.status:
            _judge_resume(start, findings, "it ends well", f"it fails with status {start.status}", start.tail)
        elif before and start.loaded is None:
            steps = sorted({step for earlier in before for step in earlier.committed})
            expected = f"it goes on from step {steps[-1] if steps else '?'}"
            _judge_resume(start, findings, expected, "it began anew", _why_not_loaded(start, before))
        elif before:
            _judge_resume(start, findings)
        _compare_printed(straight, start, findings)

    def _idle(self, straight: Start, findings: Findings) -> set[str]:
        """Return the rows of random generators that no rank draws from."""
        return set.intersection(set(findings.rows), *(Reference(records).idle() for records in straight.ranks.values()))

    def _ignored(self, findings: Findings) -> set[str]:
        return {row for row in findings.rows if any(fnmatch(row, pattern) for pattern in self._how.ignore)}


def _check_straight(straight: Start) -> None:
    """Raise UsageError unless there is something to prove."""
    said = f" Its last lines:\n{straight.tail}" if straight.tail else " It printed nothing."
    if straight.status:
        raise UsageError(f"the script fails by itself, with status {straight.status}, before any kill.{said}")
    if not straight.ranks:
        raise UsageError(f"the script ended without making an aiockpt.Checkpointer: nothing can be proved.{said}")
    if not straight.committed:
        raise UsageError(f"the script saved nothing: call ckpt.save(), or ckpt.step() with every=….{said}")


def _check_killed(killed: Start) -> None:
    if killed.died is None:
        raise UsageError(
            f"the run ended before it could be killed ({killed.kill.explain() if killed.kill else ''}), though the straight "
            f"run reached that place: the script is not reproducible. Its last lines:\n{killed.tail}"
        )


def _why_not_loaded(start: Start, before: Sequence[Start]) -> str:
    """Return why a start did not resume from the steps that were there."""
    urls = [{url for begun in other.of(Begun) for url in begun.urls} for other in (before[0], start)]
    if urls[0] != urls[1]:
        return f"its load used another place: {', '.join(sorted(urls[1]))}, and not in {', '.join(sorted(urls[0]))}"
    if start.of(LoadDone):
        return "its load found nothing"
    return "it never called load() or resume() and waited for the result"


def _judge_resume(start: Start, findings: Findings, expected: str = "", found: str = "", note: str = "") -> None:
    what, at = "how the script starts again", "at the start"
    findings.judge(RESUME, what, expected, found, at=at, order=(-2, 0), start=start.name, note=note)


def _compare_printed(straight: Start, start: Start, findings: Findings) -> None:
    """Compare printed losses: by their steps, or else from the end backwards."""
    if not straight.printed or start.died is not None or not start.printed:
        return
    steps = {step: text for step, text in straight.printed if step is not None}
    if steps:
        pairs = [(steps.get(step), text, f"at step {step}") for step, text in start.printed if step is not None]
    else:
        twins = list(zip(reversed(straight.printed), reversed(start.printed), strict=False))
        pairs = [
            (text, other, f"in line {number} from the end") for number, ((_, text), (_, other)) in enumerate(twins, 1)
        ]
    for expected, text, at in pairs:
        what, shown, equal = "what the script prints", expected or "no such line", expected == text
        findings.judge(PRINTED, what, shown, text, at=at, order=(1 << 30, 0), start=start.name, equal=equal)


def _compile(loss: str | None) -> re.Pattern[str] | None:
    try:
        return None if loss is None else re.compile(loss)
    except re.error as error:
        raise UsageError(f"--loss {loss!r} is no regular expression: {error}") from error


@contextmanager
def _work_folder(folder: Path | None, *, fast: bool) -> Iterator[Path]:
    """Yield the folder to work in: *folder*, which must be new or empty, or one that is removed at the end."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty: give --dir a new folder, so that nothing of yours is mixed in")
        yield folder
        return
    memory = "/dev/shm" if fast and Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="aiockpt-prove-", dir=memory, ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)
