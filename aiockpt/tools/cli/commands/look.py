"""Commands that only read: ``ls``, ``inspect``, ``verify`` and ``diff`` show what is there, and check it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.common import (
    DAMAGED,
    Everything,
    Json,
    Root,
    Step,
    app,
    chosen_steps,
    finish,
    open_checkpointer,
    step_number,
)

if TYPE_CHECKING:
    from aiockpt.session.checkpointer import Checkpointer
    from aiockpt.storage.backend import Backend
    from aiockpt.tools.cli.diff import LeafChange
    from aiockpt.tools.cli.results import Check


@app.command("ls")
def list_steps(root: Root, as_json: Json = False) -> None:
    """List the steps, the newest first, and what descends from what; damaged and unfinished ones too."""
    from aiockpt.pipeline.discover import look_for_hints, refuse_step
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.listing import show_survey
    from aiockpt.tools.cli.survey import survey

    backend = open_place(root)
    found = anyio.run(survey, backend)
    if not found.steps:
        anyio.run(refuse_step, backend)
    instead = [] if found.steps or as_json else anyio.run(look_for_hints, backend).hints(root)
    show.json_or(as_json, found, lambda: show_survey(root, found, instead))


@app.command("inspect")
def inspect(
    root: Root,
    step: Step = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Levels of the tree to show.", metavar="N", show_default=False)
    ] = None,
    rank: Annotated[
        int, typer.Option(min=0, help="Whose values to show, where each rank has its own.", metavar="N")
    ] = 0,
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Show what a step holds: tensors with dtypes, shapes, sizes and files; values; without reading data."""
    from aiockpt.tools.cli.contents import show_description

    (number,) = chosen_steps(root, step, False, valid=True)
    with open_checkpointer(root) as ckpt:
        seen = ckpt.describe(number).result()
    if seen.per_rank and str(rank) not in seen.per_rank:
        raise UsageError(
            f"--rank {rank}: step {seen.info.step} was saved by {show.count(seen.info.world_size, 'rank')}, from 0"
        )
    show.json_or(as_json, seen, lambda: show_description(root, seen, str(rank), depth, everything))


@app.command("verify")
def verify(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Verify every step.")] = False,
    repair_from: Annotated[
        str | None,
        typer.Option(
            "--repair",
            metavar="FROM",
            help="Write anew what is bad, from another place that has the same steps.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every block of a step and compare it. Exit status 0: all is as it was saved; 1: it is not."""
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.results import show_check

    steps = chosen_steps(root, step, every) or chosen_steps(root, None, False)
    results = []
    with open_checkpointer(root) as ckpt:
        for number in steps:
            if repair_from is None:
                results.append(_verify_one(ckpt, number, as_json))
            else:
                results.append(_repair_one(ckpt, number, open_place(repair_from), as_json))
            if not as_json:
                show_check(results[-1])
    show.json_or(as_json, results, lambda: None)
    if not all(result.valid for result in results):
        raise typer.Exit(DAMAGED)


def _verify_one(ckpt: Checkpointer, step: int, quiet: bool) -> Check:
    from aiockpt.errors import CorruptionError
    from aiockpt.tools.cli.results import Check

    try:
        seen = finish(ckpt.describe(step))
        with show.bytes_progress(f"verifying step {step}", seen.info.bytes, quiet) as tick:
            done = finish(ckpt.verify(step, on_read=tick))
    except CorruptionError as error:
        return Check(step, False, problem=str(error))
    return Check(step, True, done.generation, done.bytes, done.seconds, left_out=len(seen.left_out))


def _repair_one(ckpt: Checkpointer, step: int, source: Backend, quiet: bool) -> Check:
    from aiockpt.errors import CorruptionError
    from aiockpt.tools.cli.results import Check

    try:
        total = finish(ckpt.describe(step)).info.bytes
    except CorruptionError:
        total = 0  # its manifest is what is bad
    with show.bytes_progress(f"reading step {step}", total, quiet) as tick:
        (done,) = finish(ckpt.repair(step, source, on_read=tick))
    if done.left:
        return Check(step, False, problem=done.left)
    return Check(step, True, done.generation, total or done.bytes, done.seconds, repaired=len(done.files))


@app.command("diff")
def diff(
    root: Root,
    one: Annotated[
        int, typer.Argument(help="A step, as it was: 1000, or step-00001000.", parser=step_number, metavar="before")
    ],
    two: Annotated[
        int, typer.Argument(help="Another step, as it is, in the same form.", parser=step_number, metavar="after")
    ],
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Compare two steps: which tensors and values changed, and by how much. Exit status 1: they differ."""
    from aiockpt.tools.cli.given_root import open_place
    from aiockpt.tools.cli.results import show_changes

    changes = anyio.run(_diff, open_place(root), one, two, as_json)
    show.json_or(as_json, changes, lambda: show_changes(root, one, two, changes, everything))
    if any(change.kind != "same" for change in changes):
        raise typer.Exit(DAMAGED)


async def _diff(backend: Backend, one: int, two: int, quiet: bool) -> list[LeafChange]:
    from aiockpt.tools.cli.diff import diff_steps, tensor_bytes
    from aiockpt.tools.cli.reading import open_step
    from aiockpt.tools.cli.survey import find_committed

    entries = [await find_committed(backend, step) for step in (one, two)]
    async with open_step(backend, entries[0]) as before, open_step(backend, entries[1]) as after:
        total = sum(tensor_bytes(entry) for entry in before.manifest.tensors.values())
        with show.bytes_progress(f"comparing {one} and {two}", total, quiet) as tick:
            return await diff_steps(before, after, tick)
