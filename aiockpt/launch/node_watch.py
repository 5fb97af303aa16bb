"""The watch over the trainers of one node, over all their starts: looks at them, tells people, keeps the history.

Guarantees: no call blocks longer than some milliseconds, and a folder that cannot be written to costs the files alone.
"""

from __future__ import annotations

import fcntl
import operator
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from aiockpt.launch import telling
from aiockpt.launch.detector import Detector, StackSample, StallNotice
from aiockpt.launch.history import (
    MONITOR,
    NodeAttempt,
    NodeRun,
    Stall,
    Timeline,
    close_attempt,
    effective,
    figures_of,
    write_launch,
)
from aiockpt.launch.restart_policy import NextStart, RestartPolicy, TrainerFailure
from aiockpt.launch.trainers import NO_ANSWER, Trainers
from aiockpt.redaction import redact
from aiockpt.runtime.progress import FOLDER, ProgressRecord, write_figures

POLLS_APART_S = 0.1
ANSWER_S = 0.3
"""For the processes to write their stacks: milliseconds, on a quiet machine."""
WRITTEN_APART_S = 60.0
"""The history of a run without events: its effective time goes on."""
SHOWN_AFTER = 3
"""Samples before people are told what a stall looks like."""
STANDS_S, LOOKS_APART_S, ENDS_APART_S = 5.0, 1.0, 0.05
"""For a trainer that was told to end to stand with nothing to save, before it is killed; between looks at it, at its end."""
MOVED = 2
"""Looks in a row at which it was elsewhere."""
SHARED, ORPHAN_S = "aiockpt-run-", 60.0
"""Of the folders, locked, that launchers share with their trainers: prefix, and age from which one without a lock goes."""
Agree = Callable[[bool], bool]


def say(text: str) -> None:
    """Write lines for people, on standard error; a training does not end with who reads them."""
    try:
        sys.stderr.write("".join(f"aiockpt run: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()
    except BrokenPipeError:  # what stays in its buffer would be the exit status
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)
    except OSError:
        pass


class _TrainerLook(msgspec.Struct):
    """Where a trainer that was told to end was seen: first at *place*, and *elsewhere* in so many looks in a row.

    After `MOVED` of these it has moved, for good: on a busy machine one may see half a stack. A stopped process never
    answers.
    """

    place: tuple[str, ...]
    since_s: float
    elsewhere: int = 0

    def add(self, place: tuple[str, ...], now_s: float) -> None:
        if self.place[0].startswith(NO_ANSWER):
            self.place = place
        if self.elsewhere >= MOVED or place[0].startswith(NO_ANSWER):
            return
        if any(map(operator.ne, self.place, place)):
            self.elsewhere, self.since_s = self.elsewhere + 1, now_s
        else:
            self.elsewhere = 0

    def stands_for(self, now_s: float) -> float:
        """Return for how many seconds it has been at its place; 0 where it is elsewhere."""
        return 0.0 if self.elsewhere else now_s - self.since_s


class NodeWatch:
    """Watches the trainers of one node.

    Args:
        folder: of the run, for evidence and history; made when there is something to write.
        hang_s: as for `Detector`.
        report: takes lines for people.
    """

    def __init__(
        self, folder: Path, run_id: str, *, hang_s: float | None = None, report: Callable[[str], object] = say
    ) -> None:
        self.folder, self._hang_s, self._report = folder, hang_s, report
        self.launch = NodeRun(run_id=run_id, host=socket.gethostname(), pid=os.getpid(), began_s=time.time())
        self._decider = RestartPolicy()
        self._began_s = self._started_s = time.monotonic()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._shared = Path(tempfile.mkdtemp(prefix=SHARED, dir=memory))
        self._lock = os.open(self._shared, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        remove_orphans(self._shared.parent)
        self._trainers = Trainers(self._shared, ())
        self._records: dict[int, ProgressRecord] = {}
        self._timeline = Timeline()
        self._trained: tuple[NodeAttempt, Timeline] | None = None
        self._stall: Stall | None = None
        self._signalled: set[int] = set()
        self._has_steps = False
        self._written_s = 0.0

    # ------------------------------------------------------------------ attempts

    def begin_attempt(self, ranks: Sequence[int], world_size: int, agree: Agree = bool) -> None:
        """Begin to watch the trainers of *ranks*, which start now and inherit the environment of this process.

        Args:
            agree: told whether all ranks here hang, returns whether all nodes say so.
        """
        self._trainers.close()
        now_s, number = time.monotonic(), len(self.launch.attempts)
        if number:
            self._attempt.restart_s = now_s - self._started_s - self._attempt.lasted_s
        memory = self._shared / f"attempt-{number}"
        try:
            memory.mkdir()
        except OSError as error:  # full, or removed when the user's last login session has ended
            self._report(f"the progress of the trainers is not seen: {error}")
        os.environ[FOLDER] = str(memory)
        self._trainers, self._agree, self._started_s = Trainers(memory, ranks), agree, now_s
        self._detector, self._records = Detector(hang_s=self._hang_s), {}
        if number and self._timeline.points:
            self._trained = self._attempt, self._timeline
        self._timeline = Timeline()
        self._next_s = self._requested_s = 0.0
        self._samples_count = 0
        self._behind: StallNotice | None = None
        self._signalled = set()
        self.launch.ranks = tuple(ranks)
        self.launch.attempts.append(NodeAttempt(number=number, began_s=time.time(), world_size=world_size))

    def fail(self, failure: TrainerFailure) -> NextStart:
        """Note that the attempt has failed; return what to do."""
        decision = self._decider.decide(failure)
        self._end_attempt(failure)
        self._report(telling.of_failure(failure, self._attempt, decision, self._keep_evidence()))
        self.write()
        return decision

    def leave(self) -> None:
        """Note that the trainers are restarted with other nodes."""
        self._end_attempt(None)
        self._report("another node has failed, come or gone: the trainers here are restarted with it")

    def end(self, outcome: str) -> None:
        """Note how all of it ended, tell the table, and remove what was shared with the trainers."""
        if self.launch.attempts and not self._attempt.lasted_s:
            self._end_attempt(None)
        self.launch.outcome = outcome
        if self._has_steps or len(self.launch.attempts) > 1:
            self.write()
            self._report(f"{telling.of_launch(self.launch)}\n  the history: {self.folder}")
        self._trainers.close()
        os.environ.pop(FOLDER, None)
        shutil.rmtree(self._shared, ignore_errors=True)
        os.close(self._lock)

    @property
    def _attempt(self) -> NodeAttempt:
        return self.launch.attempts[-1]

    def _end_attempt(self, failure: TrainerFailure | None) -> None:
        now_s = time.monotonic()
        self._read()
        attempt, records = self._attempt, self._records.values()
        attempt.lasted_s, attempt.failure = now_s - self._started_s, failure
        # What the others did after one had ended is no progress.
        ended = None if failure is None or failure.kind == "hang" else self._records.get(failure.rank)
        last_s = max((record.mark_s for record in (records if ended is None else [ended])), default=0.0)
        attempt.decide_s = attempt.notice_s = now_s - last_s if last_s and failure is not None else 0.0
        if self._stall is not None and failure is not None:
            attempt.notice_s = self._stall.quiet_s
        attempt.last_step = self._timeline.last[0]
        attempt.commits = max((record.commits for record in records), default=0)
        close_attempt(attempt, self._timeline)
        self._end_stall("it ended with this attempt")

    def _read(self) -> None:
        self._records = self._trainers.read()
        if not self._timeline.add(self._records.values()):
            return
        step, (_, at_s) = self._timeline.first_step, self._timeline.last
        self._has_steps, attempt = True, self._attempt
        attempt.first_step, attempt.first_step_s = step, at_s - self._started_s
        self.launch.urls = self.launch.urls or self._trainers.urls()
        if attempt.number:
            if self._trained is not None:
                close_attempt(*self._trained, step)
            self._count()
            self._report(telling.of_restart(self.launch.attempts[-2], attempt, self.launch.ettr))
        self.write()

    # ------------------------------------------------------------------ looking

    def poll(self) -> TrainerFailure | None:
        """Look at the trainers, as often as wanted; return a failure when they are decided to hang."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + POLLS_APART_S
        self._read()
        for rank, text in self._trainers.notes():
            self._report(f"rank {rank} tells: {redact(text)}")
        if self._has_steps and now_s - self._written_s > WRITTEN_APART_S:
            self.write()
        self._notice(now_s)
        if self._requested_s:
            return self._collect(now_s) if now_s - self._requested_s >= ANSWER_S else None
        if self._behind is not None or self._detector.is_sample_due(now_s):
            self._requested_s = now_s
            self._trainers.request_stacks(self._records)
        return None

    def _notice(self, now_s: float) -> None:
        notice = self._detector.observe(now_s, self._records)
        if notice is not None and notice.all_stand:
            self._samples_count = 0
            self._stall = self._as_stall(notice, {})
            self.launch.stalls.append(self._stall)
            self._report(telling.of_notice(notice, self._records))
        elif notice is not None:
            self._behind = notice
        if self._stall is not None and self._detector.noticed is None:
            self._agree(False)
            self._end_stall("it went on by itself")

    def _collect(self, now_s: float) -> TrainerFailure | None:
        self._requested_s = 0.0
        samples = self._trainers.sample(self._records)
        if self._behind is not None:
            notice, self._behind = self._behind, None
            self._report(telling.of_stall(self._as_stall(notice, samples), self._records, samples))
        if self._stall is None or self._detector.noticed is None:
            return None
        verdict = self._detector.add(now_s, samples)
        self._samples_count += 1
        if self._samples_count == SHOWN_AFTER:
            self._stall = self.launch.stalls[-1] = self._as_stall(self._detector.noticed, samples)
            self._report(telling.of_stall(self._stall, self._records, samples, verdict, hang_s=self._hang_s))
            self.write()
        # A rank that has told nothing may be at work, or one that is not watched.
        seen = len(samples) == len(self._trainers.ranks) and not self._trainers.has_others()
        if not self._agree(verdict.hung and seen):
            return None
        behind = telling.find_behind(self._records, samples) or tuple(samples)
        self._report(telling.of_hang(behind, self._records, now_s))
        return self._describe(behind[0], "hang", samples[behind[0]].place[0])

    def _as_stall(self, notice: StallNotice, samples: Mapping[int, StackSample]) -> Stall:
        return Stall(
            at_s=self._stall.at_s if self._stall else time.time(),
            attempt=self._attempt.number,
            quiet_s=notice.quiet_s,
            median_s=notice.median_s,
            ranks=notice.ranks,
            step=max((record.step for record in self._records.values()), default=-1),
            behind=telling.find_behind(self._records, samples) if notice.all_stand else notice.ranks,
            places={str(rank): telling.in_short(sample.place) for rank, sample in samples.items()},
            folder=self._keep_evidence() if samples else "",
        )

    def _end_stall(self, how: str) -> None:
        if self._stall is None:
            return
        self.launch.stalls[-1] = msgspec.structs.replace(self._stall, ended=how)
        if self._samples_count >= SHOWN_AFTER:
            self._report(f"the stall in step {self._stall.step} is over: {how}")
        self._stall = None

    # ------------------------------------------------------------------ failures

    def end_trainers(self, pids: Mapping[int, int], number: int, timeout_s: float, *, failed: bool) -> None:
        """Send the trainers *pids* a signal; return when they have ended, or after *timeout_s*.

        One that stands in a collective with a dead rank would take all of that. Killed is one whose training thread stays
        where it was before, outside of aiockpt, for `STANDS_S`, and that has no save in flight; if a rank here has *failed*,
        or the ranks could not agree: then they cannot make another one.
        """
        running = {rank: pid for rank, pid in pids.items() if _runs(pid)}
        self._signalled |= running.keys()
        looks: dict[int, _TrainerLook] = {}
        records = self._trainers.read()
        if running:
            self._trainers.request_stacks(records)
        for rank, pid in running.items():
            # The workers of a trainer that may save outlive it; below a script, all are told, as by torch's agent.
            is_trainer = rank in records and records[rank].pid == pid
            (os.kill if is_trainer else _signal_group)(pid, number)
        began_s = looked_s = time.monotonic()
        while running and (now_s := time.monotonic()) < began_s + timeout_s:
            if now_s >= looked_s + LOOKS_APART_S:
                looked_s = now_s
                for rank, where in self._find_standing(running, looks, now_s, failed=failed):
                    if _runs(pid := running[rank]):
                        self._report(f"rank {rank} stands still, and has nothing to save: it is killed at {where}")
                        _signal_group(pid, signal.SIGKILL)
            time.sleep(ENDS_APART_S)
            for rank in [rank for rank, pid in running.items() if not _runs(pid)]:
                _signal_group(running.pop(rank), number)

    def _find_standing(
        self, pids: Mapping[int, int], looks: dict[int, _TrainerLook], now_s: float, *, failed: bool
    ) -> Iterator[tuple[int, str]]:
        """Yield the ranks of *pids* that stand where they were at first, and can save nothing any more, with that place."""
        records = self._trainers.read()
        samples = self._trainers.sample(records)
        for rank in pids.keys() & records.keys():
            place, record = samples[rank].place, records[rank]
            look = looks.setdefault(rank, _TrainerLook(place, now_s - LOOKS_APART_S))
            look.add(place, now_s)
            # Below another launcher, which would be killed, the trainers would go on without it.
            stands = record.pid == pids[rank] and look.stands_for(now_s) >= STANDS_S
            stands = stands and samples[rank].waits_for != "aiockpt"
            if stands and not record.pending and (failed or record.disagreed):
                yield rank, telling.in_short(place)
        self._trainers.request_stacks(records)

    def describe_exits(self, statuses: Mapping[int, int]) -> TrainerFailure:
        """Return the failure of an attempt whose ranks have ended with *statuses*: minus the number of a signal.

        A signal comes before the exceptions that it brings to other ranks, and of those the first counts. How the others end
        that torch's agent tells to, or kills, is no failure.
        """
        self._read()
        statuses = {rank: status for rank, status in statuses.items() if status != -signal.SIGTERM} or statuses
        own = {rank: status for rank, status in statuses.items() if rank not in self._signalled} or statuses
        killed = [rank for rank, status in own.items() if status < 0]
        crash = None if killed else self._trainers.first_crash(list(statuses))
        if crash is not None:
            return self._describe(*crash)
        rank = min(killed or own)
        return self._describe(rank, telling.name_status(own[rank]))

    def _describe(self, rank: int, kind: str, where: str = "") -> TrainerFailure:
        record = self._records.get(rank)
        return TrainerFailure(
            kind=kind,
            where=where,
            rank=rank,
            step=-1 if record is None else record.step,
            told=record is not None,
            commits=max((one.commits for one in self._records.values()), default=0),
        )

    # ------------------------------------------------------------------ files

    def _keep_evidence(self) -> str:
        """Copy the stacks and notes of this attempt to the folder of the run; return where they lie, if there are any."""
        target = self.folder / f"attempt-{self._attempt.number}"
        try:
            return str(target) if self._trainers.keep(target) else ""
        except OSError as error:
            self._report(f"{target}: the evidence cannot be kept there: {error}")
            return ""

    def write(self) -> None:
        """Write the history, beside the evidence and, where that is a folder with traces, beside the run. Tell trainers."""
        self._count()
        self._written_s = time.monotonic()
        roots = [
            Path(url.removeprefix("file://")) for url in self.launch.urls if "://" not in url.removeprefix("file://")
        ]
        with suppress(OSError):
            write_figures(self._shared, figures_of(self.launch))
        for folder in [self.folder, *(root / MONITOR for root in roots if (root / MONITOR).is_dir())]:
            with suppress(OSError):
                write_launch(folder, self.launch)

    def _count(self) -> None:
        self.launch.lasted_s = time.monotonic() - self._began_s
        if self.launch.attempts and not self._attempt.lasted_s:
            close_attempt(self._attempt, self._timeline)
        self.launch.ettr = effective(self.launch.attempts, self.launch.lasted_s)


def _runs(pid: int) -> bool:
    """Return whether a child has not ended; its status is left to who waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to a child that is not waited for yet, and to all in its process group if it leads one."""
    with suppress(OSError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)


def remove_orphans(parent: Path) -> None:
    """Remove what killed launchers of this user have left in *parent*: the lock of a process ends with it."""
    for folder in parent.glob(f"{SHARED}*"):
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                if found.st_uid == os.geteuid() and found.st_mtime < time.time() - ORPHAN_S:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
