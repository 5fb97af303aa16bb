"""Dead runs below a folder, and the deletion of their steps by the rules of retention.

Guarantees:

- A run is dead when nothing below its root was written for a given time, by the storage's dates and clock, and no heartbeat
  or lease shows otherwise. A run with an undated object, or with a part that cannot be listed, is skipped.
- Each run is listed right before any of its objects is deleted, and a failure in one run does not stop the others.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
from rich.markup import escape

from aiockpt.errors import CheckpointError
from aiockpt.format.names import parse_step
from aiockpt.monitor.live_job import JobWatch
from aiockpt.options import Retention
from aiockpt.pipeline.collect import find_reader, plan_removal, remove
from aiockpt.pipeline.discover import StepEntry, scan
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import storage_now_ns, walk
from aiockpt.tools.cli.show import ago, count, freed, print_table, say, size
from aiockpt.tools.cli.survey import open_place
from aiockpt.units import duration


class RunBelow(msgspec.Struct, kw_only=True):
    """A run below a folder, and its outcome.

    Attributes:
        run: its place.
        steps: their number, unfinished ones included; *bytes*: of all objects in their folders.
        changed_ns: time of the last write below its root, by the storage's clock; 0 where unknown.
        stays: reason for skipping it; empty for a dead run.
        kept: the steps that stay in a dead run, the newest first.
        freed_bytes: deleted bytes, or those that would be.
        left: (step id, reason) of each step that could not be deleted.
        problem: reason for an incomplete deletion; empty where it is complete.
    """

    run: str
    steps: int = 0
    bytes: int = 0
    changed_ns: int = 0
    stays: str = ""
    kept: tuple[int, ...] = ()
    freed_bytes: int = 0
    left: tuple[tuple[str, str], ...] = ()
    problem: str = ""


async def find_roots(backend: Backend) -> tuple[list[str], dict[str, str]]:
    """Return the folders at and below the root that hold steps, and those that cannot be listed, with the reasons."""
    roots: list[str] = []
    unread: dict[str, str] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            below = (await backend.list(folder)).folders
        except CheckpointError as error:
            unread[folder] = str(error)
            continue
        others = [name for name in reversed(below) if parse_step(name.rpartition("/")[2]) is None]
        folders += others
        if len(others) < len(below):
            roots.append(folder)
    return roots, unread


def clean_run(place: str | Path, *, older_than_s: float, keep: int, delete: bool) -> RunBelow:
    """Delete the surplus steps of the run at *place* if it is dead; without *delete* only list them.

    Args:
        keep: number of the newest whole steps that stay; 0 deletes all.
    """
    found = RunBelow(run=str(place))
    try:
        backend = open_place(place)
        sizes = anyio.run(_inspect, backend, found, older_than_s)
        if found.stays or not found.steps:
            return found
        if keep:
            # Nothing here is younger than *older_than_s*: a grace of a day would spare attempts of younger runs.
            _prune(place, found, sizes, Retention(last=keep, grace_s=min(older_than_s, Retention().grace_s)), delete)
        else:
            plan = anyio.run(plan_removal, backend, None)
            if delete:
                anyio.run(remove, backend, plan)
            found.freed_bytes = plan.bytes
    except (CheckpointError, OSError) as error:
        found.problem = str(error)
    return found


async def _inspect(backend: Backend, found: RunBelow, older_than_s: float) -> Counter[str]:
    """Fill in the facts of a run; return the bytes by folder, of steps and of attempts."""
    sizes: Counter[str] = Counter()
    dates = []
    async for stat in walk(backend, ""):
        dates.append(stat.modified_ns)
        step_id, _, rest = stat.key.partition("/")
        if rest and parse_step(step_id) is not None:
            sizes.update({step_id: stat.size, f"{step_id}/{rest.partition('/')[0]}": stat.size})
    entries = [entry for entry in await scan(backend) if entry.committed or entry.attempts]
    found.steps, found.bytes = len(entries), sum(sizes[entry.id] for entry in entries)
    found.changed_ns = max(dates) if dates and min(dates) > 0 else 0
    if entries:
        found.stays = await _why_it_stays(backend, found, entries, older_than_s)
    return sizes


async def _why_it_stays(backend: Backend, found: RunBelow, entries: list[StepEntry], older_than_s: float) -> str:
    if not found.changed_ns:
        return "when it was last written is not known"
    if await storage_now_ns(backend, secrets.token_hex(6)) - found.changed_ns < older_than_s * 1e9:
        within = duration(older_than_s) if older_than_s < 3.6e6 else f"{older_than_s / 86400:g} d"
        return f"written within {within}"
    job = await JobWatch(backend).poll()
    if job is not None and not job.ended and len(job.silent) < len(job.ranks):
        return "its heartbeats show that it is running"
    for entry in entries:
        if (reader := await find_reader(backend, entry.id, secrets.token_hex(6))) is not None:
            return f"step {entry.step}: {reader}"
    return ""


def _prune(place: str | Path, found: RunBelow, sizes: Counter[str], rules: Retention, delete: bool) -> None:
    from aiockpt.session.checkpointer import Checkpointer

    with Checkpointer(place) as ckpt:
        pruned = ckpt.prune(rules, dry_run=not delete).result()
    gone = {step.id for step in pruned.steps}
    gone |= {f"{one.step_id}/a-{one.attempt}" for one in pruned.garbage if one.step_id not in gone and not one.shares}
    found.freed_bytes = sum(sizes[folder] for folder in gone)
    found.kept = tuple(step.step for step in pruned.kept)
    found.left = pruned.left
    found.problem = "; ".join(f"{step_id}: {reason}" for step_id, reason in pruned.left if step_id in pruned.failed)


def show_dead_runs(folder: str, runs: Sequence[RunBelow], unread: Mapping[str, str], deleted: bool) -> None:
    """Print a row for each run below *folder*, the unreadable folders, and the freed bytes."""
    rows = []
    for run in runs:
        kept = f"keeps {count(len(run.kept), 'step')}" if run.kept else "no step stays"
        state = f"[dim]skipped: {escape(run.stays)}[/]" if run.stays else kept
        state = f"[red]{escape(run.problem)}[/]" if run.problem else state
        written = ago(run.changed_ns) if run.changed_ns else "–"
        free = "" if run.stays else size(run.freed_bytes)
        rows.append((escape(run.run), str(run.steps), size(run.bytes), written, free, state))
    headings = ("run", "steps", "size", "last written", "freed" if deleted else "frees", "")
    print_table(headings, rows, right=("steps", "size", "freed", "frees"), folds="", gap=False)
    for place, reason in unread.items():
        say(f"[red]✗ {escape(place)}:[/] {escape(reason)}")
    if freed_bytes := sum(run.freed_bytes for run in runs):
        say(freed(freed_bytes, deleted))
    else:
        say(f"{escape(folder)}: nothing to delete of {count(len(runs), 'run')}")
