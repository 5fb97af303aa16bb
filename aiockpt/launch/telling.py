"""Texts of the launcher for people, on one screen: which rank, since when, at which step, doing what, and what follows."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence

from aiockpt.launch.detector import PERIOD_S, STEPS, StackSample, StallNotice, StallVerdict
from aiockpt.launch.history import NodeAttempt, NodeRun, Stall
from aiockpt.launch.restart_policy import NextStart, TrainerFailure, shorten
from aiockpt.runtime.progress import ProgressRecord
from aiockpt.units import count, duration, name_numbers

MOST_RANKS, MOST_FRAMES = 8, 5
_DOING = {"train": "after", "save": "in the save of", "load": "in a load after", "closed": "closed after"}


def find_behind(records: Mapping[int, ProgressRecord], samples: Mapping[int, StackSample]) -> tuple[int, ...]:
    """Return the ranks that the others wait for; empty where all look alike.

    Those are behind in step; else those that wait for no other, where others do; else those at a place of their own.
    """
    steps = {rank: record.step for rank, record in records.items()}
    if steps and min(steps.values()) < max(steps.values()):
        return tuple(sorted(rank for rank, step in steps.items() if step == min(steps.values())))
    alone = [rank for rank, sample in samples.items() if not _waits_for_ranks(sample)]
    if alone and len(alone) < len(samples):
        return tuple(sorted(alone))
    places = Counter(sample.place for sample in samples.values())
    if len(places) < 2:
        return ()
    ((common, most), *_) = places.most_common(1)
    others = tuple(sorted(rank for rank, sample in samples.items() if sample.place != common))
    return others if most > len(others) else ()


def _waits_for_ranks(sample: StackSample) -> bool:
    """Return whether a rank waits for others, as far as its innermost frame shows: a collective, a backward, a save."""
    innermost = sample.place[0]
    collective = any(part in innermost for part in ("/torch/distributed/", "/torch/autograd/graph.py:"))
    return collective or sample.waits_for == "aiockpt"


def in_short(place: tuple[str, ...]) -> str:
    """Return the innermost frames, without folders."""
    return " < ".join(shorten(frame) for frame in place[:MOST_FRAMES])


def of_notice(notice: StallNotice, records: Mapping[int, ProgressRecord]) -> str:
    """Return the line of a stall that was noticed this moment."""
    step = max(record.step for record in records.values())
    usual = f"; a step takes {duration(notice.median_s)}" if notice.median_s else ""
    return f"no rank here has progressed for {duration(notice.quiet_s)}, in step {step}{usual}. Looking at the stacks"


def of_stall(
    stall: Stall,
    records: Mapping[int, ProgressRecord],
    samples: Mapping[int, StackSample],
    verdict: StallVerdict | None = None,
    *,
    hang_s: float | None = None,
) -> str:
    """Return what a stall looks like; without a *verdict*, of ranks that stand while others go on."""
    if verdict is None:
        lines = [f"{_stands(stall.ranks)} still for {duration(stall.quiet_s)}, and others here go on:"]
    else:
        lines = [_of_behind(stall, records)]
    shown = [*stall.behind, *(rank for rank in samples if rank not in stall.behind)][:MOST_RANKS]
    for rank in shown:
        record, why = records[rank], "" if verdict is None else verdict.why.get(rank, "")
        doing = f"{_DOING[record.stage]} step {record.step}"
        lines.append(f"  rank {rank:<4} {doing}: {in_short(samples[rank].place)}{f'  [{why}]' if why else ''}")
        if record.beside and record.stage != "train":
            lines.append(f"            the engine's last: {record.beside}")
    if len(samples) > len(shown):
        lines.append(f"  {count(len(samples) - len(shown), 'rank')} more")
    if stall.folder:
        lines.append(f"  all stacks: {stall.folder}")
    if verdict is not None:
        lines.append(f"  {_what_follows(stall, verdict, hang_s)}")
    return "\n".join(lines)


def _of_behind(stall: Stall, records: Mapping[int, ProgressRecord]) -> str:
    if not stall.behind:
        return f"all ranks here stand in step {stall.step}, alike:"
    others = [record.step for rank, record in records.items() if rank not in stall.behind]
    waiting = f", and the others wait for it in step {max(others)}" if others else ""
    return f"{_stands(stall.behind)} in step {records[stall.behind[0]].step}{waiting}:"


def _what_follows(stall: Stall, verdict: StallVerdict, hang_s: float | None) -> str:
    if verdict.why:
        return "what follows: nothing. A process that is busy is left alone"
    limit_s = hang_s or max(PERIOD_S, STEPS * stall.median_s)
    return f"what follows: if all of them stand there for {duration(limit_s)}, it is a hang, and all ranks are ended"


def of_hang(behind: Sequence[int], records: Mapping[int, ProgressRecord], now_s: float) -> str:
    """Return the line of a stall that was decided to be a hang."""
    quiet_s = now_s - max(record.mark_s for record in records.values())
    step = records[behind[0]].step
    quiet = duration(quiet_s)
    return f"a hang of {_ranks(behind)} in step {step}: all here stood at one place, and nothing came for {quiet}"


def of_failure(failure: TrainerFailure, attempt: NodeAttempt, decision: NextStart, folder: str) -> str:
    """Return the line of a failure, and what follows."""
    lines = [f"attempt {attempt.number} failed after {duration(attempt.lasted_s)}: {failure}"]
    if folder:
        lines.append(f"  its files: {folder}")
    if decision.reason:
        lines.append(f"STOPPED: {decision.reason}")
    elif decision.pause_s:
        lines.append(f"  the next start waits {duration(decision.pause_s)}")
    return "\n".join(lines)


def of_restart(before: NodeAttempt, attempt: NodeAttempt, ettr: float) -> str:
    """Return the line of a restart whose first step is done."""
    noticed = f"noticed after {duration(before.notice_s)}, ended after {duration(before.decide_s)}, "
    return (
        f"attempt {attempt.number} trains from step {attempt.first_step}: {noticed if before.notice_s else ''}"
        f"restarted in {duration(before.restart_s)}, first step {duration(attempt.first_step_s)} later; "
        f"{count(before.lost_steps, 'step')} lost ({duration(before.lost_s)}); ETTR {ettr:.1%}"
    )


def of_launch(launch: NodeRun) -> str:
    """Return the table of a launch."""
    ranks = count(len(launch.ranks), "rank")
    told = any(attempt.first_step >= 0 for attempt in launch.attempts)
    ettr = f", ETTR {launch.ettr:.1%}" if told else ""
    lines = [f"{launch.outcome} after {duration(launch.lasted_s)}, {ranks} on {launch.host}{ettr}"]
    if len(launch.attempts) > 1 or launch.stalls:
        columns = ("attempt", "steps", "lasted", "noticed", "decided", "restart", "first step", "lost", "ended by")
        lines += _columns([columns, *map(_row, launch.attempts)])
    lines += [_stall_row(stall) for stall in launch.stalls]
    return "\n".join(lines)


def _row(attempt: NodeAttempt) -> tuple[str, ...]:
    steps = f"{attempt.first_step}–{attempt.last_step}" if attempt.first_step >= 0 else "–"
    times = attempt.lasted_s, attempt.notice_s, attempt.decide_s, attempt.restart_s, attempt.first_step_s
    lost = f"{attempt.lost_steps} ({duration(attempt.lost_s)})" if attempt.lost_steps else "0"
    return (
        str(attempt.number),
        steps,
        *(duration(each) if each else "–" for each in times),
        lost,
        str(attempt.failure or "–"),
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _stall_row(stall: Stall) -> str:
    who = _ranks(stall.behind or stall.ranks)
    where = next((stall.places[str(rank)] for rank in stall.behind or stall.ranks if str(rank) in stall.places), "")
    at = f" at {where}" if where else ""
    return f"  stall in step {stall.step}, noticed after {duration(stall.quiet_s)}: {who}{at}; {stall.ended or 'it goes on'}"


def _ranks(ranks: Sequence[int]) -> str:
    return name_numbers("rank", ranks, MOST_RANKS)


def _stands(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'stands' if len(ranks) == 1 else 'stand'}"


def name_status(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
