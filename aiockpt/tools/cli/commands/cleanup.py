"""Commands that delete or commit: ``prune``, ``gc`` and ``rm`` delete, ``commit`` rolls forward."""

from __future__ import annotations

from typing import Annotated, Literal

import anyio
import typer

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import (
    STORAGE_FAILED,
    Json,
    Root,
    Yes,
    app,
    argument,
    flag,
    open_checkpointer,
    option,
    step_argument,
)
from aiockpt.units import parse_seconds


@app.command("prune")
def prune(
    root: Root,
    last: Annotated[int | None, option("Keep the newest N steps.", "N", min=1)] = None,
    every: Annotated[int | None, option("Also keep every step divisible by N.", "N", min=1)] = None,
    best: Annotated[str | None, option("Also keep the best step by this metric.", "METRIC")] = None,
    newer_than: Annotated[str | None, option("Also keep every step younger than this: 7d, 36h.", "AGE")] = None,
    optimizer: Annotated[
        int | None, option("Keep the optimizer state of the newest N steps only; older ones keep weights.", "N", min=1)
    ] = None,
    best_count: Annotated[int, option("How many of the best steps to keep.", "N", min=1)] = 1,
    mode: Annotated[
        Literal["min", "max"] | None, option("Whether low or high values of --best are good. Default: by its name.")
    ] = None,
    grace_hours: Annotated[
        float, option("Age from which an uncommitted attempt counts as garbage.", "HOURS", min=0)
    ] = 24.0,
    delete: Yes = False,
    dry_run: Annotated[bool, flag("Only show what would be deleted (the default).", "--dry-run", "-n")] = False,
    as_json: Json = False,
) -> None:
    """Delete the steps that no rule keeps, and uncommitted attempts of dead saves. A dry run, unless --yes.

    Of a place of versions it shows which ones stay for which receiver.
    """
    from aiockpt.options import Best, Retention
    from aiockpt.publish.receiver_notes import has_versions
    from aiockpt.tools.cli.live_view import print_once
    from aiockpt.tools.cli.results import show_pruned
    from aiockpt.tools.cli.survey import check_metric, measure, open_place, survey

    if delete and dry_run:
        raise UsageError("--yes deletes and --dry-run only shows: give one of them")
    if last is None and newer_than is None and (every or best):
        raise UsageError("--every and --best keep steps besides the newest: give --last N or --newer-than AGE too")
    backend = open_place(root)
    if anyio.run(has_versions, backend):
        if delete or last or newer_than or optimizer:
            raise UsageError(f"{root} has versions, and no steps: their publisher removes them, by Publish(keep=N)")
        anyio.run(print_once, root, backend, as_json)
        return
    there = anyio.run(survey, backend)
    listed = there.steps
    if best:
        check_metric(best, listed)
    rule = Best(best, count=best_count, mode=mode) if best else None
    rules = Retention(
        last=last, every=every, best=rule, newer_than=newer_than, optimizer=optimizer, grace_s=grace_hours * 3600
    )
    with open_checkpointer(root) as ckpt:
        found = ckpt.prune(rules, dry_run=True).result()
        folders = [f"{garbage.step_id}/a-{garbage.attempt}" for garbage in found.garbage]
        sizes = {step.id: step.bytes for step in listed} | anyio.run(measure, backend, folders)
        if delete:
            found = ckpt.prune(rules).result()
    gone = {(garbage.step_id, garbage.attempt) for garbage in found.garbage}
    left = [attempt for attempt in there.unfinished if (attempt.id, attempt.attempt) not in gone]
    show.json_or(as_json, found, lambda: show_pruned(root, found, sizes, left, delete, ruled=bool(last or newer_than)))
    if delete and found.failed:
        raise typer.Exit(STORAGE_FAILED)


@app.command("gc")
def collect_dead_runs(
    folder: Annotated[str, argument("A folder that contains runs, at any depth, or a URL.")],
    older_than: Annotated[str, option("A run is dead when nothing was written to it for so long.", "AGE")] = "30d",
    keep: Annotated[int, option("How many of a dead run's newest steps to keep.", "N", min=0)] = 1,
    everything: Annotated[bool, flag("With --keep 0: delete all steps of dead runs.", "--all", "-a")] = False,
    delete: Yes = False,
    as_json: Json = False,
) -> None:
    """List dead runs below a folder, and delete all but the newest step of each. A dry run, unless --yes."""
    from aiockpt.tools.cli.dead_runs import clean_run, find_roots, show_dead_runs
    from aiockpt.tools.cli.survey import open_place, place_below

    if not (older_than_s := parse_seconds(older_than)):
        raise UsageError(f"--older-than {older_than}: give a time such as 30d or 36h")
    if everything != (keep == 0):
        raise UsageError("--keep 0 deletes every step of a dead run and needs --all; --all needs --keep 0")
    roots, unread = anyio.run(find_roots, open_place(folder))
    places = [place_below(folder, root) for root in roots]
    runs = [clean_run(place, older_than_s=older_than_s, keep=keep, delete=delete) for place in places]
    runs = [run for run in runs if run.steps or run.problem]
    unread = {str(place_below(folder, below)): reason for below, reason in unread.items()}
    show.json_or(as_json, {"runs": runs, "unread": unread}, lambda: show_dead_runs(folder, runs, unread, delete))
    if unread or any(run.problem for run in runs):
        raise typer.Exit(STORAGE_FAILED)


@app.command("rm")
def remove_steps(
    root: Root,
    step: Annotated[int | None, step_argument("The step to remove, such as 1000 or step-00001000.")] = None,
    everything: Annotated[bool, flag("Remove the whole run.", "--all", "-a")] = False,
    sure: Annotated[bool, flag("Do not ask for confirmation.", "--yes", "-y")] = False,
    as_json: Json = False,
) -> None:
    """Remove one step, or the whole run, from a folder, a bucket or shared memory. Asks first, unless --yes."""
    from aiockpt.pipeline.collect import plan_removal, remove
    from aiockpt.tools.cli.results import ask_removal, show_removed
    from aiockpt.tools.cli.survey import open_place

    if everything == (step is not None):
        raise UsageError("give the step to remove, or --all to remove the whole run")
    backend = open_place(root)
    found = anyio.run(plan_removal, backend, step)
    if not sure and not ask_removal(found, everything):
        return
    anyio.run(remove, backend, found)
    show.json_or(as_json, found, lambda: show_removed(found))


@app.command("commit")
def commit(root: Root, as_json: Json = False) -> None:
    """Commit saves of dead jobs that were written completely and lack only the manifest."""
    from aiockpt.tools.cli.results import show_finished
    from aiockpt.tools.cli.survey import open_place, survey

    backend = open_place(root)
    with open_checkpointer(root) as ckpt:
        finished = ckpt.finish_commits().result()
    left = anyio.run(survey, backend).unfinished
    show.json_or(as_json, {"finished": finished, "unfinished": left}, lambda: show_finished(root, finished, left))
