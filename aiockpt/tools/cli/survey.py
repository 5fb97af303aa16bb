"""Roots that an operator names, and their steps: damaged and unfinished ones included.

Guarantees: nothing is changed, no missing folder is created, and torch is not imported. (`Checkpointer.steps` first
finishes the commits of dead jobs, which a resuming program needs; an operator needs to see a place unchanged.)
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import anyio
import msgspec

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    NoValidCheckpointError,
    ObjectNotFoundError,
    StepNotFoundError,
    StorageError,
    UsageError,
)
from aiockpt.format.names import attempt_folder
from aiockpt.options import Best, Mode
from aiockpt.pipeline.collect import best_step
from aiockpt.pipeline.discover import (
    StepAt,
    StepEntry,
    first_in_full,
    newest_first,
    read_receipts,
    votes_to_finish,
)
from aiockpt.pipeline.latest import find_steps
from aiockpt.pipeline.receipts import read_head
from aiockpt.pipeline.step_info import StepInfo, read_info
from aiockpt.pipeline.wrong_places import refuse_step_folder
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.world import OsFiles
from aiockpt.storage.backend import Backend, file_url, local_path
from aiockpt.storage.open import open_backend
from aiockpt.storage.transfer import walk

MANIFESTS_AT_ONCE = 8


class UnfinishedSave(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that no manifest names: of a running save, of a dead one, or of one that another attempt overtook.

    Attributes:
        missing_ranks: ranks without a receipt; None when there is no receipt, which would have the number of ranks.
        can_be_committed: all receipts exist, and no other attempt has overtaken it.
        manifest_is_damaged: a manifest of the step cannot be read, and may be the one that names this attempt.
        changed_ns: time of its last write, by the storage's clock; 0 when it is empty.
    """

    step: int
    id: str
    attempt: str
    bytes: int
    missing_ranks: tuple[int, ...] | None
    can_be_committed: bool
    manifest_is_damaged: bool
    changed_ns: int


class Survey(msgspec.Struct, frozen=True):
    """Everything below one root, the newest step first."""

    url: str
    steps: tuple[StepInfo, ...]
    unfinished: tuple[UnfinishedSave, ...]


async def survey(backend: Backend) -> Survey:
    """List every step below the root."""
    entries = await find_steps(backend)
    slots = anyio.Semaphore(MANIFESTS_AT_ONCE)
    steps: dict[str, StepInfo] = {}
    unfinished: list[UnfinishedSave] = []

    async def describe(entry: StepEntry) -> None:
        async with slots:
            if entry.committed:
                steps[entry.id] = await read_info(backend, entry)
            unfinished.extend(await find_unfinished(backend, entry))

    async with open_tasks() as tasks:
        for entry in entries:
            tasks.start_soon(describe, entry)
    order = {entry.id: place for place, entry in enumerate(entries)}
    unfinished.sort(key=lambda save: (order[save.id], save.attempt))
    return Survey(backend.url, tuple(steps[entry.id] for entry in entries if entry.committed), tuple(unfinished))


async def find_unfinished(backend: Backend, entry: StepEntry) -> list[UnfinishedSave]:
    """Return the attempts at a step that none of its manifests names."""
    if entry.head is not None and entry.attempts == (entry.head.attempt,):
        return []  # the usual step
    named: set[str | None] = set()
    for generation in entry.generations:
        try:
            named.add((await read_head(backend, entry.id, generation)).attempt)
        except ObjectNotFoundError:  # deleted since it was listed
            continue
        except (CorruptionError, StorageError):
            named.add(None)
    nameless = [attempt for attempt in entry.attempts if attempt not in named]
    return [await _describe_attempt(backend, entry, attempt, None in named) for attempt in nameless]


async def _describe_attempt(backend: Backend, entry: StepEntry, attempt: str, damaged: bool) -> UnfinishedSave:
    receipts = await read_receipts(backend, entry.id, attempt)
    votes = await votes_to_finish(backend, entry, attempt)
    files = [stat async for stat in walk(backend, attempt_folder(entry.id, attempt))]
    first = next(iter(receipts.values()), None)
    missing = None if first is None else tuple(sorted(set(range(first.world_size)) - receipts.keys()))
    return UnfinishedSave(
        step=entry.step,
        id=entry.id,
        attempt=attempt,
        bytes=sum(stat.size for stat in files),
        missing_ranks=missing,
        can_be_committed=votes is not None,
        manifest_is_damaged=damaged,
        changed_ns=max((stat.modified_ns for stat in files), default=0),
    )


async def find_committed(backend: Backend, step: int | None) -> StepEntry:
    """Return the committed step of that number; the newest one, damaged or not, for None.

    Raises:
        StepNotFoundError: there is no such step; the message lists the existing steps.
    """
    committed = [entry for entry in await find_steps(backend) if entry.committed]
    for entry in committed:
        if step in (None, entry.step):
            return entry
    if step is None:
        raise _nothing_at(backend)
    there = ", ".join(str(entry.step) for entry in committed[:10]) or "none"
    more = f" and {len(committed) - 10} more" if len(committed) > 10 else ""
    raise StepNotFoundError(f"{backend.url} has no committed step {step}; it has {there}{more}")


def _nothing_at(backend: Backend) -> StepNotFoundError:
    return StepNotFoundError(f"{backend.url} holds no checkpoint yet; `aiockpt ls` there names the runs below it")


def _nothing_valid_at(backend: Backend, skipped: list[tuple[str, str]]) -> CheckpointError:
    return NoValidCheckpointError(backend.url, skipped) if skipped else _nothing_at(backend)


async def find_valid(backend: Backend) -> StepEntry:
    """Return the step that a load of the newest would find; where only steps of weights exist, the newest of these.

    Raises:
        StepNotFoundError: nothing is committed.
        NoValidCheckpointError: no committed step is valid.
        NewerFormatError, StorageError: of a step that may be the newest.
    """
    skipped: list[tuple[str, str]] = []
    listed = [StepAt(backend, entry) for entry in await find_steps(backend) if entry.committed]
    found = newest_first(listed, lambda copy, error: skipped.append((copy.entry.id, str(error))))
    if (best := await first_in_full(found)) is None:
        raise _nothing_valid_at(backend, skipped)
    return best[0].entry


async def choose_best(backend: Backend, given: str) -> int:
    """Return the best step by a metric, as a load chooses it.

    Args:
        given: the metric, with ``:min`` or ``:max`` behind it where its name does not say what is good.

    Raises:
        UsageError: it does not, and none is given.
        StepNotFoundError: nothing is committed, or no step has the metric.
        NoValidCheckpointError: no committed step is valid.
    """
    metric, _, mode = given.rpartition(":")
    try:
        rule = Best(metric, mode=mode) if mode in get_args(Mode) else Best(given)  # type: ignore[arg-type]
    except UsageError as error:
        raise UsageError(f"best:{given}: write best:METRIC:min or best:METRIC:max, as in best:{given}:max") from error
    skipped: list[tuple[str, str]] = []
    listed = [StepAt(backend, entry) for entry in await find_steps(backend) if entry.committed]
    best = await best_step(listed, rule, lambda copy, error: skipped.append((copy.entry.id, str(error))))
    if best is None:
        raise _nothing_valid_at(backend, skipped)
    return best


async def measure(backend: Backend, prefixes: Sequence[str]) -> dict[str, int]:
    """Return the bytes below each of the folders *prefixes*."""
    return {prefix: sum([stat.size async for stat in walk(backend, prefix)]) for prefix in prefixes}


def check_metric(name: str, steps: Sequence[StepInfo]) -> None:
    """Raise UsageError when none of *steps* has the metric: a rule for it would silently keep no step."""
    known = sorted({metric for step in steps for metric in step.metrics})
    if steps and name not in known:
        raise UsageError(f"no step has the metric {name!r}; the metrics there are: {', '.join(known) or 'none'}")


def open_place(root: str | os.PathLike[str]) -> Backend:
    """Return the backend of *root*: a folder that exists, or a URL.

    Raises:
        UsageError: it cannot hold a checkpoint that this process can read.
    """
    backend = open_backend(root)
    if backend.url.startswith("memory://"):
        raise UsageError(f"{root}: memory:// exists only in the process that made it; give a folder")
    if (folder := local_path(backend.url)) is not None:
        check_folder(folder, "checkpoints are kept in a folder")
    return backend


def place_below(root: str, below: str) -> str | Path:
    """Return the place of a folder *below* the root ("": the root itself); a Path, whose text is not checked, for files."""
    folder = local_path(open_backend(root).url)
    return f"{root.rstrip('/')}/{below}".rstrip("/") if folder is None else folder / below


def is_to_come(root: str) -> bool:
    """Return whether *root* is a folder that does not exist yet."""
    folder = local_path(open_backend(root).url)
    return folder is not None and not folder.exists()


def local_folder(root: str) -> Path:
    """Return the folder that *root* names.

    Raises:
        UsageError: it names no folder, or one that does not exist.
    """
    folder = local_path(open_backend(root).url)
    if folder is None:
        raise UsageError(f"{root}: only a folder can be examined; give the path of one")
    check_folder(folder, "give a folder on the file system to be examined", may_be_made=True)
    return folder


def check_folder(folder: Path, advice: str, *, may_be_made: bool = False) -> None:
    """Raise UsageError unless *folder* is one and is not a step of a checkpoint.

    Args:
        may_be_made: an empty folder would do, and the message says how to make it.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file; {advice}")
    if not folder.is_dir():
        making = f"make it (mkdir -p {shlex.quote(str(folder))}), or {advice}"
        finding = "nothing was saved there. `aiockpt ls FOLDER` names the runs below a folder"
        raise UsageError(f"{folder}: no such folder; {making if may_be_made else finding}")
    refuse_step_folder(file_url(str(folder)), OsFiles())
