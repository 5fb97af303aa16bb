"""Commands that change what is kept: ``prune`` and ``rm`` delete, ``commit`` rolls forward."""

from __future__ import annotations

from typing import Annotated, Literal

import anyio
import typer

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.common import STORAGE_FAILED, Json, Root, app, open_checkpointer, step_number
from aiockpt.units import parse_seconds


@app.command("prune")
def prune(
    root: Root,
    last: Annotated[
        int | None, typer.Option(min=1, help="Keep the newest N steps.", metavar="N", show_default=False)
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Besides, keep every step divisible by N.", metavar="N", show_default=False),
    ] = None,
    best: Annotated[
        str | None, typer.Option(help="Besides, keep the best by this metric.", metavar="METRIC", show_default=False)
    ] = None,
    newer_than: Annotated[
        str | None,
        typer.Option(help="Besides, keep every step that is younger: 7d, 36h.", metavar="AGE", show_default=False),
    ] = None,
    optimizer: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of older steps than the newest N, keep the weights alone.", metavar="N", show_default=False
        ),
    ] = None,
    best_count: Annotated[int, typer.Option(min=1, help="How many of the best to keep.", metavar="N")] = 1,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Which values of --best are good.")] = "min",
    grace_hours: Annotated[
        float, typer.Option(min=0, help="Age at which an uncommitted attempt is garbage.", metavar="HOURS")
    ] = 24.0,
    delete: Annotated[bool, typer.Option("--yes", "-y", help="Really delete; without it only show.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show; so it is without --yes, too.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the steps that no rule keeps, and what dead saves left. Only shows what it would do, unless --yes."""
    from aiockpt.options import Best, Retention
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.results import show_pruned
    from aiockpt.tools.cli.survey import check_metric, measure, survey

    if delete and dry_run:
        raise UsageError("--yes deletes and --dry-run only shows: give one of them")
    if last is None and newer_than is None and (every or best):
        raise UsageError("--every and --best keep steps besides the newest: give --last N or --newer-than AGE too")
    backend = open_place(root)
    listed = anyio.run(survey, backend).steps
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
    show.json_or(as_json, found, lambda: show_pruned(found, sizes, delete, ruled=bool(last or newer_than)))
    if delete and found.failed:
        raise typer.Exit(STORAGE_FAILED)


@app.command("gc")
def collect_dead_runs(
    folder: Annotated[
        str, typer.Argument(help="A folder with runs in it, at any depth, or a URL.", show_default=False)
    ],
    older_than: Annotated[
        str, typer.Option(help="A run is dead when nothing was written to it for so long: 36h, 30d.", metavar="AGE")
    ] = "30d",
    keep: Annotated[int, typer.Option(min=0, help="How many steps of a dead run stay, the newest.", metavar="N")] = 1,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="With --keep 0: delete every step of dead runs, the newest too.")
    ] = False,
    delete: Annotated[bool, typer.Option("--yes", "-y", help="Really delete; without it only show.")] = False,
    as_json: Json = False,
) -> None:
    """Show what dead runs below a folder hold, and delete all but their newest step. Only shows it, unless --yes."""
    from aiockpt.tools.cli.dead_runs import clean_run, find_roots
    from aiockpt.tools.cli.given_root import open_place, place_below
    from aiockpt.tools.cli.listing import show_dead_runs

    if not (older_than_s := parse_seconds(older_than)):
        raise UsageError(f"--older-than {older_than}: give a time such as 30d or 36h")
    if everything != (keep == 0):
        raise UsageError("--keep 0 deletes every step of a dead run, so it wants --all, which is for nothing else")
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
    step: Annotated[
        int | None, typer.Argument(help="The step: 1000, or step-00001000.", parser=step_number, metavar="step")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Remove the whole run.")] = False,
    sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove one step, or the whole run, also what a job left in shared memory. Asks first, unless --yes."""
    from aiockpt.pipeline.collect import plan_removal, remove
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.results import ask_removal, show_removed

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
    """Finish the commits that dead jobs could not: of every save that was written completely and lacks its manifest."""
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.results import show_finished
    from aiockpt.tools.cli.survey import survey

    backend = open_place(root)
    with open_checkpointer(root) as ckpt:
        finished = ckpt.finish_commits().result()
    left = anyio.run(survey, backend).unfinished
    show.json_or(as_json, {"finished": finished, "unfinished": left}, lambda: show_finished(root, finished, left))
